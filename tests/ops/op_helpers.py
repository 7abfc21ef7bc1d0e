"""Bits, random tensors and hypothesis strategies for the operators' tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from pulse_kernels.backends import cpu, native, reference

# One dtype a size, and the floats that models use.
DIFF_DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.int32, torch.float32, torch.float64]
GATE_DTYPES = [torch.bfloat16, torch.float16]

# Around the steps of the loops: 64 elements, a packed or digest block of 256, a stretch of 8192, a task of 65536.
EDGE_SIZES = [0, 1, 63, 64, 65, 255, 256, 257, 8191, 8192, 8193, 65535, 65536, 65537, 131073]
sizes = st.one_of(st.integers(0, 300), st.sampled_from(EDGE_SIZES))
densities = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
seeds = st.integers(0, 2**32 - 1)


def back_end():
    """What computes operators on CPU tensors in this process: ``cpu`` or, with PULSE_NATIVE=0, ``reference``."""
    return cpu if native.cpu_library().loaded else reference


def int_bits(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as integers, its shape kept; any strides."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integer).clone(memory_format=torch.contiguous_format)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(int_bits(a), int_bits(b))


def all_same_bits(first, second) -> bool:
    return len(first) == len(second) and all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def random_bits(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, NaNs and denormals among them (bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    data = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def altered(tensor: Tensor, density: float, seed: int) -> Tensor:
    """A copy of the flat ``tensor`` with one bit flipped in about ``density`` of its elements."""
    generator = torch.Generator().manual_seed(seed + 1)
    raw = int_bits(tensor).clone()
    hit = torch.rand(raw.shape, generator=generator) < density
    places = 1 if tensor.dtype is torch.bool else 8 * raw.element_size()
    flips = torch.ones_like(raw) << torch.randint(0, places, raw.shape, generator=generator).to(raw.dtype)
    return torch.where(hit, raw ^ flips, raw).view(tensor.dtype)


def random_positions(n: int, numel: int, seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """At most ``n`` sorted unique positions below ``numel``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(numel, 1), (n if numel else 0,), generator=generator).unique().to(dtype)
