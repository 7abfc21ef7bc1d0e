"""One segment of a tensor as two streams, indices and values (docs/format.md, "Segments").

A tensor is cut into segments of at most ``SEGMENT_NUMEL`` elements, each coded alone: they encode and decode in
parallel, take bounded memory, and keep positions inside 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pulse_kernels import checks
from pulse_kernels.backends import for_device, reference
from pulse_kernels.codec.streams import checksum, load_part, raw_bytes, split, store_parts
from pulse_kernels.errors import PatchFormatError

SEGMENT_NUMEL = 1 << 24

# Codes of an index stream.
PACKED = "packed"  # pack_indices
GAPS8 = "gaps8"  # gaps as one byte each and escapes
GAPS16 = "gaps16"  # gaps as two byte planes and escapes: for sparse segments
ALL = "all"  # no stream: every element has a value (added tensors)
# Codes of a value stream.
RAW = "raw"  # the values' bytes
PLANES = "planes"  # byte planes of the values
DELTA = "delta"  # changes against the base: signs, two-bit codes of the magnitudes, byte planes of the large ones

INDEX_CODES = (PACKED, GAPS8, GAPS16, ALL)
VALUE_CODES = (RAW, PLANES, DELTA)
PROFILES = ("fast", "balanced")

# Mean gap from which two planes are smaller than one with escapes.
_GAPS16_FROM = 160


@dataclass(frozen=True)
class SegmentHeader:
    """What the patch header says of a segment. start, numel: its elements. count: changed ones. index_parts,
    value_parts: stored bytes of each part; gap codes have (top, low, escapes). escape_bytes: escapes, decoded."""

    start: int
    numel: int
    count: int
    index_code: str
    index_parts: tuple[int, ...]
    escape_bytes: int
    index_crc: int
    value_code: str
    value_parts: tuple[int, ...]
    value_crc: int

    @property
    def index_bytes(self) -> int:
        return sum(self.index_parts)

    @property
    def value_bytes(self) -> int:
        return sum(self.value_parts)

    def to_json(self) -> list[Any]:
        return [
            *(self.start, self.numel, self.count),
            *(self.index_code, list(self.index_parts), self.escape_bytes, self.index_crc),
            *(self.value_code, list(self.value_parts), self.value_crc),
        ]


@dataclass(frozen=True)
class Segment:
    """A coded segment: its header and its streams, as the parts they are made of."""

    header: SegmentHeader
    index_stream: tuple[bytes, ...]
    value_stream: tuple[bytes, ...]


def bounds(indices: Tensor, numel: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, numel, first entry, entry behind the last) of every segment that has changes; ``indices``: checked."""
    if indices.numel() and numel <= SEGMENT_NUMEL:
        yield 0, numel, 0, indices.numel()
        return
    first = 0
    while first < indices.numel():
        start = int(indices[first]) // SEGMENT_NUMEL * SEGMENT_NUMEL
        stop = min(start + SEGMENT_NUMEL, numel)
        # Searched by the segment's last position: the one behind it may not fit the indices' dtype.
        last = int(torch.searchsorted(indices, indices.new_tensor([stop - 1]), right=True))
        yield start, stop - start, first, last
        first = last


@dataclass(frozen=True)
class Changes:
    """What to code of one segment: ``values`` at ``indices``, positions of the tensor that count from element
    ``origin``; CPU tensors, flat.

    indices is None where every element has a value (added tensors). old_values: what the values replace, for profiles
    that code against them. packed: ``pack_indices`` of the positions, where a device has made it for profile "fast";
    indices are not needed then.
    """

    start: int
    numel: int
    indices: Tensor | None
    values: Tensor
    old_values: Tensor | None = None
    packed: Tensor | None = None
    origin: int = 0


def encode_segments(items: Sequence[Changes], profile: str, threads: int = 1) -> list[Segment]:
    """Code segments, on up to ``threads`` threads; positions are sorted, unique and in range."""
    if profile == "fast":
        return [_segment(item, _packed(item), (RAW, (raw_bytes(item.values),))) for item in items]
    # Everything that is likely to be kept goes through one call: threads are then started and joined once.
    index = _index_parts(items)
    value = _value_parts(items, [PLANES if item.indices is None else DELTA for item in items])
    streams = _store([*index, *value], threads)
    index_streams, value_streams = streams[: len(items)], streams[len(items) :]
    codes = [coded.code for coded in value]
    # Changes of a few units are what RL steps make; where they are not, the values may code better alone.
    alone = [
        k for k, item in enumerate(items) if codes[k] == DELTA and 4 * _size(value_streams[k]) > 3 * item.values.nbytes
    ]
    planes = _value_parts([items[k] for k in alone], [PLANES] * len(alone))
    for k, stream in zip(alone, _store(planes, threads), strict=True):
        if _size(stream) < _size(value_streams[k]):
            codes[k], value_streams[k] = PLANES, stream
    return [
        _segment(item, (coded.code, stream, coded.escape_bytes), (code, values))
        for item, coded, stream, code, values in zip(items, index, index_streams, codes, value_streams, strict=True)
    ]


@dataclass(frozen=True)
class _Coded:
    """A stream as its decoded parts, uint8 each."""

    code: str
    parts: tuple[Tensor, ...]
    escape_bytes: int = 0


_Indices: TypeAlias = tuple[str, tuple[bytes, ...], int]
_Values: TypeAlias = tuple[str, tuple[bytes, ...]]


def _size(stream: tuple[bytes, ...]) -> int:
    return sum(map(len, stream))


def _store(streams: Sequence[_Coded], threads: int) -> list[tuple[bytes, ...]]:
    stored = iter(store_parts([part for coded in streams for part in coded.parts], threads))
    return [tuple(next(stored) for _ in coded.parts) for coded in streams]


def _packed(item: Changes) -> _Indices:
    if item.packed is not None:
        return PACKED, (raw_bytes(item.packed),), 0
    if item.indices is None:
        return ALL, (), 0
    blob = for_device("cpu").pack_indices((item.indices - (item.start - item.origin)).to(torch.int32), item.numel)
    return PACKED, (raw_bytes(blob),), 0


def _index_parts(items: Sequence[Changes]) -> list[_Coded]:
    coded = [_Coded(ALL, ())] * len(items)
    listed = [(k, item.indices) for k, item in enumerate(items) if item.indices is not None]
    shifts = [8 if items[k].numel >= _GAPS16_FROM * indices.numel() else 0 for k, indices in listed]
    starts = [items[k].start - items[k].origin for k, _ in listed]
    columns = for_device("cpu").encode_gaps_many([indices for _, indices in listed], starts, shifts)
    for (k, _), shift, *parts in zip(listed, shifts, *columns, strict=True):
        coded[k] = _Coded(GAPS16 if shift else GAPS8, tuple(parts), parts[2].numel())
    return coded


def _value_parts(items: Sequence[Changes], codes: Sequence[str]) -> list[_Coded]:
    streams: dict[int, Tensor] = {}
    for code in (DELTA, PLANES):
        here = [k for k in range(len(items)) if codes[k] == code]
        bases = [old for k in here if (old := items[k].old_values) is not None] if code == DELTA else None
        columns = for_device("cpu").encode_values_many([items[k].values for k in here], bases) if here else []
        streams.update(zip(here, columns, strict=True))
    coded = []
    for k, (item, code) in enumerate(zip(items, codes, strict=True)):
        head, size = _head_sizes(code, item.values.numel()), item.values.dtype.itemsize
        planes = (streams[k].numel() - sum(head)) // size
        coded.append(_Coded(code, streams[k].split([*head, *[planes] * size])))
    return coded


def _head_sizes(code: str, count: int) -> list[int]:
    """Decoded bytes of each part of a value stream ahead of its byte planes: signs and codes."""
    return [-(-count // 8), -(-count // 4)] if code == DELTA else []


# Of each byte of codes how many of the four announce a large magnitude.
_LARGE_CODES = np.array([sum(byte >> place & 3 == 3 for place in (0, 2, 4, 6)) for byte in range(256)], dtype=np.uint8)


def _count_large(codes: Tensor, count: int) -> int:
    """How many magnitudes the planes hold; PatchFormatError for codes behind the last value."""
    if count % 4 and int(codes[-1]) >> 2 * (count % 4):
        raise PatchFormatError("codes behind the last value; the file is damaged")
    return int(_LARGE_CODES[codes.numpy()].sum(dtype=np.int64))


def _segment(item: Changes, index: _Indices, value: _Values) -> Segment:
    index_code, index_parts, escape_bytes = index
    value_code, value_parts = value
    header = SegmentHeader(
        start=item.start,
        numel=item.numel,
        count=item.values.numel(),
        index_code=index_code,
        index_parts=tuple(map(len, index_parts)),
        escape_bytes=escape_bytes,
        index_crc=checksum(index_parts),
        value_code=value_code,
        value_parts=tuple(map(len, value_parts)),
        value_crc=checksum(value_parts),
    )
    return Segment(header, index_parts, value_parts)


def decode_indices(header: SegmentHeader, stream: memoryview, what: str) -> Tensor:
    """Positions inside the segment, int32 [count]; checked: sorted, unique, in range."""
    _check_crc(stream, header.index_crc, what)
    backend = for_device("cpu")
    parts = split(stream, header.index_parts, what)
    try:
        if header.index_code == PACKED:
            packed = load_part(parts[0], len(parts[0]), what)
            count, numel = reference.packed_header(packed)
            if (count, numel) != (header.count, header.numel):
                raise PatchFormatError(
                    f"{count} indices below {numel}, the header says {header.count} below {header.numel}"
                )
            indices: Tensor = backend.unpack_indices(packed, torch.int32)
            return indices
        top = load_part(parts[0], header.count, "gaps")
        low = load_part(parts[1], header.count if header.index_code == GAPS16 else 0, "low plane of gaps")
        escapes = load_part(parts[2], header.escape_bytes, "escaped gaps")
        gaps: Tensor = backend.decode_gaps(top, low, escapes, 0, header.numel, torch.int32)
        return gaps
    except PatchFormatError as error:
        raise PatchFormatError(f"{what}: {error}") from None


def decode_values(
    header: SegmentHeader, stream: memoryview, dtype: torch.dtype, base: Tensor | None, what: str
) -> Tensor:
    """The absolute values, [count]; ``base``: the base's values at the same positions, for DELTA."""
    _check_crc(stream, header.value_crc, what)
    parts = split(stream, header.value_parts, what)
    if header.value_code == RAW:
        return load_part(parts[0], header.count * dtype.itemsize, what).view(dtype)
    head = _head_sizes(header.value_code, header.count)
    try:
        loaded = [load_part(parts[k], size, f"part {k}") for k, size in enumerate(head)]
        planes = _count_large(loaded[1], header.count) if header.value_code == DELTA else header.count
        loaded += [load_part(part, planes, f"part {k}") for k, part in enumerate(parts[len(head) :], len(head))]
        values: Tensor = for_device("cpu").decode_values(
            torch.cat(loaded), base if header.value_code == DELTA else None, dtype
        )
    except PatchFormatError as error:
        raise PatchFormatError(f"{what}: {error}") from None
    return values


def _check_crc(stream: memoryview, expected: int, what: str) -> None:
    found = checksum([stream])
    if found != expected:
        raise PatchFormatError(f"{what}: CRC-32 {found:08x}, the header says {expected:08x}; the file is damaged")


def segment_from_json(item: Any, dtype: torch.dtype, what: str) -> SegmentHeader:
    """A segment's header out of untrusted JSON, consistent in itself."""

    def fail(field: str, found: Any) -> PatchFormatError:
        return PatchFormatError(f"{what}: {field} is {found!r:.60}; the file is damaged or from a newer version")

    if not isinstance(item, list) or len(item) != 10:
        raise fail("segment", item)
    start, numel, count, index_code, index_parts, escape_bytes, index_crc, value_code, value_parts, value_crc = item
    for field, number in (("start", start), ("numel", numel), ("count", count), ("escape bytes", escape_bytes)):
        if type(number) is not int or not 0 <= number <= 1 << 62:
            raise fail(field, number)
    for field, number in (("index CRC", index_crc), ("value CRC", value_crc)):
        if type(number) is not int or not 0 <= number < 1 << 32:
            raise fail(field, number)
    if index_code not in INDEX_CODES:
        raise fail("index code", index_code)
    if value_code not in VALUE_CODES:
        raise fail("value code", value_code)
    index_needed = {PACKED: 1, ALL: 0}.get(index_code, 3)
    value_needed = 1 if value_code == RAW else len(_head_sizes(value_code, 0)) + dtype.itemsize
    for field, parts, needed in (
        ("index parts", index_parts, index_needed),
        ("value parts", value_parts, value_needed),
    ):
        sizes_fit = isinstance(parts, list) and all(type(size) is int and 0 <= size <= 1 << 62 for size in parts)
        if not sizes_fit or len(parts) != needed:
            raise fail(field, parts)
    if not 1 <= count <= numel <= checks.INT32_NUMEL:
        raise fail("count and numel", (count, numel))
    if index_code == ALL and (count != numel or value_code == DELTA):
        raise fail("codes of a whole tensor", (index_code, value_code))
    if index_code in (PACKED, ALL) and escape_bytes:
        raise fail("escape bytes", escape_bytes)
    if index_code == ALL and index_crc:
        raise fail("index CRC", index_crc)
    if escape_bytes > 9 * count:
        raise fail("escape bytes", escape_bytes)
    if value_code == RAW and value_parts[0] != count * dtype.itemsize:
        raise fail("value parts", value_parts)
    return SegmentHeader(
        *(start, numel, count, index_code, tuple(index_parts), escape_bytes, index_crc),
        *(value_code, tuple(value_parts), value_crc),
    )


__all__ = [
    "PROFILES",
    "SEGMENT_NUMEL",
    "Changes",
    "Segment",
    "SegmentHeader",
    "bounds",
    "decode_indices",
    "decode_values",
    "encode_segments",
    "segment_from_json",
]
