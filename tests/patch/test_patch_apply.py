"""Patch.apply_: all of a patch or nothing of it, on the right weights only."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pulse_kernels as pk
from pulse_kernels import ops
from pulse_kernels.patch import _at_once
from pulse_kernels.state import StateDigest

Tensors = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def snapshot(weights: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    """name -> (the tensor itself, its bytes now)."""
    pairs = weights.state_dict(keep_vars=True) if isinstance(weights, nn.Module) else weights
    return {name: (tensor, raw(tensor)) for name, tensor in pairs.items()}


def assert_untouched(weights: Any, before: dict[str, tuple[Any, torch.Tensor]]) -> None:
    now = snapshot(weights)
    assert list(now) == list(before)
    for name, (tensor, data) in before.items():
        assert now[name][0] is tensor, name
        assert torch.equal(now[name][1], data), name


def assert_state(weights: Tensors, expected: Tensors) -> None:
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert weights[name].shape == tensor.shape
        assert torch.equal(raw(weights[name]), raw(tensor)), name


def states(seed: int = 0) -> tuple[Tensors, Tensors]:
    """Mixed dtypes and shapes; in each tensor some elements change."""
    generator = torch.Generator().manual_seed(seed)
    old: Tensors = {}
    for name, dtype, shape in (
        ("bf16", torch.bfloat16, (20, 30)),
        ("fp8", torch.float8_e4m3fn, (50,)),
        ("scalar", torch.float32, ()),
        ("ints", torch.int64, (4, 5, 6)),
        ("complex", torch.complex64, (9,)),
        ("empty", torch.float16, (0, 3)),
    ):
        count = torch.Size(shape).numel() * dtype.itemsize
        old[name] = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        data = tensor.view(-1).view(torch.uint8)
        data[torch.rand(data.shape, generator=generator) < 0.1] ^= 0x55
    new["scalar"] = torch.tensor(-0.0)
    return old, new


def clone(state: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in state.items()}


# ---- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
def test_dict(verify: bool) -> None:
    old, new = states()
    patch = pk.Patch.diff(old, new)
    weights = clone(old)
    places = {name: tensor.data_ptr() for name, tensor in weights.items()}
    assert patch.apply_(weights, verify=verify) == patch.digest
    assert_state(weights, new)
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == places


def test_module_with_buffers_and_gradients() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    target = copy.deepcopy(model)
    target(torch.randn(9, 5))  # moves the running statistics
    with torch.no_grad():
        target[0].weight[2] += 1
    patch = pk.Patch.diff(model, target)
    assert set(patch.tensors) == {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    parameters = list(model.parameters())
    assert patch.apply_(model) == pk.StateDigest.of(target).hexdigest()
    assert_state(model.state_dict(), target.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_autograd_notices_the_write() -> None:
    """A backward pass through weights that a patch changed in between must not go wrong in silence."""
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    pk.Patch.diff({"w": torch.ones(3)}, {"w": torch.zeros(3)}).apply_({"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_pairs_and_read_only_mappings() -> None:
    old, new = states()
    patch = pk.Patch.diff(old, new)
    for wrap in (lambda w: list(w.items()), lambda w: iter(w.items()), MappingProxyType):
        weights = clone(old)
        assert patch.apply_(wrap(weights)) == patch.digest
        assert_state(weights, new)


def test_inference_mode() -> None:
    old, new = states()
    with torch.inference_mode():
        weights = clone(old)
        pk.Patch.diff(old, new).apply_(weights)
        assert_state(weights, new)


def test_non_contiguous_weights() -> None:
    dense = torch.arange(24.0).view(4, 6)
    old = {"t": dense.t(), "columns": dense.clone()[:, ::2], "flipped": dense.clone().permute(1, 0)[1:5]}
    new = {
        name: tensor.contiguous() + (torch.arange(tensor.numel()) % 3 == 0).view(tensor.shape)
        for name, tensor in old.items()
    }
    patch = pk.Patch.diff(old, new)
    strides = {name: tensor.stride() for name, tensor in old.items()}
    patch.apply_(old)
    assert_state(old, new)
    assert {name: tensor.stride() for name, tensor in old.items()} == strides


def test_added_removed_replaced() -> None:
    old = {"kept": torch.ones(3), "gone": torch.ones(2), "reshaped": torch.ones(4), "retyped": torch.ones(2)}
    new = {
        "kept": torch.zeros(3),
        "reshaped": torch.ones(2, 2),
        "retyped": torch.ones(2).half(),
        "here": torch.full((3,), -0.0),
        "empty": torch.ones(0),
    }
    patch = pk.Patch.diff(old, new)
    weights = clone(old)
    assert patch.apply_(weights) == pk.StateDigest.of(new).hexdigest()
    assert_state(weights, new)
    weights["here"] += 1
    assert patch.added["here"].tolist() == [0, 0, 0]  # the weights got a copy


def test_booleans_keep_their_bytes() -> None:
    """Files hold them; torch's own copies would make 1 of every byte but 0."""

    def booleans(*data: int) -> torch.Tensor:
        return torch.tensor(data, dtype=torch.uint8).view(torch.bool)

    old = {"w": booleans(0, 1, 2, 77), "shape": booleans(3)}
    new = {"w": booleans(255, 1, 77, 2), "shape": booleans(3, 4).view(2, 1), "here": booleans(5, 0).view(1, 2).t()}
    patch = pk.Patch.diff(old, new)
    weights = {"w": booleans(0, 1, 2, 77), "shape": booleans(3)}
    assert pk.Patch.from_bytes(patch.to_bytes(), weights).apply_(weights) == patch.digest
    assert [weights[name].view(torch.uint8).flatten().tolist() for name in new] == [[255, 1, 77, 2], [3, 4], [5, 0]]


def test_current_digest_saves_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = states()
    patch = pk.Patch.diff(old, new)
    weights = clone(old)
    with monkeypatch.context() as context:
        context.setattr(ops, "digest", lambda *_: pytest.fail("a pass over the weights"))
        assert patch.apply_(weights, current_digest=patch.base_digest) == patch.digest
    assert_state(weights, new)
    back = pk.Patch.diff(new, old)
    assert back.apply_(weights, current_digest=patch.digest.upper()) == patch.base_digest
    assert_state(weights, old)


def test_a_chain_of_patches() -> None:
    chain = [states(seed)[1] for seed in range(4)]
    weights, digest = clone(chain[0]), pk.StateDigest.of(chain[0]).hexdigest()
    for before, after in itertools.pairwise(chain):
        patch = pk.Patch.from_bytes(pk.Patch.diff(before, after).to_bytes(), weights, current_digest=digest)
        digest = patch.apply_(weights, current_digest=digest)
        assert_state(weights, after)


def test_a_patch_that_knows_no_digests() -> None:
    item = pk.TensorPatch("w", (3,), torch.float32, torch.tensor([1]), torch.ones(1))
    weights = {"w": torch.zeros(3)}
    assert pk.Patch(tensors={"w": item}).apply_(weights) == pk.StateDigest.of(weights).hexdigest()
    assert weights["w"].tolist() == [0, 1, 0]
    assert pk.Patch(tensors={"w": item}).apply_(weights, verify=False) == ""


@given(st.integers(0, 2**31), st.integers(0, 2**31))
@settings(max_examples=30)
def test_there_and_back(first: int, second: int) -> None:
    old, new = states(first)[0], states(second)[0]
    weights = clone(old)
    pk.Patch.diff(old, new).apply_(weights)
    assert_state(weights, new)
    pk.Patch.diff(new, old).apply_(weights)
    assert_state(weights, old)


# ---- the wrong weights -----------------------------------------------------------------------------------------------


def test_another_base() -> None:
    old, new = states()
    patch = pk.Patch.diff(old, new, base_version=41)
    weights = clone(old)
    weights["ints"][0, 0, 0] += 1
    before = snapshot(weights)
    found = pk.StateDigest.of(weights).hexdigest()
    with pytest.raises(pk.BaseMismatchError) as caught:
        patch.apply_(weights)
    assert all(text in str(caught.value) for text in (found, patch.base_digest, "version 41"))
    with pytest.raises(pk.BaseMismatchError, match=found):
        patch.apply_(weights, current_digest=found)
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits"):
        patch.apply_(weights, current_digest="41")
    assert_untouched(weights, before)


def test_the_patch_itself_is_no_base_for_it() -> None:
    """Applied twice, the second time is refused."""
    old, new = states()
    patch, weights = pk.Patch.diff(old, new), clone(old)
    patch.apply_(weights)
    before = snapshot(weights)
    with pytest.raises(pk.BaseMismatchError, match=patch.base_digest):
        patch.apply_(weights)
    assert_untouched(weights, before)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda w: w.pop("bf16"), "changes 'bf16', which the weights lack", id="a tensor is missing"),
        pytest.param(lambda w: w.pop("gone"), "changes 'gone', which the weights lack", id="nothing to remove"),
        pytest.param(
            lambda w: w.update(bf16=w["bf16"].view(30, 20)), r"bfloat16 \[30, 20\], .* \[20, 30\]", id="shape"
        ),
        pytest.param(lambda w: w.update(bf16=w["bf16"].half()), "'bf16' is float16 .* for bfloat16", id="dtype"),
        pytest.param(lambda w: w.update(more=torch.ones(1)), "the weights have digest", id="one tensor more"),
        pytest.param(lambda w: w.update(bf17=w.pop("empty")), "the weights have digest", id="another name"),
    ],
)
def test_other_tensors(edit: Callable[[Tensors], Any], message: str) -> None:
    old, new = states()
    old["gone"] = torch.ones(1)
    patch, weights = pk.Patch.diff(old, new), clone(old)
    edit(weights)
    before = snapshot(weights)
    with pytest.raises(pk.BaseMismatchError, match=message):
        patch.apply_(weights)
    assert_untouched(weights, before)


@pytest.mark.parametrize("edit", ["added", "removed", "replaced"])
def test_modules_cannot_grow_or_shrink(edit: str) -> None:
    model = nn.Linear(3, 2)
    new = clone(model.state_dict())
    new["weight"] += 1
    if edit == "added":
        new["extra"] = torch.ones(1)
    elif edit == "removed":
        del new["bias"]
    else:
        new["bias"] = torch.ones(3)
    patch = pk.Patch.diff(model, new)
    for weights in (model, list(model.named_parameters()), MappingProxyType(model.state_dict())):
        before = snapshot(model)
        with pytest.raises(pk.BaseMismatchError, match=r"adds, replaces or removes 1 tensors .*needs a dict"):
            patch.apply_(weights)
        assert_untouched(model, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3, 1], r"indices\[1\] is 1 after 3"),
        ([1, 1], r"indices\[1\] is 1 after 1"),
        ([1, 10], r"indices\[1\] is 10, expected 0 <= index < 10"),
        ([-1, 2], r"indices\[0\] is -1"),
        ([0, 2**31 - 1], r"indices\[1\] is 2147483647"),
    ],
)
def test_bad_positions(indices: list[int], message: str, dtype: torch.dtype) -> None:
    good = pk.TensorPatch("a", (10,), torch.float32, torch.tensor([1], dtype=dtype), torch.ones(1))
    bad = pk.TensorPatch("b", (10,), torch.float32, torch.tensor(indices, dtype=dtype), torch.ones(2))
    weights = {"a": torch.zeros(10), "b": torch.zeros(10)}
    before = snapshot(weights)
    for verify in (True, False):
        with pytest.raises(IndexError, match=message):
            pk.Patch(tensors={"a": good, "b": bad}).apply_(weights, verify=verify)
    assert_untouched(weights, before)


def test_expanded_weights() -> None:
    old, new = {"w": torch.zeros(3, 4)}, {"w": torch.ones(3, 4)}
    weights = {"w": torch.zeros(4).expand(3, 4)}
    with pytest.raises(ValueError, match=r"patch of 'w': .*contiguous"):
        pk.Patch.diff(old, new).apply_(weights)
    assert not weights["w"].any()


# ---- failures in the middle ------------------------------------------------------------------------------------------


def grown(old: Tensors, new: Tensors) -> tuple[Tensors, Tensors]:
    """The two states with tensors that go, come and change shape as well."""
    more_old = {"gone": torch.ones(2), "reshaped": torch.ones(4)}
    more_new = {"reshaped": torch.ones(2, 2), "here": torch.ones(3)}
    return old | more_old, new | more_new


def test_damaged_values_are_found_and_rolled_back() -> None:
    old, new = grown(*states())
    patch = pk.Patch.diff(old, new)
    for name, item in patch.tensors.items():
        damaged = copy.deepcopy(patch)
        damaged.tensors[name].values.view(torch.uint8)[-1] ^= 4
        weights = clone(old)
        before = snapshot(weights)
        for options in ({}, {"current_digest": patch.base_digest}):
            with pytest.raises(pk.VerificationError, match=f"expected {patch.digest}; they were rolled back"):
                damaged.apply_(weights, **options)  # type: ignore[arg-type]
            assert_untouched(weights, before)
        assert item.num_changed
    for damaged_added in ({}, {"here": torch.zeros(3), "reshaped": torch.ones(2, 2)}):
        damaged = copy.deepcopy(patch)
        damaged.added = damaged_added
        weights = clone(old)
        before = snapshot(weights)
        with pytest.raises(pk.VerificationError):
            damaged.apply_(weights)
        assert_untouched(weights, before)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("method", ["apply_", "exchange_"])
@pytest.mark.parametrize(("operation", "failing"), [*(("apply_patch_many_", k) for k in (1, 2, 3, 5)), ("digest", 1)])
def test_a_failure_at_any_step(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], operation: str, failing: int, method: str, done: bool
) -> None:
    """The k-th call fails before it does anything, or is interrupted after: all that was done is undone."""
    old, new = grown(*states())
    patch = pk.Patch.diff(old, new)
    assert len(patch.tensors) == 5
    weights = clone(old)
    before = snapshot(weights)
    owner, name = (ops, operation) if operation != "digest" else (StateDigest, "add_changes")
    original, calls = getattr(owner, name), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            if done:
                original(*args, **kwargs)
            raise error("in the middle")
        return original(*args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(owner, name, fails)
        with pytest.raises(error, match="in the middle"):
            getattr(patch, method)(weights)
    assert calls == failing
    assert_untouched(weights, before)
    getattr(patch, method)(weights)
    assert_state(weights, new)


class Stubborn(dict[str, torch.Tensor]):
    """A mapping whose n-th change from now on fails."""

    left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no more")

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._count()
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        self._count()
        super().__delitem__(name)


@pytest.mark.parametrize("method", ["apply_", "exchange_"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_mapping_that_fails(step: int, method: str) -> None:
    """Entries come and go last; where that fails they are put back too."""
    old, new = grown(*states())
    weights = Stubborn(clone(old))
    before = snapshot(weights)
    weights.left = step
    with pytest.raises(MemoryError, match="no more"):
        getattr(pk.Patch.diff(old, new), method)(weights)
    now = snapshot(weights)
    assert set(now) == set(before)
    assert all(now[name][0] is tensor and torch.equal(now[name][1], data) for name, (tensor, data) in before.items())


def test_copies_of_added_tensors_are_made_before_anything_is_written() -> None:
    class Unmovable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.clone:
                raise MemoryError("no room for the copy")
            return super().__torch_function__(func, types, args, kwargs or {})

    old, new = grown(*states())
    patch = pk.Patch.diff(old, new)
    patch.added["here"] = patch.added["here"].as_subclass(Unmovable)
    weights = clone(old)
    before = snapshot(weights)
    with pytest.raises(MemoryError, match="no room"):
        patch.apply_(weights)
    assert_untouched(weights, before)


# ---- tied weights ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_written_once() -> None:
    model, target = Tied(), Tied()
    patch = pk.Patch.diff(model, target)
    assert set(patch.tensors) == {"embedding.weight", "head.weight"}
    assert patch.apply_(model) == pk.StateDigest.of(target).hexdigest()
    assert torch.equal(model.head.weight, target.embedding.weight)
    assert model.head.weight is model.embedding.weight


def test_tied_weights_are_rolled_back_once() -> None:
    model, target = Tied(), Tied()
    patch = pk.Patch.diff(model, target)
    for item in patch.tensors.values():
        item.values[0] += 1
    before = snapshot(model)
    with pytest.raises(pk.VerificationError):
        patch.apply_(model)
    assert_untouched(model, before)


def test_a_patch_of_tied_weights_fits_untied_ones_and_the_reverse() -> None:
    tied, target = Tied(), Tied()
    untied = clone(tied.state_dict())
    patch = pk.Patch.diff(tied, target)
    assert patch.apply_(untied) == pk.StateDigest.of(target).hexdigest()
    assert_state(untied, target.state_dict())
    assert pk.Patch.diff(clone(tied.state_dict()), untied).apply_(tied) == pk.StateDigest.of(target).hexdigest()


def test_tied_weights_that_would_drift_apart() -> None:
    tied = Tied()
    new = clone(tied.state_dict())
    new["head.weight"][0, 0] += 1
    for state in (new, {**new, "embedding.weight": new["embedding.weight"] + 1}):
        before = snapshot(tied)
        with pytest.raises(ValueError, match=r"'\w+\.weight' and '\w+\.weight' share memory.*differently.*untie"):
            pk.Patch.diff(tied, state).apply_(tied)
        assert_untouched(tied, before)


def test_partial_overlap() -> None:
    memory = torch.zeros(10)
    weights = {"a": memory[:6], "b": memory[4:]}
    new = {"a": torch.ones(6), "b": torch.zeros(6)}
    before = snapshot(weights)
    with pytest.raises(ValueError, match=r"'a' and 'b' are different views of shared memory.*untie"):
        pk.Patch.diff(clone(weights), new).apply_(weights)
    assert_untouched(weights, before)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda m: m.t(), id="transposed"),
        pytest.param(lambda m: m.view(-1), id="flat"),
        pytest.param(lambda m: m[::2], id="every other row"),
        pytest.param(lambda m: m.view(torch.int32), id="as integers"),
        pytest.param(lambda m: m[1, 1], id="one element"),
    ],
)
def test_different_views_of_one_memory(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    matrix = torch.zeros(4, 4)
    weights = {"m": matrix, "other": other(matrix)}
    before = snapshot(weights)
    with pytest.raises(ValueError, match="different views of shared memory"):
        pk.Patch.diff(clone(weights), clone(weights) | {"m": torch.ones(4, 4)}).apply_(weights)
    assert_untouched(weights, before)


def test_views_without_a_common_element_are_not_tied() -> None:
    """Columns of one matrix, interleaved vectors, rows: their address ranges overlap, their elements do not."""
    matrix, vector = torch.zeros(4, 6), torch.zeros(12)
    weights = {
        "left": matrix[:, :3],
        "right": matrix[:, 3:],
        "even": vector[::2],
        "odd": vector[1::2],
        "bytes": torch.zeros(3, 8, dtype=torch.uint8)[:, 1:],
        "scalar": torch.zeros(()),
    }
    new = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    new["odd"] *= 3
    patch = pk.Patch.diff(weights, new)
    assert patch.apply_(weights) == patch.digest
    assert_state(weights, new)
    assert vector.tolist() == [1, 3] * 6


def test_many_interleaved_views() -> None:
    memory = torch.zeros(50, 100)
    weights = {str(k): memory[:, k] for k in range(100)}
    new = {str(k): torch.full((50,), float(k)) for k in range(100)}
    pk.Patch.diff(weights, new).apply_(weights)
    assert torch.equal(memory, torch.arange(100.0).expand(50, 100))


@pytest.mark.parametrize("fate", ["removed", "replaced"])
def test_a_tied_tensor_that_goes(fate: str) -> None:
    """b was tied to a; the new state has no b, or another one. The receiver still has both in one memory."""
    shared = torch.arange(4.0)
    old = {"a": shared.clone(), "b": shared.clone()}
    new = {"a": shared + 1} | ({"b": torch.ones(2)} if fate == "replaced" else {})
    patch = pk.Patch.diff(old, new)
    weights = {"a": shared, "b": shared}
    assert patch.apply_(weights) == patch.digest
    assert_state(weights, new)


def test_unchanged_tied_weights_do_not_matter() -> None:
    shared = torch.ones(3)
    weights = {"a": shared, "b": shared, "c": torch.ones(3)}
    pk.Patch.diff(clone(weights), clone(weights) | {"c": torch.zeros(3)}).apply_(weights)
    assert weights["c"].tolist() == [0, 0, 0]
    assert weights["a"] is weights["b"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_tensors_written_by_one_launch() -> None:
    """Off the CPU a launch takes all contiguous tensors of a device and dtype; on it each tensor is alone."""
    off = {f"w{k}": torch.empty(4, device="meta") for k in range(3)}
    off |= {"strided": torch.empty(4, 4, device="meta").t(), "half": torch.empty(4, dtype=torch.half, device="meta")}
    on = {"a": torch.empty(4), "b": torch.empty(4)}
    named = off | on
    changed = {
        name: pk.TensorPatch(name, tuple(t.shape), t.dtype, torch.arange(1), torch.zeros(1, dtype=t.dtype))
        for name, t in named.items()
    }
    assert list(_at_once(named, changed, named)) == [["w0", "w1", "w2"], ["strided"], ["half"], ["a"], ["b"]]
