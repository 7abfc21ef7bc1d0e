"""PULSELoCo: the gate on three FP32 tensors, about 4% fired, as published for H = 8 steps, and a round around it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import pulse_kernels as pk
from bench.conftest import Compare
from pulse_kernels.cli.bench_quick import Contender, plain_read, random_masters
from pulse_kernels.loco.exchange import add
from pulse_kernels.loco.wire import Entries, Label, decode, encode

SECTION = "PULSELoCo"
LOCAL_UPDATE = 0.9e-6  # spread of theta - local, and of the residual: about 4% fire
RANKS = 4


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


def test_round(compare: Compare, state: Round) -> None:
    """What one rank computes in a round: gate and pack its own entries, unpack and add up those of 4 ranks. Bytes that
    travel are left out. Eager: int64 indices, FP32 values, one dense sum."""
    numel = state.theta.numel()
    host = torch.device("cpu")

    def packed() -> tuple[Label, Tensor]:
        entries = Entries(*pk.gate_residual(*state.tensors, index_dtype=torch.int32))
        return encode(entries, numel, False, host, 2)

    label, payload = packed()

    def ours() -> None:
        packed()
        add([decode(label, payload, numel, host, "rank") for _ in range(RANKS)], numel)

    def eagerly() -> None:
        positions, values = eager_residual_gate(*state.tensors)
        total = torch.zeros(numel)
        for _ in range(RANKS):
            total.index_add_(0, positions, values)

    compare(
        Contender("gate, pack, unpack, add", ours),
        Contender("eager", eagerly),
        Contender("plain read", lambda: plain_read(*state.tensors)),
        section=SECTION,
        title=f"a round of {RANKS} ranks, {100 * label.count / numel:.1f}% fired, "
        f"{label.total / label.count:.2f} bytes an entry",
        num_bytes=12 * numel,
        bytes_an_entry=bytes_an_entry(numel),
    )


def bytes_an_entry(numel: int) -> float:
    """Of entries at random, 4% of all positions."""
    fired = torch.rand(numel, generator=torch.Generator().manual_seed(4)) < 0.04
    indices = fired.nonzero().squeeze(1).to(torch.int32)
    label, _ = encode(Entries(indices, indices.float()), numel, False, torch.device("cpu"), 2)
    return label.total / label.count
