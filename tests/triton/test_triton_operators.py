"""Every Triton kernel against the reference: hard values, edges of tiles, misaligned and tiny tensors, several in one
launch. Here its compiled PTX runs in a simulator, which checks every access, barrier and shared-memory race on the way;
test_triton_interpreter.py has all of it run in Triton's interpreter as well."""

from __future__ import annotations

import pytest
import torch
from hard_values import DTYPES, NANS, NUMBERS, full_cycle, in_every_lane
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_helpers import all_same_bits, altered, int_bits, random_bits, random_positions, same_bits

import pulse_kernels as pk
from pulse_kernels.backends import reference, triton

pytestmark = [] if triton.interpreted() else [pytest.mark.ptx]

TILE = 8192
EDGES = [1, 31, 32, 33, 4095, 4096, 4097, TILE - 1, TILE, TILE + 1, 2 * TILE + 5]
TABLE = NUMBERS + NANS
SIZES = [torch.int8, torch.bfloat16, torch.float32, torch.float64]


def names_of(kernels) -> list[str]:
    return [name for name, _ in kernels.launches]


def pair(n: int, dtype: torch.dtype, density: float, seed: int = 0):
    """Masters of any bits, and weights that differ from their rounding in about ``density``."""
    master = random_bits(n, torch.float32, seed)
    rounded = reference.round_bits(master, dtype).view(dtype)
    return master, altered(rounded, density, seed)


def misaligned(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    buffer = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    buffer[elements:].copy_(tensor)
    return buffer[elements:]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
class TestGate:
    @pytest.mark.parametrize("update", [False, True])
    def test_hard_values(self, kernels, dtype, update):
        master, rounded = in_every_lane(TABLE, dtype, full_cycle(TABLE))
        weight = (int_bits(rounded) ^ (torch.arange(master.numel()) % 3 == 0).short()).view(dtype)
        expected = reference.compact("gate_compact", master, weight, torch.int32, False)
        found = pk.gate_compact(master, weight, update=update, return_old=True)
        assert all_same_bits(found, expected)
        assert torch.equal(found[0], (torch.arange(master.numel()) % 3 == 0).nonzero().squeeze(1).int())
        if update:
            assert same_bits(weight, rounded)
        assert torch.equal(pk.visibility_mask(master, rounded), torch.zeros(master.numel(), dtype=torch.bool))

    @pytest.mark.parametrize("n", EDGES)
    def test_edges(self, kernels, dtype, n):
        master, weight = pair(n, dtype, 0.02, seed=n)
        expected = reference.compact("gate_compact", master, weight, torch.int64, False)
        assert all_same_bits(pk.gate_compact(master, weight, return_old=True, index_dtype=torch.int64), expected)
        assert torch.equal(pk.visibility_mask(master, weight), reference.visibility_mask(master, weight))

    @pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
    def test_densities(self, kernels, dtype, density):
        # 1.0 takes the path for crowded words, 0.0 has no second pass.
        master, weight = pair(2 * TILE + 77, dtype, density)
        expected = reference.compact("gate_compact", master, weight, torch.int32, False)
        assert all_same_bits(pk.gate_compact(master, weight, return_old=True), expected)
        assert names_of(kernels) == (["mark", "collect"] if expected[0].numel() else ["mark"])

    @pytest.mark.parametrize("shift", [1, 2, 3, 5])
    def test_misaligned(self, kernels, dtype, shift):
        master, weight = pair(TILE + 9, dtype, 0.05)
        expected = reference.compact("gate_compact", master, weight, torch.int32, False)
        apart = misaligned(weight, shift)
        assert all_same_bits(pk.gate_compact(misaligned(master, shift), weight, return_old=True), expected)
        assert all_same_bits(pk.gate_compact(master, apart, return_old=True, update=True), expected)
        assert same_bits(apart, reference.round_bits(master, dtype).view(dtype))

    def test_out_forms(self, kernels, dtype):
        master, weight = pair(TILE + 100, dtype, 0.03)
        expected = reference.compact("gate_compact", master, weight, torch.int32, False)
        n, before = expected[0].numel(), weight.clone()
        for room in (n - 1, n, n + 3):
            indices, values = torch.zeros(room, dtype=torch.int32), torch.zeros(room, dtype=dtype)
            old, count = torch.zeros(room, dtype=dtype), torch.zeros(1, dtype=torch.int64)
            pk.gate_compact_out(master, weight, indices, values, count, update=room == n + 3, old_values=old)
            assert count.item() == n
            if room < n:
                assert not indices.any()
                continue
            assert all_same_bits([indices[:n], values[:n], old[:n]], expected)
            assert not indices[n:].any()
            assert same_bits(weight, before) == (room == n)
        assert same_bits(weight, reference.round_bits(master, dtype).view(dtype))

    def test_many(self, kernels, dtype):
        sizes = [5, TILE, 0, TILE + 1, 1, 3 * TILE, 0]
        pairs = [pair(n, dtype, 0.03, seed=k) for k, n in enumerate(sizes)]
        masters, weights = [list(column) for column in zip(*pairs, strict=True)]
        # One of another kind, and one misaligned, among them.
        other = DTYPES[1 - DTYPES.index(dtype)]
        masters += [pair(700, other, 0.5)[0], misaligned(masters[3], 3)]
        weights += [pair(700, other, 0.5)[1], misaligned(weights[3], 1)]
        rows = [
            reference.compact("gate_compact", m, w, torch.int32, False) for m, w in zip(masters, weights, strict=True)
        ]
        found = pk.gate_compact_many(masters, weights, return_old=True, update=True)
        for got, expected in zip(zip(*found, strict=True), rows, strict=True):
            assert all_same_bits(got, expected)
        for master, weight in zip(masters, weights, strict=True):
            assert same_bits(weight, reference.round_bits(master, weight.dtype).view(weight.dtype))
        # A launch a pass for each kind, however many tensors.
        assert names_of(kernels) == ["mark", "mark", "collect", "collect"]


@pytest.mark.parametrize("dtype", SIZES, ids=["1", "2", "4", "8"])
class TestElementSizes:
    @pytest.mark.parametrize("n", [3, TILE + 33])
    def test_diff(self, kernels, dtype, n):
        old = random_bits(n, dtype, seed=n)
        new = altered(old, 0.05, seed=n)
        expected = reference.compact("diff_compact", new, old, torch.int32, False)
        many = pk.diff_compact_many([new, new[1:]], [old, old[1:]], return_old=True)
        assert all_same_bits([column[0] for column in many], expected)
        assert torch.equal(many[0][1], expected[0][expected[0] > 0] - 1)
        assert all_same_bits(pk.diff_compact(new, old, update=True, return_old=True), expected)
        assert same_bits(old, new)

    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
    def test_patches(self, kernels, dtype, index_dtype):
        weights = [random_bits(n, dtype, seed=n) for n in (5000, 1, 40)]
        indices = [random_positions(n, w.numel(), n, index_dtype) for n, w in zip((1500, 1, 0), weights, strict=True)]
        values = [random_bits(i.numel(), dtype, seed=9) for i in indices]
        expected = [w.clone() for w in weights]
        overwritten = [reference.exchange_patch_(*row) for row in zip(expected, indices, values, strict=True)]
        assert all_same_bits(pk.exchange_patch_many_(weights, indices, values), overwritten)
        assert all_same_bits(weights, expected)
        pk.apply_patch_many_(weights, indices, overwritten)
        assert all_same_bits(weights, [random_bits(n, dtype, seed=n) for n in (5000, 1, 40)])
        pk.apply_patch_(weights[0], indices[0], values[0])
        assert same_bits(weights[0], expected[0])
        gathered = pk.backends.for_device("cpu").gather(weights[0], indices[0])
        assert same_bits(gathered, values[0])
        assert names_of(kernels) == ["order", "scatter"] * 3 + ["gather"]

    @pytest.mark.parametrize("start", [0, 256, 1000, 2**40 + 77])
    def test_digest(self, kernels, dtype, start):
        key = -(7**20)
        for n in (1, 255, 257, 32768, 33000):
            tensor = random_bits(n, dtype, seed=n)
            assert torch.equal(pk.digest(tensor, key, start), reference.digest(tensor, key, start))

    def test_digest_many_and_updates(self, kernels, dtype):
        tensors = [random_bits(n, dtype, seed=n) for n in (40000, 0, 3, 700)]
        tensors.append(misaligned(tensors[3], 1))
        keys = [1, 2**63 - 1, -(2**63), 0, 5]
        before = pk.digest_many(tensors, keys)
        assert all_same_bits(before, [reference.digest(t, k, 0) for t, k in zip(tensors, keys, strict=True)])
        indices = [random_positions(t.numel() // 3, t.numel(), 1, torch.int64) for t in tensors]
        old = [t[i] for t, i in zip(tensors, indices, strict=True)]
        new = [random_bits(i.numel(), dtype, seed=4) for i in indices]
        found = pk.digest_update_many(before, indices, old, new, keys)
        for tensor, index, value in zip(tensors, indices, new, strict=True):
            reference.apply_patch_(tensor, index, value)
        assert all_same_bits(found, [reference.digest(t, k, 0) for t, k in zip(tensors, keys, strict=True)])


class TestOrder:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("at", [0, 1, 2047, 2048, 4999])
    def test_first_bad_entry(self, kernels, dtype, at):
        good = torch.arange(5000, dtype=dtype) * 2
        weight = torch.zeros(10000)
        for wrong in (-1, 10000, int(good[at - 1]) if at else -5, torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            indices = good.clone()
            indices[at] = wrong
            with pytest.raises(IndexError, match=rf"indices\[{at}\] is {wrong}"):
                pk.apply_patch_(weight, indices, torch.ones(5000))
        assert not weight.any()

    def test_many_names_the_first_bad_tensor(self, kernels):
        good, bad = torch.tensor([1, 5]), torch.tensor([5, 5])
        weights = [torch.zeros(9), torch.zeros(9), torch.zeros(9)]
        with pytest.raises(IndexError, match=r"indices\[1\] is 5 after 5"):
            pk.apply_patch_many_(weights, [good, bad, good], [torch.ones(2)] * 3)
        assert not torch.stack(weights).any()


@pytest.mark.parametrize("view", DTYPES, ids=["bf16", "fp16"])
class TestResidual:
    def test_hard_values(self, kernels, view):
        x, _ = in_every_lane(TABLE, view, full_cycle(TABLE))
        shuffled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(3))]
        rows = [(x, shuffled, x.flip(0)), (x, x, torch.zeros_like(x)), (torch.zeros_like(x), x, shuffled)]
        for theta, local, residual in rows:
            expected = reference.gate_residual_many([theta], [local], [residual], view, [torch.int32])
            found = pk.gate_residual(theta, local, residual, view=view)
            assert all_same_bits(found, [column[0] for column in expected])
            ours, oracle = residual.clone(), residual.clone()
            pk.commit_residual_(theta, local, ours, found[0])
            reference.commit_residual_(theta, local, oracle, found[0])
            assert same_bits(ours, oracle)

    def test_many(self, kernels, view):
        sizes = [1, TILE + 3, 0, 500]
        theta, local, residual = ([torch.randn(n) * scale for n in sizes] for scale in (1.0, 1.0, 1e-3))
        local = [t + 1e-3 * x for t, x in zip(theta, local, strict=True)]
        residual[1] = misaligned(residual[1], 1)
        expected = reference.gate_residual_many(theta, local, residual, view, [torch.int32] * 4)
        found = pk.gate_residual_many(theta, local, residual, view=view)
        assert all_same_bits([*found[0], *found[1]], [*expected[0], *expected[1]])
        oracle = [r.clone() for r in residual]
        for row in zip(theta, local, oracle, found[0], strict=True):
            reference.commit_residual_(*row)
        pk.commit_residual_many_(theta, local, residual, found[0])
        assert all_same_bits(residual, oracle)
        assert names_of(kernels) == ["mark", "collect", "order", "commit", "scatter"]


def test_non_contiguous_tensors(kernels):
    master, weight = pair(90 * 100, torch.bfloat16, 0.05)
    master, weight = master.view(90, 100).t(), weight.view(90, 100).t()
    expected = reference.compact("gate_compact", master, weight, torch.int32, False)
    assert all_same_bits(pk.gate_compact(master, weight, return_old=True), expected)
    indices, values = torch.zeros(9000, dtype=torch.int32), torch.zeros(9000, dtype=torch.bfloat16)
    count, copy = torch.zeros((), dtype=torch.int64), weight.clone(memory_format=torch.preserve_format)
    pk.gate_compact_out(master, copy, indices, values, count, update=True)
    assert same_bits(copy, reference.round_bits(master, torch.bfloat16).view(torch.bfloat16).view(copy.shape))
    assert all_same_bits(pk.gate_compact(master, weight, return_old=True, update=True), expected)
    assert same_bits(weight, copy)


def test_calls_with_the_same_tensors_see_what_changed_in_them(kernels):
    """The table of addresses is kept from call to call, and with other tensors a new one is made."""
    masters, weights = (
        list(column) for column in zip(*(pair(n, torch.bfloat16, 0.1, n) for n in (70, 90)), strict=True)
    )
    for step in range(3):
        expected = reference.compact_many("gate_compact", masters, weights, [torch.int32] * 2, False, True)
        found = pk.gate_compact_many(masters, weights, return_old=True, update=True)
        for mine, theirs in zip(found, expected, strict=True):
            assert all_same_bits(mine, theirs)
        masters[step % 2].add_(1)
        if step == 1:
            weights = [weight.clone() for weight in weights]


def test_a_patch_of_a_model(kernels):
    old = {"w": random_bits(TILE + 40, torch.bfloat16, 1), "b": random_bits(17, torch.float32, 2)}
    new = {name: altered(tensor, 0.03, 7) for name, tensor in old.items()}
    patch = pk.Patch.diff(old, new)
    patch.apply_(old)
    assert all_same_bits(old.values(), new.values())


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**30),
    n=st.integers(1, 2 * TILE + 200),
    density=st.sampled_from([0.0, 0.001, 0.03, 0.4, 1.0]),
    shift=st.integers(0, 8),
    dtype=st.sampled_from([*DTYPES, *SIZES]),
)
def test_any_tensor(kernels, seed, n, density, shift, dtype):
    if dtype in DTYPES and seed % 2:
        op, (new, old) = "gate_compact", pair(n, dtype, density, seed)
    else:
        op, old = "diff_compact", random_bits(n, dtype, seed)
        new = altered(old, density, seed)
    expected = reference.compact(op, new, old, torch.int32, False)
    old = misaligned(old, shift)
    assert all_same_bits(getattr(pk, op)(new, old, return_old=True, update=True), expected)
    assert same_bits(old, reference.round_bits(new, dtype).view(dtype) if op == "gate_compact" else new)
    start = seed % 1000
    assert torch.equal(pk.digest(old, seed, start), reference.digest(old, seed, start))


@pytest.mark.skipif(triton.interpreted(), reason="the interpreter checks no addresses")
def test_memory_that_nobody_named_is_caught(kernels):
    """The checks above would be empty if any address were legal."""
    from pulse_kernels.backends.triton import operators

    weight, indices, values = torch.zeros(100), torch.tensor([50]), torch.ones(1)
    operators.apply_patch_many_([weight], [indices], [values])
    assert weight[50] == 1
    kernels.legal.clear()
    with pytest.raises(kernels.ptxsim.PtxSimError):
        operators.apply_patch_many_([weight[:40]], [indices], [values])
