"""docs/format.md is true and enough: its examples are what the package writes, and a reader and a writer that know
nothing but that page agree with the package on every file."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import forge
import independent_reader
import pytest
import torch
from codec_helpers import (
    PROFILES,
    assert_same_patch,
    bits,
    changed_bits,
    independent_state,
    random_bits,
    same_bits,
    segments_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_kernels as pk
from pulse_kernels.dtypes import DTYPES
from pulse_kernels.state import tensor_key

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def example(name: str) -> list[str]:
    """The lines of the indented block behind a marker of the page."""
    block = PAGE.split(f"<!-- example: {name} -->\n\n", 1)[1].split("\n\n", 1)[0]
    return [line[4:] for line in block.splitlines()]


def from_hex(text: str) -> bytes:
    """The bytes at the start of a line: pairs of digits, one space between."""
    match = re.match(r"[0-9a-f]{2}( [0-9a-f]{2})*(?=  |$)", text)
    assert match, text
    return bytes.fromhex(match[0])


def bf16(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(2, 3)


OLD_BITS = [0x3F80, 0xBF00, 0x0000, 0x4000, 0x4040, 0x8000]
OLD = {"w": bf16(*OLD_BITS), "old": torch.zeros(1)}
NEW = {"w": bf16(0x3F80, 0xBEFF, 0x0000, 0x4000, 0x403F, 0x0000), "b": torch.tensor([1, 2, 3], dtype=torch.uint8)}


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_s_dtypes() -> None:
    rows = re.findall(r"`(\w+)` \| (\d) \| (yes|no) \|", PAGE)
    assert {(name, int(size), mark == "yes") for name, size, mark in rows} == {
        (name, dtype.itemsize, dtype.is_floating_point) for name, dtype in DTYPES.items()
    }
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == independent_reader.SIZES


def test_the_page_s_packed_indices() -> None:
    blob = b"".join(from_hex(line) for line in example("packed"))
    positions = torch.tensor([2, 3, 4, 9], dtype=torch.int32)
    assert bytes(pk.pack_indices(positions, 16).tolist()) == blob
    assert forge.pack([2, 3, 4, 9], 16) == blob
    assert independent_reader.unpack_indices(blob) == (16, [2, 3, 4, 9])


def test_the_page_s_digest() -> None:
    said = {line[:31].strip(): line[31:].strip() for line in example("digest")}
    kind = ("w", "BF16", (2, 3))
    key = independent_reader.digest_key(*kind)
    assert said["hashed text"] == independent_reader.hashed_text(*kind).hex(" ")
    assert said["key"] == f"{key:016x}"
    assert key == tensor_key("w", torch.bfloat16, (2, 3)) % 2**64
    weights = [independent_reader.weight(seed, 0) for seed in independent_reader.seeds(key)]
    lanes = pk.digest(OLD["w"], tensor_key("w", torch.bfloat16, (2, 3))).tolist()
    for label, values in {
        "seeds": independent_reader.seeds(key),
        "K of position 0": weights,
        "digest of the tensor": [lane % 2**64 for lane in lanes],
        "presence": independent_reader.presence(key),
    }.items():
        assert said[label] == " ".join(f"{value:016x}" for value in values), label
    assert said["digest of a state of it alone"] == pk.StateDigest.of({"w": OLD["w"]}).hexdigest()


def test_the_page_s_file() -> None:
    data = b"".join(from_hex(line[5:]) for line in example("file"))
    assert [int(line[:3], 16) for line in example("file")] == list(range(0, len(data), 16))
    patch = pk.Patch.diff(OLD, NEW, base_version=6, version=7)
    assert patch.to_bytes() == data
    assert_same_patch(pk.Patch.from_bytes(data, OLD), patch)
    assert independent_reader.apply(data, independent_state(OLD)) == independent_state(NEW)
    text = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["pulse"]
    assert text == "".join(example("header"))
    assert f"{len(text)} bytes" in PAGE
    # The table explains every byte once.
    rows = re.findall(r"^\| ([0-9a-f]{3}) \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    ends = [0]
    for start, size, explanation in rows:
        assert int(start, 16) == ends[-1], start
        ends.append(ends[-1] + int(size))
        here = data[ends[-2] : ends[-1]]
        if quoted := re.match(r"`((?:[0-9a-f]{2} ?)+)`", explanation):
            assert bytes.fromhex(quoted[1]) == here
        elif quoted := re.match(r"`([^.`]+)`", explanation):
            assert quoted[1].encode() == here
    assert ends[-1] == len(data)


# ---- the package's files, read independently -------------------------------------------------------------------------

NAMES = ["w", "model.layers.0.self_attn.q_proj.weight", "größe", "重み.0", "a b", "🙂"]


@st.composite
def state_pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two states: tensors of all dtypes changed, untouched, removed, added and replaced."""
    old, new = {}, {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40]), max_size=3)))
        seed = draw(st.integers(0, 2**31))
        fate = draw(st.sampled_from(["changed", "changed", "changed", "removed", "added", "replaced", "same"]))
        tensor = random_bits(dtype, shape, seed)
        if fate != "added":
            old[name] = tensor
        if fate in ("changed", "same"):
            density = draw(st.sampled_from([0.01, 0.1, 1.0])) if fate == "changed" else 0.0
            new[name] = changed_bits(tensor, density, seed + 1)
        elif fate == "added":
            new[name] = tensor
        elif fate == "replaced":
            new[name] = random_bits(dtype, (*shape, 1), seed + 1)
    return old, new


@given(state_pairs(), st.sampled_from(PROFILES), st.sampled_from([5, 64, 1 << 24]))
@settings(max_examples=100)
def test_independent_reader(
    states: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], profile: str, segment_numel: int
) -> None:
    old, new = states
    patch = pk.Patch.diff(old, new, base_version=1, version=2)
    with segments_of(segment_numel):
        data = patch.to_bytes(profile)
    base = independent_state(old)
    header, changed, added = independent_reader.read(data, base)
    assert header["profile"] == profile
    assert {name: item.indices.tolist() for name, item in patch.tensors.items()} == {
        name: positions for name, (positions, _) in changed.items()
    }
    assert {name: bits(item.values) for name, item in patch.tensors.items()} == {
        name: values for name, (_, values) in changed.items()
    }
    assert added == independent_state(patch.added)
    assert (header["base_digest"], header["digest"]) == (
        independent_reader.state_digest(base),
        independent_reader.state_digest(independent_state(new)),
    )
    assert independent_reader.apply(data, base) == independent_state(new)


def test_independent_reader_on_sparse_large_segments() -> None:
    """Every index code, with escapes and zstd frames, in tensors of thousands of elements."""
    generator = torch.Generator().manual_seed(0)
    old = {"dense": torch.zeros(5000), "sparse": torch.zeros(300_000), "clumped": torch.zeros(100_000)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["dense"] += 1
    new["sparse"][torch.randint(0, 300_000, (40,), generator=generator)] += 1
    new["clumped"][:700] += 1
    new["clumped"][-1] += 1
    patch = pk.Patch.diff(old, new)
    codes = set()
    for profile in PROFILES:
        header, changed, _ = independent_reader.read(patch.to_bytes(profile), independent_state(old))
        for name, item in patch.tensors.items():
            assert changed[name] == (item.indices.tolist(), bits(item.values))
        codes |= {segment[3] for tensor in header["tensors"] for segment in tensor[3]}
    assert codes == {"packed", "gaps8", "gaps16"}


def test_independent_reader_on_a_tensor_of_more_than_2_31_elements() -> None:
    indices = torch.tensor([0, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 + 5, 3 * 2**31 - 1])
    values = random_bits("BF16", (7,), 1)
    item = pk.TensorPatch("w", (3, 2**31), torch.bfloat16, indices, values, changed_bits(values, 1.0, 2))
    patch = pk.Patch(tensors={"w": item})
    for profile in PROFILES:
        assert item.old_values is not None
        base = {"w": ("BF16", (3, 2**31), dict(zip(indices.tolist(), bits(item.old_values), strict=True)))}
        _, changed, _ = independent_reader.read(patch.to_bytes(profile), base)  # type: ignore[arg-type]
        assert changed["w"] == (indices.tolist(), bits(values))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 1000])
def test_independent_digest(dtype: str, numel: int) -> None:
    tensor = random_bits(dtype, (numel,), numel)
    state = {"w": tensor, "scalar": random_bits(dtype, (), 3)}
    assert pk.StateDigest.of(state).hexdigest() == independent_reader.state_digest(independent_state(state))


# ---- independently written files, read by the package ----------------------------------------------------------------


@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 400),
    st.floats(0.01, 1.0),
    st.sampled_from(["packed", "gaps8", "gaps16"]),
    st.sampled_from(["raw", "planes", "delta"]),
    st.lists(st.integers(1, 399), max_size=3),
    st.integers(0, 2**31),
)
@settings(max_examples=200)
def test_independent_writer(
    dtype: str, numel: int, density: float, index_code: str, value_code: str, cuts: list[int], seed: int
) -> None:
    """Any code in any segment, segments cut anywhere, whatever the profile says."""
    old = random_bits(dtype, (numel,), seed)
    new = changed_bits(old, density, seed + 1)
    patch = pk.Patch.diff({"w": old}, {"w": new, "b": old})
    positions = patch.tensors["w"].indices.tolist() if patch.tensors else []
    old_bits, new_bits = bits(old), bits(new)
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    parts, whole = [], []
    for start, stop in itertools.pairwise(edges):
        here = [position for position in positions if start <= position < stop]
        value_lists = [new_bits[position] for position in here], [old_bits[position] for position in here]
        if here:
            parts.append(
                forge.segment(dtype, start, stop - start, here, value_lists[0], index_code, value_code, value_lists[1])
            )
        every = list(range(start, stop))
        code = value_code if value_code == "raw" else "planes"
        whole.append(forge.segment(dtype, start, stop - start, every, old_bits[start:stop], "all", code))
    forgery = forge.Forgery([["w", dtype, [numel], parts]] if parts else [], [["b", dtype, [numel], whole]])
    forgery.fields |= {"base_digest": patch.base_digest, "digest": patch.digest}
    data = forgery.build()
    assert_same_patch(pk.Patch.from_bytes(data, {"w": old}), patch)
    weights = {"w": old.clone()}
    pk.Patch.from_bytes(data, weights).apply_(weights)
    assert same_bits(weights["w"], new)


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=600), st.integers(0, 63))
@settings(max_examples=100)
def test_independent_packing(steps: list[int], scale: int) -> None:
    positions = [0]
    for step in steps:
        positions.append(positions[-1] + 1 + (step >> scale))
    for numel in (positions[-1] + 1, max(positions[-1] + 1, 2**32), max(positions[-1] + 1, 2**32 + 1), 2**62):
        blob = forge.pack(positions, numel)
        packed = pk.pack_indices(torch.tensor(positions), numel)
        assert bytes(packed.tolist()) == blob
        assert pk.unpack_indices(packed, index_dtype=torch.int64).tolist() == positions
        assert independent_reader.unpack_indices(blob) == (numel, positions)


def test_wider_blocks_than_needed_are_read() -> None:
    blob = bytearray(forge.pack([2, 3, 4, 9], 16))
    blob[24:32] = (8).to_bytes(8, "little")  # payload
    blob[40] = 16  # width
    blob[44:] = (4 << 48).to_bytes(8, "little")
    assert pk.unpack_indices(torch.tensor(list(blob), dtype=torch.uint8)).tolist() == [2, 3, 4, 9]
    assert independent_reader.unpack_indices(bytes(blob)) == (16, [2, 3, 4, 9])
