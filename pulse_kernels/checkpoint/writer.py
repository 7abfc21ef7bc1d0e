"""Writing a checkpoint by a layout, slice by slice.

Data goes to hidden temporary names first and is synced; only then do the files get their own names. Until the last of
these renames, no loader finds a checkpoint: while several files get their names, the index names one that does not
exist.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace as dataclass_replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pulse_kernels.errors import CheckpointError

from .files import (
    Workspace,
    check_free_space,
    create_file,
    is_disk_full,
    os_errors,
    remove,
    sync_folder,
    write_at,
    write_document,
)
from .folder import Weights, find_weights
from .layout import (
    DIGEST_KEY,
    INDEX_FILE,
    SINGLE_FILE,
    VERSION_KEY,
    FileLayout,
    Layout,
    TensorSpec,
    encode_header,
    encode_index,
    index_bytes,
)
from .validate import UNFINISHED_FILE, show, validate_layout


class _StagedFile:
    """One weight file under its temporary name."""

    def __init__(self, file: FileLayout, path: Path, mode: int | None) -> None:
        self.layout = file
        self.path = path
        self.header = encode_header(file)
        self.nbytes = len(self.header) + file.nbytes
        self.descriptor = -1
        self._mode = mode

    def create(self) -> None:
        self.descriptor = create_file(self.path, self._mode)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class TensorWriter:
    """Writes one tensor's elements in order; made by `TensorSink.open_tensor`."""

    def __init__(self, sink: TensorSink, spec: TensorSpec, file: _StagedFile, offset: int) -> None:
        self.spec = spec
        self.num_written = 0
        self._sink = sink
        self._file = file
        self._offset = offset

    @property
    def complete(self) -> bool:
        return self.num_written == self.spec.numel

    def append(self, values: torch.Tensor) -> None:
        """Write the next `values.numel()` elements, in row-major order; any shape, on the CPU.

        Raises:
            CheckpointError: another dtype, more elements than are left, or the disk is full.
        """
        if values.dtype != self.spec.dtype or values.device.type != "cpu":
            raise CheckpointError(
                f"tensor {show(self.spec.name)} is {self.spec.dtype} in the layout; expected values of that dtype on "
                f"the CPU, got {values.dtype} on {values.device}"
            )
        if values.numel() > self.spec.numel - self.num_written:
            raise CheckpointError(
                f"tensor {show(self.spec.name)} has {self.spec.numel} elements in the layout, {self.num_written} are "
                f"written; {values.numel()} more do not fit"
            )
        if not values.numel():
            return
        data = values.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        self._sink._write(self._file, data, self._offset + self.num_written * self.spec.itemsize)
        self.num_written += values.numel()


class TensorSink:
    """Takes the tensors of a layout, in any order, each in slices from its first element to its last.

    Different tensors may be written from different threads. Memory: one slice at a time is looked at, none is kept.
    """

    def __init__(self, layout: Layout, paths: list[Path], mode: int | None = None) -> None:
        self.layout = layout
        self._files = [_StagedFile(file, path, mode) for file, path in zip(layout.files, paths, strict=True)]
        self._writers: dict[str, TensorWriter] = {}
        self._places: dict[str, tuple[TensorSpec, _StagedFile, int]] = {}
        for staged in self._files:
            offset = len(staged.header)
            for spec in staged.layout.tensors:
                self._places[spec.name] = spec, staged, offset
                offset += spec.nbytes
        self.nbytes = sum(staged.nbytes for staged in self._files)  # of all files, headers included

    def open_tensor(self, name: str) -> TensorWriter:
        """The writer of one tensor; once per tensor. CheckpointError if the layout has no such tensor."""
        if name not in self._places:
            raise CheckpointError(f"no tensor {show(name)} in the layout, which has {len(self._places)} tensors")
        if name in self._writers:
            raise CheckpointError(f"tensor {show(name)} was opened before; it is written once")
        writer = self._writers[name] = TensorWriter(self, *self._places[name])
        return writer

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write a whole tensor; its shape is the layout's, or flat."""
        writer = self.open_tensor(name)
        writer.append(values)
        if not writer.complete:
            raise CheckpointError(
                f"tensor {show(name)} has {writer.spec.numel} elements in the layout, got {values.numel()}"
            )

    def _stage(self) -> None:
        """Create the temporary files, with their headers."""
        for staged in self._files:
            with os_errors("create the file", staged.path):
                staged.create()
            self._write(staged, memoryview(staged.header), 0)

    def _finish(self) -> None:
        """Check that everything was written, and sync it."""
        missing = [
            name
            for name, (spec, _, _) in self._places.items()
            if spec.numel and not (name in self._writers and self._writers[name].complete)
        ]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of {len(self._places)} tensors were not written to the end, {show(missing[0])} among "
                "them; the checkpoint was not made"
            )
        for staged in self._files:
            try:
                os.fsync(staged.descriptor)
                staged.close()
            except OSError as error:
                self._fail(staged, error)

    def _close(self) -> None:
        """Close the temporary files, whatever state they are in."""
        for staged in self._files:
            with suppress(OSError):  # the error that ended the write is the one to report
                staged.close()

    def _write(self, staged: _StagedFile, data: memoryview, offset: int) -> None:
        if staged.descriptor < 0:
            raise CheckpointError(f"{staged.layout.name}: already closed; nothing can be written any more")
        try:
            write_at(staged.descriptor, data, offset)
        except OSError as error:
            self._fail(staged, error)

    def _fail(self, staged: _StagedFile, error: OSError) -> None:
        full = is_disk_full(error)
        needed = f"; the checkpoint needs {self.nbytes} bytes here, free them and run this again" if full else ""
        raise CheckpointError(
            f"{staged.path.parent / staged.layout.name}: cannot write its {staged.nbytes} bytes: "
            f"{error.strerror or error}{needed}"
        ) from error


class CheckpointWriter(TensorSink):
    """Writes a new checkpoint; use it in a `with` statement.

        with CheckpointWriter("out", layout) as writer:
            tensor = writer.open_tensor("model.norm.weight")
            tensor.append(first_half); tensor.append(second_half)

    Leaving the block makes the checkpoint appear, whole; an exception inside it removes every trace.

    Args:
        path: a folder, made where there is none; or, where it ends in `.safetensors` and is no folder, a file, for a
            layout of one file, whose name it replaces. In a folder, a lone file is called `model.safetensors`.
        layout: from `Checkpoint.layout()`, or from anywhere: it is validated.
        overwrite: replace weights that are already there. Not atomic: for that there is `replace_in_place`. Other
            files of the folder stay.
        digest, version: recorded as in `replace_in_place`, where the layout has a single file or an index.

    Raises:
        CheckpointError: weights are there already, the layout is invalid, the disk is too full, or another process
            is writing here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: object,
        *,
        overwrite: bool = False,
        digest: str | None = None,
        version: int | None = None,
    ) -> None:
        target = Path(path)
        checked = validate_layout(layout)
        as_file = target.suffix == ".safetensors" and not target.is_dir()
        if as_file and (len(checked.files) > 1 or checked.has_index):
            raise CheckpointError(f"{target}: {show_files(checked)} cannot go into one file; give a folder to write to")
        if as_file:
            checked = checked.renamed(target.name)
        elif target.exists() and not target.is_dir():
            raise CheckpointError(f"{target}: a file is there; expected a folder, or a name ending in .safetensors")
        elif not checked.folder:
            checked = checked.renamed(SINGLE_FILE)
        self.path = target
        self._folder = target.parent if as_file else target
        self._marker = marker(digest, version)
        self._workspace = Workspace(self._folder, target.name if as_file else None)
        self._made_folder = not self._folder.exists()
        names = [self._workspace.temporary(f"{i:05d}") for i in range(1, len(checked.files) + 1)]
        super().__init__(with_marker(checked, self._marker), names)
        with os_errors("make the folder", self._folder):
            os.makedirs(self._folder, exist_ok=True)
        self._lock = self._workspace.locked()
        self._done = False
        try:
            self._lock.__enter__()
        except BaseException:
            self._remove_folder()
            raise
        try:
            self._old = self._existing(overwrite)
            with os_errors("clear what an earlier write left", self._folder):
                self._workspace.sweep(shards=False)
            check_free_space(self._folder, self.nbytes)
            self._stage()
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        """Sync everything and give the files their names; CheckpointError if a tensor is incomplete."""
        if self._done:
            return
        publishing = False
        try:
            self._finish()
            publishing = True
            with os_errors("put the files in place", self._folder):
                self._publish()
        except BaseException:
            try:
                if publishing and self._old is None and self._workspace.file is None:
                    self._unpublish()
            finally:
                self.abort()
            raise
        self._release()

    def abort(self) -> None:
        """Remove what was written so far."""
        if not self._done:
            try:
                self._close()
                with suppress(OSError):
                    self._workspace.sweep(shards=False)
            finally:
                self._release()
                self._remove_folder()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _existing(self, overwrite: bool) -> Weights | None:
        """The weights that are in the way, after checking that they may go."""
        if self._workspace.file is not None:
            if os.path.lexists(self.path) and not overwrite:
                raise CheckpointError(
                    f"{self.path}: already there; choose another name, or overwrite it (overwrite=True, --overwrite)"
                )
            return None
        try:
            old = find_weights(self._folder)
        except CheckpointError:
            with os_errors("list the folder", self._folder):
                visible = [name for name in os.listdir(self._folder) if not name.startswith(".")]
            if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in visible):
                return None
            if overwrite:
                raise
            old = None
        if not overwrite and not (old and old.unfinished):
            raise CheckpointError(
                f"{self._folder}: already holds weights; choose another folder, or overwrite them (overwrite=True, "
                "--overwrite)"
            )
        return old

    def _publish(self) -> None:
        """Rename the files into place. The first step takes the old checkpoint away, the last makes the new one."""
        folder, names = self._folder, [staged.layout.name for staged in self._files]
        index = folder / INDEX_FILE
        old_files = set(self._old.files if self._old else ())
        several = self.layout.has_index or len(names) > 1
        if several or old_files - {SINGLE_FILE}:
            # An index that names a missing file stands in the way of every loader until the end.
            planned = sorted({*names, *old_files, UNFINISHED_FILE})
            self._put(index, index_bytes({"metadata": {}, "weight_map": {name: name for name in planned}}))
        if several or old_files:
            for name in sorted(old_files - set(names) | {SINGLE_FILE}):
                if name != names[0] or several:
                    remove(folder / name)
            sync_folder(folder)
        for staged, name in zip(self._files, names, strict=True):
            os.rename(staged.path, folder / name)
        sync_folder(folder)
        if self.layout.has_index:
            self._put(index, encode_index(self.layout, names, self._marker))
        elif self._workspace.file is None:
            remove(index)
            sync_folder(folder)

    def _unpublish(self) -> None:
        """Undo a failed `_publish` where there was no checkpoint before."""
        for name in [staged.layout.name for staged in self._files] + [INDEX_FILE]:
            with suppress(OSError):
                remove(self._folder / name)

    def _put(self, path: Path, data: bytes) -> None:
        temporary = self._workspace.temporary("index")
        write_document(temporary, data)
        os.rename(temporary, path)
        sync_folder(path.parent)

    def _release(self) -> None:
        self._done = True
        self._lock.__exit__(None, None, None)

    def _remove_folder(self) -> None:
        if self._made_folder:
            with suppress(OSError):
                os.rmdir(self._folder)


def marker(digest: str | None, version: int | None) -> dict[str, Any]:
    """What records a checkpoint's state in metadata."""
    recorded: dict[str, Any] = {} if digest is None else {DIGEST_KEY: digest}
    return recorded if version is None else {**recorded, VERSION_KEY: version}


def show_files(layout: Layout) -> str:
    """What a layout has, for messages: `3 files and an index`."""
    count = len(layout.files)
    return f"{count} {'file' if count == 1 else 'files'}{' and an index' if layout.has_index else ''}"


def with_marker(layout: Layout, recorded: dict[str, Any]) -> Layout:
    """The layout with `recorded` in the `__metadata__` of its only file; with an index, it goes there instead."""
    if layout.has_index or len(layout.files) > 1 or not recorded:
        return layout
    (only,) = layout.files
    metadata = {**(only.metadata or {}), **{key: str(value) for key, value in recorded.items()}}
    return dataclass_replace(layout, files=(dataclass_replace(only, metadata=metadata),))
