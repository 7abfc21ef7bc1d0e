"""How small patches are on weights that change as RL steps change them."""

from __future__ import annotations

import functools

import pytest
import torch

import pulse_kernels as pk

LEARNING_RATE = 3e-6


@functools.cache
def rl_step(rms: float) -> tuple[pk.Patch, float]:
    """(patch, density) of one Adam-like step of BF16 weights with FP32 masters.

    Masters are N(0, 0.02). A step is lr * m / sqrt(v): ``rms`` is the root mean square of that ratio, well under 1
    where gradients disagree from step to step, and it sets the density.
    """
    generator = torch.Generator().manual_seed(7)
    masters = torch.randn(2000, 2000, generator=generator) * 0.02
    old = masters.bfloat16()
    steps = torch.randn(2000, 2000, generator=generator) * (rms * LEARNING_RATE)
    new = (masters - steps).bfloat16()
    patch = pk.Patch.diff({"w": old}, {"w": new})
    return patch, patch.density


@pytest.mark.parametrize(
    ("rms", "density", "most_balanced", "most_fast"),
    [(0.27, 0.028, 10.2, 16 + 9.5), (0.082, 0.01, 11.5, 16 + 10.5)],
    ids=["2.8%", "1%"],
)
def test_bits_per_changed_weight(rms: float, density: float, most_balanced: float, most_fast: float) -> None:
    patch, found = rl_step(rms)
    assert found == pytest.approx(density, rel=0.1)
    bits = {profile: 8 * len(patch.to_bytes(profile)) / patch.num_changed for profile in ("balanced", "fast")}
    assert bits["balanced"] <= most_balanced
    assert bits["fast"] <= most_fast


def test_zeros_take_no_bytes() -> None:
    """A part of zeros is stored as nothing: a dense change by one unit is the header and one plane."""
    old = {"w": torch.ones(1 << 20, dtype=torch.bfloat16)}
    new = {"w": (old["w"].view(torch.int16) + 1).view(torch.bfloat16), "b": torch.zeros(1 << 20)}
    assert len(pk.Patch.diff(old, new).to_bytes()) < 2000


def test_random_changes_cost_little_more_than_their_bits() -> None:
    """Where nothing can be saved nothing is added: parts that do not shrink are stored as they are."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    patch = pk.Patch(added={"b": values.view(torch.bfloat16)})
    for profile in ("balanced", "fast"):
        assert len(patch.to_bytes(profile)) < (1 << 20) + 1000
