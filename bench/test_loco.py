"""PULSELoCo's gate: three FP32 tensors, about 5% fired, as published for H = 8 local steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import pulse_kernels as pk
from bench.conftest import Compare
from pulse_kernels.cli.bench_quick import Contender, plain_read, random_masters

SECTION = "PULSELoCo"
LOCAL_UPDATE = 1.6e-6  # spread of theta - local


@dataclass
class Round:
    theta: Tensor
    local: Tensor
    residual: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.theta, self.local, self.residual


@pytest.fixture(scope="module")
def state(elements: int) -> Round:
    theta = random_masters(elements)
    local = theta - random_masters(elements, seed=1).mul_(LOCAL_UPDATE / 0.02)
    return Round(theta, local, random_masters(elements, seed=2).mul_(LOCAL_UPDATE / 0.02))


def eager_residual_gate(theta: Tensor, local: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    pending = residual + (theta - local)
    fired = (theta - pending).bfloat16().view(torch.int16) != theta.bfloat16().view(torch.int16)
    positions = fired.nonzero().squeeze(1)
    return positions, pending[positions]


def test_gate_residual(compare: Compare, state: Round) -> None:
    indices, _ = pk.gate_residual(*state.tensors)
    compare(
        Contender("gate_residual", lambda: pk.gate_residual(*state.tensors)),
        Contender("eager", lambda: eager_residual_gate(*state.tensors)),
        Contender("plain read", lambda: plain_read(*state.tensors)),
        section=SECTION,
        title=f"`gate_residual`, {100 * indices.numel() / state.theta.numel():.1f}% fired",
        num_bytes=12 * state.theta.numel(),
    )


def test_commit_residual(compare: Compare, state: Round) -> None:
    """Reads three tensors and writes one; the residual is restored between calls."""
    indices, _ = pk.gate_residual(*state.tensors)
    positions = indices.long()
    residual, eager_residual = state.residual.clone(), state.residual.clone()

    def eagerly() -> None:
        eager_residual.add_(state.theta - state.local)
        eager_residual[positions] = 0

    compare(
        Contender(
            "commit_residual_",
            lambda: pk.commit_residual_(state.theta, state.local, residual, indices),
            lambda: residual.copy_(state.residual),
        ),
        Contender("eager", eagerly, lambda: eager_residual.copy_(state.residual)),
        Contender("plain read", lambda: plain_read(*state.tensors)),
        section=SECTION,
        title="`commit_residual_`",
        num_bytes=12 * state.theta.numel(),
    )
    assert torch.equal(residual, eager_residual)
