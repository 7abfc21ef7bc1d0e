"""Patches decoded ahead of their base: from_bytes with ``pending``, while the weights stay what they are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from codec_helpers import PROFILES, assert_same_patch, changed_bits, random_bits, same_bits, segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_kernels as pk
from pulse_kernels.codec import segment
from pulse_kernels.dtypes import DTYPES
from pulse_kernels.state import StateDigest

Tensors = dict[str, torch.Tensor]


def chain(dtype: str, seed: int, length: int, density: float) -> list[Tensors]:
    """States with a tensor of several segments, small ones, one that comes and goes, and one that changes its kind."""
    states: list[Tensors] = [
        {
            "w": random_bits(dtype, (10, 30), seed),
            "small": random_bits(dtype, (3,), seed),
            "e": random_bits(dtype, (0,), 1),
        }
    ]
    for k in range(1, length + 1):
        last = states[-1]
        state = {"w": changed_bits(last["w"], density, seed + k), "e": last["e"]}
        for name in {"small", "late"} & last.keys():
            state[name] = changed_bits(last[name], 0.4, seed + k)
        if k == 2:
            state["late"] = random_bits(dtype, (40,), seed + k)
        if k == 4:
            state["late"] = random_bits(dtype, (5, 5), seed + k)
            del state["small"]
        states.append(state)
    return states


def assert_decodes_ahead(states: list[Tensors], profile: str) -> None:
    base = {name: tensor.clone() for name, tensor in states[0].items()}
    data = []
    for k, (old, new) in enumerate(itertools.pairwise(states)):
        data.append(pk.Patch.diff(old, new, base_version=k, version=k + 1).to_bytes(profile))
    digest = StateDigest.of(base).hexdigest()
    pending: pk.Patch | None = None
    for k, coded in enumerate(data):
        found = pk.Patch.from_bytes(coded, base, current_digest=digest, pending=pending)
        assert_same_patch(found, pk.Patch.from_bytes(coded, states[k]))
        assert_same_patch(pk.Patch.from_bytes(coded, base, pending=pending), found)
        pending = found if pending is None else pk.Patch.fold([pending, found])
    assert all(same_bits(base[name], tensor) for name, tensor in states[0].items())
    assert pending is not None
    pending.apply_(base)
    assert base.keys() == states[-1].keys()
    assert all(same_bits(base[name], tensor) for name, tensor in states[-1].items())


@given(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    st.sampled_from([16, 33, 1 << 24]),
    st.sampled_from(PROFILES),
    st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_a_chain(dtype: str, density: float, segment_numel: int, profile: str, seed: int) -> None:
    with segments_of(segment_numel):
        assert_decodes_ahead(chain(dtype, seed, 5, density), profile)


def two_steps(numel: int = 500) -> tuple[Tensors, pk.Patch, bytes, pk.Patch]:
    """(base, the first patch, the second as bytes, the second); the second changes some of what the first did."""
    old = {"w": random_bits("BF16", (numel,), 1)}
    middle = {"w": changed_bits(old["w"], 0.5, 2)}
    new = {"w": changed_bits(middle["w"], 0.5, 3)}
    first, second = pk.Patch.diff(old, middle, version=7), pk.Patch.diff(middle, new, base_version=7)
    data = second.to_bytes("balanced")
    assert any(part.value_code == segment.DELTA for part in pk.Patch.peek(data).tensors[0].segments)
    return old, first, data, second


@pytest.mark.parametrize("first", [torch.int32, torch.int64])
def test_index_dtypes_and_strides(first: torch.dtype) -> None:
    old, patch, data, second = two_steps()
    item = patch.tensors["w"]
    index, values = item.indices.to(first).repeat_interleave(2)[::2], item.values.repeat_interleave(2)[::2]
    patch.tensors["w"] = pk.TensorPatch("w", item.shape, item.dtype, index, values)
    assert_same_patch(pk.Patch.from_bytes(data, old, pending=patch), second)
    strided = {"w": torch.stack([old["w"], old["w"]], 1)[:, 0]}
    assert_same_patch(pk.Patch.from_bytes(data, strided, pending=patch), second)


def test_it_reads_the_base_only_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the base's digest at hand no pass is taken over anything."""
    old, first, data, second = two_steps()
    monkeypatch.setattr(StateDigest, "of", lambda *_: pytest.fail("a pass over the base"))
    found = pk.Patch.from_bytes(data, old, current_digest=first.base_digest.upper(), pending=first)
    assert_same_patch(found, second)


def test_files(tmp_path: Path) -> None:
    old, first, data, second = two_steps()
    (tmp_path / "p").write_bytes(data)
    assert_same_patch(pk.Patch.load(tmp_path / "p", old, pending=first), second)


def test_without_pending_it_is_another_base() -> None:
    old, first, data, _ = two_steps()
    with pytest.raises(pk.BaseMismatchError, match=r"the base has digest .*version 7"):
        pk.Patch.from_bytes(data, old)
    with pytest.raises(ValueError, match="pass base="):
        pk.Patch.from_bytes(data, pending=first)


def test_a_base_that_pending_does_not_follow() -> None:
    old, first, data, _ = two_steps()
    for digest, base in (("0" * 32, old), (None, {"w": old["w"] * 2})):
        with pytest.raises(pk.BaseMismatchError, match=f"pending patch was made against {first.base_digest}"):
            pk.Patch.from_bytes(data, base, current_digest=digest, pending=first)


def test_a_pending_patch_that_makes_another_base() -> None:
    old, first, data, second = two_steps()
    first.digest = "1" * 32
    with pytest.raises(
        pk.BaseMismatchError, match=f"with the pending patch has digest 1{{32}}, .*{second.base_digest}"
    ):
        pk.Patch.from_bytes(data, old, pending=first)
    first.digest = ""
    with pytest.raises(ValueError, match="pending patch does not know its digest"):
        pk.Patch.from_bytes(data, old, pending=first)


def test_a_pending_patch_of_other_tensors() -> None:
    old, first, data, second = two_steps()
    item = first.tensors["w"]
    flat = pk.TensorPatch("w", (5, 100), item.dtype, item.indices, item.values)
    for tensors, gone in (({"w": flat}, ()), ({}, ("w",))):
        pending = pk.Patch(tensors=tensors, removed=gone, base_digest=first.base_digest, digest=second.base_digest)
        with pytest.raises(pk.BaseMismatchError, match="'w'"):
            pk.Patch.from_bytes(data, old, pending=pending)


@pytest.mark.parametrize("index", [[3, 1], [1, 1], [-1, 2], [4, 500]])
def test_a_pending_patch_with_bad_positions(index: list[int]) -> None:
    old, first, data, second = two_steps()
    values = torch.zeros(2, dtype=torch.bfloat16)
    tensors = {"w": pk.TensorPatch("w", (500,), torch.bfloat16, torch.tensor(index), values)}
    pending = pk.Patch(tensors=tensors, base_digest=first.base_digest, digest=second.base_digest)
    with pytest.raises(IndexError, match=r"patch of 'w': indices\["):
        pk.Patch.from_bytes(data, old, pending=pending)


def test_a_shard_without_digests() -> None:
    """A part of a patch cannot name the digest of the whole: nothing is compared then, also not by a pass."""
    old, first, _, second = two_steps()
    shard = pk.Patch(7, 8, second.tensors)
    data = shard.to_bytes("balanced")
    assert_same_patch(pk.Patch.from_bytes(data, old, pending=first), shard)
    unknown = pk.Patch(tensors=first.tensors)
    assert_same_patch(pk.Patch.from_bytes(data, old, current_digest="2" * 32, pending=unknown), shard)
    with pytest.raises(pk.BaseMismatchError, match=r"the base has digest 2{32}"):
        pk.Patch.from_bytes(data, old, current_digest="2" * 32, pending=first)


def test_damaged_bytes_are_refused_all_the_same() -> None:
    old, first, data, _ = two_steps(64)
    for at in range(8, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(pk.PatchFormatError):
            pk.Patch.from_bytes(bytes(damaged), old, pending=first)
    with pytest.raises(pk.PatchFormatError, match="the limit is 10 "):
        pk.Patch.from_bytes(data, old, pending=first, max_decoded_bytes=10)


def test_an_empty_patch_on_either_side() -> None:
    old, first, data, second = two_steps()
    middle = first.digest
    nothing = pk.Patch(base_digest=middle, digest=middle)
    assert_same_patch(pk.Patch.from_bytes(nothing.to_bytes(), old, pending=first), nothing)
    at_base = pk.Patch(base_digest=first.base_digest, digest=first.base_digest)
    coded = first.to_bytes()
    assert_same_patch(pk.Patch.from_bytes(coded, old, pending=at_base), first)
    assert_same_patch(pk.Patch.from_bytes(data, old, pending=pk.Patch.fold([at_base, first, nothing])), second)
