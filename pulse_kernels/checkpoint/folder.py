"""Which files of a folder are the checkpoint: the rule transformers follows, and what to do where it says nothing.

1. `model.safetensors`, if there is one, is the whole checkpoint; an index beside it is ignored.
2. Otherwise `model.safetensors.index.json` names the files.
3. Otherwise every visible `*.safetensors` file in the folder itself belongs to it, provided that no tensor lies in
   two of them, that numbered files are all there, and that no index of another name says something else.
   transformers loads no such folder; adapters, diffusers components and hand-made folders look like this.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pulse_kernels.errors import CheckpointError

from .files import is_staged_shard, os_errors
from .layout import INDEX_FILE, SINGLE_FILE
from .validate import UNFINISHED_FILE, check_file_name, check_file_set, check_json, parse_json, show

_MAX_INDEX_BYTES = 200_000_000

# Weights in other formats, and pickled trainer state, which belongs to the step the folder was saved at.
_NOT_AUXILIARY = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".msgpack",
    ".msgpack.index.json", ".h5", ".h5.index.json", ".gguf", ".onnx", ".onnx_data", ".tflite", ".npz", ".distcp",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder.

    kind: "single" is `model.safetensors`, "index" is an index and its shards, "loose" is files without an index.
    weight_map: tensor name -> file name; None without an index.
    """

    kind: Literal["single", "index", "loose"]
    files: tuple[str, ...]
    index_metadata: dict[str, Any] | None = None
    weight_map: dict[str, str] | None = None

    @property
    def entry(self) -> str | None:
        """The file a loader opens first; None for several loose files."""
        if self.kind == "index":
            return INDEX_FILE
        return self.files[0] if len(self.files) == 1 else None

    @property
    def unfinished(self) -> bool:
        """Whether a write of this folder was cut off before its end."""
        return UNFINISHED_FILE in self.files


def find_weights(folder: Path) -> Weights:
    """The weight files of `folder`, by the rule above; only the index is opened.

    Raises:
        CheckpointError: there are none, or the index cannot be read or names what is no file name.
    """
    if (folder / SINGLE_FILE).is_file():
        return Weights("single", (SINGLE_FILE,))
    if (folder / INDEX_FILE).is_file():
        return _read_index(folder / INDEX_FILE)
    with os_errors("list the folder", folder):
        visible = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    for name in visible:
        if name.endswith(".safetensors.index.json"):
            raise CheckpointError(
                f"{folder}: found the index {name}, expected {INDEX_FILE}; rename it, or name one of its files directly"
            )
    loose = [name for name in visible if name.endswith(".safetensors") and not is_staged_shard(name)]
    loose = [check_file_name(name, str(folder)) for name in loose if (folder / name).is_file()]
    if not loose:
        raise CheckpointError(
            f"{folder}: no checkpoint here: expected {SINGLE_FILE}, {INDEX_FILE} or other *.safetensors files, "
            f"found {show(visible[0]) + ' and the like' if visible else 'an empty folder'}"
        )
    check_file_set(loose, has_index=False, where=str(folder))
    return Weights("loose", tuple(loose))


def auxiliary_files(folder: Path) -> list[str]:
    """Every file that is no weights (config, tokenizer, ...), as sorted relative paths with `/`.

    Sub-folders are included, linked ones are not entered. Left out: hidden files and folders, weights and indexes in
    any format (`*.safetensors`, `*.bin`, `*.pt`, `*.gguf`, ...), and pickled trainer state, which has the same
    endings: all of these belong to other weights than the ones a patch makes.
    """
    found: list[str] = []
    with os_errors("list the folder", folder):
        for parent, subfolders, names in os.walk(folder, onerror=_raise):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in names:
                file = Path(parent, name)
                if is_auxiliary(name) and file.is_file():
                    found.append(file.relative_to(folder).as_posix())
    return sorted(found)


def is_auxiliary(name: str) -> bool:
    """Whether a file of this name is no weights, trainer state or hidden file."""
    return not name.startswith(".") and not name.endswith(_NOT_AUXILIARY)


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """Another one whenever the file was replaced or written."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def identity(folder: Path) -> tuple[object, ...]:
    """Changes whenever the folder's checkpoint is replaced; equal before and after a look means one state was seen."""
    marks: list[object] = []
    for name in (SINGLE_FILE, INDEX_FILE):
        try:
            marks.append(file_state(os.stat(folder / name)))
        except OSError:
            marks.append(None)
    return tuple(marks)


def _read_index(path: Path) -> Weights:
    where = str(path)
    with os_errors("read the index", path):
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{where}: larger than {_MAX_INDEX_BYTES} bytes, so no index of a checkpoint")
        document = parse_json(path.read_bytes(), where)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: expected an object with a non-empty 'weight_map'; restore the file")
    metadata = document.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where}: 'metadata' is {show(metadata)}, expected an object")
    check_json(metadata, f"{where}: metadata")
    names = weight_map.values()
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: 'weight_map' holds a file name that is not a string; restore the file")
    files = [check_file_name(name, where) for name in sorted(set(names))]
    if UNFINISHED_FILE not in files:
        check_file_set(files, has_index=True, where=where)
    return Weights("index", tuple(files), metadata, weight_map)


def _raise(error: OSError) -> None:
    raise error
