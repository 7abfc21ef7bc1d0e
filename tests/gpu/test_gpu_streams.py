"""Graphs, streams, devices, and calls that may not wait for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu_helpers import (
    DRY_RUN,
    all_same_bits,
    altered,
    captured,
    no_synchronisation,
    random_bits,
    random_positions,
    same_bits,
)

import pulse_kernels as pk
from pulse_kernels.backends import reference

pytestmark = pytest.mark.gpu

N = 3001 if DRY_RUN else 1_000_003
CAPACITY = N // 20


class Buffers:
    """All tensors of an ``_out`` call on the device, to be filled anew between replays."""

    def __init__(self, op, device):
        self.op, self.device = op, device
        self.source = torch.zeros(N, dtype=torch.float32 if op == "gate_compact" else torch.bfloat16, device=device)
        self.target = torch.zeros(N, dtype=torch.bfloat16, device=device)
        self.indices = torch.zeros(CAPACITY, dtype=torch.int32, device=device)
        self.values = torch.zeros(CAPACITY, dtype=torch.bfloat16, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def call(self, update=True):
        out = getattr(pk, f"{self.op}_out")
        out(self.source, self.target, self.indices, self.values, self.count, update=update)

    def fill(self, density, seed):
        """New bits of which this share changes; returns what the call must leave."""
        if self.op == "gate_compact":
            source = random_bits(N, torch.float32, seed)
            target = altered(reference.round_bits(source, torch.bfloat16).view(torch.bfloat16), density, seed)
        else:
            target = random_bits(N, torch.bfloat16, seed)
            source = altered(target, density, seed)
        self.source.view(torch.uint8).copy_(source.view(torch.uint8))
        self.target.view(torch.uint8).copy_(target.view(torch.uint8))
        changes = reference.compact(self.op, source, target.clone(), torch.int32, False)
        fits = len(changes[0]) <= CAPACITY
        if fits:
            reference.apply_patch_(target, *changes[:2])
        return changes, target, fits

    def check(self, expected):
        changes, target, fits = expected
        found = len(changes[0])
        assert self.count.tolist() == [found]
        assert same_bits(self.target, target)
        if fits:
            assert all_same_bits([self.indices[:found], self.values[:found]], changes[:2])


@pytest.mark.parametrize("op", ["gate_compact", "diff_compact"])
def test_a_graph_takes_new_inputs(device, op):
    """Among them more changes than fit, which write nothing, and none at all."""
    buffers = Buffers(op, device)
    replay = captured(buffers.call, device)
    fitting = []
    for seed, density in enumerate((0.01, 0.04, 0.5, 0.0)):
        expected = buffers.fill(density, seed)
        replay()
        buffers.check(expected)
        fitting.append(expected[2])
    assert fitting == [True, True, False, True]


def test_a_graph_of_a_patch(device):
    weight = torch.zeros(N, dtype=torch.bfloat16, device=device)
    count = len(random_positions(CAPACITY, N, 0)) // 2
    indices = torch.arange(count, dtype=torch.int32, device=device)
    values = torch.zeros(count, dtype=torch.bfloat16, device=device)
    replay = captured(lambda: pk.apply_patch_(weight, indices, values, check=False), device)
    expected = torch.zeros(N, dtype=torch.bfloat16)
    for seed in range(3):
        new_indices, new_values = random_positions(CAPACITY, N, seed)[:count], random_bits(count, torch.bfloat16, seed)
        indices.copy_(new_indices)
        values.view(torch.int16).copy_(new_values.view(torch.int16))
        reference.apply_patch_(expected, new_indices, new_values)
        replay()
        assert same_bits(weight, expected)


@pytest.mark.parametrize("op", ["gate_compact", "diff_compact"])
@pytest.mark.parametrize("update", [False, True])
def test_out_forms_do_not_wait(device, op, update):
    buffers = Buffers(op, device)
    buffers.call(update)  # compiles, which may wait
    buffers.target.zero_()
    (changes, target, _), before = buffers.fill(0.01, 3), buffers.target.clone()
    with no_synchronisation(device):
        buffers.call(update)
    buffers.check((changes, target if update else before, True))


def test_an_unchecked_patch_does_not_wait(device):
    weight = torch.zeros(1000, dtype=torch.bfloat16, device=device)
    indices = torch.arange(0, 1000, 7, dtype=torch.int32, device=device)
    values = torch.ones(len(indices), dtype=torch.bfloat16, device=device)
    pk.apply_patch_(weight, indices, values * 2, check=False)
    with no_synchronisation(device):
        pk.apply_patch_(weight, indices, values, check=False)
    assert weight.nonzero().squeeze(1).tolist() == list(range(0, 1000, 7))
    assert float(weight.max()) == 1


def test_waiting_would_be_noticed(device):
    if device.type == "cpu":
        pytest.skip("a CPU is never waited for")
    with no_synchronisation(device), pytest.raises(RuntimeError):
        torch.ones(1, device=device).item()


def test_two_streams_at_once(device):
    """Each fills its inputs late, behind other work: kernels on any other stream would find them empty."""
    on_gpu = device.type == "cuda"
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]
    sources = [random_bits(N, torch.float32, seed) for seed in range(2)]
    expected = [reference.compact("gate_compact", s, s.new_zeros(N).bfloat16(), torch.int32, False) for s in sources]
    ready = [source.to(device) for source in sources]
    masters = [torch.zeros(N, device=device) for _ in sources]
    weights = [torch.zeros(N, dtype=torch.bfloat16, device=device) for _ in sources]
    if on_gpu:
        torch.cuda.synchronize()
    found = [()] * 2
    for k, stream in enumerate(streams):
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            if on_gpu:
                torch.cuda._sleep(20_000_000)
            masters[k].view(torch.int32).copy_(ready[k].view(torch.int32))
            found[k] = pk.gate_compact(masters[k], weights[k], update=True)
            digest = pk.digest(weights[k], 1)
            found[k] = (*found[k], digest)
    if on_gpu:
        torch.cuda.synchronize()
    for k, row in enumerate(expected):
        assert all_same_bits(found[k][:2], row[:2])
        rounded = reference.round_bits(sources[k], torch.bfloat16).view(torch.bfloat16)
        assert same_bits(weights[k], rounded)
        assert torch.equal(found[k][2].cpu(), reference.digest(rounded, 1, 0))


@pytest.fixture
def other_device(device):
    """Not the current one; in a dry run the same."""
    if device.type == "cpu":
        return device
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    return torch.device("cuda:1")


def test_a_device_that_is_not_the_current_one(device, other_device):
    source = random_bits(N, torch.float32, 1)
    expected = reference.compact("gate_compact", source, source.new_zeros(N).bfloat16(), torch.int32, False)
    weight = torch.zeros(N, dtype=torch.bfloat16, device=other_device)
    indices, values = pk.gate_compact(source.to(other_device), weight)
    assert indices.device == values.device == weight.device
    assert all_same_bits([indices, values], expected[:2])
    # One patch for both devices.
    weights = [weight, weight.to(device)]
    pk.apply_patch_many_(weights, [indices, indices.to(device)], [values, values.to(device)])
    rounded = reference.round_bits(source, torch.bfloat16).view(torch.bfloat16)
    assert all_same_bits(weights, [rounded, rounded])
    blob = pk.pack_indices(indices[:300], N)
    assert blob.device == weight.device
    assert torch.equal(pk.unpack_indices(blob).cpu(), expected[0][:300])
