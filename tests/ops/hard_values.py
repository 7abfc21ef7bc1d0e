"""FP32 bit patterns at which rounding goes wrong, with the BF16 and FP16 bits they must give, worked out by hand.

BF16 is the upper half of FP32: a lower half under 0x8000 rounds down, over it up, 0x8000 to the even upper half. FP16
counts units of 2^-10 of the power of two (0x2000 in FP32's bits), and of 2^-24 below 2^-14. NaN becomes 0x7FC0 and
0x7E00 with its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

# (FP32, BF16, FP16)
NUMBERS = [
    (0x00000000, 0x0000, 0x0000),  # +0
    (0x80000000, 0x8000, 0x8000),  # -0
    (0x00000001, 0x0000, 0x0000),  # smallest FP32 denormal
    (0x80000001, 0x8000, 0x8000),
    (0x00007FFF, 0x0000, 0x0000),  # under the tie between 0 and BF16's smallest denormal
    (0x00008000, 0x0000, 0x0000),  # that tie: to even
    (0x00008001, 0x0001, 0x0000),
    (0x80008001, 0x8001, 0x8000),
    (0x00010000, 0x0001, 0x0000),  # BF16's smallest denormal
    (0x00018000, 0x0002, 0x0000),  # tie between the denormals 1 and 2: to even
    (0x007F7FFF, 0x007F, 0x0000),
    (0x007F8000, 0x0080, 0x0000),  # tie between the largest denormal and the smallest normal
    (0x007FFFFF, 0x0080, 0x0000),  # largest FP32 denormal
    (0x00800000, 0x0080, 0x0000),  # smallest FP32 normal
    (0x3F800000, 0x3F80, 0x3C00),  # 1
    (0x3F800FFF, 0x3F80, 0x3C00),
    (0x3F801000, 0x3F80, 0x3C00),  # 1 + 2^-11: FP16's tie, down to even
    (0x3F801001, 0x3F80, 0x3C01),
    (0x3F802FFF, 0x3F80, 0x3C01),
    (0x3F803000, 0x3F80, 0x3C02),  # 1 + 3 * 2^-11: FP16's tie, up to even
    (0x3F803001, 0x3F80, 0x3C02),
    (0x3F807FFF, 0x3F80, 0x3C04),
    (0x3F808000, 0x3F80, 0x3C04),  # 1 + 2^-8: BF16's tie, down to even
    (0x3F808001, 0x3F81, 0x3C04),
    (0x3F817FFF, 0x3F81, 0x3C0C),
    (0x3F818000, 0x3F82, 0x3C0C),  # 1 + 3 * 2^-8: BF16's tie, up to even
    (0x3F818001, 0x3F82, 0x3C0C),
    (0xBF808000, 0xBF80, 0xBC04),
    (0xBF818000, 0xBF82, 0xBC0C),
    (0x3FFFFFFF, 0x4000, 0x4000),  # carries into the exponent
    (0x32FFFFFF, 0x3300, 0x0000),
    (0x33000000, 0x3300, 0x0000),  # 2^-25: tie between 0 and FP16's smallest subnormal, to even
    (0x33000001, 0x3300, 0x0001),
    (0xB3000000, 0xB300, 0x8000),
    (0xB3000001, 0xB300, 0x8001),
    (0x33800000, 0x3380, 0x0001),  # 2^-24: FP16's smallest subnormal
    (0x33BFFFFF, 0x33C0, 0x0001),
    (0x33C00000, 0x33C0, 0x0002),  # 1.5 * 2^-24: tie, up to even
    (0x34200000, 0x3420, 0x0002),  # 2.5 * 2^-24: tie, down to even
    (0x34200001, 0x3420, 0x0003),
    (0x387FC000, 0x3880, 0x03FF),  # FP16's largest subnormal
    (0x387FDFFF, 0x3880, 0x03FF),
    (0x387FE000, 0x3880, 0x0400),  # tie between it and the smallest normal
    (0x38800000, 0x3880, 0x0400),  # 2^-14: FP16's smallest normal
    (0x477FE000, 0x4780, 0x7BFF),  # 65504: FP16's largest finite
    (0x477FEFFF, 0x4780, 0x7BFF),  # 65519.996
    (0x477FF000, 0x4780, 0x7C00),  # 65520: Inf
    (0xC77FF000, 0xC780, 0xFC00),
    (0x47800000, 0x4780, 0x7C00),  # 65536
    (0x7F7F0000, 0x7F7F, 0x7C00),  # BF16's largest finite
    (0x7F7F7FFF, 0x7F7F, 0x7C00),
    (0x7F7F8000, 0x7F80, 0x7C00),  # tie between it and Inf
    (0x7F7FFFFF, 0x7F80, 0x7C00),  # FP32's largest finite
    (0xFF7FFFFF, 0xFF80, 0xFC00),
    (0x7F800000, 0x7F80, 0x7C00),  # Inf
    (0xFF800000, 0xFF80, 0xFC00),
]
NANS = [
    (0x7F800001, 0x7FC0, 0x7E00),  # plain rounding would make this Inf
    (0x7F807FFF, 0x7FC0, 0x7E00),
    (0x7F808000, 0x7FC0, 0x7E00),
    (0x7FBFFFFF, 0x7FC0, 0x7E00),
    (0x7FC00000, 0x7FC0, 0x7E00),
    (0x7FFFFFFF, 0x7FC0, 0x7E00),  # plain rounding would carry this into -0
    (0xFF800001, 0xFFC0, 0xFE00),
    (0xFFC00000, 0xFFC0, 0xFE00),
    (0xFFFFFFFF, 0xFFC0, 0xFE00),
]
DTYPES = (torch.bfloat16, torch.float16)


def patterns(values: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of ``dtype`` with these bits."""
    unsigned = {2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    return torch.tensor(values, dtype=torch.int64).to(unsigned).view(dtype)


def in_every_lane(rows: list[tuple[int, int, int]], dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor]:
    """(FP32 [n], what it rounds to [n]). With n = 64 * an odd period every row meets every position modulo 64."""
    filler = (0x3F800000, 0x3F80, 0x3C00)
    period = [*rows, *[filler] * (1 - len(rows) % 2)]  # an odd number of rows
    column = 1 if dtype is torch.bfloat16 else 2
    cycled = [period[k % len(period)] for k in range(n)]
    return patterns([row[0] for row in cycled], torch.float32), patterns([row[column] for row in cycled], dtype)


def alone_in_every_lane(rows: list[tuple[int, int, int]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(FP32, what it rounds to): runs of 64 ones with one of ``rows`` among them, each row in each of the 64 places."""
    column = 1 if dtype is torch.bfloat16 else 2
    one = (0x3F800000, 0x3F80, 0x3C00)
    laid = [row if place == lane else one for row in rows for lane in range(64) for place in range(64)]
    return patterns([row[0] for row in laid], torch.float32), patterns([row[column] for row in laid], dtype)


def full_cycle(rows: list[tuple[int, int, int]]) -> int:
    return 64 * (len(rows) | 1)
