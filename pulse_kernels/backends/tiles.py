"""Tensors cut into tiles, one program each: how one launch serves all tensors of a model.

The table has an int64 row for each tensor that has any tile: the launch's own columns, then the first tile. It goes to
the device once, from pinned memory, without synchronisation; which row a tile belongs to is laid out there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """rows: of the caller's list, in the table's order. last: int64 [rows], the last tile of each, on the device, and
    ``table`` (int64 [rows, columns + 1]) and ``tile_rows`` (int32 [count]) beside it; None for a lone row, whose
    columns stand in ``row``."""

    rows: list[int]
    count: int
    row: tuple[int, ...]
    table: Tensor | None = None
    tile_rows: Tensor | None = None
    last: Tensor | None = None


def cut(
    columns: Sequence[tuple[int, ...]], sizes: Sequence[int], tile: int, device: torch.device, keep: bool = False
) -> Tiles:
    """Cut tensors of ``sizes`` elements, each with its columns of the table; empty ones get no row.

    ``keep`` the table for the next call with the very same columns and sizes on the same stream: right for addresses
    that stay, such as a model's. A table depends on nothing else, so that none can be out of date.
    """
    if sum(size > 0 for size in sizes) <= 1:
        rows = [k for k, size in enumerate(sizes) if size]
        return Tiles(rows, sum(-(-sizes[k] // tile) for k in rows), (*columns[rows[0]], 0) if rows else ())
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # A replay would copy the table again, from memory that is long another's.
            raise RuntimeError(
                f"a CUDA graph is being captured and {len(sizes)} tensors came in one call, whose table of addresses "
                "a graph cannot keep; call the operator for each tensor"
            )
        # On another stream a kept table might not be there yet, nor its memory be safe from reuse.
        stream = torch.cuda.current_stream(device).cuda_stream
    return (_kept if keep else _cut)(tuple(columns), tuple(sizes), tile, device, stream)


def _cut(
    columns: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], tile: int, device: torch.device, _: int
) -> Tiles:
    rows = [k for k, size in enumerate(sizes) if size]
    counts = [-(-sizes[k] // tile) for k in rows]
    width = len(columns[0])
    flat, first = [], 0
    for k, count in zip(rows, counts, strict=True):
        flat += [*columns[k], first]
        first += count
    flat += counts
    pinned = torch.tensor(flat, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    on_device = pinned.to(device, non_blocking=True)
    split = len(rows) * (width + 1)
    table, tiles_of = on_device[:split].view(len(rows), width + 1), on_device[split:]
    numbers = torch.arange(len(rows), dtype=torch.int32, device=device)
    tile_rows = torch.repeat_interleave(numbers, tiles_of, output_size=first)
    return Tiles(rows, first, (), table, tile_rows, tiles_of.cumsum(0) - 1)


_kept = functools.lru_cache(maxsize=8)(_cut)  # each holds 4 bytes of the device a tile
