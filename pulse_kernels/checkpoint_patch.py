"""Patches between checkpoints on disk, streamed: neither checkpoint is ever in memory as a whole.

Memory: a few slices, each a sixteenth of the largest tensor (at least 2^20 elements), and the coded patch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pulse_kernels import codec, ops
from pulse_kernels.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    TensorInfo,
    TensorSink,
    replace_in_place,
)
from pulse_kernels.errors import BaseMismatchError, CheckpointError, PatchFormatError, VerificationError, naming
from pulse_kernels.state import StateDigest

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_MIN_SLICE = 1 << 20  # elements; smaller ones would pay more for their headers than they hold
_PARTS = 16  # slices of the largest tensor


class _Report:
    """A dataclass that goes into JSON."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class DiffReport(_Report):
    """What ``diff`` made. dense_bytes: the new checkpoint's tensor data. ratio: dense_bytes / patch_bytes."""

    patch_bytes: int
    dense_bytes: int
    ratio: float
    num_changed: int
    num_elements: int
    density: float
    tensors_changed: int
    tensors_added: int
    tensors_removed: int
    base_digest: str
    digest: str
    profile: str
    seconds: float


@dataclass(frozen=True)
class ApplyReport(_Report):
    """What ``apply`` wrote. path: where; digest: of the state there; version: the patch's."""

    path: str
    digest: str
    base_digest: str
    version: int | None
    num_changed: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class VerifyReport(_Report):
    """What ``verify`` found. differences: one line each of the first 20 of num_differences; identical: whether
    there are none."""

    identical: bool
    num_differences: int
    differences: tuple[str, ...]
    tensors: int
    bytes_compared: int
    digest: str
    seconds: float


def _quiet(done: int, total: int) -> None:
    pass


def _slice_numel(*checkpoints: Checkpoint) -> int:
    largest = max((info.numel for checkpoint in checkpoints for info in checkpoint.tensors.values()), default=0)
    return min(max(largest // _PARTS, _MIN_SLICE), codec.SEGMENT_NUMEL)


def _same_kind(a: TensorInfo, b: TensorInfo | None) -> bool:
    return b is not None and a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape)


# ---- diff -----------------------------------------------------------------------------------------------------------


def diff(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    profile: str = "balanced",
    base_version: int | None = None,
    version: int | None = None,
    progress: Progress = _quiet,
) -> DiffReport:
    """Write the patch that turns checkpoint ``old`` into ``new``; each is a safetensors file or a folder of them.

    Tensors are matched by name, whatever shards they lie in; those added, reshaped or retyped go into the patch whole.
    Raises CheckpointError (a checkpoint cannot be read), PulseError (the patch cannot be written), ValueError (profile,
    or a tensor name no patch can carry).
    """
    started = time.perf_counter()
    with Checkpoint.open(old) as before, Checkpoint.open(new) as after:
        removed = tuple(name for name in before.tensors if name not in after.tensors)
        header = codec.PatchHeader(profile, base_version, version, "", "", [], [], removed, after.layout())
        builder = codec.PatchBuilder(header)
        base, change = StateDigest(), StateDigest()
        step = _slice_numel(before, after)
        dense_bytes = sum(info.nbytes for info in after.tensors.values())
        num_elements = sum(info.numel for info in after.tensors.values())
        total = dense_bytes + sum(info.nbytes for info in before.tensors.values())
        count = _Counter(total, progress)
        with _Encoder(builder, profile) as encoder:
            for info in after.tensors.values():
                like = before.tensors.get(info.name)
                target = codec.tensor_header(info.name, info.dtype, info.shape)
                if _same_kind(info, like):
                    base.add_presence(info.name, info)
                    _diff_tensor(before, after, info, target, encoder, base, change, step, count)
                else:
                    header.added.append(target)
                    change.add_presence(info.name, info)
                    for start, values in _slices(after, info, step, count):
                        change.add_slice(info.name, info, start, values)
                        encoder.submit(target, codec.Changes(start, values.numel(), None, values))
            for info in before.tensors.values():
                if not _same_kind(info, after.tensors.get(info.name)):
                    change.subtract(_count_in(before, info, base, step, count))
        header.base_digest = base.hexdigest()
        base.merge(change)
        header.digest = base.hexdigest()
        header.tensors.extend(tensor for tensor in encoder.targets if tensor.segments)
        patch_bytes = codec.save_builder(builder, out)
    return DiffReport(
        patch_bytes=patch_bytes,
        dense_bytes=dense_bytes,
        ratio=dense_bytes / patch_bytes,
        num_changed=header.num_changed,
        num_elements=num_elements,
        density=header.num_changed / max(1, num_elements),
        tensors_changed=len(header.tensors),
        tensors_added=len(header.added),
        tensors_removed=len(removed),
        base_digest=header.base_digest,
        digest=header.digest,
        profile=profile,
        seconds=time.perf_counter() - started,
    )


def _diff_tensor(
    before: Checkpoint,
    after: Checkpoint,
    info: TensorInfo,
    target: codec.TensorHeader,
    encoder: _Encoder,
    base: StateDigest,
    change: StateDigest,
    step: int,
    count: _Counter,
) -> None:
    encoder.targets.append(target)
    for start in range(0, info.numel, step):
        stop = min(start + step, info.numel)
        old_slice, new_slice = before.read(info.name, start, stop), after.read(info.name, start, stop)
        base.add_slice(info.name, info, start, old_slice)
        indices, values, old_values = ops.diff_compact(new_slice, old_slice, return_old=True)
        if indices.numel():
            change.update(info.name, info, indices.long() + start, old_values, values)
            encoder.submit(target, codec.Changes(start, stop - start, indices, values, old_values, origin=start))
        count.add(2 * old_slice.nbytes)


def _count_in(checkpoint: Checkpoint, info: TensorInfo, base: StateDigest, step: int, count: _Counter) -> StateDigest:
    """Add one base tensor to ``base``; returns its own digest."""
    own = StateDigest()
    own.add_presence(info.name, info)
    for start, values in _slices(checkpoint, info, step, count):
        own.add_slice(info.name, info, start, values)
    base.merge(own)
    return own


def _slices(checkpoint: Checkpoint, info: TensorInfo, step: int, count: _Counter) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, info.numel, step):
        values = checkpoint.read(info.name, start, min(start + step, info.numel))
        yield start, values
        count.add(values.nbytes)


class _Counter:
    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self._progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self._progress(self.done, self.total)


class _Encoder:
    """Codes segments on threads behind the comparison; segments are added in order, and few wait at a time."""

    def __init__(self, builder: codec.PatchBuilder, profile: str) -> None:
        codec.check_profile(profile)
        self._profile = profile
        self.targets: list[codec.TensorHeader] = []
        self._builder = builder
        self._threads = torch.get_num_threads()
        self._pending: deque[tuple[codec.TensorHeader, Future[list[codec.Segment]]]] = deque()

    def __enter__(self) -> _Encoder:
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def submit(self, target: codec.TensorHeader, changes: codec.Changes) -> None:
        self._pending.append((target, self._pool.submit(codec.encode_segments, [changes], self._profile)))
        while len(self._pending) > self._threads:
            self._take()

    def _take(self) -> None:
        target, future = self._pending.popleft()
        self._builder.add(target, *future.result())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            while kind is None and self._pending:
                self._take()
        finally:
            self._pool.shutdown(cancel_futures=True)


# ---- apply and verify -----------------------------------------------------------------------------------------------


class _Patched:
    """The checkpoint that a patch makes of a base, as a stream of slices; keeps both digests as it goes."""

    def __init__(self, base: Checkpoint, patch: str | os.PathLike[str], progress: Progress) -> None:
        self._reader = codec.PatchReader(codec.read_file(patch))
        self._base = base
        self.header = self._reader.header
        self._streams: dict[str, list[tuple[int, memoryview, memoryview]]] = {}
        for tensor, s, index_stream, value_stream in self._reader.streams():
            self._streams.setdefault(tensor.name, []).append((s, index_stream, value_stream))
        self.changed = {tensor.name: tensor for tensor in self.header.tensors}
        self.added = {tensor.name: tensor for tensor in self.header.added}
        self._check_kinds()
        self.before, self._change = StateDigest(), StateDigest()
        self.bytes_out = 0
        self._step = _slice_numel(base)
        total = sum(info.nbytes for info in base.tensors.values()) + sum(item.nbytes for item in self.header.added)
        self._count = _Counter(total, progress)

    def _check_kinds(self) -> None:
        for name in (*self.changed, *self.header.removed):
            if name not in self._base.tensors:
                raise BaseMismatchError(f"{self._base.path} lacks {name!r}, which the patch changes; give its own base")
        for name, tensor in self.changed.items():
            info = self._base.tensors[name]
            if info.dtype != tensor.dtype or tuple(info.shape) != tensor.shape:
                raise BaseMismatchError(
                    f"{name!r} is {info.dtype_name} {list(info.shape)} in {self._base.path}, the patch was made for "
                    f"{tensor.dtype_name} {list(tensor.shape)}; give its own base"
                )

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name -> (dtype name, shape) of every tensor of the new checkpoint."""
        kept = {
            name: (info.dtype_name, tuple(info.shape))
            for name, info in self._base.tensors.items()
            if name not in self.header.removed
        }
        return kept | {name: (tensor.dtype_name, tensor.shape) for name, tensor in self.added.items()}

    def layout(self) -> dict[str, Any]:
        """The target's layout: the patch's own, or the base's with added tensors in its last file."""
        layout = self.header.layout
        if layout is None:
            layout = self._base.layout()
            for file in layout["files"]:
                file["tensors"] = [
                    item for item in file["tensors"] if item[0] not in self.header.removed and item[0] not in self.added
                ]
            extra = [[name, tensor.dtype_name, list(tensor.shape)] for name, tensor in self.added.items()]
            layout["files"][-1]["tensors"] += extra
        try:
            files = layout["files"]
            planned = {name: (dtype, tuple(shape)) for file in files for name, dtype, shape in file["tensors"]}
        except (KeyError, TypeError, ValueError):
            raise PatchFormatError("patch header: the layout is not one; the file is damaged") from None
        kinds = self.kinds()
        if planned != kinds:
            odd = sorted(name for name in planned.keys() | kinds if planned.get(name) != kinds.get(name))
            raise PatchFormatError(
                f"patch header: the layout and the patched tensors differ in {odd[0]!r:.200} and {len(odd) - 1} more"
            )
        return layout

    def slices(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(start, flat values) of a tensor of the new checkpoint, in order, without gaps."""
        if name in self.added:
            yield from self._added_slices(self.added[name])
            return
        info = self._base.tensors[name]
        self.before.add_presence(name, info)
        at = 0
        for s, index_stream, value_stream in self._streams.get(name, []):
            segment = self.changed[name].segments[s]
            yield from self._kept_slices(info, at, segment.start)
            at = segment.start + segment.numel
            values = self._read(info, segment.start, at)
            self.before.add_slice(name, info, segment.start, values)
            local, new = codec.decode_segment(self.changed[name], s, index_stream, value_stream, values)
            assert local is not None
            old = ops.exchange_patch_(values, local, new, check=False)
            self._change.update(name, info, local.long() + segment.start, old, new)
            yield segment.start, values
        yield from self._kept_slices(info, at, info.numel)

    def _added_slices(self, tensor: codec.TensorHeader) -> Iterator[tuple[int, Tensor]]:
        self._change.add_presence(tensor.name, tensor)
        for s, index_stream, value_stream in self._streams.get(tensor.name, []):
            _, values = codec.decode_segment(tensor, s, index_stream, value_stream, None)
            start = tensor.segments[s].start
            self._change.add_slice(tensor.name, tensor, start, values)
            self._count.add(values.nbytes)
            self.bytes_out += values.nbytes
            yield start, values

    def _kept_slices(self, info: TensorInfo, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        for at in range(start, stop, self._step):
            values = self._read(info, at, min(at + self._step, stop))
            self.before.add_slice(info.name, info, at, values)
            yield at, values

    def _read(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        values = self._base.read(info.name, start, stop)
        self._count.add(values.nbytes)
        self.bytes_out += values.nbytes
        return values

    def finish(self) -> str:
        """Count in what is left of the base, check both digests; returns the new one."""
        for name in (*self.header.removed, *(name for name in self.added if name in self._base.tensors)):
            own = _count_in(self._base, self._base.tensors[name], self.before, self._step, self._count)
            self._change.subtract(own)
        found = self.before.hexdigest()
        if self.header.base_digest and found != self.header.base_digest:
            version = "" if self.header.base_version is None else f" (version {self.header.base_version})"
            raise BaseMismatchError(
                f"{self._base.path} has digest {found}, the patch's base has {self.header.base_digest}{version}; "
                "nothing was changed. Give the patch's own base"
            )
        after = self.before.copy()
        after.merge(self._change)
        result = after.hexdigest()
        if self.header.digest and result != self.header.digest:
            raise VerificationError(
                f"the patched checkpoint has digest {result}, expected {self.header.digest}; nothing was changed. "
                "Fetch the patch again"
            )
        return result


def apply(
    base: str | os.PathLike[str],
    patch: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = _quiet,
) -> ApplyReport:
    """Write the checkpoint that ``patch`` makes of ``base`` to ``out``, or in the base's place where ``out`` is None.

    Files are laid out as the target's were; other files of a base folder (config, tokenizer) are copied to a new
    folder. In place, a loader sees the whole old or the whole new checkpoint at every moment, and after an interruption
    ``checkpoint_state`` says which. Raises PatchFormatError, BaseMismatchError, CheckpointError, VerificationError; the
    base is then as it was, and ``out`` was not made.
    """
    started = time.perf_counter()
    with naming(patch), Checkpoint.open(base) as source:
        patched = _Patched(source, patch, progress)
        layout, header = patched.layout(), patched.header
        digest = ""

        def write(sink: TensorSink) -> None:
            nonlocal digest
            if out is None and not source.is_current():  # looked at under the lock
                raise CheckpointError(
                    f"{base}: another process replaced or wrote this checkpoint meanwhile; nothing was changed. Start "
                    "again, with the patch for what is there now"
                )
            for name in patched.kinds():
                tensor = sink.open_tensor(name)
                for _, values in patched.slices(name):
                    tensor.append(values)
            digest = patched.finish()

        if out is None:
            replace_in_place(
                *(base, layout, write),
                old_digest=header.base_digest,
                new_digest=header.digest,
                version=header.version,
            )
        else:
            if Path(out).exists() and os.path.samefile(base, out):
                raise CheckpointError(f"{out}: is the base itself; use --in-place to replace it")
            with _removed_on_error() as created:
                with CheckpointWriter(out, layout, overwrite=overwrite) as writer:
                    write(writer)
                    _copy_aux(source, Path(out), created)
                created.clear()
    return ApplyReport(
        path=os.fspath(base if out is None else out),
        digest=digest,
        base_digest=patched.before.hexdigest(),
        version=header.version,
        num_changed=header.num_changed,
        bytes_written=patched.bytes_out,
        seconds=time.perf_counter() - started,
    )


class _removed_on_error:
    """A list of files; those still in it when the block ends are removed."""

    def __enter__(self) -> list[Path]:
        self._files: list[Path] = []
        return self._files

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)


def _copy_aux(source: Checkpoint, out: Path, created: list[Path]) -> None:
    if not out.is_dir():
        return
    for name in source.aux_files():
        target = out / name
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            created.append(target)
            shutil.copyfile(source.path / name, target)
        except OSError as error:
            raise CheckpointError(f"{target}: cannot copy it from the base: {error.strerror or error}") from error


def verify(
    base: str | os.PathLike[str],
    patch: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    progress: Progress = _quiet,
) -> VerifyReport:
    """Whether ``patch`` turns ``base`` into exactly ``new``: tensor by tensor, bit by bit; nothing is written.

    Raises PatchFormatError, BaseMismatchError, CheckpointError where there is nothing to compare.
    """
    started = time.perf_counter()
    differences: list[str] = []
    with naming(patch), Checkpoint.open(base) as source, Checkpoint.open(new) as expected:
        patched = _Patched(source, patch, progress)
        kinds = patched.kinds()
        for name in expected.tensors:
            if name not in kinds:
                differences.append(f"{name}: only in {expected.path}")
        for name, (dtype, shape) in kinds.items():
            info = expected.tensors.get(name)
            same_kind = info is not None and (info.dtype_name, tuple(info.shape)) == (dtype, shape)
            if info is None:
                differences.append(f"{name}: not in {expected.path}")
            elif not same_kind:
                found = f"{info.dtype_name} {list(info.shape)}"
                differences.append(f"{name}: {dtype} {list(shape)} patched, {found} in {expected.path}")
            first = None
            for start, values in patched.slices(name):
                if same_kind and first is None:
                    first = _first_difference(values, expected.read(name, start, start + values.numel()), start)
            if first is not None:
                differences.append(f"{name}: differs from position {first} on")
        digest = ""
        try:
            digest = patched.finish()
        except VerificationError as error:
            differences.append(str(error))
    return VerifyReport(
        identical=not differences,
        num_differences=len(differences),
        differences=tuple(differences[:20]),
        tensors=len(kinds),
        bytes_compared=patched.bytes_out,
        digest=digest,
        seconds=time.perf_counter() - started,
    )


def _first_difference(a: Tensor, b: Tensor, start: int) -> int | None:
    positions, _ = ops.diff_compact(a, b)
    return start + int(positions[0]) if positions.numel() else None


__all__ = ["ApplyReport", "DiffReport", "VerifyReport", "apply", "diff", "verify"]
