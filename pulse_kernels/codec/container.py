"""A patch file: a safetensors file with one uint8 tensor a stream and the patch header in its metadata.

Stream ``<k>.<s>.i`` holds the indices and ``<k>.<s>.v`` the values of segment s of the k-th tensor: changed tensors
first, then added ones, in the header's order and without gaps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

from pulse_kernels.codec.header import PatchHeader, TensorHeader, parse_json
from pulse_kernels.codec.segment import ALL, Segment
from pulse_kernels.errors import PatchFormatError

MAX_HEADER_BYTES = 100_000_000  # what the safetensors library reads


def _streams(header: PatchHeader) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every stream in file order."""
    for k, tensor in enumerate((*header.tensors, *header.added)):
        for s, segment in enumerate(tensor.segments):
            if segment.index_code != ALL:
                yield f"{k}.{s}.i", segment.index_bytes
            yield f"{k}.{s}.v", segment.value_bytes


def _outer_header(header: PatchHeader, text: str) -> dict[str, Any]:
    crc = zlib.crc32(text.encode())
    outer: dict[str, Any] = {"__metadata__": {"format": "pulse", "pulse": text, "pulse_crc32": f"{crc:08x}"}}
    at = 0
    for name, size in _streams(header):
        outer[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    return outer


def _check_readable(header: PatchHeader, text: str) -> None:
    """ValueError for a header that a reader would refuse, or read as another."""
    try:
        again = PatchHeader.from_json(text)
    except PatchFormatError as error:
        raise ValueError(f"the patch cannot be written, a reader would refuse it: {error}") from None
    if again.layout != header.layout:
        raise ValueError("the patch's layout is not plain JSON data: keys must be text, sequences lists")


class PatchBuilder:
    """Collects coded segments; ``chunks`` then gives the file."""

    def __init__(self, header: PatchHeader) -> None:
        self.header = header
        self._streams: dict[int, list[Segment]] = {}

    def add(self, tensor: TensorHeader, segment: Segment) -> None:
        """Append a segment to a tensor of the header."""
        tensor.segments.append(segment.header)
        self._streams.setdefault(id(tensor), []).append(segment)

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, piece by piece."""
        text = self.header.to_json()
        _check_readable(self.header, text)
        outer = json.dumps(_outer_header(self.header, text), separators=(",", ":"), ensure_ascii=False).encode()
        outer += b" " * (-len(outer) % 8)
        if len(outer) > MAX_HEADER_BYTES:
            raise ValueError(
                f"patch header of {len(outer)} bytes, the safetensors format allows {MAX_HEADER_BYTES}; "
                "split the state into several patches"
            )
        yield len(outer).to_bytes(8, "little")
        yield outer
        for tensor in (*self.header.tensors, *self.header.added):
            for segment in self._streams.get(id(tensor), []):
                yield from segment.index_stream
                yield from segment.value_stream


class PatchReader:
    """A patch's bytes with its header checked: every stream lies where the header says and none is left over."""

    def __init__(self, buffer: Any) -> None:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise TypeError("the buffer is not contiguous; pass bytes")
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if len(view) < 8:
            raise PatchFormatError(f"{len(view)} bytes, expected a patch file (8 bytes of header length first)")
        length = int.from_bytes(view[:8], "little")
        if length > min(MAX_HEADER_BYTES, len(view) - 8):
            raise PatchFormatError(
                f"a header of {length} bytes in a file of {len(view)}: not a patch file, or a truncated one"
            )
        head = bytes(view[8 : 8 + length])
        if not head.startswith(b"{"):
            raise PatchFormatError(f"the file starts with {bytes(view[:16])!r}: not a safetensors file, so no patch")
        outer = parse_json(head, "safetensors header")
        metadata = outer.get("__metadata__") if isinstance(outer, dict) else None
        if not isinstance(metadata, dict) or not isinstance(metadata.get("pulse"), str):
            raise PatchFormatError(
                "no __metadata__['pulse'] in the header: a safetensors file, but no patch; "
                "`pulse-kernels diff` makes one"
            )
        text: str = metadata["pulse"]
        try:
            crc = f"{zlib.crc32(text.encode()):08x}"
        except UnicodeEncodeError:
            raise PatchFormatError("patch header: not Unicode text") from None
        if metadata.get("pulse_crc32") != crc:
            raise PatchFormatError(
                f"patch header: CRC-32 {crc}, the file says {metadata.get('pulse_crc32')!r:.20}; the file is damaged"
            )
        self.header = PatchHeader.from_json(text)
        expected = _outer_header(self.header, text)
        # Compared as text too: in Python 1 == 1.0 == True.
        if outer != expected or json.dumps(outer, sort_keys=True) != json.dumps(expected, sort_keys=True):
            raise PatchFormatError("the list of streams does not fit the patch header; the file is damaged")
        self._data = view[8 + length :]
        needed = sum(size for _, size in _streams(self.header))
        if len(self._data) != needed:
            raise PatchFormatError(
                f"{len(self._data)} bytes of streams, the header says {needed}; "
                "the file is truncated or has trailing bytes"
            )

    def streams(self) -> Iterator[tuple[TensorHeader, int, memoryview, memoryview]]:
        """(tensor, number of the segment, index stream, value stream) in file order."""
        at = 0
        for tensor in (*self.header.tensors, *self.header.added):
            for s, segment in enumerate(tensor.segments):
                middle, end = at + segment.index_bytes, at + segment.index_bytes + segment.value_bytes
                yield tensor, s, self._data[at:middle], self._data[middle:end]
                at = end
