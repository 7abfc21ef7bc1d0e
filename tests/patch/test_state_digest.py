"""StateDigest: a sum over tensors that is kept current with the changes alone. Its definition is in docs/format.md;
the values are checked against it in tests/codec/test_codec_format.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pulse_kernels as pk
from pulse_kernels import StateDigest
from pulse_kernels.dtypes import DTYPES

# By tests/codec/independent_reader.py; digests are kept in files for years, so these must never change.
KNOWN = {
    "floats": "53e347d06caff6be9473f07bf97dafa8",
    "ones": "6e3bf8a1c6fa33bc98516cc94463e842",
    "empty": "686574de07deaccd2d04e4979a9be7df",
}


def test_the_empty_state() -> None:
    assert StateDigest().hexdigest() == StateDigest.of({}).hexdigest() == "0" * 32


def test_known_values() -> None:
    assert StateDigest.of({"w": torch.arange(1000.0)}).hexdigest() == KNOWN["floats"]
    assert StateDigest.of({"w": torch.ones(3, 4, dtype=torch.bfloat16)}).hexdigest() == KNOWN["ones"]
    assert StateDigest.of({"größe": torch.zeros(2, 0, dtype=torch.int64)}).hexdigest() == KNOWN["empty"]


def test_order_does_not_matter() -> None:
    tensors = {name: torch.randn(5) for name in "abcd"}
    digests = {
        StateDigest.of([(name, tensors[name]) for name in order]).hexdigest()
        for order in itertools.permutations("abcd")
    }
    assert len(digests) == 1


def test_everything_about_a_tensor_matters() -> None:
    """Name, dtype, shape, position and presence, also where all bits are zero or there are none."""
    states: list[dict[str, torch.Tensor]] = [
        {},
        *(
            {"a": torch.zeros(shape)}
            for shape in ((), (1,), (1, 1), (2,), (0,), (0, 1), (1, 0), (0, 0), (2, 3), (3, 2))
        ),
        *({"a": torch.zeros(2, dtype=dtype)} for dtype in DTYPES.values() if dtype is not torch.float32),
        *({"a": torch.zeros(0, dtype=dtype)} for dtype in DTYPES.values() if dtype is not torch.float32),
        {"b": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(0)},
        {"a": torch.tensor([1.0, 0.0])},
        {"a": torch.tensor([0.0, 1.0])},
        {"a": torch.tensor([-0.0, 0.0])},
        {"a": torch.tensor([0.0, -0.0])},
        {"a": torch.tensor([float("nan"), 0.0])},
        {"a": torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)},
        {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 1.0])},
        {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([1.0, 0.0])},
    ]
    assert len({StateDigest.of(state).hexdigest() for state in states}) == len(states)


def test_any_single_bit_matters_in_both_lanes() -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        raw = torch.zeros(5 * dtype.itemsize, dtype=torch.uint8)
        zero = StateDigest.of({"w": raw.view(dtype)}).hexdigest()
        for k in range(8 * raw.numel()):
            raw[k // 8] = 1 << k % 8
            digest = StateDigest.of({"w": raw.view(dtype)}).hexdigest()
            raw[k // 8] = 0
            assert digest[:16] != zero[:16]
            assert digest[16:] != zero[16:]


def test_memory_layout_does_not_matter() -> None:
    dense = torch.randn(6, 8)
    for tensor in (dense.t(), dense[:, ::2], dense[1:, 3:], dense[:1].expand(5, 8), nn.Parameter(dense)):
        assert StateDigest.of({"w": tensor}) == StateDigest.of({"w": tensor.detach().clone().contiguous()})


def test_tensors_come_and_go() -> None:
    state = {name: torch.randn(7) for name in "abc"}
    digest = StateDigest.of(state)
    digest.remove_tensor("b", state["b"])
    assert digest == StateDigest.of({name: state[name] for name in "ac"})
    digest.add_tensor("d", torch.zeros(0))
    digest.remove_tensor("d", torch.zeros(0))
    digest.add_tensor("b", state["b"])
    assert digest == StateDigest.of(state)


@given(
    st.sampled_from(list(DTYPES.values())),
    st.integers(1, 700),
    st.floats(0.0, 1.0),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
)
@settings(max_examples=80)
def test_update_is_recomputing(
    dtype: torch.dtype, numel: int, density: float, index_dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (2, numel * dtype.itemsize), dtype=torch.uint8, generator=generator)
    old, other = raw[0].view(integers), raw[1].view(integers)
    moved = torch.rand(numel, generator=generator) < density
    new = torch.where(moved, other, old)
    indices = moved.nonzero().squeeze(1).to(index_dtype)
    before, after = old[moved].view(dtype), new[moved].view(dtype)
    digest = StateDigest.of({"w": old.view(dtype), "other": torch.ones(3)})
    digest.update("w", old.view(dtype), indices, before, after)
    assert digest == StateDigest.of({"w": new.view(dtype), "other": torch.ones(3)})
    digest.update("w", old.view(dtype), indices, after, before)
    assert digest == StateDigest.of({"w": old.view(dtype), "other": torch.ones(3)})


@pytest.mark.parametrize("cuts", [[], [1], [255], [256], [257], [100, 300, 301], list(range(0, 1000, 7))])
def test_slices_add_up(cuts: list[int]) -> None:
    tensor = torch.randn(20, 50)
    digest = StateDigest()
    digest.add_presence("w", tensor)
    edges = sorted({0, *cuts, 1000})
    for start, stop in reversed(list(itertools.pairwise(edges))):
        digest.add_slice("w", tensor, start, tensor.view(-1)[start:stop])
    assert digest == StateDigest.of({"w": tensor})


def test_merge_and_subtract() -> None:
    a, b = {"a": torch.randn(3)}, {"b": torch.randn(3)}
    digest = StateDigest.of(a)
    digest.merge(StateDigest.of(b))
    assert digest == StateDigest.of(a | b)
    digest.subtract(StateDigest.of(a))
    assert digest == StateDigest.of(b)


def test_text() -> None:
    digest = StateDigest.of({"w": torch.ones(3)})
    text = digest.hexdigest()
    assert len(text) == 32
    assert text == text.lower()
    assert StateDigest.fromhex(text) == StateDigest.fromhex(text.upper()) == digest
    assert repr(digest) == f"StateDigest({text})"
    for bad in (
        "",
        "0" * 31,
        "0" * 33,
        "g" + "0" * 31,
        "-" + "0" * 31,
        "1_" + "0" * 30,
        " " + "0" * 31,
        "0x" + "0" * 30,
    ):
        with pytest.raises(ValueError, match="expected 32 hexadecimal digits"):
            StateDigest.fromhex(bad)
    for unicode in ("\u0661" * 32, "0" * 31 + "\n"):
        with pytest.raises(ValueError, match="expected 32 hexadecimal digits"):
            StateDigest.fromhex(unicode)


def test_copies_are_apart_and_digests_are_no_keys() -> None:
    digest = StateDigest.of({"w": torch.ones(3)})
    other = digest.copy()
    other.add_tensor("v", torch.ones(1))
    assert digest == StateDigest.of({"w": torch.ones(3)}) != other
    assert digest != digest.hexdigest()
    with pytest.raises(TypeError, match="unhashable"):
        hash(digest)


def test_patches_carry_it() -> None:
    old, new = {"w": torch.randn(300)}, {"w": torch.randn(300), "b": torch.randn(2)}
    patch = pk.Patch.diff(old, new)
    assert (patch.base_digest, patch.digest) == tuple(StateDigest.of(state).hexdigest() for state in (old, new))
