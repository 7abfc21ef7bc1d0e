"""Patch.exchange_: apply_ with the patch that takes it back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pulse_kernels as pk
from pulse_kernels.state import StateDigest

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool, torch.int64, torch.complex64)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def clone(state: Tensors) -> Tensors:
    return {name: raw(tensor).clone().view(tensor.dtype).view(tensor.shape) for name, tensor in state.items()}


def assert_state(weights: Tensors, expected: Tensors) -> None:
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert (weights[name].dtype, weights[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(weights[name]), raw(tensor)), name


def random_state(seed: int) -> Tensors:
    """Any bits; some names are there or not, and some have one of two shapes, by the seed."""
    generator = torch.Generator().manual_seed(seed)
    state: Tensors = {}
    for k, dtype in enumerate(DTYPES):
        for name, shape in ((f"kept{k}", (5, 7)), (f"maybe{k}", (11,)), (f"shape{k}", (3 + seed % 2,))):
            if name.startswith("maybe") and torch.rand((), generator=generator) < 0.5:
                continue
            count = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
            state[name] = data.view(dtype).view(shape)
    return state


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_there_back_and_there(first: int, second: int) -> None:
    old, new = random_state(first), random_state(second)
    patch = pk.Patch.diff(old, new, base_version=3, version=4)
    weights = clone(old)
    back = patch.exchange_(weights)
    assert_state(weights, new)
    assert (back.base_version, back.version) == (4, 3)
    assert (back.base_digest, back.digest) == (patch.digest, patch.base_digest)
    again = back.exchange_(weights, current_digest=patch.digest)
    assert_state(weights, old)
    assert (again.base_version, again.version) == (3, 4)
    assert (again.base_digest, again.digest) == (patch.base_digest, patch.digest)
    assert again.exchange_(weights).exchange_(weights).apply_(weights) == patch.digest
    assert_state(weights, new)


def test_what_the_undo_holds() -> None:
    old = {"w": torch.tensor([1.0, -0.0, 3.0]), "gone": torch.ones(2), "reshaped": torch.ones(4)}
    new = {"w": torch.tensor([1.0, 0.0, float("nan")]), "here": torch.ones(1), "reshaped": torch.ones(2, 2)}
    weights = clone(old)
    patch = pk.Patch.diff(old, new)
    back = patch.exchange_(weights)
    item = back.tensors["w"]
    assert item.indices.tolist() == [1, 2]
    assert raw(item.values).tolist() == raw(torch.tensor([-0.0, 3.0])).tolist()
    assert item.old_values is not None
    assert raw(item.old_values).tolist() == raw(torch.tensor([0.0, float("nan")])).tolist()
    assert back.removed == ("here",)
    assert {name: tensor.tolist() for name, tensor in back.added.items()} == {"gone": [1, 1], "reshaped": [1] * 4}
    digest = StateDigest.of({"w": new["w"]})
    digest.add_lanes(back.digest_changes["w"])
    assert digest == StateDigest.of({"w": old["w"]})
    assert back.layout is None


def test_what_comes_back_is_a_copy() -> None:
    """The removed tensor is tied to one that stays and changes, now and later."""
    shared = torch.arange(4.0)
    weights = {"a": shared, "b": shared}
    patch = pk.Patch.diff({"a": torch.arange(4.0), "b": torch.arange(4.0)}, {"a": torch.arange(4.0) + 1})
    back = patch.exchange_(weights)
    shared += 5
    assert back.added["b"].tolist() == [0, 1, 2, 3]
    shared -= 5
    assert back.apply_(weights) == patch.base_digest
    assert_state(weights, {"a": torch.arange(4.0), "b": torch.arange(4.0)})


def test_tied_tensors_have_an_entry_each() -> None:
    shared = torch.zeros(5)
    weights = {"a": shared, "b": shared}
    new = {"a": torch.tensor([0.0, 1, 0, 0, 2]), "b": torch.tensor([0.0, 1, 0, 0, 2])}
    patch = pk.Patch.diff(clone(weights), new)
    back = patch.exchange_(weights)
    assert [(name, item.name, item.values.tolist()) for name, item in back.tensors.items()] == [
        ("a", "a", [0, 0]),
        ("b", "b", [0, 0]),
    ]
    assert shared.tolist() == [0, 1, 0, 0, 2]
    assert back.apply_(weights) == patch.base_digest
    assert not shared.any()


def test_a_patch_that_lies_in_the_weights() -> None:
    weights = {"w": torch.tensor([1.0, 2.0, 3.0])}
    item = pk.TensorPatch("w", (3,), torch.float32, torch.tensor([0, 1, 2]), weights["w"].flip(0)[:3])
    alias = pk.TensorPatch("w", (3,), torch.float32, torch.tensor([1, 2]), weights["w"][:2])
    for one in (item, alias):
        before = weights["w"].tolist()
        back = pk.Patch(tensors={"w": one}).exchange_(weights)
        back.apply_(weights)
        assert weights["w"].tolist() == before


@pytest.mark.parametrize(("digests", "verify"), [(True, False), (False, True), (False, False)])
def test_digests_that_are_not_known(digests: bool, verify: bool) -> None:
    item = pk.TensorPatch("w", (3,), torch.float32, torch.tensor([1]), torch.ones(1))
    weights, after = {"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 1, 0])}
    before, result = (StateDigest.of(state).hexdigest() for state in (weights, after))
    patch = pk.Patch(tensors={"w": item}, base_digest=before if digests else "", digest=result if digests else "")
    back = patch.exchange_(weights, verify=verify)
    assert (back.base_digest, back.digest) == ((result, before) if digests or verify else ("", ""))
    assert set(back.digest_changes) == ({"w"} if verify else set())
    back.apply_(weights, verify=verify)
    assert weights["w"].tolist() == [0, 0, 0]


def test_modules_and_strided_weights() -> None:
    model = nn.Linear(3, 2)
    old = clone(model.state_dict())
    with torch.no_grad():
        model.weight.set_(model.weight.detach().t().contiguous().t())  # type: ignore[call-overload]
    new = {name: tensor + 1 for name, tensor in old.items()}
    back = pk.Patch.diff(old, new).exchange_(model)
    assert_state(model.state_dict(), new)
    back.apply_(model)
    assert_state(model.state_dict(), old)


def test_the_wrong_weights_are_left_alone() -> None:
    patch = pk.Patch.diff({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    weights = {"w": torch.full((3,), 2.0)}
    with pytest.raises(pk.BaseMismatchError, match="the weights have digest"):
        patch.exchange_(weights)
    patch.tensors["w"].values[0] = 7
    weights = {"w": torch.zeros(3)}
    with pytest.raises(pk.VerificationError):
        patch.exchange_(weights)
    assert weights["w"].tolist() == [0, 0, 0]
