"""Patches on a GPU: the same bytes as on the CPU, sent beside the gate."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from gpu_helpers import DRY_RUN, all_same_bits, altered, laid, random_bits, random_positions, same_bits
from torch import Tensor

import pulse_kernels as pk
from pulse_kernels import ops, transfer
from pulse_kernels.backends import reference
from pulse_kernels.codec import segment, sending

pytestmark = pytest.mark.gpu

SIZES = [300, 900, 1, 0] if DRY_RUN else [300, 8193, 1, 0, 3_000_017, 4096, (1 << 24) + 5]
PROFILES = ["fast", "balanced"]


@functools.cache  # shared by the tests, which write copies only
def model(density: float, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters of any bits and weights that are these rounded, but for some bits; on the CPU."""
    masters, weights = {}, {}
    for k, size in enumerate(SIZES):
        dtype = [torch.bfloat16, torch.float16][k % 2]
        masters[f"w{k}"] = random_bits(size, torch.float32, seed + k)
        weights[f"w{k}"] = altered(reference.round_bits(masters[f"w{k}"], dtype).view(dtype), density, seed)
    return masters, weights


def on(device: torch.device, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def assert_same(found: pk.Patch, expected: pk.Patch) -> None:
    assert (found.base_digest, found.digest) == (expected.base_digest, expected.digest)
    assert list(found.tensors) == list(expected.tensors)
    for name, item in expected.tensors.items():
        other = found.tensors[name]
        for column in ("indices", "values", "old_values"):
            assert same_bits(getattr(other, column), getattr(item, column)), (name, column)


@pytest.fixture(params=[20] if DRY_RUN else [20, 24], ids=lambda power: f"2^{power}")
def segments(request, monkeypatch):
    monkeypatch.setattr(segment, "SEGMENT_NUMEL", 1 << request.param)


@pytest.mark.usefixtures("packing", "segments")
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("knows_old", [True, False])
def test_bytes_are_those_of_the_cpu(device, profile, knows_old):
    old = model(0.02, 1)[1]
    new = model(0.05, 1)[1] | {"added": torch.arange(5000.0).view(50, 100).t()}
    on_cpu, away = pk.Patch.diff(old, new), pk.Patch.diff(on(device, old), on(device, new))
    assert_same(away, on_cpu)
    base = None
    if not knows_old:
        base = on(device, old)
        for patch in (on_cpu, away):
            for name, item in patch.tensors.items():
                patch.tensors[name] = pk.TensorPatch(name, item.shape, item.dtype, item.indices, item.values)
    expected = on_cpu.to_bytes(profile, None if knows_old else old)
    assert away.to_bytes(profile, base) == expected
    assert all(item.values.device.type == device.type for item in away.tensors.values())


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("group_bytes", [1, 1 << 30] if DRY_RUN else [1, 100_000, 1 << 30])
@pytest.mark.parametrize("update", [True] if DRY_RUN else [True, False])
def test_gating_a_model(device, profile, group_bytes, update):
    masters, weights = model(0.02, 2)
    weights = on(torch.device("cpu"), weights)
    away = on(device, weights)
    found = pk.Patch.gate(on(device, masters), away, update=update, profile=profile, group_bytes=group_bytes)
    expected = pk.Patch.gate(masters, weights, update=update, profile=None)
    assert all(same_bits(away[name], weights[name]) for name in weights)
    assert_same(found, expected)
    if device.type == "cuda":
        assert all(transfer.is_away(item.values) for item in found.tensors.values())
        assert found.sent.keys() == found.tensors.keys()
    for name in PROFILES:
        assert found.to_bytes(name) == expected.to_bytes(name)
    receiver = on(device, model(0.02, 2)[1])
    assert found.apply_(receiver) == expected.digest


def test_a_failure_in_a_later_group_changes_nothing(device, monkeypatch):
    masters, weights = model(0.02, 3)
    away, gate, calls = on(device, weights), ops.gate_compact_many, []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no more")
        return gate(*arguments, **options)

    monkeypatch.setattr(ops, "gate_compact_many", failing)
    with pytest.raises(torch.OutOfMemoryError):
        pk.Patch.gate(on(device, masters), away, group_bytes=1, profile="balanced")
    assert len(calls) == 3
    assert all(same_bits(away[name], weights[name]) for name in weights)


def test_bad_positions_are_found_on_the_device(device):
    for positions in ([0, 10], [3, 3], [-1]):
        indices, values = torch.tensor(positions, device=device), torch.zeros(len(positions), device=device)
        patch = pk.Patch(tensors={"w": pk.TensorPatch("w", (10,), torch.float32, indices, values)})
        for profile, base in (("fast", None), ("balanced", {"w": torch.zeros(10, device=device)})):
            with pytest.raises(IndexError, match="patch of 'w'"):
                patch.to_bytes(profile, base)


def test_copies_are_right_while_the_device_is_busy(device):
    """Sources are made, sent, dropped, and their memory asked for again, all before the device has got that far."""
    n = 1000 if DRY_RUN else 20_000_000
    seed = torch.arange(n, device=device)
    sent = []
    for k in range(5):
        work = seed
        for _ in range(20):
            work = work + 1
        sent.append(transfer.to_host([work, (work * k).split(n // 4)[1]]))
        del work
    for k, (whole, part) in enumerate(sent):
        expected = torch.arange(n) + 20
        assert torch.equal(whole.get(), expected)
        assert torch.equal(part.get(), (expected * k).split(n // 4)[1])
        if device.type == "cuda":
            assert whole.get().is_pinned()


def test_copies_follow_the_stream_that_is_current(device):
    if device.type == "cpu":
        pytest.skip("streams need a GPU")
    side = torch.cuda.Stream(device)
    source = torch.zeros(10_000_000, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(50):
            source.add_(1)
        (sent,) = transfer.to_host([source])
    assert bool((sent.get() == 50).all())


def test_sending_does_not_wait_for_the_device(device):
    """Neither beginning a copy nor sending a gated group: only counts are waited for, by the gate and the packing."""
    masters, weights = (on(device, tensors) for tensors in model(0.02, 4))
    base = pk.StateDigest.of(weights).hexdigest()
    if device.type == "cpu":
        transfer.to_host(list(weights.values()))
        pk.Patch.gate(masters, weights, base_digest=base)
        return
    warm = {name: tensor.clone() for name, tensor in weights.items()}
    pk.Patch.gate(masters, warm, base_digest=base, group_bytes=100_000).to_bytes()  # compiles, and finds its memory
    torch.cuda.synchronize()
    groups, gate, before = [], ops.gate_compact_many, torch.cuda.get_sync_debug_mode()

    def counted(*arguments, **options):
        groups.append(1)
        return gate(*arguments, **options)

    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patching:
        warnings.simplefilter("always")
        patching.setattr(ops, "gate_compact_many", counted)
        try:
            torch.cuda.set_sync_debug_mode("error")
            sent = transfer.to_host(list(masters.values()))  # which nobody writes
            torch.cuda.set_sync_debug_mode("warn")
            pk.Patch.gate(masters, weights, base_digest=base, group_bytes=100_000)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [str(one.message) for one in caught if "synchroniz" in str(one.message)]
    assert 1 < len(groups) <= len(waits) <= len(groups) + 1, waits  # the counts of each group, and the digest
    assert all(same_bits(copy.get(), tensor) for copy, tensor in zip(sent, masters.values(), strict=True))


@pytest.mark.usefixtures("packing")
def test_applying_packed_indices(device):
    """Contiguous weights in one call of the fused kernel, strided and tied ones unpacked; bad blobs change nothing."""
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]
    sizes = SIZES[:4] if DRY_RUN else SIZES[:5]
    weights = [random_bits(n, dtypes[k % 4], k) for k, n in enumerate(sizes)]
    positions = [random_positions(n // 50 + 1, n, n) for n in sizes]
    values = [random_bits(p.numel(), w.dtype, 9) for p, w in zip(positions, weights, strict=True)]
    packed = [pk.pack_indices(p, n) for p, n in zip(positions, sizes, strict=True)]
    expected = [weight.clone() for weight in weights]
    old = pk.exchange_patch_many_(expected, positions, values)
    blobs, news = [blob.to(device) for blob in packed], [value.to(device) for value in values]
    for layout in ("whole", "misaligned", "strided"):
        away = [laid(weight, layout, device) for weight in weights]
        broken = blobs[1].clone()
        broken[-1] ^= 0xFF
        with pytest.raises(pk.PatchFormatError):
            pk.apply_packed_patch_many_(away, [blobs[0], broken, *blobs[2:]], news)
        assert all_same_bits(away, weights)
        assert all_same_bits(pk.exchange_packed_patch_many_(away, blobs, news), old)
        assert all_same_bits(away, expected)
        pk.apply_packed_patch_many_(away, blobs, [value.to(device) for value in old])
        assert all_same_bits(away, weights)
    tied = weights[1].to(device, copy=True)
    others = random_bits(values[1].numel(), tied.dtype, 10).to(device)
    first, second = pk.exchange_packed_patch_many_([tied, tied], [blobs[1]] * 2, [news[1], others])
    assert all_same_bits([first, second], [old[1], values[1]])


def test_packing_on_the_device_is_used_where_it_is(device):
    if device.type == "cuda":
        from pulse_kernels.backends import native

        assert sending.packs_on(device) == native.cuda_library().loaded
    else:
        assert not sending.packs_on(device)
