"""PULSELoCo's gate and its commit: nothing of the pseudo-gradient is lost, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import GATE_DTYPES, all_same_bits, int_bits, random_bits, same_bits, seeds, sizes

import pulse_kernels as pk
from pulse_kernels.backends import reference


def test_a_worked_example():
    # BF16 near 1: steps of 2^-7 above, 2^-8 below; the ties lie half a step away and go to 1, which is even.
    rows = [
        # theta, local, residual, s, fires
        (1.0, 1.0, 0.0, 0.0, False),  # no change
        (1.0, 1 - 2**-7, 0.0, 2**-7, True),  # two steps down
        (1.0, 1 - 2**-10, 0.0, 2**-10, False),  # less than half a step
        (1.0, 1 - 2**-10, 2**-10, 2**-9, False),  # half a step: the tie goes to 1
        (1.0, 1 - 2**-10, 2**-10 + 2**-20, 2**-9 + 2**-20, True),  # just over half a step
        (1.0, 1 + 2**-8, 0.0, -(2**-8), False),  # half a step up: the tie goes to 1
        (0.0, 0.0, 2**-30, 2**-30, True),  # 0 to -2^-30
        (-0.0, -0.0, 0.0, 0.0, False),  # -0 - 0 is -0
    ]
    theta, local, residual, s = (torch.tensor(column) for column in list(zip(*rows, strict=True))[:4])
    indices, values = pk.gate_residual(theta, local, residual)
    assert indices.tolist() == [1, 4, 6]
    assert values.tolist() == [2**-7, 2**-9 + 2**-20, 2**-30]
    pk.commit_residual_(theta, local, residual, indices)
    assert residual.tolist() == [0, 0, 2**-10, 2**-9, 0, -(2**-8), 0, 0]
    s[indices.long()] = 0
    assert same_bits(residual, s)


def test_nothing_is_lost_over_many_rounds():
    # Multiples of 2^-16 below 1: FP32 adds them exactly, so what was sent and what is left add up exactly.
    generator = torch.Generator().manual_seed(1)
    theta = torch.randint(-(2**15), 2**15, (5000,), generator=generator) * 2.0**-16
    residual, sent, total = torch.zeros(5000), torch.zeros(5000), torch.zeros(5000)
    fired = 0
    for _ in range(20):
        delta = torch.randint(-30, 31, (5000,), generator=generator) * 2.0**-16
        local = theta - delta
        indices, values = pk.gate_residual(theta, local, residual)
        pk.commit_residual_(theta, local, residual, indices, check=False)
        sent[indices.long()] += values
        total += delta
        fired += indices.numel()
        assert torch.equal(sent + residual, total)
    assert 0 < fired < 20 * 5000


def triple(n, seed):
    theta = random_bits(n, torch.float32, seed)
    local = torch.where(random_bits(n, torch.bool, seed), theta, random_bits(n, torch.float32, seed + 1))
    residual = torch.where(
        random_bits(n, torch.bool, seed + 1), torch.zeros(n), random_bits(n, torch.float32, seed + 2)
    )
    near = theta * (1 + 2.0**-9)  # updates about as large as a BF16 step
    return theta, torch.where(random_bits(n, torch.bool, seed + 2), local, near), residual


@given(n=sizes, seed=seeds, view=st.sampled_from(GATE_DTYPES))
def test_gate_and_commit_agree_with_the_reference_and_conserve(n, seed, view):
    theta, local, residual = triple(n, seed)
    before = [t.clone() for t in (theta, local, residual)]
    s = reference.pending_residual(theta, local, residual)
    indices, values = pk.gate_residual(theta, local, residual, view=view)
    assert all_same_bits([theta, local, residual], before)  # reads only
    (expected_indices,), (expected_values,) = reference.gate_residual_many(
        [theta], [local], [residual], view, [torch.int32]
    )
    assert all_same_bits((indices, values), (expected_indices, expected_values))

    pk.commit_residual_(theta, local, residual, indices)
    fired = torch.zeros(n, dtype=torch.bool)
    fired[indices.long()] = True
    # Bit for bit: what fired was sent as s and leaves +0, all else stays as s.
    assert torch.equal(int_bits(values), int_bits(s)[fired])
    assert torch.equal(int_bits(residual), torch.where(fired, 0, int_bits(s)))
    assert all_same_bits([theta, local], before[:2])


@given(n=sizes, seed=seeds, view=st.sampled_from(GATE_DTYPES))
def test_gate_agrees_with_eager_pytorch(n, seed, view):
    generator = torch.Generator().manual_seed(seed)
    theta, residual = torch.randn(n, generator=generator), torch.randn(n, generator=generator) * 1e-3
    local = theta + torch.randn(n, generator=generator) * 1e-3
    s = residual + (theta - local)
    fired = ((theta - s).to(view).view(torch.int16) != theta.to(view).view(torch.int16)).nonzero().squeeze(1)
    assert all_same_bits(pk.gate_residual(theta, local, residual, view=view), (fired.int(), s[fired]))


@pytest.mark.parametrize("view", GATE_DTYPES)
def test_many_is_each_in_turn(view, threads):
    rows = [triple(n, n) for n in (0, 1, 70000, 300)]
    thetas, locals_, residuals = (list(column) for column in zip(*rows, strict=True))
    indices, values = pk.gate_residual_many(thetas, locals_, residuals, view=view)
    for row, index, value in zip(rows, indices, values, strict=True):
        assert all_same_bits((index, value), pk.gate_residual(*row, view=view))
    expected = [residual.clone() for residual in residuals]
    for theta, local, residual, index in zip(thetas, locals_, expected, indices, strict=True):
        pk.commit_residual_(theta, local, residual, index)
    pk.commit_residual_many_(thetas, locals_, residuals, indices)
    assert all_same_bits(residuals, expected)


def test_nothing_in_nothing_out():
    assert pk.gate_residual_many([], [], []) == ([], [])
    pk.commit_residual_many_([], [], [], [])
