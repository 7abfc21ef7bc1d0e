"""Reading a checkpoint slice by slice, without mapping it into memory.

Every file is validated by the safetensors library first; its header is then parsed here again, for the byte offsets
that the library does not give. Data is read with `preadv` straight into torch memory: what a slice needs is all that
is ever resident, unlike with a mapping, whose touched pages count until it is closed.

The files stay open from `Checkpoint.open` to `close`, so a checkpoint that is replaced in the meantime still reads
as what it was.
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pulse_kernels.errors import CheckpointError

from .files import os_errors
from .folder import Weights, auxiliary_files, file_state, find_weights, identity
from .layout import SINGLE_FILE, FileLayout, Layout, TensorInfo, TensorSpec, without_marker
from .validate import UNFINISHED_FILE, check_file_name, check_spec, parse_json, show

_OPEN_ATTEMPTS = 5
_READ_BYTES = 1 << 30  # one call reads less than 2 GiB everywhere


@dataclass
class _OpenFile:
    name: str
    path: Path
    descriptor: int
    metadata: dict[str, str] | None
    tensors: tuple[TensorInfo, ...]
    state: tuple[int, ...]  # file_state when it was opened


class Checkpoint:
    """An open checkpoint: a safetensors file, or a Hugging Face folder of them.

    Attributes:
        path: what was opened.
        is_folder: whether that is a folder.
        tensors: name -> TensorInfo (name, dtype, dtype_name, shape, numel, itemsize, nbytes, file, offset), file
            after file, each in the order of its bytes.
        recorded: the metadata that can carry a recorded digest: the index's, or the single file's.

    Use it in a `with` statement or call `close`. Reading is safe from several threads at once.
    """

    def __init__(self, path: Path, weights: Weights | None, files: list[_OpenFile]) -> None:
        self.path = path
        self.is_folder = weights is not None
        self._weights = weights
        self._files = {file.name: file for file in files}
        self.tensors: dict[str, TensorInfo] = {info.name: info for file in files for info in file.tensors}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open and check a checkpoint; no tensor data is read.

        Args:
            path: a safetensors file, or a folder, whose weight files are found as transformers finds them
                (`model.safetensors`, then `model.safetensors.index.json`), or, where there is neither, are all of its
                `*.safetensors` files. Symbolic links are followed.

        Raises:
            CheckpointError: nothing there, no safetensors file, a truncated one, a missing shard, an index that does
                not fit its files, a tensor in two files, a dtype of less than a byte.
        """
        if sys.byteorder != "little":
            raise CheckpointError("safetensors files are little-endian, and this machine is not")
        path = Path(path)
        with os_errors("open", path):
            is_folder = path.is_dir()
            if not is_folder and not path.is_file():
                found = "is neither a file nor a folder" if path.exists() else "no such file or folder"
                raise CheckpointError(f"{path}: {found}; expected a safetensors file or a folder of them")
        if not is_folder:
            return cls(path, None, [_open_file(path.name, path)])
        for _ in range(_OPEN_ATTEMPTS - 1):
            before = identity(path)
            try:
                opened = cls._open_folder(path)
            except CheckpointError:
                if identity(path) == before:
                    raise
                continue  # replaced while we looked: what was missing is not missing any more
            if identity(path) == before:
                return opened
            opened.close()
        return cls._open_folder(path)

    @classmethod
    def _open_folder(cls, path: Path) -> Checkpoint:
        weights = find_weights(path)
        missing = [name for name in weights.files if not (path / name).is_file()]
        if UNFINISHED_FILE in missing:
            raise CheckpointError(f"{path}: the write of this checkpoint was interrupted; write it again")
        if missing:
            listed = "its index names" if weights.kind == "index" else "it had"
            raise CheckpointError(
                f"{path}: {len(missing)} of {len(weights.files)} weight files are missing ({listed} {missing[0]}); "
                "copy or download them"
            )
        files: list[_OpenFile] = []
        try:
            owner: dict[str, str] = {}
            for name in weights.files:
                files.append(_open_file(name, path / name))
                for info in files[-1].tensors:
                    if info.name in owner:
                        raise CheckpointError(
                            f"{path}: tensor {show(info.name)} is in both {owner[info.name]} and {name}; "
                            "remove the file that does not belong to this checkpoint"
                        )
                    owner[info.name] = name
            for tensor, name in (weights.weight_map or {}).items():
                if owner.get(tensor) != name:
                    found = f"it is in {owner[tensor]}" if tensor in owner else "no file has it"
                    raise CheckpointError(
                        f"{path}: the index says that tensor {show(tensor)} is in {name}, but {found}; "
                        "index and files are of different checkpoints, restore the one or the other"
                    )
        except BaseException:
            for file in files:
                os.close(file.descriptor)
            raise
        return cls(path, weights, files)

    def layout(self) -> dict[str, Any]:
        """How this checkpoint is laid out, as JSON data that `validate_layout` and the writers accept.

        A recorded digest is left out: it belongs to this copy, not to the layout. Tensors that a shard holds beside
        those in the index are listed: loaders see them too.
        """
        metadata = None
        if self._weights is not None and self._weights.kind == "index":
            metadata = without_marker(self._weights.index_metadata) or {}
        files = tuple(
            FileLayout(
                self._layout_name(file.name),
                without_marker(file.metadata),
                tuple(TensorSpec(info.name, info.dtype_name, info.shape) for info in file.tensors),
            )
            for file in self._files.values()
        )
        return Layout(files, metadata, self.is_folder).to_json()

    @property
    def recorded(self) -> dict[str, Any]:
        if self._weights is not None and self._weights.kind == "index":
            return dict(self._weights.index_metadata or {})
        if len(self._files) == 1:
            return dict(next(iter(self._files.values())).metadata or {})
        return {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` (default: all) of a tensor in row-major order, as a new 1-D CPU tensor.

        Raises:
            CheckpointError: no such tensor or element, or the file cannot be read.
        """
        info = self._info(name)
        stop = info.numel if stop is None else stop
        if not 0 <= start <= stop <= info.numel:
            raise CheckpointError(
                f"{self.path}: tensor {show(name)} has {info.numel} elements; {start} to {stop} was asked for"
            )
        out = torch.empty(stop - start, dtype=info.dtype, device="cpu")
        self._read(info, start, out)
        return out

    def read_into(self, name: str, start: int, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (contiguous, on the CPU, of the tensor's dtype) with the elements from `start` on; returns it.

        Raises:
            CheckpointError: no such tensor or element, `out` does not fit, or the file cannot be read.
        """
        info = self._info(name)
        if out.dtype != info.dtype or out.device.type != "cpu" or not out.is_contiguous():
            raise CheckpointError(
                f"{self.path}: tensor {show(name)} is {info.dtype}; a contiguous CPU tensor of that dtype is needed to "
                f"read into, got {out.dtype} on {out.device}"
            )
        if start < 0 or start + out.numel() > info.numel:
            raise CheckpointError(
                f"{self.path}: tensor {show(name)} has {info.numel} elements; "
                f"{start} to {start + out.numel()} was asked for"
            )
        self._read(info, start, out)
        return out

    def aux_files(self) -> list[str]:
        """Every other file of the folder (config, tokenizer, ...), see `auxiliary_files`. A file has none."""
        return auxiliary_files(self.path) if self.is_folder else []

    def is_current(self) -> bool:
        """Whether the files at the path are still those that were opened, unwritten since."""
        try:
            names = list(find_weights(self.path).files) if self.is_folder else [self.path.name]
            folder = self.path if self.is_folder else self.path.parent
            now = {name: file_state(os.stat(folder / name)) for name in names}
        except (OSError, CheckpointError):
            return False
        return now == {name: file.state for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files; reading raises CheckpointError afterwards. Closing twice is fine."""
        for file in self._files.values():
            descriptor, file.descriptor = file.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {show(name)} among its {len(self.tensors)}")
        return self.tensors[name]

    def _read(self, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        file = self._files[info.file]
        if file.descriptor < 0:
            raise CheckpointError(f"{self.path}: closed; open it again to read tensor {show(info.name)}")
        if not out.numel():
            return
        view = out.detach().view(-1).view(torch.uint8).numpy().data
        offset = info.offset + start * info.itemsize
        with os_errors(f"read tensor {show(info.name)}", file.path):
            while view:
                count = os.preadv(file.descriptor, [view[:_READ_BYTES]], offset)
                if count == 0:
                    raise CheckpointError(
                        f"{file.path}: ends at byte {offset}, inside tensor {show(info.name)}; "
                        "it was cut while open, restore it"
                    )
                view = view[count:]
                offset += count

    def _layout_name(self, name: str) -> str:
        """A lone file may be called anything, a file of a layout may not."""
        if self.is_folder:
            return name
        try:
            return check_file_name(name, str(self.path))
        except CheckpointError:
            return SINGLE_FILE


def _open_file(name: str, path: Path) -> _OpenFile:
    for _ in range(_OPEN_ATTEMPTS):
        with os_errors("open", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            try:
                with safe_open(path, framework="pt") as checked:
                    checked.keys()
                same = os.path.samestat(status, os.stat(path))
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(_why_unreadable(path, descriptor, status.st_size, error)) from error
            if same:
                with os_errors("read the header", path):
                    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
                    header = parse_json(os.pread(descriptor, length, 8), str(path))
                metadata, tensors = _parse_header(header, name, path, 8 + length, status.st_size)
                return _OpenFile(name, path, descriptor, metadata, tensors, file_state(status))
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # replaced between the two openings
    raise CheckpointError(f"{path}: replaced {_OPEN_ATTEMPTS} times while it was being opened; try again later")


def _parse_header(
    header: dict[str, Any], name: str, path: Path, data_start: int, file_bytes: int
) -> tuple[dict[str, str] | None, tuple[TensorInfo, ...]]:
    """`__metadata__` and the tensors in the order of their bytes; the library has checked the JSON's form."""
    metadata = header.pop("__metadata__", None)
    tensors: list[TensorInfo] = []
    for tensor, fields in header.items():
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path}: tensor {show(tensor)} is described by {show(fields)}, expected an object")
        spec = check_spec(tensor, fields["dtype"], fields["shape"], str(path))
        first, last = fields["data_offsets"]
        if last - first != spec.nbytes or not 0 <= first <= last <= file_bytes - data_start:
            raise CheckpointError(
                f"{path}: tensor {show(tensor)} of {spec.nbytes} bytes is said to lie at {first} to {last}"
            )
        tensors.append(TensorInfo(spec.name, spec.dtype_name, spec.shape, name, data_start + first))
    # Empty tensors share their offset with a neighbour; the sort is stable, so they keep the header's order.
    tensors.sort(key=lambda info: (info.offset, info.offset + info.nbytes))
    return metadata, tuple(tensors)


def _why_unreadable(path: Path, descriptor: int, file_bytes: int, error: Exception) -> str:
    """The library's complaint, with what can be said about the usual causes."""
    try:
        start = os.pread(descriptor, 64, 0)
        if start.startswith(b"version https://git-lfs"):
            return f"{path}: a Git LFS pointer, not the file it stands for; fetch that with 'git lfs pull'"
        (length,) = struct.unpack("<Q", start[:8].ljust(8, b"\xff"))
        if 8 + length > file_bytes:
            return (
                f"{path}: not a safetensors file, or cut short: the file has {file_bytes} bytes, of which its header "
                f"would take {8 + length}; restore it"
            )
        header = parse_json(os.pread(descriptor, min(length, file_bytes), 8), str(path))
        ends = [fields["data_offsets"][1] for key, fields in header.items() if key != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
        if needed != file_bytes:
            return (
                f"{path}: its header describes {needed} bytes, the file has {file_bytes}; it was cut or damaged, "
                "restore it"
            )
    except (OSError, CheckpointError, AttributeError, KeyError, IndexError, TypeError, struct.error):
        pass
    return f"{path}: not a readable safetensors file ({error}); restore it"
