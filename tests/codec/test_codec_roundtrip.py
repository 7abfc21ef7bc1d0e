"""What goes into a patch file comes out, bit for bit: every dtype, profile, shape and bit pattern."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_helpers import (
    PROFILES,
    assert_same_patch,
    changed_bits,
    random_bits,
    same_bits,
    segments_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import pulse_kernels as pk
from pulse_kernels.backends import for_device, reference
from pulse_kernels.codec.header import name_problem
from pulse_kernels.dtypes import DTYPES


def forget_old(patch: pk.Patch) -> pk.Patch:
    """The patch as one that came from elsewhere: without the old values."""
    tensors = {
        name: pk.TensorPatch(name, item.shape, item.dtype, item.indices, item.values)
        for name, item in patch.tensors.items()
    }
    return pk.Patch(
        *(patch.base_version, patch.version, tensors, patch.added, patch.removed),
        *(patch.base_digest, patch.digest, patch.layout),
    )


def assert_round_trip(patch: pk.Patch, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    """Through every profile, with old values and without, and onto the old tensors."""
    for profile in PROFILES:
        data = patch.to_bytes(profile)
        assert forget_old(patch).to_bytes(profile, base=old) == data
        found = pk.Patch.from_bytes(data, old)
        assert_same_patch(found, patch)
        weights = {name: tensor.clone() for name, tensor in old.items()}
        assert found.apply_(weights) == patch.digest
        assert set(weights) == set(new)
        assert all(same_bits(weights[name], new[name]) for name in new)
        header = pk.Patch.peek(data)
        assert (header.profile, header.num_changed, header.numel) == (profile, patch.num_changed, patch.numel)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([(), (0,), (1,), (2,), (33,), (64,), (0, 3), (5, 1), (16, 33), (2, 0, 5), (2, 3, 50)]),
    st.sampled_from([0.02, 0.3, 1.0]),
    st.sampled_from([16, 33, 1 << 24]),
    st.integers(0, 2**31),
)
@settings(max_examples=120)
def test_every_dtype_and_shape(
    dtype: str, shape: tuple[int, ...], density: float, segment_numel: int, seed: int
) -> None:
    old = {"w": random_bits(dtype, shape, seed), "same": random_bits(dtype, (3,), seed)}
    new = {"w": changed_bits(old["w"], density, seed), "same": old["same"], "b": old["w"]}
    with segments_of(segment_numel):
        assert_round_trip(pk.Patch.diff(old, new), old, new)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_wholly_changed(dtype: str) -> None:
    old = {"w": random_bits(dtype, (40, 50), 1)}
    new = {"w": changed_bits(old["w"], 1.0, 2)}
    patch = pk.Patch.diff(old, new)
    assert patch.density == 1.0
    assert_round_trip(patch, old, new)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "I16", "U16"])
@pytest.mark.parametrize("partner", ["xor 1", "xor 8000", "xor 7fff", "xor ffff", "times 3", "reversed", "plus 1"])
def test_every_16_bit_pattern(dtype: str, partner: str) -> None:
    """All 65536 patterns as new values; as old ones the same patterns in another order."""
    every = torch.arange(65536)
    number = int(partner.split()[1], 16) if " " in partner else 0
    if partner.startswith("xor"):
        other = every ^ number
    elif partner.startswith("times"):
        other = (every * number + 1) % 65536
    else:
        other = every.flip(0) if partner == "reversed" else (every + 1) % 65536
    old = {"w": other.to(torch.uint16).view(DTYPES[dtype])}
    new = {"w": every.to(torch.uint16).view(DTYPES[dtype])}
    patch = pk.Patch.diff(old, new)
    assert patch.num_changed == int((every != other).sum())
    assert_round_trip(patch, old, new)


@pytest.mark.parametrize("back_end", [for_device("cpu"), reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16])
def test_16_bit_patterns_against_each_other(back_end: Any, dtype: torch.dtype) -> None:
    """A million pairs: every new pattern against 16 rotations of the old ones."""
    every = torch.arange(65536).to(torch.uint16).view(torch.int16)
    for first in range(0, 65536, 16384):
        olds = torch.cat([every.roll(first + shift) for shift in (0, 1, 127, 1025)]).view(dtype)
        news = every.repeat(4).view(dtype)
        (planes,) = back_end.encode_values_many([news], [olds])
        assert same_bits(back_end.decode_values(planes, olds, dtype), news)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_hard_values(dtype: str) -> None:
    """Signed zeros, denormals, infinities, quiet and signalling NaNs with payloads, each against each."""
    size = DTYPES[dtype].itemsize
    mantissa = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52}[dtype]
    sign, infinity = 1 << (8 * size - 1), ((1 << (8 * size - 1 - mantissa)) - 1) << mantissa
    positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity, infinity + 1]
    positive += [infinity | 1 << (mantissa - 1), infinity | (1 << mantissa) - 1, infinity | 1 << (mantissa - 1) | 5]
    patterns = positive + [value | sign for value in positive]
    pairs = list(itertools.product(patterns, patterns))

    def tensor(values: list[int]) -> torch.Tensor:
        raw = b"".join(value.to_bytes(size, "little") for value in values)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(DTYPES[dtype])

    old, new = {"w": tensor([a for a, _ in pairs])}, {"w": tensor([b for _, b in pairs])}
    patch = pk.Patch.diff(old, new)
    assert patch.num_changed == len(pairs) - len(patterns)
    assert_round_trip(patch, old, new)


# ---- sizes and segments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 127, 128, 129, 640])
def test_segment_edges(numel: int) -> None:
    """Changes at the first and last position of segments, in some and not in others."""
    for positions in ([0], [numel - 1], [0, numel - 1], list(range(0, numel, 64)), list(range(63, numel, 64))):
        if not positions:
            continue
        old = {"w": torch.zeros(numel)}
        new = {"w": torch.zeros(numel)}
        new["w"][positions] = 1.0
        with segments_of(64):
            patch = pk.Patch.diff(old, new)
            assert_round_trip(patch, old, new)
            starts = [segment.start for segment in pk.Patch.peek(patch.to_bytes()).tensors[0].segments]
        assert starts == sorted({position // 64 * 64 for position in positions})


def test_more_than_2_24_elements() -> None:
    """Real segments: changes around the cut, and an added tensor of two segments."""
    numel = (1 << 24) + 1000
    old = {"w": torch.zeros(numel, dtype=torch.uint8)}
    new = {"w": old["w"].clone(), "b": torch.zeros(numel, dtype=torch.uint8)}
    positions = [0, 5, (1 << 24) - 1, 1 << 24, numel - 1]
    new["w"][positions] = 7
    new["b"][positions] = 9
    patch = pk.Patch.diff(old, new)
    assert patch.tensors["w"].indices.tolist() == positions
    assert_round_trip(patch, old, new)
    header = pk.Patch.peek(patch.to_bytes())
    spans = [(0, 1 << 24), (1 << 24, 1000)]
    assert [(segment.start, segment.numel) for segment in header.tensors[0].segments] == spans
    assert [(segment.start, segment.numel) for segment in header.added[0].segments] == spans


@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((3, 2**31), [0, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 + 5, 3 * 2**31 - 1]),
        ((2**31,), [2**31 - 1]),
        ((2**31, 2**31), [0, 1, 2**40, 2**62 - 1]),
    ],
)
def test_int64_positions(shape: tuple[int, ...], indices: list[int]) -> None:
    """No such tensor exists here; its patch does, and takes memory for its changes alone."""
    values = random_bits("BF16", (len(indices),), 1)
    item = pk.TensorPatch("w", shape, torch.bfloat16, torch.tensor(indices), values, values)
    assert item.numel == torch.tensor(shape).prod()
    patch = pk.Patch(tensors={"w": item})
    found = pk.Patch.from_bytes(patch.to_bytes("fast"))
    assert_same_patch(found, patch)
    assert found.tensors["w"].indices.dtype == torch.int64
    assert len(pk.Patch.peek(patch.to_bytes("balanced")).tensors[0].segments) == len({index >> 24 for index in indices})


def test_int32_positions_in_a_tensor_of_more_than_2_31_elements() -> None:
    indices = torch.tensor([1, 2**24, 2**31 - 1], dtype=torch.int32)
    patch = pk.Patch(tensors={"w": pk.TensorPatch("w", (2**33,), torch.uint8, indices, torch.ones(3).byte())})
    assert pk.Patch.from_bytes(patch.to_bytes("fast")).tensors["w"].indices.tolist() == indices.tolist()


@pytest.mark.parametrize("density", [0.001, 0.004, 0.00625, 0.01, 0.1, 0.9])
def test_gaps_of_all_lengths(density: float) -> None:
    """Around the switch from one byte a gap to two, with escapes on both sides."""
    generator = torch.Generator().manual_seed(int(density * 1e5))
    old = {"w": torch.zeros(200_000)}
    new = {"w": (torch.rand(200_000, generator=generator) < density).float()}
    new["w"][100_000:170_000] = 0.0
    patch = pk.Patch.diff(old, new)
    assert_round_trip(patch, old, new)


@pytest.mark.parametrize("gap", [0, 254, 255, 256, 255 + 127, 255 + 128, 65279, 65280, 65281, 65535, 65536, 2_200_000])
def test_gaps_around_an_escape(gap: int) -> None:
    numel = 3_000_000
    for back_end in (for_device("cpu"), reference):
        for shift in (0, 8):
            indices = torch.tensor([gap, gap + 1, 2 * gap + 2], dtype=torch.int32)
            indices = indices[indices < numel]
            top, low, escapes = (column[0] for column in back_end.encode_gaps_many([indices], [0], [shift]))
            assert top.numel() == indices.numel()
            assert low.numel() == (indices.numel() if shift else 0)
            found = back_end.decode_gaps(top, low, escapes, 0, numel, torch.int32)
            assert found.tolist() == indices.tolist()


# ---- whole tensors, names, layout ------------------------------------------------------------------------------------


def test_added_removed_and_replaced() -> None:
    old = {
        "kept": torch.ones(4),
        "removed": torch.ones(2),
        "reshaped": torch.ones(6),
        "retyped": torch.ones(3),
    }
    new = {
        "kept": torch.ones(4),
        "reshaped": torch.ones(2, 3),
        "retyped": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(-0.0),
        "empty": torch.ones(0, 7, dtype=torch.int64),
        "zeros": torch.zeros(1000),
    }
    patch = pk.Patch.diff(old, new)
    assert not patch.tensors
    assert set(patch.added) == set(new) - {"kept"}
    assert patch.removed == ("removed",)
    assert_round_trip(patch, old, new)


def test_added_tensors_of_any_memory_layout() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    added = {"t": matrix.t(), "slice": matrix[:, ::2], "expanded": torch.ones(1).expand(5)}
    added |= {"conjugate": complex_.conj(), "negated": complex_.conj().imag}
    for profile in PROFILES:
        found = pk.Patch.from_bytes(pk.Patch(added=added).to_bytes(profile)).added
        assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
        assert found["negated"].tolist() == [-2.0, 4.0]
        for name in ("t", "slice", "expanded"):
            assert same_bits(found[name], added[name])


def test_empty_patch() -> None:
    patch = pk.Patch.diff({"w": torch.ones(3)}, {"w": torch.ones(3)})
    assert (patch.num_changed, patch.numel, patch.density) == (0, 0, 0.0)
    assert patch.base_digest == patch.digest != ""
    assert_round_trip(patch, {"w": torch.ones(3)}, {"w": torch.ones(3)})
    assert_same_patch(pk.Patch.from_bytes(pk.Patch().to_bytes()), pk.Patch())


def test_changed_tensor_without_changes() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    item = pk.TensorPatch("w", (2, 3), torch.float16, nothing, torch.zeros(0, dtype=torch.float16))
    for profile in PROFILES:
        patch = pk.Patch(tensors={"w": item})
        assert_same_patch(pk.Patch.from_bytes(patch.to_bytes(profile, base={"w": torch.ones(2, 3).half()})), patch)


def test_entries_that_change_nothing() -> None:
    """A patch made by hand may list them, as a chain of patches that was folded does."""
    for dtype in sorted(DTYPES):
        old = random_bits(dtype, (20,), 1)
        indices = torch.arange(0, 20, 3, dtype=torch.int32)
        values = old.view(-1, 1).view(torch.uint8)[indices.long()].view(old.dtype).reshape(-1)
        patch = pk.Patch(tensors={"w": pk.TensorPatch("w", (20,), old.dtype, indices, values, values)})
        for profile in PROFILES:
            assert_same_patch(pk.Patch.from_bytes(patch.to_bytes(profile), {"w": old}), patch)


def test_versions_and_digests() -> None:
    patch = pk.Patch(0, 2**63 - 1, base_digest="0" * 32, digest="0123456789abcdef" * 2)
    assert_same_patch(pk.Patch.from_bytes(patch.to_bytes()), patch)


def test_layout_passes_through() -> None:
    layout: dict[str, Any] = {
        "files": [{"name": "größe.safetensors", "tensors": [], "metadata": {"a": '"quoted"\n\u2028\x7f'}}],
        "big": 2**63,
        "real": 1.5e-300,
        "nothing": None,
        "yes": True,
    }
    assert pk.Patch.from_bytes(pk.Patch(layout=layout).to_bytes()).layout == layout
    assert pk.Patch.from_bytes(pk.Patch(layout={}).to_bytes()).layout == {}
    assert pk.Patch.from_bytes(pk.Patch().to_bytes()).layout is None


@pytest.mark.parametrize(
    "name", ["w", "größe", "重み.0.🙂", "a b", "a..b", "...", "a/b/c", "x" * 4096, '"quoted"', "1:2", "é" * 2048]
)
def test_names(name: str) -> None:
    old, new = {name: torch.zeros(3)}, {name: torch.ones(3), name[:-1] + "!": torch.ones(1)}
    assert_round_trip(pk.Patch.diff(old, new), old, new)


@given(st.lists(st.text(min_size=1, max_size=20), max_size=4, unique=True))
@settings(max_examples=100)
def test_any_name_is_written_or_refused_with_its_name(names: list[str]) -> None:
    new = {name: torch.ones(1) for name in names}
    refused = [name for name in names if name_problem(name)]
    if refused:
        with pytest.raises(ValueError, match="rename the tensor") as caught:
            pk.Patch(added=new).to_bytes()
        assert repr(refused[0])[:80] in str(caught.value)
    else:
        assert list(pk.Patch.from_bytes(pk.Patch(added=new).to_bytes()).added) == names


# ---- the container ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_standard_tools_open_a_patch(tmp_path: Path, profile: str) -> None:
    old = {"w": random_bits("BF16", (100, 100), 1), "v": random_bits("F32", (70,), 2)}
    new = {name: changed_bits(tensor, 0.1, 3) for name, tensor in old.items()} | {"b": torch.zeros(5)}
    path = tmp_path / "patch.safetensors"
    size = pk.Patch.diff(old, new).save(path, profile)
    assert size == path.stat().st_size
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"0.0.i", "0.0.v", "1.0.i", "1.0.v", "2.0.v"}
        header = json.loads(file.metadata()["pulse"])
        assert file.metadata()["format"] == "pulse"
        streams = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert [tensor[0] for tensor in header["tensors"] + header["added"]] == ["w", "v", "b"]
    assert all(stream.dtype == torch.uint8 for stream in streams.values())
    assert streams["0.0.v"].numel() == sum(header["tensors"][0][3][0][8])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers(kind: Any) -> None:
    patch = pk.Patch.diff({"w": torch.zeros(300)}, {"w": torch.ones(300)})
    assert_same_patch(pk.Patch.from_bytes(kind(patch.to_bytes("fast"))), patch)


def test_the_result_does_not_share_the_buffer() -> None:
    patch = pk.Patch.diff({"w": torch.zeros(300)}, {"w": torch.ones(300), "b": torch.ones(3)})
    buffer = bytearray(patch.to_bytes("fast"))
    found = pk.Patch.from_bytes(buffer)
    buffer[:] = bytes(len(buffer))
    assert_same_patch(found, patch)


def test_bytes_do_not_depend_on_threads() -> None:
    old = {f"{k}": random_bits("BF16", (3000,), k) for k in range(8)}
    new = {name: changed_bits(tensor, 0.3, 9) for name, tensor in old.items()}
    patch = pk.Patch.diff(old, new)
    threads = torch.get_num_threads()
    with segments_of(1000):
        try:
            torch.set_num_threads(4)
            many = {profile: patch.to_bytes(profile) for profile in PROFILES}
            torch.set_num_threads(1)
            assert {profile: patch.to_bytes(profile) for profile in PROFILES} == many
        finally:
            torch.set_num_threads(threads)


def test_patches_coded_on_many_threads_at_once() -> None:
    old = {"w": random_bits("BF16", (5000,), 1)}
    patches = [pk.Patch.diff(old, {"w": changed_bits(old["w"], 0.2, seed)}) for seed in range(8)]
    expected = [patch.to_bytes() for patch in patches]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(10):
            if patches[k].to_bytes() != expected[k]:
                wrong.append(k)
            assert_same_patch(pk.Patch.from_bytes(expected[k], old), patches[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- what cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3, 1], "indices[1] is 1 after 3"),
        ([1, 1], "indices[1] is 1 after 1"),
        ([1, 10], "indices[1] is 10, expected 0 <= index < 10"),
        ([-1, 2], "indices[0] is -1"),
    ],
)
def test_bad_indices(profile: str, indices: list[int], message: str) -> None:
    for dtype in (torch.int32, torch.int64):
        item = pk.TensorPatch("w", (10,), torch.float32, torch.tensor(indices, dtype=dtype), torch.ones(2))
        with pytest.raises(IndexError) as caught:
            pk.Patch(tensors={"w": item}).to_bytes(profile, base={"w": torch.zeros(10)})
        assert "'w'" in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (pk.Patch(removed=("a", "a")), "'a' is listed twice"),
        (pk.Patch(removed=("../a",)), "looks like a path"),
        (pk.Patch(version=-1), "version is -1"),
        (pk.Patch(base_version=2**63), "base_version is 9223372036854775808"),
        (pk.Patch(version=1.5), "version is 1.5"),  # type: ignore[arg-type]
        (pk.Patch(digest="0" * 31), "digest is '000"),
        (pk.Patch(base_digest="0" * 31 + "G"), "base_digest is '000"),
        (pk.Patch(layout={"a": float("nan")}), "JSON"),
        (pk.Patch(layout={"a": {1, 2}}), "JSON"),
        (pk.Patch(layout={1: "a"}), "layout is not plain JSON"),  # type: ignore[dict-item]
        (pk.Patch(layout={"a": (1, 2)}), "layout is not plain JSON"),
        (pk.Patch(layout={"a": "\ud800"}), "layout is not Unicode"),
        (pk.Patch(layout=[1]), "layout is [1]"),  # type: ignore[arg-type]
        (pk.Patch(added={"w": torch.ones([1] * 65)}), "up to 64 sizes"),
        (pk.Patch(added={"a\\b": torch.ones(1)}), "looks like a path"),
    ],
)
def test_no_file_that_a_reader_would_refuse(patch: pk.Patch, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        patch.to_bytes()


def test_unknown_profile() -> None:
    with pytest.raises(ValueError, match="profile is 'tiny', expected one of fast, balanced"):
        pk.Patch().to_bytes("tiny")


def test_unknown_dtype() -> None:
    with pytest.raises(TypeError, match="complex128 has no safetensors name"):
        pk.Patch(added={"w": torch.ones(1, dtype=torch.complex128)}).to_bytes()


# ---- the base --------------------------------------------------------------------------------------------------------


def changed_patch() -> tuple[dict[str, torch.Tensor], pk.Patch]:
    old = {"w": torch.ones(500, dtype=torch.bfloat16)}
    return old, pk.Patch.diff(old, {"w": changed_bits(old["w"], 0.1, 1)}, base_version=8)


def test_a_base_is_asked_for_where_it_is_needed() -> None:
    _, patch = changed_patch()
    with pytest.raises(ValueError, match=r"codes the values of 'w' against the base.*base=.*profile='fast'"):
        forget_old(patch).to_bytes("balanced")
    assert forget_old(patch).to_bytes("fast") == patch.to_bytes("fast")
    with pytest.raises(ValueError, match=f"against its base .digest {patch.base_digest}.; pass base="):
        pk.Patch.from_bytes(patch.to_bytes("balanced"))
    assert_same_patch(pk.Patch.from_bytes(patch.to_bytes("fast")), patch)


def test_another_base_is_refused() -> None:
    old, patch = changed_patch()
    data = patch.to_bytes("balanced")
    other = {"w": old["w"] * 2}
    digest = pk.StateDigest.of(other).hexdigest()
    with pytest.raises(pk.BaseMismatchError) as caught:
        pk.Patch.from_bytes(data, other)
    assert all(text in str(caught.value) for text in (digest, patch.base_digest, "version 8"))
    for wrong in ({}, {"w": old["w"].float()}, {"w": old["w"].view(5, 100)}):
        for act in (lambda base: pk.Patch.from_bytes(data, base), lambda base: forget_old(patch).to_bytes(base=base)):
            with pytest.raises(pk.BaseMismatchError, match="'w'"):
                act(wrong)


def test_a_known_digest_saves_the_pass_over_the_base() -> None:
    old, patch = changed_patch()
    data = patch.to_bytes("balanced")
    assert_same_patch(pk.Patch.from_bytes(data, old, current_digest=patch.base_digest.upper()), patch)
    with pytest.raises(pk.BaseMismatchError, match="0" * 32):
        pk.Patch.from_bytes(data, old, current_digest="0" * 32)
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits"):
        pk.Patch.from_bytes(data, old, current_digest="latest")


def test_a_base_of_another_memory_layout() -> None:
    dense = random_bits("F32", (40, 50), 1)
    old = {"w": dense.t()}
    new = {"w": changed_bits(dense.t().contiguous(), 0.1, 2)}
    assert_round_trip(pk.Patch.diff(old, new), old, new)


# ---- without the compiled library ------------------------------------------------------------------------------------


def test_the_reference_back_end_writes_and_reads_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    old, new = {}, {}
    for k, dtype in enumerate(sorted(DTYPES)):
        old[dtype] = random_bits(dtype, (700,), k)
        new[dtype] = changed_bits(old[dtype], float(torch.rand((), generator=generator)), k)
    new["added"] = random_bits("F32", (300,), 9)
    patch = pk.Patch.diff(old, new)
    data = {profile: patch.to_bytes(profile) for profile in PROFILES}
    for module in ("pulse_kernels.codec", "pulse_kernels.codec.segment"):
        monkeypatch.setattr(f"{module}.for_device", lambda _: reference)
    with segments_of(1 << 24):
        for profile in PROFILES:
            assert patch.to_bytes(profile) == data[profile]
            assert_same_patch(pk.Patch.from_bytes(data[profile], old), patch)


@pytest.mark.parametrize("profile", ["fast", "balanced"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_strided_columns(profile: str, count: int) -> None:
    """Every second entry of longer tensors, one of them included: it counts as contiguous whatever its stride."""
    positions, values = torch.arange(2 * count), torch.arange(2.0 * count)
    rows = [(positions[::2], values[::2], values[1::2])]
    rows.append(tuple(column.clone(memory_format=torch.contiguous_format) for column in rows[0]))
    found = [
        pk.Patch(tensors={"w": pk.TensorPatch("w", (20,), torch.float32, *columns)}).to_bytes(profile)
        for columns in rows
    ]
    assert found[0] == found[1]
