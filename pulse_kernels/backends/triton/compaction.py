"""Gate and compaction in two passes over a bitmask, and the dense passes beside them.

Pass one (``mark``) reads every element once and leaves a bit each and a count per tile; a running sum of the counts
follows; pass two (``collect``) visits set bits alone. The result is sorted and the same in every run.

A tensor is cut into tiles of TILE elements, one program each. Many tensors run as one launch over a table of int64
rows (source, target, third, numel, first tile) and ``tile_rows``, the row of each tile; a single tensor comes as
arguments instead, which a CUDA graph can capture. Loads are wide in whole tiles of aligned tensors; masked ones,
which the compiler leaves scalar, are for tails and misaligned tensors.
"""

import triton
import triton.language as tl

from pulse_kernels.backends.triton.bits import (
    changed,
    field,
    lowest_bit,
    new_value,
    pending,
    pointer,
    popcount,
    row_of,
)

CROWDED = tl.constexpr(8)  # changes in a word of 32 elements

# Named in each kernel's own list: Triton would compile anew for values of 1 and multiples of 16.
PLAIN = ["source", "target", "third", "numel", "tiles", "capacity", "out"]


@triton.jit
def mark_part(source, target, third, at, live, words_out, KIND: tl.constexpr, STEP: tl.constexpr):
    """Bits of STEP elements as int32 words, bit k of word j for element 32 j + k; returns how many are set."""
    places = tl.arange(0, STEP)
    bits = changed(source, target, third, at + places, live, KIND)
    if live is not None:
        bits = bits & live
    bits = bits.to(tl.int32)
    words = tl.sum(tl.reshape(bits << (places % 32), [STEP // 32, 32]), axis=1)
    tl.store(words_out + tl.arange(0, STEP // 32), words)
    return tl.sum(bits)


@triton.jit(do_not_specialize=PLAIN)
def mark(
    table,
    tile_rows,
    source: tl.int64,
    target: tl.int64,
    third: tl.int64,
    numel: tl.int64,
    words,
    counts,
    KIND: tl.constexpr,
    SOURCE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Pass one. Traffic: each element of the inputs once (6 bytes for the BF16 gate, 12 for the residual gate), one
    bit each written, 4 bytes a tile."""
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    source = field(table, row, 0, 5, source)
    target = field(table, row, 1, 5, target)
    third = field(table, row, 2, 5, third)
    begin = (tile - field(table, row, 4, 5, tile.to(tl.int64) * 0)) * TILE
    left = field(table, row, 3, 5, numel) - begin
    words += tile.to(tl.int64) * (TILE // 32)
    aligned = ((source | target | third) & 15) == 0
    s = pointer(source, SOURCE_SIZE) + begin
    t = pointer(target, SIZE) + begin
    r = pointer(third, 4) + begin
    total = 0
    if (left >= TILE) & aligned:
        # 16 bytes a thread of the widest input, so that each request of a warp is contiguous in all of them.
        s = tl.multiple_of(s, 16)
        t = tl.multiple_of(t, 16 * SIZE // SOURCE_SIZE)
        r = tl.multiple_of(r, 16)
        for k in tl.static_range(0, TILE, STEP):
            total += mark_part(s, t, r, k, None, words + k // 32, KIND, STEP)
    else:
        for k in range(0, TILE, STEP):
            live = k + tl.arange(0, STEP) < left
            total += mark_part(s, t, r, k, live, words + k // 32, KIND, STEP)
    tl.store(counts + tile, total)


@triton.jit
def put_change(s, t, r, at, live, begin, place, indices, values, old_values, KIND: tl.constexpr, UPDATE: tl.constexpr):
    """Store the changes of the elements ``at`` at ``place`` in the results, and into the target."""
    new = new_value(s, t, r, at, live, KIND)
    if old_values is not None:
        tl.store(old_values + place, tl.load(t + at, mask=live), mask=live)
    tl.store(indices + place, (begin + at).to(indices.dtype.element_ty), mask=live)
    tl.store(values + place, new, mask=live)
    if UPDATE:
        tl.store(t + at, new, mask=live)


@triton.jit(do_not_specialize=PLAIN)
def collect(
    table,
    tile_rows,
    source: tl.int64,
    target: tl.int64,
    third: tl.int64,
    words,
    ends,
    tiles: tl.int64,
    capacity: tl.int64,
    indices,
    values,
    old_values,
    KIND: tl.constexpr,
    SOURCE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    UPDATE: tl.constexpr,
    TILE: tl.constexpr,
    DENSE_STEP: tl.constexpr,
):
    """Pass two. ``ends``: running sum of the counts. Nothing is written where the last one exceeds ``capacity``.

    Traffic: a bit an element; for every change its position and value written, a sector of 32 bytes of the source read
    and, with UPDATE, one of the target written (neighbours share sectors).
    """
    tile = tl.program_id(0)
    if tl.load(ends + (tiles - 1)) <= capacity:
        row = row_of(tile_rows, tile)
        begin = (tile - field(table, row, 4, 5, tile.to(tl.int64) * 0)) * TILE
        s = pointer(field(table, row, 0, 5, source), SOURCE_SIZE) + begin
        t = pointer(field(table, row, 1, 5, target), SIZE) + begin
        r = pointer(field(table, row, 2, 5, third), 4) + begin
        start = tl.load(ends + tile - 1, mask=tile > 0, other=0)
        indices += start  # places within the tile's own part then take 32 bits
        values += start
        if old_values is not None:
            old_values += start
        words += tile.to(tl.int64) * (TILE // 32)
        lanes = tl.arange(0, TILE // 32)
        bits = tl.load(words + lanes)
        count = popcount(bits)
        most = tl.max(count)
        if most <= CROWDED:
            place = tl.cumsum(count, 0) - count
            for _ in range(most):
                live = bits != 0
                at = lanes * 32 + lowest_bit(bits)
                put_change(s, t, r, at, live, begin, place, indices, values, old_values, KIND, UPDATE)
                place += 1
                bits = bits & (bits - 1)
        else:
            # Crowded words: one lane a word would spread every request over 32 places of the results.
            done = 0
            for k in range(0, TILE, DENSE_STEP):
                at = k + tl.arange(0, DENSE_STEP)
                bit = (tl.load(words + at // 32) >> (at % 32)) & 1
                place = done + tl.cumsum(bit, 0) - bit
                put_change(s, t, r, at, bit != 0, begin, place, indices, values, old_values, KIND, UPDATE)
                done += tl.sum(bit)


@triton.jit(do_not_specialize=PLAIN)
def visibility(
    table,
    tile_rows,
    source: tl.int64,
    target: tl.int64,
    out: tl.int64,
    numel: tl.int64,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Where the gate sees a change, a byte each (``out`` stands in the third column). Traffic: 6 bytes read, 1 written
    an element."""
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    source = field(table, row, 0, 5, source)
    target = field(table, row, 1, 5, target)
    out = field(table, row, 2, 5, out)
    begin = (tile - field(table, row, 4, 5, tile.to(tl.int64) * 0)) * TILE
    left = field(table, row, 3, 5, numel) - begin
    aligned = ((source | target | out) & 15) == 0
    s = pointer(source, 4) + begin
    t = pointer(target, 2) + begin
    o = pointer(out, 1) + begin
    if (left >= TILE) & aligned:
        s = tl.multiple_of(s, 16)
        t = tl.multiple_of(t, 8)
        o = tl.multiple_of(o, 4)
        for k in tl.static_range(0, TILE, STEP):
            at = k + tl.arange(0, STEP)
            tl.store(o + at, changed(s, t, s, at, None, KIND).to(tl.int8))
    else:
        for k in range(0, TILE, STEP):
            at = k + tl.arange(0, STEP)
            live = at < left
            tl.store(o + at, changed(s, t, s, at, live, KIND).to(tl.int8), mask=live)


@triton.jit(do_not_specialize=PLAIN)
def commit(
    table,
    tile_rows,
    source: tl.int64,
    target: tl.int64,
    third: tl.int64,
    numel: tl.int64,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write ``s = residual + (theta - local)`` into the residual, the third column. Traffic: 12 bytes read, 4 written
    an element."""
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    source = field(table, row, 0, 5, source)
    target = field(table, row, 1, 5, target)
    third = field(table, row, 2, 5, third)
    begin = (tile - field(table, row, 4, 5, tile.to(tl.int64) * 0)) * TILE
    left = field(table, row, 3, 5, numel) - begin
    aligned = ((source | target | third) & 15) == 0
    s = pointer(source, 4) + begin
    t = pointer(target, 4) + begin
    r = pointer(third, 4) + begin
    if (left >= TILE) & aligned:
        s = tl.multiple_of(s, 16)
        t = tl.multiple_of(t, 16)
        r = tl.multiple_of(r, 16)
        for k in tl.static_range(0, TILE, STEP):
            at = k + tl.arange(0, STEP)
            tl.store(r + at, pending(tl.load(s + at), tl.load(t + at), tl.load(r + at)))
    else:
        for k in range(0, TILE, STEP):
            at = k + tl.arange(0, STEP)
            live = at < left
            new = pending(tl.load(s + at, mask=live), tl.load(t + at, mask=live), tl.load(r + at, mask=live))
            tl.store(r + at, new, mask=live)
