"""What a store must be able to do, and obstore's stores behind that.

A back end tries once; retries, time limits and checks of names are `store.Store`'s.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pulse_kernels.errors import StoreError

PART_BYTES = 16 << 20
"""Bytes of one part of an upload and of one ranged read."""


class NotFound(StoreError):
    """There is no object of that key."""


class AlreadyExists(StoreError):
    """A create-only write met another object of that key."""


class Entry(NamedTuple):
    """An object in a listing: its key and its size in bytes."""

    key: str
    size: int


class Backend(Protocol):
    """A store that tries once. Raises NotFound, AlreadyExists, or whatever else went wrong."""

    def put(self, key: str, data: Any, *, create: bool) -> None:
        """Write bytes-like `data`, or an iterable of them; with `create` only where there is no such object."""

    def get(self, key: str, start: int, end: int) -> Any:
        """Bytes [start, end) of an object as a buffer; fewer, or none, where the object is shorter."""

    def size(self, key: str) -> int:
        """Bytes of an object."""

    def list(self, prefix: str, after: str = "") -> Iterable[Entry]:
        """All objects below the folder `prefix`, in any order; "" is the whole store. after: a key; only those that
        come behind it as text."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""


def flat(data: Any) -> memoryview:
    """A bytes-like object as a flat view of bytes, not copied."""
    return memoryview(data).cast("B")


# obstore's threads do not survive a fork: a call in the child would wait for ever. None: not used yet.
_process: int | None = None


def claim_process() -> None:
    """Refuse to call obstore in a process forked from one that has used it."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise StoreError(
            "this process was forked from one that had already used an object store, whose threads do not survive a "
            "fork. Start it with the 'spawn' or 'forkserver' method of multiprocessing"
        )


class ObstoreBackend:
    """An obstore store as a Backend.

    On a local folder with ``durable`` every object is written beside its place, forced to the disk, and only then
    given its name, so that after a power loss an object is there whole or not at all, and what was written before a
    manifest is there if the manifest is. Symbolic links that lead out of the folder are not followed: neither listed,
    read, written through nor deleted behind.
    """

    def __init__(self, store: Any, *, durable: bool = True, uploads: int = 4) -> None:
        import obstore
        from obstore.store import LocalStore

        claim_process()
        self.store = store
        self.uploads = uploads  # parts of one upload under way at once
        self._obstore: Any = obstore
        self.folder: Path | None = Path(store.prefix or "/") if isinstance(store, LocalStore) else None
        self.durable = durable and self.folder is not None

    def __repr__(self) -> str:
        return f"ObstoreBackend({type(self.store).__name__})"  # obstore's own repr shows passwords in URLs

    def _check_inside(self, *names: str) -> None:
        """StoreError where links in a local folder lead out of it."""
        for name in names:
            if not self._is_inside(name):
                raise StoreError(
                    f"{name!r:.200} leads out of {self.folder} by a symbolic link, which is not followed; remove the "
                    "link, and put what it points to into the folder"
                )

    def _is_inside(self, name: str) -> bool:
        if self.folder is None:
            return True
        top, real = os.path.realpath(self.folder), os.path.realpath(self.folder / name)
        return real == top or real.startswith(os.path.join(top, ""))

    def put(self, key: str, data: Any, *, create: bool) -> None:
        claim_process()
        self._check_inside(key.rpartition("/")[0])
        if not self.durable:
            return self._put(key, data, create)
        folder, _, name = key.rpartition("/")
        # No key starts with a dot, so that no listing shows these.
        temporary = f"{folder}{'/' if folder else ''}.upload-{secrets.token_hex(6)}-{name[:100]}"
        try:
            self._put(temporary, data, False)
            self._sync(temporary)
            self._name(temporary, key, create)
        except BaseException:
            with suppress(Exception):
                self._obstore.delete(self.store, temporary)
            raise
        self._sync_folders(key)

    def _put(self, key: str, data: Any, create: bool) -> None:
        try:
            data = flat(data)
        except TypeError:  # chunks
            self._obstore.put(
                self.store, key, map(flat, data), use_multipart=True, chunk_size=PART_BYTES,
                max_concurrency=self.uploads,
            )  # fmt: skip
            return
        exists = False
        try:
            if create:
                self._obstore.put(self.store, key, data, mode="create")
            else:
                self._obstore.put(self.store, key, data, chunk_size=PART_BYTES, max_concurrency=self.uploads)
        except self._obstore.exceptions.AlreadyExistsError:
            exists = True
        if exists:  # raised out here, so that no traceback shows obstore's text
            raise AlreadyExists(f"{key!r} exists already")

    def _name(self, temporary: str, key: str, create: bool) -> None:
        """Give a written file its name; a hard link is what never replaces."""
        exists = False
        try:
            if create:
                self._obstore.copy(self.store, temporary, key, overwrite=False)
                self._obstore.delete(self.store, temporary)
            else:
                self._obstore.rename(self.store, temporary, key, overwrite=True)
        except self._obstore.exceptions.AlreadyExistsError:
            exists = True
        if exists:
            raise AlreadyExists(f"{key!r} exists already")

    def _sync(self, key: str) -> None:
        assert self.folder is not None
        handle = os.open(self.folder / key, os.O_RDWR)  # Windows syncs no file that is open for reading
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _sync_folders(self, key: str) -> None:
        """Force the folders above an object to the disk: names live there."""
        assert self.folder is not None
        if os.name == "nt":
            return
        parts = key.split("/")[:-1]
        for depth in range(len(parts), -1, -1):
            handle = os.open(self.folder.joinpath(*parts[:depth]), os.O_RDONLY)
            try:
                os.fsync(handle)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that know no such thing
                    raise
            finally:
                os.close(handle)

    def get(self, key: str, start: int, end: int) -> Any:
        claim_process()
        if end <= start:
            return b""
        self._check_inside(key)
        exceptions = self._obstore.exceptions
        failed: Exception | None = None
        try:
            return self._obstore.get_range(self.store, key, start=start, end=end)
        except FileNotFoundError:
            pass
        except (exceptions.GenericError, exceptions.NotSupportedError) as error:
            failed = error
        if failed is None:
            raise NotFound(f"there is no {key!r}")
        # Stores refuse ranges that begin behind the end, and some web servers refuse all ranges.
        size = self.size(key)
        if start >= size:
            return b""
        if isinstance(failed, exceptions.NotSupportedError):
            return self._get_without_ranges(key, start, end)
        raise failed

    def _get_without_ranges(self, key: str, start: int, end: int) -> bytes:
        """The bytes [start, end) out of the whole object's stream, whose rest is not read."""
        found, position = bytearray(), 0
        for chunk in self._obstore.get(self.store, key).stream(min_chunk_size=1 << 20):
            found += flat(chunk)[max(0, start - position) : max(0, end - position)]
            position += len(chunk)
            if position >= end:
                break
        return bytes(found)

    def size(self, key: str) -> int:
        claim_process()
        self._check_inside(key)
        with suppress(FileNotFoundError):
            return int(self._obstore.head(self.store, key)["size"])
        raise NotFound(f"there is no {key!r}")

    def list(self, prefix: str, after: str = "") -> Iterator[Entry]:
        claim_process()
        for page in self._obstore.list(self.store, prefix or None, offset=after or None, chunk_size=1000):
            for item in page:
                if self._is_inside(item["path"]):
                    yield Entry(item["path"], item["size"])

    def delete(self, keys: Sequence[str]) -> None:
        claim_process()
        self._check_inside(*{key.rpartition("/")[0] for key in keys})
        with suppress(FileNotFoundError):
            self._obstore.delete(self.store, list(keys))
            return
        for key in keys:  # some stores stop at the first that is missing
            with suppress(FileNotFoundError):
                self._obstore.delete(self.store, key)
