"""Patch.diff: what changed between two states, compared by bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pulse_kernels as pk
from pulse_kernels.dtypes import DTYPES


def bits(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def test_what_a_patch_says() -> None:
    old = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "same": torch.ones(2), "gone": torch.ones(1)}
    new = {"w": torch.tensor([[1.0, 5.0], [3.0, 6.0]]), "same": torch.ones(2), "here": torch.ones(3)}
    patch = pk.Patch.diff(old, new, base_version=4, version=5)
    assert (patch.base_version, patch.version) == (4, 5)
    assert list(patch.tensors) == ["w"]
    item = patch.tensors["w"]
    assert (item.name, item.shape, item.dtype) == ("w", (2, 2), torch.float32)
    assert item.indices.dtype == torch.int32
    assert item.indices.tolist() == [1, 3]
    assert item.values.tolist() == [5.0, 6.0]
    assert item.old_values is not None
    assert item.old_values.tolist() == [2.0, 4.0]
    assert list(patch.added) == ["here"]
    assert patch.removed == ("gone",)
    assert patch.base_digest == pk.StateDigest.of(old).hexdigest()
    assert patch.digest == pk.StateDigest.of(new).hexdigest()
    assert (patch.num_changed, patch.numel, patch.density) == (2, 4, 0.5)


def test_bits_are_compared_not_numbers() -> None:
    """-0 and +0 differ, a NaN equals itself and no NaN of another payload."""
    old = bits(0x0000, 0x8000, 0x7FC0, 0x7FC0, 0xFFC0, 0x7F81)
    new = bits(0x8000, 0x8000, 0x7FC0, 0x7FC1, 0x7FC0, 0x7F81)
    item = pk.Patch.diff({"w": old}, {"w": new}).tensors["w"]
    assert item.indices.tolist() == [0, 3, 4]
    assert item.values.view(torch.int16).tolist() == new.view(torch.int16)[[0, 3, 4]].tolist()


def test_modules_dicts_and_pairs() -> None:
    torch.manual_seed(0)
    old, new = nn.Linear(3, 2), nn.Linear(3, 2)
    patches = [
        pk.Patch.diff(a, b)
        for a, b in (
            (old, new),
            (old.state_dict(), dict(new.named_parameters())),
            (old.named_parameters(), iter(new.state_dict().items())),
        )
    ]
    assert {patch.digest for patch in patches} == {pk.StateDigest.of(new).hexdigest()}
    assert [list(patch.tensors) for patch in patches] == [["weight", "bias"]] * 3
    assert not patches[0].tensors["weight"].values.requires_grad


def test_buffers_of_a_module_count_and_other_state_does_not() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    old, new = Odd(), Odd()
    new.seen += 1  # type: ignore[operator]
    new.scratch += 1  # type: ignore[operator]
    assert list(pk.Patch.diff(old, new).tensors) == ["seen"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5, 0), (1,), (3, 4, 5)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    raw = torch.zeros(numel * dtype.itemsize, dtype=torch.uint8)
    old = raw.clone().view(dtype).reshape(shape)
    raw[:: dtype.itemsize] = 1
    new = raw.view(dtype).reshape(shape)
    patch = pk.Patch.diff({"w": old}, {"w": new})
    assert patch.num_changed == numel
    if numel:
        assert patch.tensors["w"].indices.tolist() == list(range(numel))
        assert torch.equal(patch.tensors["w"].values.view(torch.uint8), raw)
    else:
        assert not patch.tensors
        assert patch.base_digest == patch.digest


def test_non_contiguous_tensors_count_in_row_major_order() -> None:
    old = torch.zeros(3, 4).t()
    new = torch.zeros(4, 3)
    new[1, 2] = 7
    assert pk.Patch.diff({"w": old}, {"w": new}).tensors["w"].indices.tolist() == [5]
    assert pk.Patch.diff({"w": new}, {"w": old}).tensors["w"].indices.tolist() == [5]
    columns = torch.arange(12.0).view(3, 4)[:, ::2]
    assert pk.Patch.diff({"w": torch.zeros(3, 2)}, {"w": columns}).tensors["w"].values.tolist() == [2, 4, 6, 8, 10]


def test_added_tensors_are_copies() -> None:
    """The trainer goes on writing into its weights; a patch made before must not follow."""
    new = {"w": torch.ones(3), "b": torch.ones(3)}
    patch = pk.Patch.diff({"w": torch.zeros(3)}, new)
    new["w"] += 1
    new["b"] += 1
    assert patch.tensors["w"].values.tolist() == [1, 1, 1]
    assert patch.added["b"].tolist() == [1, 1, 1]


def test_reshaped_and_retyped_tensors_are_replaced() -> None:
    old = {"a": torch.ones(4), "b": torch.ones(4)}
    new = {"a": torch.ones(2, 2), "b": torch.ones(4).half()}
    patch = pk.Patch.diff(old, new)
    assert (list(patch.tensors), list(patch.added), patch.removed) == ([], ["a", "b"], ())
    assert patch.base_digest == pk.StateDigest.of(old).hexdigest()
    assert patch.digest == pk.StateDigest.of(new).hexdigest()


def test_a_known_base_digest_is_not_taken_again() -> None:
    old = {"w": torch.zeros(50), "same": torch.ones(2), "gone": torch.ones(1), "reshaped": torch.ones(4)}
    new = {"w": torch.ones(50), "same": torch.ones(2), "here": torch.ones(3), "reshaped": torch.ones(2, 2)}
    plain = pk.Patch.diff(old, new)
    for known in (plain.base_digest, plain.base_digest.upper()):
        patch = pk.Patch.diff(old, new, base_digest=known)
        assert (patch.base_digest, patch.digest) == (plain.base_digest, plain.digest)
        assert patch.tensors["w"].indices.tolist() == list(range(50))
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits"):
        pk.Patch.diff(old, new, base_digest="latest")


def test_bad_states() -> None:
    with pytest.raises(TypeError, match="expected a tensor"):
        pk.Patch.diff({"w": [1.0]}, {})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="pairs"):
        pk.Patch.diff([torch.ones(1)], {})  # type: ignore[list-item]
    with pytest.raises(ValueError, match="twice"):
        pk.Patch.diff([("w", torch.ones(1)), ("w", torch.ones(1))], {})
    with pytest.raises(TypeError, match="complex128"):
        pk.Patch.diff({}, {"w": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(TypeError, match="strided"):
        pk.Patch.diff({"w": torch.ones(2).to_sparse()}, {"w": torch.ones(2).to_sparse()})


# ---- patches made by hand --------------------------------------------------------------------------------------------


def test_tensor_patches_are_consistent() -> None:
    indices, values = torch.tensor([1, 2]), torch.ones(2)
    assert pk.TensorPatch("w", torch.Size([4]), torch.float32, indices, values).shape == (4,)
    assert pk.TensorPatch("w", [2, 2], torch.float32, indices, values).shape == (2, 2)  # type: ignore[arg-type]
    assert pk.TensorPatch("w", (2**40, 2**22), torch.float32, indices, values).numel == 2**62
    for bad, error, message in (
        ((indices.float(), values), TypeError, "indices is float32, expected int32 or int64"),
        ((indices.view(1, 2), values), ValueError, "indices has 2 dimensions"),
        ((indices, values[:1]), ValueError, "values has 1 entries, indices has 2"),
        ((indices, values.half()), TypeError, "values is float16, expected float32"),
        ((indices, values, values.half()), TypeError, "old_values is float16"),
        ((indices, values, values[:1]), ValueError, "old_values has 1 entries"),
    ):
        with pytest.raises(error, match=f"TensorPatch 'w': {message}"):
            pk.TensorPatch("w", (4,), torch.float32, *bad)  # type: ignore[arg-type]


def test_a_tensor_has_one_fate() -> None:
    item = pk.TensorPatch("w", (4,), torch.float32, torch.tensor([1]), torch.ones(1))
    with pytest.raises(ValueError, match="is named 'w'; both must be the same"):
        pk.Patch(tensors={"v": item})
    with pytest.raises(ValueError, match="'w' is both changed and added"):
        pk.Patch(tensors={"w": item}, added={"w": torch.ones(1)})
    with pytest.raises(ValueError, match="'w' is both changed and removed"):
        pk.Patch(tensors={"w": item}, removed=("w",))
    with pytest.raises(ValueError, match="'w' is both added and removed"):
        pk.Patch(added={"w": torch.ones(1)}, removed=("w",))


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_lazy_views_are_what_they_show(lazy: str) -> None:
    plain = torch.randn(100, dtype=torch.complex64)
    view = plain.conj() if lazy == "conj" else torch._neg_view(plain)
    shown = view.resolve_conj().resolve_neg()
    new = shown.clone()
    new[5] = 7
    for patch in (pk.Patch.diff({"w": view}, {"w": new}), pk.Patch.diff({"w": new}, {"w": view})):
        assert patch.tensors["w"].indices.tolist() == [5]
    patch = pk.Patch.diff({"w": view}, {"w": new})
    assert patch.base_digest == pk.StateDigest.of({"w": shown}).hexdigest()
    assert patch.digest == pk.StateDigest.of({"w": new}).hexdigest()
