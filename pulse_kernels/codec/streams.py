"""Byte parts of a stream: zstd where it saves something, raw where not, nothing where all bytes are zero."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
import zstandard
from torch import Tensor

from pulse_kernels.codec.parallel import parallel_map
from pulse_kernels.errors import PatchFormatError

ZSTD_LEVEL = 1
MAX_WINDOW = 1 << 27  # bytes: what a streaming zstd decoder takes without being told
_MIN_ZSTD = 64  # bytes below which a frame's own header outweighs the gain
_THREAD_BYTES = 1 << 21  # to compress, for which another thread pays
_idle: list[zstandard.ZstdCompressor] = []  # each holds a megabyte of tables, and serves one thread at a time


def _compress(buffer: memoryview) -> bytes:
    try:
        compressor = _idle.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
    try:
        return compressor.compress(buffer)
    finally:
        _idle.append(compressor)


def checksum(parts: Sequence[bytes | memoryview]) -> int:
    """CRC-32 (ISO-HDLC) over all parts."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, little-endian, row-major."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    # One element may have any stride and still count as contiguous, but not as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes()


def store_parts(parts: Sequence[Tensor], threads: int) -> list[bytes]:
    """Each uint8 [n] as it is stored: b"" if all zero, a zstd frame if that is shorter, else the bytes themselves."""
    arrays = [part.numpy() for part in parts]
    used = [k for k, array in enumerate(arrays) if array.any()]
    worth = [k for k in used if arrays[k].size >= _MIN_ZSTD]
    worth.sort(key=lambda k: arrays[k].size, reverse=True)  # so that the threads end together
    threads = min(threads, 1 + sum(arrays[k].size for k in worth) // _THREAD_BYTES)
    stored = [b""] * len(arrays)
    for k, frame in zip(worth, parallel_map(lambda k: _compress(arrays[k].data), worth, threads), strict=True):
        if len(frame) < arrays[k].size:
            stored[k] = frame
    for k in used:
        stored[k] = stored[k] or arrays[k].tobytes()
    return stored


def load_part(stored: memoryview, size: int, what: str) -> Tensor:
    """The uint8 [size] that ``store_parts`` stored; takes no more memory than ``size``, whatever the frame claims."""
    if len(stored) == 0:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    if len(stored) == size:
        return torch.from_numpy(np.array(np.frombuffer(stored, dtype=np.uint8)))
    if len(stored) > size:
        raise PatchFormatError(f"{what}: {len(stored)} stored bytes for {size} decoded ones; the file is damaged")
    try:
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != size:
            raise PatchFormatError(
                f"{what}: a zstd frame of {frame.content_size} bytes, expected {size}; the file is damaged"
            )
        if frame.window_size > MAX_WINDOW:
            raise PatchFormatError(
                f"{what}: a zstd frame with a window of {frame.window_size} bytes, at most {MAX_WINDOW} are allowed"
            )
        # One frame and nothing behind it; more than the declared size does not fit the buffer and is an error.
        data = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PatchFormatError(f"{what}: {error}; the file is damaged") from None
    if len(data) != size:
        raise PatchFormatError(f"{what}: a zstd frame gives {len(data)} bytes, expected {size}; the file is damaged")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def split(stream: memoryview, sizes: Sequence[int], what: str) -> list[memoryview]:
    """A stream cut into parts of the given sizes, which must add up to it."""
    if sum(sizes) != len(stream):
        raise PatchFormatError(f"{what}: parts of {sum(sizes)} bytes in a stream of {len(stream)}; the file is damaged")
    parts, at = [], 0
    for size in sizes:
        parts.append(stream[at : at + size])
        at += size
    return parts
