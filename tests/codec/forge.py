"""A writer of patch files written from docs/format.md alone; it writes lies as willingly as truths.

A file is a ``Forgery``: the patch header as plain data and the streams as parts. ``build`` computes every size and
CRC-32 from them, so that an edit of either comes out as the work of someone who knows the format.
"""

from __future__ import annotations

import copy
import itertools
import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import zstandard
from independent_reader import SIZES, UNSIGNED, ordered, to_signed

# ---- streams ---------------------------------------------------------------------------------------------------------


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def part(data: bytes) -> bytes:
    """As short as the format has it."""
    if not any(data):
        return b""
    return min(data, frame(data), key=len)


def leb128(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def gaps(positions: list[int], shift: int) -> tuple[bytes, bytes, bytes]:
    """(top, low, escapes) of positions inside a segment."""
    top, low, escapes, previous = bytearray(), bytearray(), bytearray(), -1
    for position in positions:
        gap, previous = position - previous - 1, position
        top.append(min(gap >> shift, 255))
        low.append(gap & 255)
        if top[-1] == 255:
            escapes += leb128((gap >> shift) - 255)
    return bytes(top), bytes(low) if shift else b"", bytes(escapes)


def pack(positions: list[int], numel: int) -> bytes:
    bases, offsets, widths, payload = b"", b"", b"", b""
    base_size = 4 if numel <= 2**32 else 8
    for at in range(0, len(positions), 256):
        block = positions[at : at + 256]
        entries = [0, *(b - a - 1 for a, b in itertools.pairwise(block))]
        width = max(entries).bit_length()
        string = sum(entry << (j * width) for j, entry in enumerate(entries))
        bases += block[0].to_bytes(base_size, "little")
        offsets += struct.pack("<I", sum(widths))
        widths += bytes([width])
        payload += string.to_bytes((len(block) * width + 31) // 32 * 4, "little")
    widths += bytes(-len(widths) % 4)
    head = struct.pack("<4sBBHQQQ", b"PKIX", 1, base_size, 0, numel, len(positions), len(payload))
    return head + bases + offsets + widths + payload


def raw(values: list[int], size: int) -> bytes:
    return struct.pack(f"<{len(values)}{UNSIGNED[size]}", *values)


def planes(values: list[int], size: int) -> list[bytes]:
    return [bytes(value >> 8 * b & 255 for value in values) for b in range(size)]


def delta(new: list[int], old: list[int], dtype: str) -> tuple[bytes, bytes, list[int]]:
    """(signs, codes, large magnitudes less 3)."""
    size = SIZES[dtype]
    mask, signs, codes = (1 << 8 * size) - 1, bytearray(-(-len(new) // 8)), bytearray(-(-len(new) // 4))
    large = []
    for j, (now, before) in enumerate(zip(new, old, strict=True)):
        change = ordered(to_signed(now, size), dtype) - ordered(to_signed(before, size), dtype)
        change = to_signed(change & mask, size)
        signs[j // 8] |= (change < 0) << j % 8
        magnitude = (~change if change < 0 else change - 1) & mask
        codes[j // 4] |= min(magnitude, 3) << 2 * (j % 4)
        if magnitude >= 3:
            large.append(magnitude - 3)
    return bytes(signs), bytes(codes), large


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A segment's header without what ``build`` computes, and the stored parts of both streams."""

    start: int
    numel: int
    count: int
    index_code: str
    index: list[bytes]
    escape_size: int
    value_code: str
    value: list[bytes]


def segment(
    dtype: str,
    start: int,
    numel: int,
    positions: list[int],
    values: list[int],
    index_code: str = "gaps8",
    value_code: str = "planes",
    old: list[int] | None = None,
) -> Part:
    """An honest segment; positions count from the tensor's beginning."""
    local, size = [position - start for position in positions], SIZES[dtype]
    index: list[bytes] = []
    escape_size = 0
    if index_code == "packed":
        index = [pack(local, numel)]
    elif index_code != "all":
        top, low, escapes = gaps(local, 8 if index_code == "gaps16" else 0)
        index, escape_size = [part(top), part(low), part(escapes)], len(escapes)
    value = []
    if value_code == "delta":
        assert old is not None
        signs, codes, values = delta(values, old, dtype)
        value = [part(signs), part(codes)]
    value += [raw(values, size)] if value_code == "raw" else [part(plane) for plane in planes(values, size)]
    return Part(start, numel, len(positions), index_code, index, escape_size, value_code, value)


@dataclass
class Forgery:
    """tensors, added: [name, dtype, shape, [Part, ...]]. fields: the rest of the patch header."""

    tensors: list[Any] = field(default_factory=list)
    added: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(
        default_factory=lambda: {
            "format": 1,
            "profile": "balanced",
            "base_version": None,
            "version": None,
            "base_digest": "",
            "digest": "",
            "removed": [],
        }
    )

    def copy(self) -> Forgery:
        return copy.deepcopy(self)

    def header(self) -> dict[str, Any]:
        """The patch header as plain data, sizes and CRCs filled in."""
        lists = {
            key: [[name, dtype, shape, [self._segment(p) for p in parts]] for name, dtype, shape, parts in tensors]
            for key, tensors in (("tensors", self.tensors), ("added", self.added))
        }
        return self.fields | lists

    @staticmethod
    def _segment(p: Part) -> list[Any]:
        index = [p.index_code, [len(data) for data in p.index], p.escape_size, zlib.crc32(b"".join(p.index))]
        value = [p.value_code, [len(data) for data in p.value], zlib.crc32(b"".join(p.value))]
        return [p.start, p.numel, p.count, *index, *value]

    def streams(self) -> list[tuple[str, bytes]]:
        streams = []
        for k, (_, _, _, parts) in enumerate(self.tensors + self.added):
            for s, p in enumerate(parts):
                if p.index_code != "all":
                    streams.append((f"{k}.{s}.i", b"".join(p.index)))
                streams.append((f"{k}.{s}.v", b"".join(p.value)))
        return streams

    def outer(self, text: str | None = None) -> dict[str, Any]:
        """The outer header; ``text``: the patch header's, where it is not the honest one."""
        if text is None:
            text = json.dumps(self.header())
        crc = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        outer: dict[str, Any] = {"__metadata__": {"format": "pulse", "pulse": text, "pulse_crc32": f"{crc:08x}"}}
        at = 0
        for name, data in self.streams():
            outer[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
            at += len(data)
        return outer

    def data(self) -> bytes:
        return b"".join(data for _, data in self.streams())

    def build(self, text: str | None = None) -> bytes:
        return file(self.outer(text), self.data())


def file(outer: Any, data: bytes, *, encoding: str = "utf-8") -> bytes:
    """A file of an outer header (JSON text as it is, anything else as JSON) and the streams' bytes."""
    head = (outer if isinstance(outer, str) else json.dumps(outer)).encode(encoding)
    return struct.pack("<Q", len(head)) + head + data


def from_header(header: Any, data: bytes) -> bytes:
    """A file whose outer header says what the patch header ``header`` says, whatever ``data`` is."""
    text = json.dumps(header)
    outer = Forgery().outer(text)
    at = 0
    for k, tensor in enumerate(header["tensors"] + header["added"]):
        for s, item in enumerate(tensor[3]):
            sizes = [("i", sum(item[4]))] if item[3] != "all" else []
            for kind, size in [*sizes, ("v", sum(item[8]))]:
                outer[f"{k}.{s}.{kind}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
                at += size
    return file(outer, data)
