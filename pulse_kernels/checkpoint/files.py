"""File operations that survive a crash, and the corner of a folder a writer keeps for itself.

Nothing here knows what a checkpoint is. A change to a folder is durable once the folder itself is synced, so every
rename, link and unlink that a later step relies on is followed by `sync_folder`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pulse_kernels.errors import CheckpointError

# A weight file that is in place but does not have its own name yet; loaders reach it through the index.
_STAGED_SHARD = re.compile(r"pulse-[0-9a-f]{16}-\d{5}\.safetensors")

_LOCK_ATTEMPTS = 6  # a look at the state holds the lock for microseconds
_LOCK_PAUSE_SECONDS = 0.05

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def os_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError from the block into a CheckpointError: `path`, what failed, what to do."""
    try:
        yield
    except OSError as error:
        what_next = ""
        if error.errno in _DISK_FULL:
            what_next = "; free some space, or raise the limit, and run this again"
        elif error.errno in _FORBIDDEN:
            what_next = "; check the owner and the permissions of the file and of its folder"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            what_next = "; raise the limit of open files (ulimit -n)"
        raise CheckpointError(f"{path}: cannot {doing}: {error.strerror or error}{what_next}") from error


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an OSError says that the disk, the quota or the size limit is exhausted."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError where `folder`'s file system says that it has not `needed_bytes` free."""
    with os_errors("look up the free space", folder):
        usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed_bytes:  # some network file systems report a total of 0: unknown
        raise CheckpointError(
            f"{folder}: not enough disk space: {needed_bytes} bytes are needed, {usage.free} are free; "
            f"free {needed_bytes - usage.free} bytes and run this again. Nothing was written."
        )


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable; a file system that cannot sync a folder is left alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def create_file(path: Path, mode: int | None) -> int:
    """A descriptor of a new, empty file, never one that somebody put at `path`; `mode`: permission bits."""
    remove(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return descriptor


def write_at(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """All of `data` at byte `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view[: 1 << 30], offset)
        view = view[written:]
        offset += written


def write_document(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a small file at `path` and sync its contents; its name is durable after `sync_folder`."""
    descriptor = create_file(path, mode)
    try:
        write_at(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Unlink `path`; nothing happens where there is none."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def is_staged_shard(name: str) -> bool:
    """Whether `name` is one that `Workspace.staged_shard` gives."""
    return _STAGED_SHARD.fullmatch(name) is not None


class Workspace:
    """The names a writer uses for itself beside the files it writes, and the lock that makes it the only one.

    There is one per checkpoint folder, and one per lone file, so that unrelated files in one folder do not wait for
    each other. Whoever holds the lock owns every temporary file under these names.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        scope = "apply" if file is None else "file-" + hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
        self.folder = folder
        self.file = file
        self._prefix = f".pulse-{scope}"
        self.journal = folder / f"{self._prefix}.json"
        self.lock = folder / f"{self._prefix}.lock"

    def temporary(self, label: str) -> Path:
        """A hidden name; no loader looks at it."""
        return self.folder / f"{self._prefix}-{label}.tmp"

    @staticmethod
    def staged_shard(token: str, number: int) -> str:
        """A visible name no checkpoint uses by itself; `token`: 16 hexadecimal digits."""
        return f"pulse-{token}-{number:05d}.safetensors"

    def leftovers(self, in_use: Iterable[str] = ()) -> list[str]:
        """Names that a writer left here, sorted: temporary files, and in a folder staged shards not `in_use`."""
        used = set(in_use)
        return sorted(
            name
            for name in os.listdir(self.folder)
            if (name.startswith(f"{self._prefix}-") and name.endswith(".tmp"))
            or (self.file is None and is_staged_shard(name) and name not in used)
        )

    def sweep(self, in_use: Iterable[str] = (), *, shards: bool = True) -> None:
        """Remove what `leftovers` lists; `shards=False` spares the staged shards. Call it under the lock."""
        for name in self.leftovers(in_use):
            if shards or not is_staged_shard(name):
                remove(self.folder / name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; CheckpointError where another process has it. A killed holder's lock is free."""
        descriptor = self._acquire()
        try:
            yield
        finally:
            try:
                with suppress(OSError):  # where it stays behind, it does so unlocked
                    remove(self.lock)
            finally:
                os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a process is writing here right now."""
        try:
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def _acquire(self) -> int:
        for attempt in range(_LOCK_ATTEMPTS):
            if attempt:
                time.sleep(_LOCK_PAUSE_SECONDS)
            with os_errors("lock the folder", self.lock):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(self.lock, flags, 0o666)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The last holder removes the file: a lock on a removed file locks nothing.
                    if os.path.samestat(os.fstat(descriptor), os.stat(self.lock)):
                        return descriptor
                except (BlockingIOError, FileNotFoundError):
                    pass
                except BaseException:
                    os.close(descriptor)
                    raise
            os.close(descriptor)
        raise CheckpointError(
            f"{self.lock}: another process is writing this checkpoint; wait until it has ended and run this again"
        )
