"""What killed uploads and removed versions leave in a local folder: files that no listing shows, and empty folders."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pulse_kernels.errors import StoreError
from pulse_kernels.sync.manifest import version_in
from pulse_kernels.sync.store import Entry, Store

MIN_AGE = 3600.0
"""Seconds since anybody wrote a temporary file, after which its upload is dead: a living one writes all the time."""

_TOPS = ("manifests", "anchors", "patches")
# What ObstoreBackend names its temporary files, and what obstore's own are called while they are written.
_TEMPORARY = re.compile(r"\.upload-[0-9a-f]{12}-.*|[A-Za-z0-9].*#[0-9]+", re.DOTALL)


def dead_uploads(store: Store, min_age: float = MIN_AGE) -> list[Entry]:
    """Temporary files of uploads that nobody finishes any more, by their path below the folder; none elsewhere."""
    found = []
    for folder, _, files in _walk(store):
        for name in files:
            if not _TEMPORARY.fullmatch(name):
                continue
            path = folder / name
            with suppress(FileNotFoundError):  # finished just now
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= min_age:
                    assert store.folder is not None
                    found.append(Entry(path.relative_to(store.folder).as_posix(), status.st_size))
    return sorted(found)


def remove_uploads(store: Store, entries: list[Entry]) -> None:
    """Remove what ``dead_uploads`` found. StoreError where the system does not let go of one."""
    for entry in entries:
        assert store.folder is not None
        try:
            os.unlink(store.folder / entry.key)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(
                f"{store.describe()}: cannot delete {entry.key}: {error.strerror or error}; check the permissions"
            ) from error


def remove_empty_folders(store: Store, newest: int) -> None:
    """Remove the folders of versions up to ``newest`` that have nothing in them.

    rmdir removes empty folders alone, so that no race costs a file; whoever writes there makes the folder anew.
    """
    for folder, _, _ in _walk(store):
        assert store.folder is not None
        version = version_in(f"{folder.relative_to(store.folder).as_posix()}/")
        if version is not None and version <= newest:
            with suppress(OSError):
                os.rmdir(folder)


def _walk(store: Store) -> Iterator[tuple[Path, list[str], list[str]]]:
    """The folders that a chain writes to, the inner ones first; nothing behind symbolic links."""
    if store.folder is None:
        return
    for top in _TOPS:
        if not os.path.islink(store.folder / top):
            for place, folders, files in os.walk(store.folder / top, topdown=False):
                yield Path(place), folders, files
