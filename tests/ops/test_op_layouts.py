"""Tensors that are not plain: strided, offset, 0-d, empty, tied, aliased, with a gradient, of inference mode."""

from __future__ import annotations

import pytest
import torch
from op_helpers import all_same_bits, altered, int_bits, random_bits, same_bits

import pulse_kernels as pk
from pulse_kernels.backends import reference

# From a flat tensor of 4096 elements to a view of some of them. The contiguous ones start at an odd address.
LAYOUTS = {
    "offset by one": lambda flat: flat[1:1001],
    "offset by three, 2-d": lambda flat: flat[3 : 3 + 900].view(30, 30),
    "every second": lambda flat: flat[::2],
    "transposed": lambda flat: flat.view(64, 64).t(),
    "rows with gaps": lambda flat: flat.view(64, 64)[3:40, 5:50],
    "columns": lambda flat: flat.view(64, 64)[:, 7],
    "permuted": lambda flat: flat.view(4, 16, 64).permute(2, 0, 1),
    "channels last": lambda flat: flat.view(4, 16, 8, 8).permute(0, 3, 1, 2),
    "as_strided": lambda flat: flat.as_strided((5, 7, 3), (600, 40, 11), 2),
    "diagonal": lambda flat: flat.view(64, 64).diagonal(),
    "0-d": lambda flat: flat[77],
    "one element, idle strides": lambda flat: flat.as_strided((1, 1), (5, 3), 9),
    "empty": lambda flat: flat[:0],
    "empty, strided": lambda flat: flat.view(64, 64)[:, 64:].t(),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def rounded(master, dtype):
    return reference.round_bits(master.contiguous(), dtype).view(dtype).view(master.shape)


def outside(layout, memory):
    """The bits of all elements of ``memory`` that the view does not show."""
    shown = torch.zeros(memory.shape, dtype=torch.bool)
    layout(shown).fill_(True)
    return int_bits(memory)[~shown]


class TestStrided:
    def test_gate(self, layout):
        memory, sources = random_bits(4096, torch.bfloat16, 1), random_bits(4096, torch.float32, 2)
        weight, master = layout(memory), layout(sources)
        expected = pk.gate_compact(master.contiguous(), weight.contiguous(), return_old=True)
        assert all_same_bits(pk.gate_compact(master, weight, return_old=True), expected)
        mask = pk.visibility_mask(master.contiguous(), weight.contiguous())
        assert torch.equal(pk.visibility_mask(master, weight), mask)
        untouched = outside(layout, memory)
        assert all_same_bits(pk.gate_compact(master, weight, update=True, return_old=True), expected)
        assert same_bits(weight, rounded(master, torch.bfloat16))
        assert torch.equal(outside(layout, memory), untouched)

    def test_one_side_strided(self, layout):
        memory, sources = random_bits(4096, torch.bfloat16, 1), random_bits(4096, torch.float32, 2)
        for weight, master in [
            (layout(memory), layout(sources).contiguous()),
            (layout(memory).contiguous(), layout(sources)),
        ]:
            pk.gate_compact_many([master], [weight], update=True)
            assert same_bits(weight, rounded(master, torch.bfloat16))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64])
    def test_diff_patch_and_digest(self, layout, dtype):
        memory = random_bits(4096, dtype, 3)
        old, new = layout(memory), layout(altered(memory, 0.3, 3))
        untouched, receiver = outside(layout, memory), old.contiguous().clone()
        expected = pk.diff_compact(new.contiguous(), old.contiguous(), return_old=True)
        assert all_same_bits(pk.diff_compact(new, old, return_old=True), expected)
        indices, values, old_values = expected

        before = pk.digest(old, 7)
        assert torch.equal(before, pk.digest(old.contiguous(), 7))
        assert same_bits(pk.exchange_patch_(old, indices, values), old_values)
        assert same_bits(old, new.contiguous())
        assert torch.equal(pk.digest_update(before, indices, old_values, values, 7), pk.digest(old, 7))
        pk.apply_patch_(old, indices, old_values)
        assert same_bits(old, receiver)
        pk.diff_compact(new, old, update=True)
        assert same_bits(old, new.contiguous())
        assert torch.equal(outside(layout, memory), untouched)

    def test_residual(self, layout):
        memory = [random_bits(4096, torch.float32, seed) for seed in (4, 5, 6)]
        theta, local, residual = (layout(flat) for flat in memory)
        dense = [t.contiguous().clone() for t in (theta, local, residual)]
        expected = pk.gate_residual(*dense)
        assert all_same_bits(pk.gate_residual(theta, local, residual), expected)
        untouched = outside(layout, memory[2])
        pk.commit_residual_(*dense, expected[0])
        pk.commit_residual_(theta, local, residual, expected[0])
        assert all_same_bits([theta, local, residual], dense)
        assert torch.equal(outside(layout, memory[2]), untouched)


def test_strided_indices_and_values():
    weight = torch.zeros(10)
    indices, values = torch.tensor([[1, 9], [4, 9], [8, 9]])[:, 0], torch.tensor([1.0, 9, 2, 9, 3, 9])[::2]
    assert pk.exchange_patch_(weight, indices, values).tolist() == [0, 0, 0]
    assert weight.tolist() == [0, 1, 0, 0, 2, 0, 0, 0, 3, 0]
    blob = pk.pack_indices(indices, 10)
    spread = torch.stack([blob, blob], 1)[:, 1]
    assert pk.unpack_indices(spread).tolist() == [1, 4, 8]
    digest = torch.tensor([[0, 5], [0, 6]])[:, 0]
    assert torch.equal(pk.digest_update(digest, indices, torch.zeros(6)[::2], values, 1), pk.digest(weight, 1))


@pytest.mark.parametrize(
    "make_view",
    [
        lambda flat: flat[:1].expand(5),
        lambda flat: flat[:3].view(3, 1).expand(3, 4),
        lambda flat: flat[:9].unfold(0, 3, 1),
        lambda flat: flat.as_strided((5, 4), (3, 4)),  # 4 * 3 and 3 * 4 meet
    ],
    ids=["expanded", "expanded rows", "unfolded", "colliding strides"],
)
def test_weights_whose_elements_share_memory_are_not_written(make_view):
    view, residual = make_view(torch.zeros(99, dtype=torch.bfloat16)), make_view(torch.zeros(99))
    master = torch.ones(view.shape)
    empty, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for call in [
        lambda: pk.gate_compact(master, view, update=True),
        lambda: pk.gate_compact_many([master, master], [torch.zeros_like(master).bfloat16(), view], update=True),
        lambda: pk.gate_compact_out(master, view, empty, view.new_zeros(0), one, update=True),
        lambda: pk.diff_compact(master.bfloat16(), view, update=True),
        lambda: pk.apply_patch_(view, empty, view.new_zeros(0)),
        lambda: pk.exchange_patch_(view, empty, view.new_zeros(0)),
        lambda: pk.commit_residual_(master, master, residual, empty),
    ]:
        with pytest.raises(ValueError, match=r"share memory .*contiguous\(\)"):
            call()
    assert pk.gate_compact(master, view)[0].numel() == master.numel()  # reading them is fine


class TestTied:
    """The same memory twice in one list: the meaning is one after the other."""

    @pytest.mark.parametrize("memory", [torch.zeros(10, 1), torch.zeros(10, 2)], ids=["contiguous", "strided"])
    def test_gate_many(self, memory):
        weight = memory.bfloat16()[:, 0]
        ones, twos = torch.ones(10), torch.full((10,), 2.0)
        columns = pk.gate_compact_many([ones, twos], [weight, weight], update=True, return_old=True)
        indices, values, old = ([column.tolist() for column in part] for part in columns)
        assert indices == [list(range(10))] * 2
        assert values == [[1] * 10, [2] * 10]
        assert old == [[0] * 10, [1] * 10]
        assert weight.tolist() == [2] * 10

    def test_gate_many_of_overlapping_views(self):
        weight = torch.zeros(6, dtype=torch.bfloat16)
        indices, _ = pk.gate_compact_many([torch.ones(4), torch.ones(4)], [weight[:4], weight[2:]], update=True)
        assert [i.tolist() for i in indices] == [[0, 1, 2, 3], [2, 3]]

    def test_pure_gate_many(self):
        weight = torch.zeros(3, dtype=torch.bfloat16)
        indices, _ = pk.gate_compact_many([torch.ones(3), torch.ones(3)], [weight, weight])
        assert [i.tolist() for i in indices] == [[0, 1, 2]] * 2

    def test_patch_many(self):
        weight, index = torch.zeros(4), torch.tensor([1, 2])
        first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        old = pk.exchange_patch_many_([weight, weight], [index, index], [first, second])
        assert [o.tolist() for o in old] == [[0, 0], [1, 2]]
        assert weight.tolist() == [0, 3, 4, 0]
        pk.apply_patch_many_([weight, weight], [index, index[:1]], [first, second[:1]])
        assert weight.tolist() == [0, 3, 2, 0]

    def test_commit_many(self):
        theta, local, residual = torch.ones(2), torch.zeros(2), torch.zeros(2)
        none = torch.zeros(0, dtype=torch.int64)
        pk.commit_residual_many_([theta] * 2, [local] * 2, [residual] * 2, [none, torch.tensor([0])])
        assert residual.tolist() == [0, 2]


class TestAliased:
    """What is read overlaps what is written: it counts as it was before the call."""

    N = 150000  # three tasks

    def test_diff_against_itself_shifted(self, threads):
        memory = random_bits(self.N, torch.int32, 1)
        before = memory.clone()
        indices, values = pk.diff_compact(memory[1:], memory[:-1], update=True)
        expected = pk.diff_compact(before[1:], before[:-1])
        assert all_same_bits((indices, values), expected)
        assert torch.equal(memory[:-1], before[1:])

    def test_diff_out_against_itself_shifted(self):
        memory = random_bits(self.N, torch.int32, 1)
        before = memory.clone()
        indices, values = torch.zeros(self.N, dtype=torch.int32), torch.zeros(self.N, dtype=torch.int32)
        pk.diff_compact_out(memory[1:], memory[:-1], indices, values, torch.zeros(1, dtype=torch.int64), update=True)
        assert torch.equal(memory[:-1], before[1:])

    def test_a_chain_of_diffs(self, threads):
        a, b, c = (random_bits(self.N, torch.int32, seed) for seed in range(3))
        for _ in range(20):  # at one time on several threads, only some attempts would go wrong
            first, second, third = a.clone(), b.clone(), c.clone()
            pk.diff_compact_many([second, third], [first, second], update=True)
            assert torch.equal(first, b)
            assert torch.equal(second, c)
            first, second, third = a.clone(), b.clone(), c.clone()
            pk.diff_compact_many([second, first], [first, third], update=True)
            assert torch.equal(first, b)
            assert torch.equal(third, b)

    def test_a_master_over_its_weight(self):
        memory = torch.arange(1.0, self.N + 1)
        expected = memory.bfloat16()
        weight = memory.view(torch.bfloat16)[: self.N]  # the first half of the master's own memory
        pk.gate_compact(memory, weight, update=True)
        assert same_bits(weight, expected)

    def test_values_from_the_weight_itself(self):
        weight = torch.arange(10.0)
        pk.apply_patch_(weight, torch.arange(1, 10), weight[:9])
        assert weight.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
        old = pk.exchange_patch_(weight, torch.arange(2), weight[8:])
        assert (old.tolist(), weight[:2].tolist()) == ([0, 0], [7, 8])

    def test_commit_over_theta(self):
        memory = torch.arange(1.0, 12.0)
        theta, residual = memory[:10].clone(), memory[1:].clone()
        local = torch.zeros(10)
        pk.commit_residual_(theta, local, residual, torch.tensor([3]))
        pk.commit_residual_(memory[:10], local, memory[1:], torch.tensor([3]))
        assert torch.equal(memory[1:], residual)


class TestAutograd:
    index, value = torch.tensor([1]), torch.tensor([5.0])

    def test_parameters_are_written_in_place_and_stay_leaves(self):
        weight = torch.nn.Parameter(torch.zeros(3))
        pk.apply_patch_(weight, self.index, self.value)
        old = pk.exchange_patch_(weight, self.index, torch.nn.Parameter(self.value + 1))
        pk.diff_compact(torch.tensor([0.0, 6, 7], requires_grad=True), weight, update=True)
        assert weight.tolist() == [0, 6, 7]
        assert weight.is_leaf
        assert weight.requires_grad
        assert not old.requires_grad
        low = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        indices, values = pk.gate_compact(weight, low, update=True)
        assert low.tolist() == [0, 6, 7]
        assert not values.requires_grad
        residual = torch.nn.Parameter(torch.zeros(3))
        pk.commit_residual_(weight, torch.nn.Parameter(torch.zeros(3)), residual, indices)
        assert residual.tolist() == [0, 0, 0]

    def test_autograd_notices_the_write(self):
        weight = torch.nn.Parameter(torch.ones(3))
        loss = (weight * weight).sum()
        pk.apply_patch_(weight, self.index, self.value)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_version_counters(self):
        def versions(call, *tensors):
            before = [tensor._version for tensor in tensors]
            call()
            return [tensor._version > version for tensor, version in zip(tensors, before, strict=True)]

        master, weight, other = torch.ones(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)
        indices, values, count = torch.zeros(3, dtype=torch.int32), weight.clone(), torch.zeros(1, dtype=torch.int64)
        old, view, none = weight.clone(), other[1:], torch.zeros(0, dtype=torch.int64)
        both = (master, weight)
        assert versions(lambda: pk.gate_compact(master, weight), *both) == [False, False]
        assert versions(lambda: pk.gate_compact(master, weight, update=True), *both) == [False, True]
        assert versions(lambda: pk.gate_compact_many([master], [weight], update=True), *both) == [False, True]
        assert versions(lambda: pk.diff_compact(other, master, update=True), other, master) == [False, True]
        buffers = (weight, indices, values, count, old)
        call = lambda update: pk.gate_compact_out(  # noqa: E731
            master, weight, indices, values, count, update=update, old_values=old
        )
        assert versions(lambda: call(False), *buffers) == [False, True, True, True, True]
        assert versions(lambda: call(True), *buffers) == [True, True, True, True, True]
        # A view and its base share a counter.
        assert versions(lambda: pk.apply_patch_(view, self.index, self.value), view, other) == [True, True]
        assert versions(lambda: pk.exchange_patch_(other, self.index, self.value), other) == [True]
        assert versions(lambda: pk.apply_patch_many_([other], [self.index], [self.value]), other) == [True]
        assert versions(lambda: pk.exchange_patch_many_([other], [self.index], [self.value]), other) == [True]
        triple = (other, other.clone(), torch.zeros(3))
        assert versions(lambda: pk.commit_residual_(*triple, none), *triple) == [False, False, True]
        lists = [[t] for t in triple]
        assert versions(lambda: pk.commit_residual_many_(*lists, [none]), *triple) == [False, False, True]

    def test_inference_tensors(self):
        with torch.inference_mode():
            weight, low = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
            pk.apply_patch_(weight, self.index, self.value)
            pk.gate_compact(weight, low, update=True)
        assert low.tolist() == [0, 5, 0]
        # Outside too: the operators keep no graph.
        assert pk.exchange_patch_(weight, self.index, self.value + 1).tolist() == [5]
        pk.gate_compact(weight, low, update=True)
        assert low.tolist() == [0, 6, 0]
        assert pk.digest(low, 1).tolist() == pk.digest(low.clone(), 1).tolist()

    @pytest.mark.parametrize("stride", [1, 2])
    def test_inference_tensors_written_outside_of_inference_mode(self, stride):
        with torch.inference_mode():
            weight, residual = torch.zeros(6, dtype=torch.bfloat16)[::stride], torch.zeros(6)[::stride]
            indices, count = torch.zeros(6, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
            values, old = torch.zeros(6, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16)
        n = weight.numel()
        ones, none = torch.ones(n), torch.zeros(0, dtype=torch.int64)
        pk.gate_compact_out(ones, weight, indices, values, count, update=True, old_values=old)
        assert count.tolist() == [n]
        assert (indices[:n].tolist(), values[:n].tolist(), old[:n].tolist()) == (list(range(n)), [1] * n, [0] * n)
        assert weight.tolist() == [1] * n
        pk.commit_residual_(ones, torch.zeros(n), residual, none)
        assert residual.tolist() == [1] * n
        pk.apply_patch_(weight, torch.tensor([1]), torch.tensor([7.0]).bfloat16())
        assert weight[1] == 7


def test_lazy_conjugates_and_negatives_count_as_what_they_show():
    z = torch.tensor([1 + 2j, 3 - 4j, 5j])
    assert torch.equal(pk.digest(z.conj(), 1), pk.digest(z.conj().resolve_conj(), 1))
    assert not torch.equal(pk.digest(z.conj(), 1), pk.digest(z, 1))
    negated = torch._neg_view(torch.ones(2))
    assert pk.gate_compact(negated, torch.ones(2, dtype=torch.bfloat16))[1].tolist() == [-1, -1]
