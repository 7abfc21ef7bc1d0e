"""One segment of a tensor as two streams, indices and values (docs/format.md, "Segments").

A tensor is cut into segments of at most ``SEGMENT_NUMEL`` elements, each coded alone: they encode and decode in
parallel, take bounded memory, and keep positions inside 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pulse_kernels import checks
from pulse_kernels.backends import for_device, reference
from pulse_kernels.codec.streams import checksum, load_part, raw_bytes, split, store_part
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
DELTA = "delta"  # signs of the changes against the base, in the order of the values, and planes of their magnitudes

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
    first = 0
    while first < indices.numel():
        start = int(indices[first]) // SEGMENT_NUMEL * SEGMENT_NUMEL
        stop = min(start + SEGMENT_NUMEL, numel)
        # Searched by the segment's last position: the one behind it may not fit the indices' dtype.
        last = int(torch.searchsorted(indices, indices.new_tensor([stop - 1]), right=True))
        yield start, stop - start, first, last
        first = last


def encode_changes(
    start: int, numel: int, indices: Tensor, values: Tensor, old_values: Tensor | None, profile: str
) -> Segment:
    """Code sorted positions ``indices`` in [start, start + numel) and their ``values``; CPU tensors."""
    return encode_local(start, numel, indices - start if start else indices, values, old_values, profile)


def encode_local(
    start: int, numel: int, local: Tensor, values: Tensor, old_values: Tensor | None, profile: str
) -> Segment:
    """``encode_changes`` of positions that count from ``start``."""
    backend = for_device("cpu")
    count = local.numel()
    index: tuple[str, tuple[bytes, ...], int]
    if profile == "fast":
        blob = raw_bytes(backend.pack_indices(local.to(torch.int32), numel))
        index = (PACKED, (blob,), 0)
    else:
        shift = 8 if numel >= _GAPS16_FROM * count else 0
        top, low, escapes = backend.encode_gaps(local, 0, shift)
        parts = (store_part(top), store_part(low) if shift else b"", store_part(escapes))
        index = (GAPS16 if shift else GAPS8, parts, escapes.numel())
    return _segment(start, numel, count, index, _encode_values(backend, values, old_values, profile))


def encode_whole(start: int, values: Tensor, profile: str) -> Segment:
    """Code every element of a slice of an added tensor; ``values``: flat, CPU."""
    count = values.numel()
    return _segment(
        start, count, count, (ALL, (), 0), _encode_values(for_device("cpu"), values, None, profile, whole=True)
    )


def _encode_values(
    backend: Any, values: Tensor, old_values: Tensor | None, profile: str, *, whole: bool = False
) -> tuple[str, tuple[bytes, ...]]:
    raw = values.numel() * values.element_size()
    if profile == "fast":
        return RAW, (raw_bytes(values),)
    if not whole:
        assert old_values is not None
        coded = backend.encode_values(values, old_values)
        signs = sign_bytes(values.numel())
        delta = (store_part(coded[:signs]), *_store_planes(coded[signs:], values.element_size()))
        # Differences of a few units are what RL steps make; where they are not, the values may code better alone.
        if 4 * sum(map(len, delta)) <= 3 * raw:
            return DELTA, delta
        planes = _store_planes(backend.encode_values(values, None), values.element_size())
        return min((DELTA, delta), (PLANES, planes), key=lambda coded: sum(map(len, coded[1])))
    return PLANES, _store_planes(backend.encode_values(values, None), values.element_size())


def sign_bytes(count: int) -> int:
    """Bytes of the signs of ``count`` changes."""
    return -(-count // 8)


def _store_planes(planes: Tensor, itemsize: int) -> tuple[bytes, ...]:
    return tuple(store_part(plane) for plane in planes.view(itemsize, -1))


def _segment(
    start: int, numel: int, count: int, index: tuple[str, tuple[bytes, ...], int], value: tuple[str, tuple[bytes, ...]]
) -> Segment:
    index_code, index_parts, escape_bytes = index
    value_code, value_parts = value
    header = SegmentHeader(
        start=start,
        numel=numel,
        count=count,
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
    sizes = [header.count] * dtype.itemsize
    if header.value_code == DELTA:
        sizes.insert(0, sign_bytes(header.count))
    planes = [load_part(part, size, f"{what}, part {k}") for k, (part, size) in enumerate(zip(parts, sizes, strict=True))]
    values: Tensor = for_device("cpu").decode_values(
        torch.cat(planes), base if header.value_code == DELTA else None, dtype
    )
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
    value_needed = {RAW: 1, PLANES: dtype.itemsize, DELTA: dtype.itemsize + 1}[value_code]
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
    "Segment",
    "SegmentHeader",
    "bounds",
    "decode_indices",
    "decode_values",
    "encode_changes",
    "encode_whole",
    "segment_from_json",
]
