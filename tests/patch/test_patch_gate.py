"""Patch.gate: the patch that Patch.diff finds between the weights before and after; all of the update or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hard_values import DTYPES, NANS, NUMBERS, in_every_lane
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pulse_kernels as pk
from pulse_kernels import ops
from pulse_kernels.backends import reference

Tensors = dict[str, Tensor]


def bits(tensor: Tensor) -> Tensor:
    return reference.bits(tensor).clone()


def copied(weights: Tensors) -> Tensors:
    """Clones that keep strides."""
    return {name: weight.detach().clone() for name, weight in weights.items()}


def assert_same(found: pk.Patch, expected: pk.Patch) -> None:
    for field in ("base_version", "version", "removed", "base_digest", "digest", "layout"):
        assert getattr(found, field) == getattr(expected, field), field
    assert not found.added
    assert list(found.tensors) == list(expected.tensors)
    for name, item in expected.tensors.items():
        other = found.tensors[name]
        assert (other.name, other.shape, other.dtype) == (item.name, item.shape, item.dtype)
        assert other.indices.dtype == item.indices.dtype
        assert torch.equal(other.indices, item.indices), name
        assert other.old_values is not None
        assert item.old_values is not None
        assert torch.equal(bits(other.values), bits(item.values)), name
        assert torch.equal(bits(other.old_values), bits(item.old_values)), name
    for profile in ("fast", "balanced"):
        assert found.to_bytes(profile) == expected.to_bytes(profile)


def rounded(masters: Tensors, weights: Tensors) -> Tensors:
    return {
        name: reference.round_bits(masters[name], weight.dtype).view(weight.dtype).view(weight.shape)
        for name, weight in weights.items()
    }


def random_model(sizes: list[tuple[int, ...]], density: float, seed: int) -> tuple[Tensors, Tensors]:
    """Masters of any bits; weights that are these rounded, but for a fraction with any bits."""
    generator = torch.Generator().manual_seed(seed)
    masters, weights = {}, {}
    for k, size in enumerate(sizes):
        count, dtype = torch.Size(size).numel(), DTYPES[k % 2]
        data = torch.randint(0, 256, (4 * count,), dtype=torch.uint8, generator=generator)
        masters[f"w{k}"] = data.view(torch.float32).view(size)
        near = reference.round_bits(masters[f"w{k}"], dtype)
        noise = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).to(torch.int16)
        moved = torch.rand(count, generator=generator) < density
        weights[f"w{k}"] = torch.where(moved, noise, near).view(dtype).view(size)
    return masters, weights


@given(
    sizes=st.lists(st.sampled_from([(), (0,), (1,), (7, 9), (0, 3), (300,), (64, 65)]), max_size=6),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    group_bytes=st.sampled_from([1, 700, 1 << 30]),
    update=st.booleans(),
    undo=st.booleans(),
    knows_base=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_difference(
    sizes: list[tuple[int, ...]],
    density: float,
    group_bytes: int,
    update: bool,
    undo: bool,
    knows_base: bool,
    seed: int,
) -> None:
    masters, weights = random_model(sizes, density, seed)
    old, new = copied(weights), rounded(masters, weights)
    base_digest = pk.StateDigest.of(old).hexdigest() if knows_base else None
    options: dict[str, Any] = {"base_version": 7, "version": 8, "base_digest": base_digest}
    found = pk.Patch.gate(masters, weights, update=update, undo=undo, group_bytes=group_bytes, **options)
    assert_same(found, pk.Patch.diff(old, new, **options))
    for name, weight in weights.items():
        assert torch.equal(bits(weight), bits(new[name] if update else old[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0x0000, 0x7F81, 0xFFFF])
def test_hard_values(dtype: torch.dtype, before: int) -> None:
    """Ties, denormals, signed zeros, infinities and NaN payloads, over zeros and over NaNs."""
    master, expected = in_every_lane([*NUMBERS, *NANS], dtype, 64 * 67)
    weight = torch.full((64 * 67,), before, dtype=torch.int32).to(torch.uint16).view(dtype)
    old = weight.clone()
    found = pk.Patch.gate({"w": master}, {"w": weight})
    assert torch.equal(bits(weight), bits(expected))
    assert_same(found, pk.Patch.diff({"w": old}, {"w": expected}))


def test_modules_and_pairs() -> None:
    torch.manual_seed(0)
    model, trained = nn.Linear(30, 20).bfloat16(), nn.Linear(30, 20)
    old = copied(model.state_dict())
    found = pk.Patch.gate(trained.named_parameters(), model)
    assert found.num_changed > 300
    assert not found.tensors["weight"].values.requires_grad
    assert_same(found, pk.Patch.diff(old, model))
    assert pk.Patch.gate(trained, model.named_parameters()).num_changed == 0


def test_strided_weights_and_masters() -> None:
    masters, weights = random_model([(40, 50), (30, 20), (600,)], 0.2, 1)
    weights = {"w0": weights["w0"].t().contiguous().t(), "w1": weights["w1"][:, ::2], "w2": weights["w2"]}
    masters = {"w0": masters["w0"], "w1": masters["w1"][:, ::2], "w2": masters["w2"].repeat(2)[:1200:2]}
    old, new = {name: weight.clone() for name, weight in weights.items()}, rounded(masters, weights)
    found = pk.Patch.gate(masters, weights)
    assert_same(found, pk.Patch.diff(old, new))
    for name, weight in weights.items():
        assert torch.equal(bits(weight), bits(new[name]))


@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
def test_tied_weights(group_bytes: int) -> None:
    """Under all their names in the patch, as for diff; the later ones are no change less for being written already."""
    masters, weights = random_model([(20, 30), (50,)], 0.3, 2)
    masters["tied"], weights["tied"] = masters["w0"], weights["w0"]
    old, new = copied(weights), rounded(masters, weights)
    found = pk.Patch.gate(masters, weights, group_bytes=group_bytes)
    assert list(found.tensors) == ["w0", "w1", "tied"]
    assert_same(found, pk.Patch.diff(old, new))


def test_columns_of_one_matrix_are_apart() -> None:
    masters, matrix = torch.randn(50, 4), torch.zeros(50, 4, dtype=torch.bfloat16)
    found = pk.Patch.gate(
        {f"c{k}": masters[:, k] for k in range(4)}, {f"c{k}": matrix[:, k] for k in range(4)}, group_bytes=1 << 30
    )
    assert len(found.tensors) == 4
    assert torch.equal(matrix, masters.bfloat16())


def test_an_empty_model() -> None:
    assert_same(pk.Patch.gate({}, {}), pk.Patch.diff({}, {}))


# ---- errors ----------------------------------------------------------------------------------------------------------


def refused() -> Iterator[Any]:
    def case(name: str, error: type[Exception], match: str, masters: Tensors, weights: Tensors, **options: Any) -> Any:
        good_master, good_weight = torch.ones(5), torch.zeros(5, dtype=torch.bfloat16)
        return pytest.param(
            error, match, {"good": good_master, **masters}, {"good": good_weight, **weights}, options, id=name
        )

    f, w = torch.ones(6), torch.zeros(6, dtype=torch.bfloat16)
    yield case("no master", ValueError, "'a' has a weight and no master", {}, {"a": w})
    yield case("no weight", ValueError, "'a' has a master and no weight", {"a": f}, {})
    yield case("master dtype", TypeError, "gate of 'a': master is float64", {"a": f.double()}, {"a": w})
    yield case("weight dtype", TypeError, "gate of 'a': weight is float32", {"a": f}, {"a": f.clone()})
    yield case("shape", ValueError, "gate of 'a': weight has shape", {"a": f}, {"a": w[:5]})
    yield case("expanded", ValueError, "gate of 'a': elements of weight share", {"a": f}, {"a": w[:1].expand(6)})
    yield case("device", ValueError, "gate of 'a': master is on cpu", {"a": f}, {"a": w.to("meta")})
    yield case("digest", ValueError, "32 hexadecimal", {}, {}, base_digest="12")
    yield case("profile", ValueError, "expected one of fast, balanced", {}, {}, profile="dense")
    yield case("group", ValueError, "group_bytes is 0", {}, {}, group_bytes=0)
    yield case(
        "overlap", ValueError, "'a' and 'b' share memory but", {"a": f[:4], "b": f[:4]}, {"a": w[:4], "b": w[2:]}
    )
    yield case("two masters", ValueError, "different masters", {"a": f, "b": f.clone()}, {"a": w, "b": w})
    both = torch.zeros(6)
    yield case(
        "master over weight", ValueError, "share memory; keep them apart",
        {"a": both}, {"a": both.view(torch.bfloat16)[:6]},
    )  # fmt: skip


@pytest.mark.parametrize(("error", "match", "masters", "weights", "options"), list(refused()))
def test_what_is_refused_changes_nothing(
    error: type[Exception], match: str, masters: Tensors, weights: Tensors, options: dict[str, Any]
) -> None:
    before = {name: weight.clone() for name, weight in weights.items()}
    with pytest.raises(error, match=match):
        pk.Patch.gate(masters, weights, group_bytes=options.pop("group_bytes", 1), **options)
    for name, weight in weights.items():
        if weight.device.type == "cpu":
            assert torch.equal(bits(weight), bits(before[name])), name


@pytest.mark.parametrize("step", ["second group", "gated", "written", "after the second group", "digest", "sending"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("update", [True, False])
def test_a_late_failure_changes_nothing(
    step: str, error: type[BaseException], update: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pulse_kernels import codec, patch, transfer

    masters, weights = random_model([(40, 30), (500,), (70,)], 0.4, 3)
    weights["w1"] = weights["w1"].repeat_interleave(2)[::2]
    masters["tied"], weights["tied"] = masters["w0"], weights["w0"]
    before = {name: bits(weight) for name, weight in weights.items()}
    gate, write, calls = ops.gate_compact_many, ops.apply_patch_many_, []

    def fail(*_: Any, **__: Any) -> Any:
        assert not update or any(not torch.equal(bits(weights[name]), before[name]) for name in weights)
        raise error("no more")

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if step == "second group" and len(calls) == 2:
            fail()
        result = gate(*arguments, **options)
        if step == "gated" and len(calls) == 2:
            fail()
        return result

    def interrupted(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        if step == "written" and len(calls) == 2:
            monkeypatch.setattr(ops, "apply_patch_many_", write)
            fail()

    monkeypatch.setattr(ops, "gate_compact_many", failing)
    monkeypatch.setattr(ops, "apply_patch_many_", interrupted)
    if step == "digest":
        monkeypatch.setattr(patch, "_add_changes", fail)
    if step == "after the second group":
        made = patch.TensorPatch
        monkeypatch.setattr(patch, "TensorPatch", lambda *row: fail() if len(calls) == 2 else made(*row))
    if step == "sending":
        monkeypatch.setattr(transfer, "is_away", lambda tensor: True)
        monkeypatch.setattr(codec._Codec, "send", staticmethod(lambda items, profile: fail() if items else []))
    if step == "written" and not update:
        pytest.skip("nothing is written")
    with pytest.raises(error, match="no more"):
        pk.Patch.gate(masters, weights, update=update, group_bytes=1)
    for name, weight in weights.items():
        assert torch.equal(bits(weight), before[name]), name
