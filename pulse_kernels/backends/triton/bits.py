"""Device functions that several kernels share: rounding and comparing on bits, and a tile's place in its tensor.

Weights are integers here, never floats: neither Triton's interpreter nor a GPU's conversions keep to one NaN rule.
"""

import triton
import triton.language as tl

# What is compared with what; csrc/cuda and backends/two_pass.py have the same numbers.
GATE_BF16 = tl.constexpr(0)
GATE_FP16 = tl.constexpr(1)
DIFF = tl.constexpr(2)
RESIDUAL_BF16 = tl.constexpr(3)
RESIDUAL_FP16 = tl.constexpr(4)


@triton.jit
def field(table, row, column: tl.constexpr, columns: tl.constexpr, direct):
    """Entry ``column`` of a tensor's row in the table, or the argument that stands for it where there is no table."""
    if table is None:
        return direct.to(tl.int64)  # the interpreter takes a small argument for an int32
    else:
        return tl.load(table + row * columns + column)


@triton.jit
def row_of(tile_rows, tile):
    """The table's row of the tensor that a tile lies in."""
    if tile_rows is None:
        return tile.to(tl.int64) * 0
    else:
        return tl.load(tile_rows + tile).to(tl.int64)


@triton.jit
def pointer(address, size: tl.constexpr):
    """An address as a pointer to integers of ``size`` bytes."""
    if size == 1:
        return address.to(tl.pointer_type(tl.int8))
    elif size == 2:
        return address.to(tl.pointer_type(tl.int16))
    elif size == 4:
        return address.to(tl.pointer_type(tl.int32))
    else:
        return address.to(tl.pointer_type(tl.int64))


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def round_to_bf16(u):
    """FP32 bits (int32) to BF16 bits, as csrc/bits/rounding.h: round half to even, a NaN becomes quiet | sign."""
    rounded = (u + (0x7FFF + ((u >> 16) & 1))) >> 16
    is_nan = (u & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, ((u >> 16) & 0x8000) | 0x7FC0, rounded) & 0xFFFF


@triton.jit
def round_to_fp16(u):
    """FP32 bits (int32) to FP16 bits, as csrc/bits/rounding.h."""
    magnitude = u & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + (0x0FFF + ((magnitude >> 13) & 1))) >> 13
    # Below 2^-14 the result counts units of 2^-24.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(126 - (magnitude >> 23), 1), 25)
    half = (magnitude & 0) + 1 << (shift - 1)
    subnormal = (significand + (half - 1) + ((significand >> shift) & 1)) >> shift
    rounded = tl.where(magnitude < 0x38800000, subnormal, normal)
    rounded = tl.where(magnitude >= 0x47800000, 0x7C00, rounded)
    return tl.where(magnitude > 0x7F800000, 0x7E00, rounded) | ((u >> 16) & 0x8000)


@triton.jit
def round_bits(u, KIND: tl.constexpr):
    if (KIND == GATE_BF16) or (KIND == RESIDUAL_BF16):
        return round_to_bf16(u)
    else:
        return round_to_fp16(u)


@triton.jit
def canonical(x):
    """Bits of a computed FP32: its NaNs all become 0x7FC00000."""
    return tl.where(x != x, 0x7FC00000, as_bits(x))


@triton.jit
def pending(theta, local, residual):
    """``s = residual + (theta - local)``, as bits; arguments are bits."""
    difference = theta.to(tl.float32, bitcast=True) - local.to(tl.float32, bitcast=True)
    return canonical(residual.to(tl.float32, bitcast=True) + difference)


@triton.jit
def fires(theta, s, KIND: tl.constexpr):
    """Whether ``view(theta - s)`` has other bits than ``view(theta)``; arguments are bits."""
    moved = canonical(theta.to(tl.float32, bitcast=True) - s.to(tl.float32, bitcast=True))
    return round_bits(moved, KIND) != round_bits(theta, KIND)


@triton.jit
def changed(source, target, third, at, live, KIND: tl.constexpr):
    """Whether the elements ``at`` changed; ``live`` masks loads, None in a whole tile."""
    if KIND == DIFF:
        return tl.load(source + at, mask=live) != tl.load(target + at, mask=live)
    elif (KIND == GATE_BF16) or (KIND == GATE_FP16):
        old = tl.load(target + at, mask=live).to(tl.int32) & 0xFFFF
        return round_bits(tl.load(source + at, mask=live), KIND) != old
    else:
        theta = tl.load(source + at, mask=live)
        s = pending(theta, tl.load(target + at, mask=live), tl.load(third + at, mask=live))
        return fires(theta, s, KIND)


@triton.jit
def new_value(source, target, third, at, live, KIND: tl.constexpr):
    """What the elements ``at`` became, in bits of the target's width."""
    if KIND == DIFF:
        return tl.load(source + at, mask=live)
    elif (KIND == GATE_BF16) or (KIND == GATE_FP16):
        return round_bits(tl.load(source + at, mask=live), KIND).to(tl.int16)
    else:
        return pending(tl.load(source + at, mask=live), tl.load(target + at, mask=live), tl.load(third + at, mask=live))


@triton.jit
def popcount(x):
    """Set bits of 32-bit words; in plain arithmetic, which the interpreter knows too."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def lowest_bit(x):
    """Place of the lowest set bit of 32-bit words: the exponent of that power of two, which FP32 holds exactly."""
    power = (x & -x).to(tl.uint32, bitcast=True).to(tl.float32)
    return (as_bits(power) >> 23) - 127
