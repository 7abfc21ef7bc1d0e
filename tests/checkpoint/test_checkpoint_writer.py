"""A new checkpoint appears whole or not at all, with the bytes the safetensors library would read."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    all_bits,
    bits,
    layout_of,
    load_as_transformers,
    load_with_reader,
    values,
    visible,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pulse_kernels.checkpoint import Checkpoint, CheckpointWriter, checkpoint_state
from pulse_kernels.dtypes import DTYPES
from pulse_kernels.errors import CheckpointError

ONE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True)}
TWO = {"c": torch.tensor([0, 1, 2, 65535], dtype=torch.uint16), "none": torch.zeros(2, 0)}
SHARDED = layout_of(("s-1.safetensors", ONE), ("s-2.safetensors", TWO), index={}, metadata={"format": "pt", "k": "ü"})
SINGLE = layout_of(("model.safetensors", ONE))


def test_a_sharded_folder(tmp_path: Path) -> None:
    write(tmp_path / "new" / "out", SHARDED, ONE | TWO)
    folder = tmp_path / "new" / "out"
    assert visible(folder) == ["model.safetensors.index.json", "s-1.safetensors", "s-2.safetensors"]
    assert all_bits(load_as_transformers(folder)) == all_bits(ONE | TWO)
    assert json.loads((folder / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 33},
        "weight_map": {
            "a": "s-1.safetensors",
            "b": "s-1.safetensors",
            "c": "s-2.safetensors",
            "none": "s-2.safetensors",
        },
    }
    with safe_open(folder / "s-2.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "ü"}
    with Checkpoint.open(folder) as checkpoint:
        expected = {**SHARDED, "index": {"metadata": {"total_size": 33}}}
        assert checkpoint.layout() == expected


def test_a_file(tmp_path: Path) -> None:
    write(tmp_path / "other.safetensors", SINGLE, ONE)
    assert visible(tmp_path) == ["other.safetensors"]
    assert all_bits(load_file(tmp_path / "other.safetensors")) == all_bits(ONE)


def test_a_lone_file_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path, layout_of(("model-00003-of-00007.safetensors", ONE), folder=False), ONE)
    assert visible(tmp_path) == ["model.safetensors"]


def test_loose_files(tmp_path: Path) -> None:
    write(tmp_path / "out", {**SHARDED, "index": None}, ONE | TWO)
    assert visible(tmp_path / "out") == ["s-1.safetensors", "s-2.safetensors"]
    assert all_bits(load_with_reader(tmp_path / "out")) == all_bits(ONE | TWO)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_every_dtype_in_slices(tmp_path: Path, dtype_name: str) -> None:
    tensors = {"a": values(dtype_name, (5, 7), 1), "b": values(dtype_name, (), 2), "c": values(dtype_name, (0, 2), 3)}
    path = tmp_path / "x.safetensors"
    with CheckpointWriter(path, layout_of(("x.safetensors", tensors))) as writer:
        slices = {name: writer.open_tensor(name) for name in reversed(tensors)}
        slices["b"].append(tensors["b"])
        for start in range(0, 35, 11):
            slices["a"].append(tensors["a"].reshape(-1)[start : start + 11])
    assert all_bits(load_file(path)) == all_bits(tensors)


def test_tensors_written_from_several_threads(tmp_path: Path) -> None:
    tensors = {str(i): torch.full((1000,), i) for i in range(20)}
    with CheckpointWriter(tmp_path, layout_of(("model.safetensors", tensors))) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: writer.write(*item), tensors.items()))
    assert all_bits(load_as_transformers(tmp_path)) == all_bits(tensors)


def test_the_bytes_are_the_librarys_own(tmp_path: Path) -> None:
    tensors = {f"{name}.é\n\x7f": values(name, (3, i + 1), i) for i, name in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={'"': "\\\t"})
    with Checkpoint.open(tmp_path / "theirs.safetensors") as theirs:
        write(tmp_path / "ours.safetensors", theirs.layout(), tensors)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8"), max_size=5).filter(lambda name: name != "__metadata__"),
            st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**32),
)
def test_any_layout_round_trips(
    tmp_path_factory: pytest.TempPathFactory, files: list[dict[str, Any]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("out")
    groups: list[tuple[str, dict[str, torch.Tensor]]] = []
    for i, specs in enumerate(files):
        tensors = {f"{i}{name}": values(dtype, tuple(shape), seed + i) for name, (dtype, shape) in specs.items()}
        groups.append((f"f{i}.safetensors", tensors))
    together = {name: tensor for _, tensors in groups for name, tensor in tensors.items()}
    write(folder, layout_of(*groups, index={"x": [1]}), together)
    assert all_bits(load_as_transformers(folder)) == all_bits(together)
    with Checkpoint.open(folder) as checkpoint:
        again = checkpoint.layout()
    write(folder / "again", again, together)
    assert visible(folder / "again") == sorted([*(name for name, _ in groups), "model.safetensors.index.json"])
    for name in visible(folder / "again"):
        assert (folder / name).read_bytes() == (folder / "again" / name).read_bytes()


def test_a_recorded_state(tmp_path: Path) -> None:
    write(tmp_path / "sharded", SHARDED, ONE | TWO, digest="d1", version=7)
    write(tmp_path / "x.safetensors", SINGLE, ONE, digest="d2", version=8)
    write(tmp_path / "plain", SINGLE, ONE)
    states = [checkpoint_state(tmp_path / name) for name in ("sharded", "x.safetensors", "plain")]
    assert [(state.digest, state.version) for state in states] == [("d1", 7), ("d2", 8), (None, None)]
    with Checkpoint.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.layout()["files"][0]["metadata"] is None


def test_a_big_tensor_is_never_whole_in_memory(tmp_path: Path) -> None:
    layout = layout_of(("x.safetensors", {}))
    layout["files"][0]["tensors"] = [["a", "U8", [1 << 26]]]
    block = torch.zeros(1 << 20, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with CheckpointWriter(tmp_path, layout) as writer:
        tensor = writer.open_tensor("a")
        for _ in range(64):
            tensor.append(block)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB


def test_tensors_of_odd_memory_layout(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(12.0).reshape(3, 4).t(), "g": torch.ones(3, requires_grad=True)}
    write(tmp_path, layout_of(("model.safetensors", tensors)), tensors)
    assert bits(load_as_transformers(tmp_path)["t"]) == bits(tensors["t"])


def unknown(writer: CheckpointWriter) -> None:
    writer.write("nope", torch.zeros(1))


def other_dtype(writer: CheckpointWriter) -> None:
    writer.write("a", torch.zeros(2, 3, dtype=torch.int32))


def too_many(writer: CheckpointWriter) -> None:
    writer.write("a", torch.zeros(7))


def too_few(writer: CheckpointWriter) -> None:
    writer.write("a", torch.zeros(5))


def twice(writer: CheckpointWriter) -> None:
    writer.write("a", torch.zeros(6))
    writer.write("a", torch.zeros(6))


def not_all(writer: CheckpointWriter) -> None:
    writer.write("a", torch.zeros(6))


def half(writer: CheckpointWriter) -> None:
    writer.write("b", torch.tensor(True))
    writer.open_tensor("a").append(torch.zeros(3))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (unknown, "no tensor 'nope'"),
        (other_dtype, "expected values of that dtype"),
        (too_many, "do not fit"),
        (too_few, "got 5"),
        (twice, "written once"),
        (not_all, "1 of 2 tensors were not written"),
        (half, "1 of 2 tensors were not written"),
    ],
)
def test_a_wrong_use_leaves_nothing(tmp_path: Path, use: Callable[[CheckpointWriter], None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message), CheckpointWriter(tmp_path / "out", SINGLE) as writer:
        use(writer)
    assert visible(tmp_path) == []


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def interrupted() -> None:
        with CheckpointWriter(tmp_path, SHARDED) as writer:
            writer.write("a", ONE["a"])
            assert len(visible(tmp_path)) == 4  # config, lock, two temporary files
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert visible(tmp_path) == ["config.json"]


def test_weights_are_not_overwritten_unasked(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", SINGLE, ONE)
    before = (tmp_path / "x.safetensors").read_bytes()
    for path in (tmp_path / "x.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="already"):
            CheckpointWriter(path, SINGLE)
    assert visible(tmp_path) == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_bytes() == before
    (tmp_path / "plain").write_text("x")
    with pytest.raises(CheckpointError, match="expected a folder"):
        CheckpointWriter(tmp_path / "plain", SINGLE)
    with pytest.raises(CheckpointError, match="2 files and an index"):
        CheckpointWriter(tmp_path / "y.safetensors", SHARDED)


LOOSE = {**SHARDED, "index": None}
LONE = layout_of(("adapter.safetensors", ONE))


@pytest.mark.parametrize("old", [SINGLE, SHARDED, LOOSE, LONE])
@pytest.mark.parametrize("new", [SINGLE, SHARDED, LOOSE, LONE])
def test_overwriting(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    write(tmp_path / "fresh", new, ONE | TWO if len(new["files"]) == 2 else ONE)
    write(tmp_path / "out", old, ONE | TWO if len(old["files"]) == 2 else ONE)
    (tmp_path / "out" / "config.json").write_text("{}")
    changed = {name: torch.ones_like(tensor) for name, tensor in (ONE | TWO).items()}
    used = {name: changed[name] for file in new["files"] for name, _, _ in file["tensors"]}
    write(tmp_path / "out", new, used, overwrite=True)
    assert all_bits(load_with_reader(tmp_path / "out")) == all_bits(used)
    assert visible(tmp_path / "out") == sorted(["config.json", *visible(tmp_path / "fresh")])


def fails_with(code: int, after_bytes: int) -> Callable[..., int]:
    """`os.pwrite` on a disk with `after_bytes` left, which also writes less than asked at its end."""
    left, real = after_bytes, os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        nonlocal left
        if left == 0:
            raise OSError(code, os.strerror(code))
        written = real(descriptor, memoryview(data)[: min(left, 7)], offset)
        left -= written
        return written

    return pwrite


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after_bytes", [0, 20, 200])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, after_bytes: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails_with(code, after_bytes))
        with pytest.raises(CheckpointError, match=r"s-\d.safetensors: cannot write its \d+ bytes.*needs \d+ bytes"):
            write(tmp_path / "out", SHARDED, ONE | TWO)
        assert visible(tmp_path) == []
    write(tmp_path / "out", SHARDED, ONE | TWO)


def test_a_disk_that_is_full_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="needs"):
        write(tmp_path / "out", SHARDED, ONE | TWO)
    assert visible(tmp_path) == []


def test_a_file_size_limit(tmp_path: Path) -> None:
    layout = layout_of(("model.safetensors", {"a": torch.zeros(5000)}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="needs 20072 bytes"):
            write(tmp_path / "out", layout, {"a": torch.zeros(5000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert visible(tmp_path) == []


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    layout = layout_of(("model.safetensors", {}))
    layout["files"][0]["tensors"] = [["a", "U8", [1 << 60]]]
    with pytest.raises(CheckpointError, match=r"not enough disk space: 11529215046068\d+ bytes are needed"):
        CheckpointWriter(tmp_path / "out", layout)
    assert visible(tmp_path) == []


def test_two_writers_at_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", SINGLE) as writer:
        with pytest.raises(CheckpointError, match="another process"):
            CheckpointWriter(tmp_path / "out", SINGLE)
        for name, tensor in ONE.items():
            writer.write(name, tensor)
    assert all_bits(load_as_transformers(tmp_path / "out")) == all_bits(ONE)


def test_nothing_can_be_written_after_the_end(tmp_path: Path) -> None:
    layout = layout_of(("model.safetensors", {"a": torch.zeros(2)}))
    with CheckpointWriter(tmp_path / "out", layout) as writer:
        tensor = writer.open_tensor("a")
        tensor.append(torch.zeros(2))
    with pytest.raises(CheckpointError, match="do not fit"):
        tensor.append(torch.zeros(1))
    tensor.num_written = 0
    with pytest.raises(CheckpointError, match="already closed"):
        tensor.append(torch.zeros(1))
    writer.close()
    writer.abort()
    assert visible(tmp_path / "out") == ["model.safetensors"]
