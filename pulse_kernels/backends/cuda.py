"""csrc/cuda bound to the operators: packed indices of many tensors, and the two passes of compaction.

Tensors of a call are on one device. All work goes to its current stream; tables of addresses go there once, from pinned
memory. A raw operator is one kernel launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pulse_kernels.backends.reference import BLOCK, check_packed_fit, dense, packed_headers, packed_sizes
from pulse_kernels.backends.two_pass import Job
from pulse_kernels.errors import PatchFormatError

_raw: Any = torch.ops.pulse_kernels_cuda  # tests put another in its place
_TILE_BLOCKS = 8  # index blocks a program: csrc/cuda/packing.h
_ALIGNMENT = 16  # of every part of a buffer that several tensors share, and of the blobs that kernels read
_NO_ERROR = (1 << 63) - 1
_ERRORS = (  # by class, see UnpackError in csrc/cuda/packing.h
    "a block width over 63",
    "offsets are not the running sum of widths",
    "a non-zero pad byte",
    "the payload is not what the widths need",
    "block {block} has positions out of range or order, or stray bits",
)


def architectures() -> list[str]:
    """What the library was compiled for, such as ``sm_90``; it has PTX of the last, for later GPUs."""
    return [f"sm_{number}" for number in str(_raw.architectures()).split(",")]


# ---- compaction -----------------------------------------------------------------------------------------------------


def mark(job: Job, mask: Tensor, counts: Tensor) -> None:
    """Pass one: bit k of word j of ``mask`` (int32 [tiles * 256]) tells whether element 32 j + k of a tile changed;
    ``counts`` (int32 [tiles]) gets how many did."""
    _raw.mark(job.kind, job.size, job.table, job.tile_rows, _row(job), job.tiles, mask, counts)


def collect(
    job: Job,
    mask: Tensor,
    ends: Tensor,
    indices: Tensor,
    values: Tensor,
    old_values: Tensor | None,
    update: bool,
) -> None:
    """Pass two: the changes of all tiles behind one another; ``ends`` (int64 [tiles]) is the running sum of the counts.
    Nothing is written where they exceed ``indices.numel()``."""
    arguments = (mask, ends, indices, values, old_values, update)
    _raw.collect(job.kind, job.size, job.table, job.tile_rows, _row(job), job.tiles, *arguments)


def _row(job: Job) -> list[int]:
    return list(job.row) if job.table is None else []


# ---- packed indices (layout: docs/format.md) ------------------------------------------------------------------------


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """int64, copied without synchronisation."""
    pinned = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _tiles_of(counts: Sequence[int]) -> list[int]:
    """Tiles of each list of indices; an empty one has a tile too, for its header."""
    return [max(1, -(-count // (BLOCK * _TILE_BLOCKS))) for count in counts]


def _tile_rows(tiles: list[int], tiles_on_device: Tensor) -> Tensor:
    """int32: the row of each tile."""
    rows = torch.arange(len(tiles), dtype=torch.int32, device=tiles_on_device.device)
    return torch.repeat_interleave(rows, tiles_on_device, output_size=sum(tiles))


def _laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(where each part begins, size of the whole) in bytes of a buffer with aligned parts."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def _parts(buffer: Tensor, begins: list[int], sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [buffer[at : at + size].view(dtype) for at, size, dtype in zip(begins, sizes, dtypes, strict=True)]


def _running(sizes: Sequence[int]) -> list[int]:
    """Sums of the sizes before each."""
    sums, total = [], 0
    for size in sizes:
        sums.append(total)
        total += size
    return sums


def pack_indices_many(indices: list[Tensor], numels: list[int]) -> list[Tensor]:
    """Each list's blob, the bytes of ``reference.pack_indices``; all are parts of one allocation.

    indices: int32 or int64, mixed as they come, increasing (else a blob comes out that ``unpack_indices`` refuses or
    reads as other positions). Two launches, one synchronisation.
    """
    if not indices:
        return []
    lists, device = [dense(index) for index in indices], indices[0].device
    counts = [index.numel() for index in lists]
    tables_bytes = [packed_sizes(count, numel)[2] for count, numel in zip(counts, numels, strict=True)]
    blocks = [-(-count // BLOCK) for count in counts]
    tiles, first_blocks = _tiles_of(counts), _running(blocks)
    first_tiles = _running(tiles)

    def table_of(blobs_at: list[int]) -> list[int]:
        columns = zip(lists, counts, numels, first_tiles, first_blocks, blobs_at, strict=True)
        return [
            number
            for index, count, numel, tile, block, at in columns
            for number in (index.data_ptr(), int(index.dtype is torch.int64), count, numel, tile, block, at)
        ]

    last_blocks = [first + own - 1 for first, own in zip(first_blocks, blocks, strict=True) if own]
    sent = _on_device([*table_of([0] * len(lists)), *tiles, *last_blocks], device)
    table, tiles_sent, last_sent = sent.split([7 * len(lists), len(tiles), len(last_blocks)])
    tile_rows = _tile_rows(tiles, tiles_sent)
    widths = torch.zeros(sum(blocks), dtype=torch.uint8, device=device)
    _raw.pack_widths(table, tile_rows, widths)
    ends = widths.cumsum(0, dtype=torch.int64)
    found = iter(torch.stack([ends[last_sent], widths[last_sent].long()], 1).tolist())  # the synchronisation
    sizes, end_before = [], 0
    for size, count, own in zip(tables_bytes, counts, blocks, strict=True):
        payload = 0
        if own:
            end, last_width = next(found)
            offset, end_before = end - last_width - end_before, end
            if offset >= 1 << 32:
                raise ValueError(f"{count} indices spread so far need a payload of over 2^37 bytes; pack them in parts")
            payload = 32 * offset + -(-(count - (own - 1) * BLOCK) * last_width // 32) * 4
        sizes.append(size + payload)
    begins, total = _laid_out(sizes)
    blobs = torch.empty(total, dtype=torch.uint8, device=device)
    _raw.pack(_on_device(table_of(begins), device), tile_rows, widths, ends, blobs)
    return _parts(blobs, begins, sizes, [torch.uint8] * len(sizes))


def _aligned(blob: Tensor) -> Tensor:
    blob = dense(blob)
    return blob.clone() if blob.data_ptr() % _ALIGNMENT else blob


class _Blobs:
    """Packed indices that nobody vouches for: headers read and checked on the host, the rest by ``check``."""

    def __init__(self, packed: list[Tensor], headers: Sequence[tuple[int, int]] | None = None):
        self.blobs, self.device = [_aligned(blob) for blob in packed], packed[0].device
        self.headers = packed_headers(packed) if headers is None else headers  # a synchronisation, or none
        self.counts, self.numels = [count for count, _ in self.headers], [numel for _, numel in self.headers]

    def send(self, columns: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Make the device's table; columns: where results begin in bytes, the size of one, the address of weight and
        values, and the size of a value."""
        tiles = _tiles_of(self.counts)
        numbers, first = [], 0
        rows = zip(self.blobs, self.counts, self.numels, tiles, columns, strict=True)
        for blob, count, numel, own_tiles, column in rows:
            payload = blob.numel() - packed_sizes(count, numel)[2]
            numbers += [blob.data_ptr(), count, numel, payload, first, *column]
            first += own_tiles
        sent = _on_device([*numbers, *tiles], self.device)
        self.table, tiles_sent = sent.split([len(numbers), len(tiles)])
        self.tile_rows = _tile_rows(tiles, tiles_sent)

    def check(self, out: Tensor | None) -> None:
        """Unpack into ``out``, or only look: PatchFormatError for the first bad blob. One launch, one
        synchronisation."""
        errors = torch.full((len(self.blobs),), _NO_ERROR, dtype=torch.int64, device=self.device)
        _raw.unpack(self.table, self.tile_rows, errors, out)
        for k, error in enumerate(errors.tolist()):
            if error != _NO_ERROR:
                text = _ERRORS[error >> 56].format(block=error & ((1 << 56) - 1))
                raise PatchFormatError(f"packed indices: {text}; the bytes are damaged or not from pack_indices", k)


def unpack_indices_many(
    packed: list[Tensor], index_dtypes: list[torch.dtype], headers: Sequence[tuple[int, int]] | None = None
) -> list[Tensor]:
    """Each blob's indices as int32 or int64 (the caller's choice, in which they fit); all are parts of one allocation.

    PatchFormatError for a blob that is not one in every bit. One launch, one synchronisation; one more to read the
    headers, where the caller has not.
    """
    if not packed:
        return []
    blobs = _Blobs(packed, headers)
    sizes = [count * dtype.itemsize for count, dtype in zip(blobs.counts, index_dtypes, strict=True)]
    begins, total = _laid_out(sizes)
    blobs.send([(at, dtype.itemsize, 0, 0, 0) for at, dtype in zip(begins, index_dtypes, strict=True)])
    indices = torch.empty(total, dtype=torch.uint8, device=blobs.device)
    blobs.check(indices)
    return _parts(indices, begins, sizes, index_dtypes)


def exchange_packed_many_(
    weights: list[Tensor], packed: list[Tensor], values: list[Tensor], keep_old: bool
) -> list[Tensor]:
    """Write ``values[k]`` at the positions packed in ``packed[k]`` into the contiguous ``weights[k]``, without laying
    the positions out in memory; the overwritten values, or nothing in each place without ``keep_old``.

    Nothing is written unless every blob is good and fits its weight and values; else PatchFormatError. Two launches,
    two synchronisations, both before the first write.
    """
    if not packed:
        return []
    blobs, dense_values = _Blobs(packed), [dense(value) for value in values]
    for k, (weight, value) in enumerate(zip(weights, dense_values, strict=True)):
        if not weight.is_contiguous() or value.dtype != weight.dtype:
            raise ValueError(f"weight {k}: expected contiguous, with values of its dtype {weight.dtype}")
    check_packed_fit(weights, dense_values, blobs.headers)
    sizes = [value.nbytes if keep_old else 0 for value in dense_values]
    begins, total = _laid_out(sizes)
    blobs.send(
        [
            (at, weight.element_size(), weight.data_ptr(), value.data_ptr(), weight.element_size())
            for at, weight, value in zip(begins, weights, dense_values, strict=True)
        ]
    )
    old_values = torch.empty(total, dtype=torch.uint8, device=blobs.device)
    blobs.check(None)
    _raw.exchange(blobs.table, blobs.tile_rows, old_values if keep_old else None)
    return _parts(old_values, begins, sizes, [weight.dtype for weight in weights])
