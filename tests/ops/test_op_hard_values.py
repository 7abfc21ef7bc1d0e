"""The table of hard values on every operator that rounds, every lane of a 64-element step and every tail."""

from __future__ import annotations

import pytest
import torch
from hard_values import DTYPES, NANS, NUMBERS, alone_in_every_lane, full_cycle, in_every_lane, patterns
from op_helpers import int_bits, same_bits

import pulse_kernels as pk

# Vector loops take a detour for 64 elements with a NaN or a tie among them: numbers alone, NaNs alone, and both.
TABLES = {"numbers": NUMBERS, "nans": NANS, "mixed": NUMBERS + NANS}


@pytest.fixture(params=TABLES)
def table(request):
    return TABLES[request.param]


@pytest.fixture(params=DTYPES, ids=["bf16", "fp16"])
def dtype(request):
    return request.param


def gate_compact(master, weight):
    return pk.gate_compact(master, weight)


def gate_compact_update(master, weight):
    weight = weight.clone()
    rounded = weight.clone()
    indices, values = pk.gate_compact(master, weight, update=True)
    rounded[indices.long()] = values
    assert same_bits(weight, rounded)
    return indices, values


def gate_compact_many(master, weight):
    indices, values = pk.gate_compact_many([master[:5], master, master[:0]], [weight[:5], weight, weight[:0]])
    assert indices[0].tolist() == [k for k in indices[1].tolist() if k < 5]
    return indices[1], values[1]


def gate_compact_out(master, weight):
    indices, values = torch.empty(weight.numel(), dtype=torch.int64), torch.empty_like(weight)
    count = torch.zeros(1, dtype=torch.int64)
    pk.gate_compact_out(master, weight, indices, values, count)
    return indices[: int(count)], values[: int(count)]


def gate_compact_out_update(master, weight):
    indices, values = torch.empty(weight.numel(), dtype=torch.int32), torch.empty_like(weight)
    count = torch.zeros((), dtype=torch.int64)
    pk.gate_compact_out(master, weight.clone(), indices, values, count, update=True)
    return indices[: int(count)], values[: int(count)]


def visibility_mask(master, weight):
    mask = pk.visibility_mask(master, weight)
    assert torch.equal(pk.visibility_mask_many([master, master], [weight, weight])[1], mask)
    return mask.nonzero().squeeze(1), None


GATES = [
    visibility_mask,
    gate_compact,
    gate_compact_update,
    gate_compact_many,
    gate_compact_out,
    gate_compact_out_update,
]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
class TestGates:
    def test_the_rounded_value_is_no_change(self, gate, table, dtype):
        master, rounded = in_every_lane(table, dtype, full_cycle(table))
        assert gate(master, rounded)[0].numel() == 0

    @pytest.mark.parametrize("bit", [0, 7, 15])
    def test_any_other_bit_is_a_change(self, gate, table, dtype, bit):
        master, rounded = in_every_lane(table, dtype, full_cycle(table))
        flip = 1 << bit if bit < 15 else -(1 << 15)  # bit 15: +0 against -0 among them
        indices, values = gate(master, (int_bits(rounded) ^ flip).view(dtype))
        assert indices.tolist() == list(range(master.numel()))
        assert values is None or same_bits(values, rounded)

    def test_one_change_in_every_lane(self, gate, table, dtype):
        master, rounded = in_every_lane(table, dtype, 128)
        for lane in range(64):
            raw = int_bits(rounded)
            raw[64 + lane] ^= 1
            indices, values = gate(master, raw.view(dtype))
            assert indices.tolist() == [64 + lane]
            assert values is None or same_bits(values, rounded[64 + lane : 65 + lane])

    def test_alone_among_64(self, gate, table, dtype):
        master, rounded = alone_in_every_lane(table, dtype)
        assert gate(master, rounded)[0].numel() == 0
        where = torch.arange(len(table) * 64) * 64 + torch.arange(64).repeat(len(table))
        altered = int_bits(rounded)
        altered[where] ^= 1
        indices, values = gate(master, altered.view(dtype))
        assert indices.tolist() == where.tolist()
        assert values is None or same_bits(values, rounded[where])

    def test_every_tail(self, gate, table, dtype):
        master, rounded = in_every_lane(table, dtype, 66)
        altered = (int_bits(rounded) ^ 1).view(dtype)
        for n in range(66):
            assert gate(master[:n], rounded[:n])[0].numel() == 0
            indices, values = gate(master[:n], altered[:n])
            assert indices.tolist() == list(range(n))
            assert values is None or same_bits(values, rounded[:n])


class TestResidualGate:
    def test_what_rounds_away_from_zero_fires(self, table, dtype):
        # theta = local = 0 and residual = -x: s = -x and theta - s = x, so an entry fires where x rounds to other bits
        # than +0 has. (x = -0: s = +0 and theta - s = +0.)
        x, rounded = in_every_lane(table, dtype, full_cycle(table))
        zero = torch.zeros_like(x)
        indices, values = pk.gate_residual(zero, zero, (int_bits(x) ^ -(1 << 31)).view(torch.float32), view=dtype)
        fires = (int_bits(rounded) != 0) & (int_bits(x) != -(1 << 31))
        assert indices.tolist() == fires.nonzero().squeeze(1).tolist()
        s = torch.where(x.isnan(), torch.tensor(float("nan")), -x)[fires]
        assert same_bits(values, s)

    def test_nothing_pending_fires_nowhere_but_at_what_is_not_finite(self, table, dtype):
        # theta = local and residual = 0: s = 0. Inf - Inf and NaN - NaN are NaN, which reads as 0x7FC0 (0x7E00): that
        # is a change for Inf and negative NaN, and none for positive NaN.
        theta, rounded = in_every_lane(table, dtype, full_cycle(table))
        indices, values = pk.gate_residual(theta, theta, torch.zeros_like(theta), view=dtype)
        quiet = 0x7FC0 if dtype is torch.bfloat16 else 0x7E00
        fires = ~theta.isfinite() & (int_bits(rounded) != quiet)
        assert indices.tolist() == fires.nonzero().squeeze(1).tolist()
        assert same_bits(values, patterns([0x7FC00000] * indices.numel(), torch.float32))
