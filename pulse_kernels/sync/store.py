"""Object stores as a chain needs them: checked names, retries, bounded parallelism, sizes known before memory is taken.

backend.py tries once; retries.py decides what to try again; redact.py what of an address may be shown.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from pulse_kernels.errors import ChainError, StoreError
from pulse_kernels.sync import redact
from pulse_kernels.sync.backend import (
    PART_BYTES,
    AlreadyExists,
    Backend,
    Entry,
    NotFound,
    ObstoreBackend,
    flat,
)
from pulse_kernels.sync.retries import Exhausted, Retries, is_full

T = TypeVar("T")
StoreLike: TypeAlias = "str | os.PathLike[str] | Store | Any"

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")
MAX_KEY_CHARS = 512
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class Full(StoreError):
    """A disk or quota is full: whether a write took effect can be read back at once, nothing of it is under way."""


class _FromCaller(BaseException):
    """What an iterator of the caller's raised, carried past the retries; never leaves this module."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Store:
    """Objects under keys, below one prefix.

    backend: what tries once. name: what messages call the store, without credentials. retries: when to try again.
    parallel: ranged reads under way at once. Safe to use from several threads.

    Keys are folders and names of letters, digits, ``.``, ``_`` and ``-``, none beginning with a dot: none can leave the
    prefix. Raises StoreError where a key is not of that form, a request fails for good, or keeps failing.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        retries: Retries | None = None,
        parallel: int = 8,
        secrets: Iterable[str] = (),
    ) -> None:
        if parallel < 1:
            raise ValueError(f"parallel is {parallel}, expected at least 1")
        self.backend = backend
        self.retries = Retries() if retries is None else retries
        self._name = name
        self._parallel = parallel
        self._secrets = tuple(secrets)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def describe(self) -> str:
        """The store's address, without credentials."""
        return self._name

    @property
    def folder(self) -> Path | None:
        """The local folder that the objects lie in, None where they lie elsewhere."""
        found = getattr(self.backend, "folder", None)
        return found if isinstance(found, Path) else None

    def __repr__(self) -> str:
        return f"Store({self._name})"

    # ---- writing --------------------------------------------------------------------------------------------------

    def put(self, key: str, data: Any) -> None:
        """Write bytes-like ``data``, over whatever is there. Nobody sees a part of it."""
        view = flat(data)
        self._try("write", key, lambda: self.backend.put(key, view, create=False))

    def put_stream(self, key: str, chunks: Callable[[], Iterable[Any]]) -> None:
        """Write what ``chunks()`` yields, bytes-like pieces; asked anew for every retry. Multi-part where the store is.

        What the iterator raises comes out as it is, and is not tried again.
        """

        def attempt() -> None:
            raised: list[BaseException] = []

            def guarded() -> Iterable[Any]:
                try:
                    yield from chunks()
                except GeneratorExit:
                    raise
                except BaseException as error:
                    raised.append(error)
                    raise

            try:
                self.backend.put(key, guarded(), create=False)
            except BaseException as error:
                if raised:  # obstore wraps it, or turns it into text
                    raise _FromCaller(raised[0]) from error
                raise

        try:
            self._try("write", key, attempt)
        except _FromCaller as carried:
            raise carried.error from None

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist. AlreadyExists where another one does; one of exactly these bytes is
        ours: the answer to an earlier attempt was lost."""

        def attempt() -> None:
            try:
                self.backend.put(key, flat(data), create=True)
            except AlreadyExists:
                if bytes(flat(self.backend.get(key, 0, len(data) + 1))) != data:
                    raise

        self._try("create", key, attempt)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        for key in keys:
            self._check(key)
        for start in range(0, len(keys), 1000):
            some = keys[start : start + 1000]
            self._try("delete", some[0], lambda some=some: self.backend.delete(some))  # type: ignore[misc]

    def discard(self, keys: Sequence[str]) -> None:
        """Remove what nobody needs; where that fails, it stays until somebody tidies up."""
        with suppress(Exception):
            self.delete(keys)

    def put_owed(self, owed: list[tuple[str, bytes]]) -> None:
        """Write keys and their bytes in turn; each leaves the list once it is there."""
        while owed:
            self.put(*owed[0])
            del owed[0]

    # ---- reading --------------------------------------------------------------------------------------------------

    def get(self, key: str, size: int) -> memoryview:
        """The ``size`` bytes of an object, writable. ChainError where it is shorter or longer; NotFound."""
        self._check(key)
        starts = range(0, max(size, 1), PART_BYTES)
        # Ahead of the memory: whoever names a size may lie.
        if len(starts) > 1 and (found := self.size(key)) != size:
            raise ChainError(_wrong_size(key, found, size))
        try:
            data = bytearray(size)
        except (MemoryError, OverflowError):
            raise StoreError(f"{key}: {size} bytes do not fit into memory") from None
        view = memoryview(data)
        if len(starts) == 1:
            self._read_into(key, view, 0, size, last=True)
            return view

        def part(start: int) -> None:
            end = min(start + PART_BYTES, size)
            self._read_into(key, view[start:end], start, end, last=end == size)

        for _ in self._threads().map(part, starts):
            pass
        return view

    def read(self, key: str, limit: int) -> bytes:
        """An object of at most ``limit`` bytes. ChainError where it is longer; NotFound."""
        data: bytes = self._try("read", key, lambda: bytes(flat(self.backend.get(key, 0, min(limit + 1, PART_BYTES)))))
        if len(data) == PART_BYTES:
            size = self.size(key)
            if size <= limit:
                return bytes(self.get(key, size))
            data = b"\0" * (limit + 1)
        if len(data) > limit:
            raise ChainError(f"{key}: more than {limit} bytes, the most there can be; it was damaged or forged")
        return data

    def size(self, key: str) -> int:
        """Bytes of an object; NotFound."""
        return self._try("look up", key, lambda: self.backend.size(key))

    def exists(self, key: str) -> bool:
        """Whether there is an object of that key."""
        try:
            self.size(key)
        except NotFound:
            return False
        return True

    def list(self, prefix: str = "", after: str = "") -> list[Entry]:
        """All objects below the folder ``prefix``, by key; those whose keys no chain could have are left out. after: a
        key; only those behind it, which a store with many looks up quickly."""
        found = self._try("list", prefix, lambda: list(self.backend.list(prefix, after)), checked=prefix != "")
        return sorted(entry for entry in found if KEY.match(entry.key) and len(entry.key) <= MAX_KEY_CHARS)

    # ---- the rest -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of threads; the store may be used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._parallel, "pulse-store")
            return self._pool

    def _read_into(self, key: str, target: memoryview, start: int, end: int, *, last: bool) -> None:
        """Bytes [start, end) into ``target``; with ``last`` nothing may follow them."""
        asked = end + 1 if last else end

        def attempt() -> Any:
            return flat(self.backend.get(key, start, asked))

        data = self._try("read", key, attempt)
        if len(data) != end - start:
            raise ChainError(_wrong_size(key, start + len(data), end, at_least=len(data) > end - start))
        target[:] = data

    def _check(self, key: str) -> None:
        if len(key) > MAX_KEY_CHARS or not KEY.match(key):
            raise StoreError(
                f"the key {key!r:.120} is refused: expected up to {MAX_KEY_CHARS} letters, digits, '.', '_', '-' and "
                "single '/' between names that begin with a letter or digit"
            )

    def _try(self, what: str, key: str, call: Callable[[], T], *, checked: bool = True) -> T:
        if checked:
            self._check(key)
        try:
            return self.retries.run(call)
        except (StoreError, ChainError):
            raise
        except Exhausted as exhausted:
            failed, tries = exhausted.cause, f" after {exhausted.attempts} attempts in {exhausted.seconds:.1f} s"
        except MemoryError:
            raise
        except Exception as error:
            failed, tries = error, ""
        # Raised out here, so that no traceback shows obstore's text, which may hold credentials.
        why = redact.text(str(failed), self._secrets) or type(failed).__name__
        kind = StoreError
        if is_full(failed):
            kind, fix = Full, "free some space"
        elif type(failed).__name__ == "NotSupportedError" and what == "create":
            fix = "this kind of store cannot write only where nothing is: it can be followed, not published to"
        elif tries:
            fix = "check that the store can be reached; nothing was lost, try again"
        else:
            fix = "check its address, credentials and permissions"
        raise kind(f"{self._name}: cannot {what} {key or 'the store'}{tries}: {why}; {fix}")


def _wrong_size(key: str, found: int, expected: int, *, at_least: bool = False) -> str:
    return (
        f"{key}: {'at least ' if at_least else ''}{found} bytes in the store, expected {expected}; the object was cut "
        "or replaced. Run `pulse-kernels fsck` on the store"
    )


def open_store(
    store: StoreLike,
    *,
    create: bool = True,
    retries: Retries | None = None,
    parallel: int = 8,
    durable: bool = True,
    **options: Any,
) -> Store:
    """``store`` as a Store: a URL (s3://, gs://, az://, http(s)://, memory://, file://), a folder, an obstore store, a
    Store, which comes back as it is.

    create: make a folder that is not there; else that is a StoreError. durable: force what is written to a local folder
    to the disk. options: obstore's own, for a URL: ``client_options``, ``retry_config``, ``credential_provider``,
    ``config`` with what the store needs beyond its environment variables (endpoint, region). Every memory:// is a new,
    empty store of this process.

    Raises StoreError for an address that cannot be used; it shows no credentials.
    """
    if isinstance(store, Store):
        if options or retries is not None:
            raise TypeError("a Store is opened already; pass options where it is opened")
        return store
    common: dict[str, Any] = {"retries": retries, "parallel": parallel}
    if isinstance(store, str) and (scheme := _URL.match(store)):
        if scheme.group(1).lower() == "file":
            return open_store(_path_of(store), create=create, durable=durable, **common, **options)
        return _from_url(store, options, common)
    if isinstance(store, str | os.PathLike):
        return _from_folder(Path(store).expanduser(), create, durable, options, common)
    if options:
        raise TypeError(f"{type(store).__name__}: options go with a URL; give them to obstore where the store is made")
    if all(callable(getattr(store, name, None)) for name in ("put", "get", "size", "list", "delete")):
        return Store(store, type(store).__name__, **common)
    if not type(store).__module__.startswith("obstore"):
        raise TypeError(f"store is {type(store).__name__}, expected a URL, a folder, an obstore store or a Store")
    backend = ObstoreBackend(store, durable=durable)
    name = str(backend.folder) if backend.folder is not None else type(store).__name__
    return Store(backend, name, **common)


def _path_of(url: str) -> Path:
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise StoreError(f"{redact.url(url)}: a file URL names no host; write file:///{parts.netloc}{parts.path}")
    return Path(unquote(parts.path))


def _from_folder(path: Path, create: bool, durable: bool, options: dict[str, Any], common: dict[str, Any]) -> Store:
    from obstore.store import LocalStore

    if options:
        raise TypeError(f"{path}: a folder takes no options, found {', '.join(sorted(options))}")
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: is a file; expected a folder")
    if not path.exists():
        if not create:
            raise StoreError(f"{path}: no such folder; check the path, or publish there first")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: cannot make the folder: {error.strerror or error}; choose another") from error
    return Store(ObstoreBackend(LocalStore(str(path.absolute())), durable=durable), str(path), **common)


def _from_url(url: str, options: dict[str, Any], common: dict[str, Any]) -> Store:
    from obstore.store import MemoryStore, from_url

    if url.rstrip("/") in ("memory:", "memory://") or url.startswith("memory://"):
        return Store(ObstoreBackend(MemoryStore()), "memory://", **common)
    secrets = redact.secrets_of(options) | redact.secrets_of_url(url)
    given = dict(options)
    local = url.lower().startswith("http://") or _plain_endpoint(given) or _plain_environment()
    limits: dict[str, Any] = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=120)}
    if local:
        limits["allow_http"] = True
    given["client_options"] = {**limits, **(given.get("client_options") or {})}
    given.setdefault(
        "retry_config",
        {
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=60),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        },
    )
    try:
        opened = from_url(url, **given)
    except Exception as error:
        why = redact.text(str(error), secrets)
    else:
        return Store(ObstoreBackend(opened), redact.url(url), secrets=secrets, **common)
    raise StoreError(f"{redact.url(url)}: cannot be opened: {why}; check the address and its options")


def _plain_endpoint(options: dict[str, Any]) -> bool:
    """Whether the caller named an endpoint without TLS, as of a server on this machine."""
    config = options.get("config") or {}
    endpoints = [value for source in (config, options) for name, value in source.items() if "endpoint" in str(name)]
    return any(str(value).lower().startswith("http://") for value in endpoints)


def _plain_environment() -> bool:
    """Whether obstore's own switch allows an endpoint without TLS; our client options would hide it from obstore."""
    switches = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in switches)


__all__ = ["AlreadyExists", "Entry", "Full", "NotFound", "Store", "StoreLike", "open_store"]
