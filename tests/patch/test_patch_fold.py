"""Patch.fold: k consecutive patches as one, against applying them one by one to plain dicts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_kernels as pk
from pulse_kernels import patch_fold
from pulse_kernels.state import StateDigest

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool, torch.int64, torch.complex64, torch.uint16)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def clone(state: Tensors) -> Tensors:
    return {name: raw(tensor).clone().view(tensor.dtype).view(tensor.shape) for name, tensor in state.items()}


def assert_state(weights: Tensors, expected: Tensors) -> None:
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert (weights[name].dtype, weights[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(weights[name]), raw(tensor)), name


def few_bits(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of two bit patterns, NaN and -0.0 in most dtypes, so that values come back often."""
    count = torch.Size(shape).numel()
    pattern = (
        [0xFF] * dtype.itemsize if torch.rand((), generator=generator) < 0.5 else [0] * (dtype.itemsize - 1) + [0x80]
    )
    pair = torch.tensor([[0] * dtype.itemsize, pattern], dtype=torch.uint8)
    return pair[torch.randint(0, 2, (count,), generator=generator)].view(-1).view(dtype).view(shape)


def random_chain(seed: int, length: int, *, grow: bool) -> list[Tensors]:
    """States of which each changes a little from the one before; with ``grow`` names come, go and change shape."""
    generator = torch.Generator().manual_seed(seed)
    states = [
        {f"w{k}": few_bits(dtype, (4, 5), generator) for k, dtype in enumerate(DTYPES)} | {"empty": torch.ones(0)}
    ]
    for _ in range(length):
        state = clone(states[-1])
        for name, tensor in list(state.items()):
            chance = torch.rand((), generator=generator)
            if grow and chance < 0.15:
                del state[name]
            elif grow and chance < 0.3:
                state[name] = few_bits(DTYPES[int(chance * 100) % len(DTYPES)], (int(chance * 1000) % 4,), generator)
            elif chance < 0.7 and tensor.numel():
                other = few_bits(tensor.dtype, tuple(tensor.shape), generator)
                here = torch.rand(tensor.numel(), generator=generator) < 0.4
                size = tensor.element_size()
                raw(tensor).view(-1, size)[here] = raw(other).view(-1, size)[here]
        for k, dtype in enumerate(DTYPES):
            if grow and f"w{k}" not in state and torch.rand((), generator=generator) < 0.3:
                state[f"w{k}"] = few_bits(dtype, (3,), generator)
        states.append(state)
    return states


def patches_of(states: Sequence[Tensors]) -> list[pk.Patch]:
    return [
        pk.Patch.diff(old, new, base_version=k, version=k + 1)
        for k, (old, new) in enumerate(itertools.pairwise(states))
    ]


def edited(patch: pk.Patch, **fields: Any) -> pk.Patch:
    """The patch with other fields in all its tensors."""
    tensors = {
        name: replace(item, **{f: make(item) for f, make in fields.items()}) for name, item in patch.tensors.items()
    }
    return pk.Patch(
        *(patch.base_version, patch.version, tensors, patch.added, patch.removed),
        *(patch.base_digest, patch.digest, patch.layout),
    )


def tensor_of(*values: float) -> pk.Patch:
    return pk.Patch(tensors={"w": item_of(dict(enumerate(values)))})


def item_of(
    values: dict[int, float], old: dict[int, float] | None = None, numel: int = 10, **kwargs: Any
) -> pk.TensorPatch:
    index = torch.tensor(list(values), dtype=kwargs.get("index_dtype", torch.int32))
    before = None if old is None else torch.tensor([old[k] for k in values])
    return pk.TensorPatch("w", (numel,), torch.float32, index, torch.tensor(list(values.values())), before)


# ---- as one by one ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(1, 6))
@settings(max_examples=60)
def test_changes(seed: int, length: int) -> None:
    states = random_chain(seed, length, grow=False)
    folded = pk.Patch.fold(patches_of(states))
    expected = pk.Patch.diff(states[0], states[-1], base_version=0, version=length)
    for field in ("base_version", "version", "base_digest", "digest", "removed", "digest_changes"):
        assert getattr(folded, field) == getattr(expected, field), field
    assert set(folded.tensors) == set(expected.tensors)
    for name, item in expected.tensors.items():
        found = folded.tensors[name]
        assert (found.name, found.shape, found.dtype) == (name, item.shape, item.dtype)
        assert found.indices.dtype is torch.int32
        assert found.indices.tolist() == item.indices.tolist()
        assert torch.equal(raw(found.values), raw(item.values))
        assert found.old_values is not None
        assert item.old_values is not None
        assert torch.equal(raw(found.old_values), raw(item.old_values))
    weights = clone(states[0])
    back = folded.exchange_(weights)
    assert_state(weights, states[-1])
    back.apply_(weights)
    assert_state(weights, states[0])


@given(st.integers(0, 2**31), st.integers(1, 6), st.booleans())
@settings(max_examples=60)
def test_names_that_come_and_go(seed: int, length: int, know_old: bool) -> None:
    states = random_chain(seed, length, grow=True)
    patches = patches_of(states)
    if not know_old:
        patches = [edited(patch, old_values=lambda _: None) for patch in patches]
    added = [(tensor, raw(tensor).clone()) for patch in patches for tensor in patch.added.values()]
    doubtful = {
        name
        for name in states[0].keys() - states[-1].keys()
        if next(name in patch.added for patch in patches if name in {*patch.tensors, *patch.added, *patch.removed})
    }
    folded = pk.Patch.fold(patches)
    weights = clone(states[0])
    if doubtful:  # replaced first, then removed: taken for new ones that are gone again
        with pytest.raises(pk.VerificationError):
            folded.apply_(weights)
        assert_state(weights, states[0])
        return
    assert folded.apply_(weights) == patches[-1].digest == StateDigest.of(states[-1]).hexdigest()
    assert_state(weights, states[-1])
    assert all(torch.equal(raw(tensor), data) for tensor, data in added)  # the patches' own are as they were


@given(st.integers(0, 2**31), st.data())
@settings(max_examples=30)
def test_folds_of_folds(seed: int, data: st.DataObject) -> None:
    states = random_chain(seed, 5, grow=False)
    patches = patches_of(states)
    cut = data.draw(st.integers(1, 4))
    twice = pk.Patch.fold([pk.Patch.fold(patches[:cut]), pk.Patch.fold(patches[cut:])])
    once = pk.Patch.fold(patches)
    assert set(twice.tensors) == set(once.tensors)
    for name, item in once.tensors.items():
        assert twice.tensors[name].indices.tolist() == item.indices.tolist()
        assert torch.equal(raw(twice.tensors[name].values), raw(item.values))


@pytest.mark.parametrize("first", [torch.int32, torch.int64])
@pytest.mark.parametrize("second", [torch.int32, torch.int64])
def test_the_last_writer_wins(first: torch.dtype, second: torch.dtype) -> None:
    a = pk.Patch(tensors={"w": item_of({1: 1.0, 4: 2.0, 9: 3.0}, index_dtype=first)})
    b = pk.Patch(tensors={"w": item_of({0: 4.0, 4: 5.0, 5: 6.0}, index_dtype=second)})
    item = pk.Patch.fold([a, b]).tensors["w"]
    assert item.indices.tolist() == [0, 1, 4, 5, 9]
    assert item.values.tolist() == [4, 1, 5, 6, 3]
    assert item.old_values is None


def test_old_values_are_those_before_the_first_change() -> None:
    a = item_of({1: 1.0, 4: 2.0}, {1: -1.0, 4: -2.0})
    b = item_of({4: 5.0, 6: 6.0}, {4: 2.0, 6: -6.0})
    item = pk.Patch.fold([pk.Patch(tensors={"w": one}) for one in (a, b)]).tensors["w"]
    assert item.old_values is not None
    assert (item.values.tolist(), item.old_values.tolist()) == ([1, 5, 6], [-1, -2, -6])
    for without in ((a, replace(b, old_values=None)), (replace(a, old_values=None), b)):
        item = pk.Patch.fold([pk.Patch(tensors={"w": one}) for one in without]).tensors["w"]
        assert item.values.tolist() == [1, 5, 6]
        assert item.old_values is None


def test_values_that_come_back_are_left_out_by_their_bits() -> None:
    nan = float("nan")
    there = item_of({0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}, {0: nan, 1: 2.0, 2: -0.0, 3: 7.0})
    back = item_of({0: nan, 1: -0.0, 2: 0.0, 3: 7.0}, {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0})
    item = pk.Patch.fold([pk.Patch(tensors={"w": one}) for one in (there, back)]).tensors["w"]
    assert item.indices.tolist() == [1, 2]
    only = [pk.Patch(tensors={"w": item_of({3: 1.0}, {3: 7.0})}), pk.Patch(tensors={"w": item_of({3: 7.0}, {3: 1.0})})]
    assert pk.Patch.fold(only).tensors == {}
    forgetful = [edited(patch, old_values=lambda _: None) for patch in only]
    assert pk.Patch.fold(forgetful).tensors["w"].values.tolist() == [7]


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**62])
def test_large_tensors(numel: int) -> None:
    """No memory of that size is needed; at 2^62 position and entry number do not fit one integer."""
    top = numel - 1
    a = item_of({0: 1.0, top: 2.0}, numel=numel, index_dtype=torch.int64)
    b = item_of({5: 3.0, top - 1: 4.0, top: 5.0}, numel=numel, index_dtype=torch.int64)
    item = pk.Patch.fold([pk.Patch(tensors={"w": one}) for one in (a, b, a)]).tensors["w"]
    assert item.indices.tolist() == [0, 5, top - 1, top]
    assert item.values.tolist() == [1, 3, 4, 2]
    assert item.indices.dtype is (torch.int32 if numel < 2**31 else torch.int64)


def test_both_ways_to_sort_agree() -> None:
    generator = torch.Generator().manual_seed(3)
    lists = [torch.randperm(1000, generator=generator)[: 50 * k].sort()[0].int() for k in range(1, 8)]
    for numel in (1000, 2**62):
        positions, entries = patch_fold._in_order(lists, numel)
        joined = torch.cat(lists)
        assert torch.equal(joined[entries], positions.int())
        assert torch.equal(entries, torch.sort(joined, stable=True)[1])


def test_one_patch() -> None:
    patch = pk.Patch.diff({"w": torch.zeros(3)}, {"w": torch.ones(3), "v": torch.ones(1)}, base_version=1, version=2)
    patch.layout = {"files": []}
    folded = pk.Patch.fold([patch])
    assert folded.tensors["w"].values.tolist() == [1, 1, 1]
    for field in ("base_version", "version", "base_digest", "digest", "layout", "digest_changes", "removed"):
        assert getattr(folded, field) == getattr(patch, field), field
    assert list(folded.added) == ["v"]


def test_what_comes_from_which_patch() -> None:
    first = pk.Patch(3, 4, layout={"k": 1}, base_digest="1" * 32, digest="2" * 32)
    last = pk.Patch(4, 7, layout={"k": 2}, base_digest="2" * 32, digest="3" * 32)
    folded = pk.Patch.fold(iter([first, pk.Patch(), last]))  # type: ignore[arg-type]
    assert (folded.base_version, folded.version, folded.layout) == (3, 7, {"k": 2})
    assert (folded.base_digest, folded.digest) == ("1" * 32, "3" * 32)
    assert pk.Patch.fold([pk.Patch(), last]).base_digest == ""
    assert pk.Patch.fold([first, pk.Patch()]).layout is None


def test_digest_changes_are_known_only_where_all_are() -> None:
    states = random_chain(1, 3, grow=False)
    patches = patches_of(states)
    assert pk.Patch.fold(patches).digest_changes
    patches[1].digest_changes = {}
    assert pk.Patch.fold(patches).digest_changes == {}


# ---- names -----------------------------------------------------------------------------------------------------------


def added(*values: float) -> pk.Patch:
    return pk.Patch(added={"w": torch.tensor(values, dtype=torch.float32)})


REMOVED = pk.Patch(removed=("w",))
CHANGED = tensor_of(1.0, 2.0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([CHANGED, REMOVED], "removed", id="changed, removed"),
        pytest.param([REMOVED, added(1, 2)], [1, 2], id="removed, added"),
        pytest.param([REMOVED, added(1, 2), REMOVED], "removed", id="removed, added, removed"),
        pytest.param([CHANGED, added(3, 4), REMOVED], "removed", id="changed, replaced, removed"),
        pytest.param([CHANGED, added(3, 4)], [3, 4], id="changed, replaced"),
        pytest.param([added(3, 4), added(5)], [5], id="added, replaced"),
        pytest.param([added(*[7.0] * 10), CHANGED], [1, 2, *[7] * 8], id="added, changed"),
        pytest.param([REMOVED, added(*[7.0] * 10), CHANGED, tensor_of(9.0)], [9, 2, *[7] * 8], id="changed twice"),
    ],
)
def test_a_tensor_that_comes_or_goes(steps: list[pk.Patch], expected: Any) -> None:
    folded = pk.Patch.fold(steps)
    assert folded.tensors == {}
    if expected == "removed":
        assert (folded.removed, folded.added) == (("w",), {})
    else:
        assert folded.removed == ()
        assert folded.added["w"].tolist() == expected


def test_a_tensor_that_comes_and_goes() -> None:
    with pytest.raises(ValueError, match=r"'w' is added and then removed.*apply them one by one"):
        pk.Patch.fold([added(1), REMOVED])
    first, last = pk.Patch(added=added(1).added, base_digest="1" * 32), pk.Patch(removed=("w",), digest="1" * 32)
    folded = pk.Patch.fold([first, last])
    assert (folded.added, folded.removed, folded.tensors) == ({}, (), {})


# ---- what does not follow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        pytest.param(
            [pk.Patch(1, 2), pk.Patch(3, 4)], r"patches\[1\] is made for version 3, .*version 2", id="version"
        ),
        pytest.param(
            [pk.Patch(), pk.Patch(digest="a" * 32), pk.Patch(base_digest="b" * 32)],
            rf"patches\[2\] has a base of digest {'b' * 32}, the one before it makes {'a' * 32}",
            id="digest",
        ),
        pytest.param([REMOVED, CHANGED], "'w' is changed after it was removed", id="changed after removed"),
        pytest.param([REMOVED, REMOVED], "'w' is removed twice", id="removed twice"),
        pytest.param(
            [CHANGED, pk.Patch(tensors={"w": item_of({1: 1.0}, numel=11)})], r"float32 \[11\], .* \[10\]", id="shape"
        ),
        pytest.param([added(1, 2), CHANGED], r"changed as float32 \[10\], before that it is float32 \[2\]", id="added"),
        pytest.param(
            [
                CHANGED,
                pk.Patch(
                    tensors={
                        "w": pk.TensorPatch("w", (10,), torch.half, *(torch.zeros(0).int(), torch.zeros(0).half()))
                    }
                ),
            ],
            r"changed as float16 \[10\], before that it is float32",
            id="dtype",
        ),
    ],
)
def test_patches_that_do_not_follow_each_other(patches: list[pk.Patch], message: str) -> None:
    with pytest.raises(pk.BaseMismatchError, match=message):
        pk.Patch.fold(patches)


def test_nothing_to_fold() -> None:
    with pytest.raises(ValueError, match="no patches"):
        pk.Patch.fold([])


@pytest.mark.parametrize("index", [[3, 1], [1, 1], [-1, 2], [4, 10]])
def test_bad_positions(index: list[int]) -> None:
    bad = pk.Patch(tensors={"w": pk.TensorPatch("w", (10,), torch.float32, torch.tensor(index), torch.zeros(2))})
    for first in (CHANGED, added(*[0.0] * 10)):
        with pytest.raises(IndexError, match=r"patch of 'w': indices\["):
            pk.Patch.fold([first, bad])
