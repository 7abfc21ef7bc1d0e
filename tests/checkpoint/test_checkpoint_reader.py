"""Reading files and folders as Hugging Face lays them out, and refusing what is none."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import all_bits, bits, layout_of, load_with_reader, values
from safetensors.torch import save_file

from pulse_kernels.checkpoint import Checkpoint, validate_layout
from pulse_kernels.dtypes import DTYPES
from pulse_kernels.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FIRST = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "z": torch.tensor(1.5, dtype=torch.bfloat16)}
SECOND = {"m": torch.arange(5, dtype=torch.int64), "empty": torch.zeros(0, 4)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    """A safetensors file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(folder: Path, weight_map: object, **others: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **others}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for name, tensors in zip(SHARDS, (FIRST, SECOND), strict=True):
        save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    write_index(tmp_path, {**dict.fromkeys(FIRST, SHARDS[0]), **dict.fromkeys(SECOND, SHARDS[1])})
    return tmp_path


def test_a_sharded_folder(sharded: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "z", "m", "empty"}
        info = checkpoint.tensors["a"]
        assert (info.dtype, info.dtype_name, info.shape) == (torch.float32, "F32", (2, 3))
        assert (info.numel, info.itemsize, info.nbytes, info.file) == (6, 4, 24, SHARDS[0])
        assert checkpoint.read("a", 2, 5).tolist() == [2.0, 3.0, 4.0]
        assert checkpoint.read("m", 4).tolist() == [4]
        assert checkpoint.read("m", 5).tolist() == []
        assert checkpoint.read("z").shape == (1,)
        assert checkpoint.read("empty").shape == (0,)
        assert checkpoint.is_folder
    assert all_bits(load_with_reader(sharded)) == all_bits(FIRST | SECOND)


def test_layout_of_a_sharded_folder(sharded: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        layout = checkpoint.layout()
    assert layout == layout_of(
        (SHARDS[0], FIRST),
        (SHARDS[1], {"m": SECOND["m"], "empty": SECOND["empty"]}),
        index={"total_size": 1},
        metadata={"format": "pt"},
    )
    assert validate_layout(json.loads(json.dumps(layout))).to_json() == layout


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_every_dtype(tmp_path: Path, dtype_name: str) -> None:
    tensors = {"a": values(dtype_name, (7, 3), 1), "b": values(dtype_name, (), 2), "c": values(dtype_name, (0,), 3)}
    save_file(tensors, tmp_path / "x.safetensors")
    with Checkpoint.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.tensors["a"].dtype_name == dtype_name
        assert bits(checkpoint.read("a", 4, 9)) == bits(tensors["a"].reshape(-1)[4:9])
        out = torch.zeros(2, 3, dtype=tensors["a"].dtype)
        assert checkpoint.read_into("a", 15, out) is out
        assert bits(out) == bits(tensors["a"][5:])
    assert all_bits(load_with_reader(tmp_path / "x.safetensors")) == all_bits(tensors)


def test_data_order_is_not_header_order(tmp_path: Path) -> None:
    header = {
        "late": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]},
        "early": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    write_raw(tmp_path / "x.safetensors", header, b"\1\2\3")
    with Checkpoint.open(tmp_path / "x.safetensors") as checkpoint:
        assert list(checkpoint.tensors) == ["early", "late"]
        assert checkpoint.read("early").tolist() == [1, 2]
        assert checkpoint.read("late").tolist() == [3]


def test_model_safetensors_goes_before_the_index(sharded: Path) -> None:
    save_file({"only": torch.ones(1)}, sharded / "model.safetensors")
    with Checkpoint.open(sharded) as checkpoint:
        assert list(checkpoint.tensors) == ["only"]
        assert checkpoint.layout()["index"] is None


def test_the_index_goes_before_other_files(sharded: Path) -> None:
    save_file({"a": torch.ones(1)}, sharded / "consolidated.safetensors")
    assert set(load_with_reader(sharded)) == {"a", "z", "m", "empty"}


def test_files_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with Checkpoint.open(sharded) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "z", "m", "empty"}
        assert checkpoint.layout()["index"] is None
    (sharded / SHARDS[1]).rename(sharded / ".hidden.safetensors")
    with pytest.raises(CheckpointError, match="1 of the 2 files"):
        Checkpoint.open(sharded)
    (sharded / SHARDS[0]).rename(sharded / "adapter_model.safetensors")
    assert set(load_with_reader(sharded)) == {"a", "z"}


def test_tensors_that_only_the_shard_knows_are_read(sharded: Path) -> None:
    write_index(sharded, {"a": SHARDS[0], "m": SHARDS[1]})
    assert set(load_with_reader(sharded)) == {"a", "z", "m", "empty"}


def test_symbolic_links_may_point_anywhere(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs, snapshot = tmp_path_factory.mktemp("blobs"), tmp_path_factory.mktemp("snapshot")
    for i, name in enumerate([*SHARDS, INDEX]):
        os.rename(sharded / name, blobs / f"{i:064x}")
        os.symlink(blobs / f"{i:064x}", snapshot / name)
    assert all_bits(load_with_reader(snapshot)) == all_bits(FIRST | SECOND)
    with Checkpoint.open(blobs / f"{0:064x}") as lone:
        assert lone.layout()["files"][0]["name"] == "model.safetensors"
        assert lone.layout()["folder"] is False


def test_open_files_outlive_their_names(sharded: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        for name in SHARDS:
            os.unlink(sharded / name)
        assert checkpoint.read("m").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("m")


def test_reading_from_several_threads(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1 << 16)}, tmp_path / "x.safetensors")
    with Checkpoint.open(tmp_path / "x.safetensors") as checkpoint, ThreadPoolExecutor(4) as pool:
        slices = pool.map(lambda i: checkpoint.read("a", i * 1000, i * 1000 + 1000), range(65))
        assert torch.equal(torch.cat(list(slices)), torch.arange(65_000))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_only_the_slice_is_resident(tmp_path: Path) -> None:
    nbytes = 128 << 20
    path = tmp_path / "x.safetensors"
    write_raw(path, {"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    os.truncate(path, path.stat().st_size + nbytes)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with Checkpoint.open(path) as checkpoint:
        buffer = torch.zeros(1 << 20, dtype=torch.uint8)
        before = resident_bytes()
        most = 0
        for start in range(0, nbytes, 1 << 20):
            checkpoint.read_into("a", start, buffer)
            checkpoint.read("a", start, start + (1 << 20))
            most = max(most, resident_bytes() - before)
    assert most < 16 << 20


def test_other_files(sharded: Path) -> None:
    for name in [
        "config.json", "tokenizer.json", "1_Pooling/config.json", "a/b/notes.txt", ".gitattributes", ".cache/x.json",
        "pytorch_model.bin", "optimizer.pt", "sub/other.safetensors", "gguf/model.gguf", "pytorch_model.bin.index.json",
    ]:  # fmt: skip
        (sharded / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded / name).write_text("x")
    os.symlink("/nonexistent", sharded / "dangling")
    os.symlink(sharded / "config.json", sharded / "linked.json")
    os.symlink(sharded, sharded / "loop")
    with Checkpoint.open(sharded) as checkpoint:
        assert checkpoint.aux_files() == [
            "1_Pooling/config.json", "a/b/notes.txt", "config.json", "linked.json", "tokenizer.json",
        ]  # fmt: skip
    with Checkpoint.open(sharded / SHARDS[0]) as lone:
        assert lone.aux_files() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.read("nope"), "no tensor"),
        (lambda c: c.read("a", -1), "6 elements"),
        (lambda c: c.read("a", 0, 7), "6 elements"),
        (lambda c: c.read("a", 4, 3), "6 elements"),
        (lambda c: c.read_into("a", 4, torch.zeros(3)), "6 elements"),
        (lambda c: c.read_into("a", -1, torch.zeros(3)), "6 elements"),
        (lambda c: c.read_into("a", 0, torch.zeros(3, dtype=torch.int32)), "of that dtype"),
        (lambda c: c.read_into("a", 0, torch.zeros(4)[::2]), "contiguous"),
    ],
)
def test_wrong_questions(sharded: Path, call: Callable[[Checkpoint], object], message: str) -> None:
    with Checkpoint.open(sharded) as checkpoint, pytest.raises(CheckpointError, match=message):
        call(checkpoint)


def damage_cut(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], (folder / SHARDS[1]).stat().st_size - 1)


def damage_grown(folder: Path) -> None:
    with open(folder / SHARDS[1], "ab") as file:
        file.write(b"\0")


def damage_header_cut(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], 20)


def damage_empty(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], 0)


def damage_no_safetensors(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes(b"PK\3\4" + b"\0" * 100)


def damage_lfs_pointer(folder: Path) -> None:
    (folder / SHARDS[1]).write_text("version https://git-lfs.example/spec/v1\noid sha256:00\nsize 12\n")


def damage_missing(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def damage_directory(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[1]).mkdir()


def damage_wrong_shard(folder: Path) -> None:
    write_index(folder, {"a": SHARDS[0], "m": SHARDS[0], "z": SHARDS[1]})


def damage_unknown_tensor(folder: Path) -> None:
    write_index(folder, {"a": SHARDS[0], "nope": SHARDS[1]})


def damage_twice(folder: Path) -> None:
    save_file({**SECOND, "a": FIRST["a"]}, folder / SHARDS[1])


def damage_sub_byte(folder: Path) -> None:
    write_raw(folder / SHARDS[1], {"m": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"\1\1")


def damage_duplicate_key(folder: Path) -> None:
    tensor = b'"m":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_raw(folder / SHARDS[1], b"{" + tensor + b"," + tensor + b"}", b"\1")


def damage_huge_empty(folder: Path) -> None:
    write_raw(folder / SHARDS[1], {"m": {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}})


def damage_index_text(folder: Path) -> None:
    (folder / INDEX).write_text("{'weight_map': 1}")


def damage_index_deep(folder: Path) -> None:
    (folder / INDEX).write_text("[" * 200_000)


def damage_index_binary(folder: Path) -> None:
    (folder / INDEX).write_bytes(b"\xff\xfe\x00")


def damage_index_twice(folder: Path) -> None:
    (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{SHARDS[0]}", "a": "{SHARDS[1]}"}}}}')


def damage_index_map(folder: Path) -> None:
    write_index(folder, [])


def damage_index_number(folder: Path) -> None:
    (folder / INDEX).write_text(f'{{"metadata": {{"n": {"9" * 5000}}}, "weight_map": {{"a": "{SHARDS[0]}"}}}}')


def damage_index_metadata(folder: Path) -> None:
    write_index(folder, {"a": SHARDS[0]}, metadata=3)


def damage_other_index(folder: Path) -> None:
    (folder / INDEX).rename(folder / "diffusion_pytorch_model.safetensors.index.json")


def damage_nothing_left(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "pytorch_model.bin").write_text("x")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "cut or damaged"),
        (damage_grown, "cut or damaged"),
        (damage_header_cut, "cut short"),
        (damage_empty, "the file has 0 bytes"),
        (damage_no_safetensors, "not a safetensors file"),
        (damage_lfs_pointer, "git lfs pull"),
        (damage_missing, "weight files are missing"),
        (damage_directory, "weight files are missing"),
        (damage_wrong_shard, "the index says"),
        (damage_unknown_tensor, "no file has it"),
        (damage_twice, "is in both"),
        (damage_sub_byte, "sub-byte dtype F4"),
        (damage_duplicate_key, "appears twice"),
        (damage_huge_empty, "2\\^63"),
        (damage_index_text, "not JSON"),
        (damage_index_deep, "not JSON"),
        (damage_index_binary, "not JSON"),
        (damage_index_twice, "appears twice"),
        (damage_index_map, "weight_map"),
        (damage_index_number, "not JSON|number of"),
        (damage_index_metadata, "expected an object"),
        (damage_other_index, "rename it"),
        (damage_nothing_left, "no checkpoint here"),
    ],
)
def test_damaged_folders(sharded: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(sharded)
    descriptors = len(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(sharded)
    assert str(sharded) in str(caught.value)
    assert len(os.listdir("/dev/fd")) == descriptors


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "x\0.safetensors", "sub/x.safetensors", 5, ""],
)
def test_index_names_that_leave_the_folder(sharded: Path, name: object) -> None:
    save_file(FIRST, sharded.parent / "x.safetensors")
    write_index(sharded, {"a": name})
    with pytest.raises(CheckpointError, match="file name"):
        Checkpoint.open(sharded)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Checkpoint.open(tmp_path / "nope")
    with pytest.raises(CheckpointError, match="empty folder"):
        Checkpoint.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        Checkpoint.open(tmp_path / "pipe")


def test_a_file_cut_while_open(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "x.safetensors")
    with Checkpoint.open(tmp_path / "x.safetensors") as checkpoint:
        os.truncate(tmp_path / "x.safetensors", 500)
        with pytest.raises(CheckpointError, match="ends at byte 500"):
            checkpoint.read("a")


def test_a_folder_replaced_while_it_is_opened(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is read, then another checkpoint takes the folder over, then the files are opened."""
    from pulse_kernels.checkpoint import reader

    find, done = reader.find_weights, threading.Event()

    def find_then_replace(folder: Path) -> Any:
        weights = find(folder)
        if not done.is_set():
            done.set()
            save_file({"new": torch.ones(2)}, sharded / "model.safetensors")
            for name in SHARDS:
                os.unlink(sharded / name)
        return weights

    monkeypatch.setattr(reader, "find_weights", find_then_replace)
    assert list(load_with_reader(sharded)) == ["new"]
