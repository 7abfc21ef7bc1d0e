"""Tensors cut into tiles, one program each: how one launch serves all tensors of a model.

The table has an int64 row for each tensor that has any tile: the launch's own columns, then the first tile. It goes to
the device once, from pinned memory, without synchronisation; which row a tile belongs to is laid out there.
"""

from __future__ import annotations

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


def cut(columns: Sequence[tuple[int, ...]], sizes: Sequence[int], tile: int, device: torch.device) -> Tiles:
    """Cut tensors of ``sizes`` elements, each with its columns of the table; empty ones get no row."""
    rows = [k for k, size in enumerate(sizes) if size]
    counts = [-(-sizes[k] // tile) for k in rows]
    if len(rows) <= 1:
        return Tiles(rows, sum(counts), (*columns[rows[0]], 0) if rows else ())
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A replay would copy the table again, from memory that is long another's.
        raise RuntimeError(
            f"a CUDA graph is being captured and {len(rows)} tensors came in one call, whose table of addresses a "
            "graph cannot keep; call the operator for each tensor"
        )
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
