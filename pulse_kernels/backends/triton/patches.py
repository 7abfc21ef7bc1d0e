"""Kernels in O(changed): scatter and exchange, order of positions, digest updates. One program a TILE of changes.

Rows of the table: (indices, first pointer, second pointer, third pointer, count, parameter, first tile).
"""

import triton
import triton.language as tl

from pulse_kernels.backends.triton.bits import field, pointer, row_of
from pulse_kernels.backends.triton.digest import digest_weight, unsigned

PLAIN = ["indices", "weight", "values", "old_values", "old", "new", "count", "numel", "key"]
LAST = tl.constexpr(6)
COLUMNS = tl.constexpr(7)


@triton.jit(do_not_specialize=PLAIN)
def scatter(
    table,
    tile_rows,
    indices: tl.int64,
    weight: tl.int64,
    values: tl.int64,
    old_values: tl.int64,
    count: tl.int64,
    INDEX_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    OLD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write values (zeros, with ZERO) at checked positions, keep what was there with OLD.

    Traffic: position and value of each change, a sector of 32 bytes of the weight written (and read, with OLD).
    """
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    begin = (tile - field(table, row, LAST, COLUMNS, tile.to(tl.int64) * 0)) * TILE
    at = begin + tl.arange(0, TILE)
    live = at < field(table, row, 4, COLUMNS, count)
    where = tl.load(pointer(field(table, row, 0, COLUMNS, indices), INDEX_SIZE) + at, mask=live, other=0)
    place = pointer(field(table, row, 1, COLUMNS, weight), SIZE) + where.to(tl.int64)
    if OLD:
        old = pointer(field(table, row, 3, COLUMNS, old_values), SIZE)
        tl.store(old + at, tl.load(place, mask=live), mask=live)
    if ZERO:
        tl.store(place, tl.zeros([TILE], place.dtype.element_ty), mask=live)
    else:
        new = tl.load(pointer(field(table, row, 2, COLUMNS, values), SIZE) + at, mask=live)
        tl.store(place, new, mask=live)


@triton.jit(do_not_specialize=PLAIN)
def gather(
    indices: tl.int64,
    weight: tl.int64,
    values: tl.int64,
    count: tl.int64,
    INDEX_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Values at checked positions. Traffic: position and value of each, a sector of 32 bytes of the weight."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = at < count
    where = tl.load(pointer(indices, INDEX_SIZE) + at, mask=live, other=0)
    tl.store(pointer(values, SIZE) + at, tl.load(pointer(weight, SIZE) + where, mask=live), mask=live)


@triton.jit(do_not_specialize=PLAIN)
def order(
    table,
    tile_rows,
    indices: tl.int64,
    count: tl.int64,
    numel: tl.int64,
    bad,
    INDEX_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lower ``bad`` (int64, one a tensor) to the first entry that is out of [0, numel) or not above the one before it.

    Traffic: each position once.
    """
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    begin = (tile - field(table, row, LAST, COLUMNS, tile.to(tl.int64) * 0)) * TILE
    at = begin + tl.arange(0, TILE)
    live = at < field(table, row, 4, COLUMNS, count)
    positions = pointer(field(table, row, 0, COLUMNS, indices), INDEX_SIZE)
    here = tl.load(positions + at, mask=live, other=0).to(tl.int64)
    before = tl.load(positions + at - 1, mask=live & (at > 0), other=-1).to(tl.int64)
    # The entry before the first is -1, so that being above it means being no negative number.
    before = tl.where(at > 0, before, -1)
    wrong = live & ((here < 0) | (here >= field(table, row, 5, COLUMNS, numel)) | (here <= before))
    nowhere = 0x7FFFFFFFFFFFFFFF
    first = tl.min(tl.where(wrong, at, nowhere))
    if first != nowhere:
        tl.atomic_min(bad + row, first)


@triton.jit(do_not_specialize=PLAIN)
def digest_changes(
    table,
    tile_rows,
    indices: tl.int64,
    old: tl.int64,
    new: tl.int64,
    count: tl.int64,
    key: tl.int64,
    sums,
    INDEX_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add ``(new - old) * K`` of both lanes to ``sums`` (int64, two a tensor). Traffic: position and both values."""
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    begin = (tile - field(table, row, LAST, COLUMNS, tile.to(tl.int64) * 0)) * TILE
    at = begin + tl.arange(0, TILE)
    live = at < field(table, row, 4, COLUMNS, count)
    where = tl.load(pointer(field(table, row, 0, COLUMNS, indices), INDEX_SIZE) + at, mask=live, other=0)
    before = unsigned(tl.load(pointer(field(table, row, 1, COLUMNS, old), SIZE) + at, mask=live, other=0), SIZE)
    after = unsigned(tl.load(pointer(field(table, row, 2, COLUMNS, new), SIZE) + at, mask=live, other=0), SIZE)
    key = field(table, row, 5, COLUMNS, key)
    for lane in tl.static_range(2):
        change = (after - before) * digest_weight(key, lane, where.to(tl.int64))
        tl.atomic_add(sums + row * 2 + lane, tl.sum(change))
