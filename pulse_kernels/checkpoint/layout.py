"""What a checkpoint is made of: files, tensors, dtypes, and the bytes that describe these on disk.

A *layout* is everything about a checkpoint except the tensors' values: which files there are, which tensors lie in
each and in what order, the metadata, and whether an index file ties them together. As JSON:

    {"format": 1,
     "folder": true,                                  false: a lone file, whose name is not part of the checkpoint
     "files": [{"name": "model-00001-of-00002.safetensors",
                "metadata": {"format": "pt"},         the file's __metadata__, or null
                "tensors": [["model.norm.weight", "BF16", [2048]], ...]}, ...],    in the order of their bytes
     "index": {"metadata": {"total_size": 4096}}}     null where there is no index file

Layouts arrive inside patch files, so nothing in one is believed before `validate_layout` has seen it.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Any

import torch

from pulse_kernels.dtypes import DTYPES
from pulse_kernels.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Where the state of a checkpoint is recorded: in the index's metadata, or in a single file's __metadata__.
DIGEST_KEY = "pulse_digest"
VERSION_KEY = "pulse_version"

MAX_HEADER_BYTES = 100_000_000  # the safetensors library reads no longer header

SUB_BYTE_DTYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layout: name, dtype as safetensors spells it, shape."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """One tensor of an open checkpoint: its spec, the file it lies in, and the byte where it starts there."""

    file: str
    offset: int


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file: its name, `__metadata__` and tensors in the order of their bytes."""

    name: str
    metadata: dict[str, str] | None
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data, without the header."""
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True)
class Layout:
    """A validated layout; `index_metadata` is None where there is no index file."""

    files: tuple[FileLayout, ...]
    index_metadata: dict[str, Any] | None
    folder: bool

    @property
    def has_index(self) -> bool:
        return self.index_metadata is not None

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(file.nbytes for file in self.files)

    def renamed(self, name: str) -> Layout:
        """The layout of a single file, under another file name."""
        (only,) = self.files
        return dataclass_replace(self, files=(dataclass_replace(only, name=name),))

    def to_json(self) -> dict[str, Any]:
        """The form `validate_layout` reads."""
        files = [
            {
                "name": file.name,
                "metadata": file.metadata,
                "tensors": [[spec.name, spec.dtype_name, list(spec.shape)] for spec in file.tensors],
            }
            for file in self.files
        ]
        index = None if self.index_metadata is None else {"metadata": self.index_metadata}
        return {"format": 1, "folder": self.folder, "files": files, "index": index}


def without_marker(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """`metadata` without the recorded digest and version; None where nothing else was in it."""
    if metadata is None or not (DIGEST_KEY in metadata or VERSION_KEY in metadata):
        return metadata
    return {k: v for k, v in metadata.items() if k not in (DIGEST_KEY, VERSION_KEY)} or None


def encode_header(file: FileLayout) -> bytes:
    """The bytes before a safetensors file's data: 8 of length, then JSON padded to a multiple of 8.

    For a layout that the safetensors library wrote, these are the library's own bytes.

    Raises:
        CheckpointError: the header would be longer than the safetensors library reads.
    """
    header: dict[str, Any] = {}
    if file.metadata is not None:
        header["__metadata__"] = file.metadata
    start = 0
    for spec in file.tensors:
        stop = start + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype_name, "shape": spec.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.name}: its header would take {len(text)} bytes, over the format's {MAX_HEADER_BYTES}; "
            "spread the tensors over more files"
        )
    return struct.pack("<Q", len(text)) + text


def encode_index(layout: Layout, names: list[str], marker: dict[str, Any]) -> bytes:
    """The index file of `layout` with its files called `names`, and `marker` added to its metadata."""
    metadata = {**(layout.index_metadata or {}), "total_size": layout.nbytes, **marker}
    weight_map = {spec.name: name for file, name in zip(layout.files, names, strict=True) for spec in file.tensors}
    return index_bytes({"metadata": metadata, "weight_map": weight_map})


def index_bytes(document: dict[str, Any]) -> bytes:
    """An index in the form transformers writes."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
