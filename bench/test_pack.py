"""Packed indices, as the profile ``fast`` stores them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pulse_kernels as pk
from bench.conftest import Compare
from bench.workloads import DENSITIES, percent
from pulse_kernels.cli.bench_quick import Contender, changed_positions


def _pack_and_unpack(compare: Compare, elements: int, density: float, what: str, threads: str) -> None:
    indices = changed_positions(elements, density).int()
    count = indices.numel()
    packed = pk.pack_indices(indices, elements)
    assert torch.equal(pk.unpack_indices(packed), indices)
    flat = indices.numpy()
    gaps = np.diff(flat, prepend=0).astype(np.uint16)
    torch_gaps = torch.from_numpy(gaps)
    calls = max(1, 2_000_000 // max(count, 1))
    unpacking = what == "unpack_indices"
    contenders = (
        [
            Contender(what, lambda: pk.unpack_indices(packed), calls=calls),
            Contender("eager", lambda: torch_gaps.int().cumsum(0, dtype=torch.int32), calls=calls),
            Contender("numpy", lambda: gaps.cumsum(dtype=np.int32), calls=calls),
        ]
        if unpacking
        else [
            Contender(what, lambda: pk.pack_indices(indices, elements), calls=calls),
            Contender("eager", lambda: indices.diff(prepend=indices.new_zeros(1)).to(torch.uint16), calls=calls),
            Contender("numpy", lambda: np.diff(flat, prepend=np.int32(0)).astype(np.uint16), calls=calls),
        ]
    )
    compare(
        *contenders,
        section="Index packing",
        title=f"`{what}`, {percent(density)} changed, {threads}",
        density=density,
        num_changed=count,
        packed_bits=8 * packed.numel() / count,
    )


@pytest.mark.parametrize("what", ["pack_indices", "unpack_indices"])
@pytest.mark.parametrize("density", DENSITIES)
def test_one_thread(compare: Compare, one_thread: None, elements: int, density: float, what: str) -> None:
    """Ours beside the smallest part of what others do: gaps as 16 bits, unchecked, with no escape for wider ones."""
    _pack_and_unpack(compare, elements, density, what, "one thread")


@pytest.mark.parametrize("what", ["pack_indices", "unpack_indices"])
def test_all_threads(compare: Compare, elements: int, what: str) -> None:
    _pack_and_unpack(compare, elements, 0.01, what, "all threads")
