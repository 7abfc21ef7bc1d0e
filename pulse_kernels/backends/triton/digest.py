"""The state digest (docs/format.md, csrc/bits/digest.h): ``sum_i bits_i * M(lane, i >> 8) * T(lane, i & 255)``.

All arithmetic wraps at 64 bits; int64 tensors stand for unsigned ones, so right shifts go through uint64.
"""

import triton
import triton.language as tl

from pulse_kernels.backends.triton.bits import field, pointer, row_of

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
PLAIN = ["tensor", "numel", "key", "start"]


@triton.jit
def u64(x):
    return x.to(tl.uint64, bitcast=True) if x.dtype == tl.int64 else x.to(tl.uint64)


@triton.jit
def mix64(z):
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    return z ^ (z >> 31)


@triton.jit
def digest_seed(key, LANE: tl.constexpr):
    return mix64(u64(key) + GOLDEN) if LANE == 0 else mix64(u64(key) + GOLDEN + GOLDEN)


@triton.jit
def block_factor(seed, block):
    return mix64(seed + u64(block) * GOLDEN) | 1


@triton.jit
def slot_factor(seed, slot):
    """32 bits: a product with an element of up to 4 bytes is one wide multiply."""
    return (mix64((seed ^ 0xFFFFFFFFFFFFFFFF) + u64(slot) * GOLDEN) >> 32) | 1


@triton.jit
def digest_weight(key, LANE: tl.constexpr, positions):
    """K(lane, position) as int64; positions int64."""
    seed = digest_seed(key, LANE)
    weight = block_factor(seed, positions >> 8) * slot_factor(seed, positions & 255)
    return weight.to(tl.int64, bitcast=True)


@triton.jit
def unsigned(bits, SIZE: tl.constexpr):
    """Bits of SIZE bytes as a non-negative int64 (8 bytes: as they are)."""
    if SIZE == 8:
        return bits
    else:
        return bits.to(tl.int64) & ((1 << (8 * SIZE)) - 1)


@triton.jit
def sum_part(data, at, low, high, row0, seed0, seed1, slots0, slots1, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Weighted sums of both lanes over ROWS blocks of 256 elements from ``at`` on, as [ROWS, 32] partial ones.

    ``high`` masks a tail, ``low`` what lies before the tensor; None in a whole tile.
    """
    places = at + tl.arange(0, ROWS)[:, None] * 256 + tl.arange(0, 256)[None, :]
    if high is None:
        raw = tl.load(data + places)
    else:
        raw = tl.load(data + places, mask=(places >= low) & (places < high), other=0)
    # 8 neighbours, 16 bytes of BF16, are one thread's: their sum takes no exchange, and one multiply by the factor of
    # their block.
    raw = tl.reshape(unsigned(raw, SIZE), [ROWS, 32, 8])
    rows = row0 + tl.arange(0, ROWS)
    first = tl.sum(raw * slots0, axis=2) * block_factor(seed0, rows).to(tl.int64, bitcast=True)[:, None]
    second = tl.sum(raw * slots1, axis=2) * block_factor(seed1, rows).to(tl.int64, bitcast=True)[:, None]
    return first, second


@triton.jit
def slots_of(seed):
    """Factors of the 256 places in a block, int64 [1, 32, 8]."""
    places = tl.arange(0, 32)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return slot_factor(seed, places).to(tl.int64, bitcast=True)[None, :, :]


@triton.jit(do_not_specialize=PLAIN)
def digest(
    table,
    tile_rows,
    tensor: tl.int64,
    numel: tl.int64,
    key: tl.int64,
    start: tl.int64,
    sums,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add a tensor's weighted sum to ``sums`` (int64, two a tensor). Rows of the table: (pointer, elements, key, start,
    first tile). Tiles begin at multiples of 256 positions: the first may reach to before the tensor.

    Traffic: each element once; two atomic additions a tile.
    """
    tile = tl.program_id(0)
    row = row_of(tile_rows, tile)
    tensor = field(table, row, 0, 5, tensor)
    numel = field(table, row, 1, 5, numel)
    key = field(table, row, 2, 5, key)
    start = field(table, row, 3, 5, start)
    begin = (tile - field(table, row, 4, 5, tile.to(tl.int64) * 0)) * TILE
    before = start & 255  # positions of the first block that lie before the tensor
    low = before - begin
    left = before + numel - begin
    data = pointer(tensor, SIZE) + (begin - before)
    block = (start >> 8) + (begin >> 8)
    seed0 = digest_seed(key, 0)
    seed1 = digest_seed(key, 1)
    slots0 = slots_of(seed0)
    slots1 = slots_of(seed1)
    ROWS: tl.constexpr = STEP // 256
    total0 = tl.zeros([ROWS, 32], tl.int64)
    total1 = tl.zeros([ROWS, 32], tl.int64)
    if (left >= TILE) & (low <= 0) & (((tensor - before * SIZE) & 15) == 0):
        data = tl.multiple_of(data, 16)
        for k in range(0, TILE, STEP):
            part0, part1 = sum_part(data, k, None, None, block + k // 256, seed0, seed1, slots0, slots1, SIZE, ROWS)
            total0 += part0
            total1 += part1
    else:
        for k in range(0, tl.minimum(left, TILE).to(tl.int32), STEP):
            part0, part1 = sum_part(data, k, low, left, block + k // 256, seed0, seed1, slots0, slots1, SIZE, ROWS)
            total0 += part0
            total1 += part1
    tl.atomic_add(sums + row * 2, tl.sum(total0))
    tl.atomic_add(sums + row * 2 + 1, tl.sum(total1))
