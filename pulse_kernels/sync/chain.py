"""A chain of versions in a store, as whoever reads it sees it: manifests, parts, and the cheapest way to a version."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from pulse_kernels.errors import ChainError, PulseError, StoreError, TrustError
from pulse_kernels.sync.manifest import MAX_MANIFEST_BYTES, Manifest, Part, manifest_key, version_of
from pulse_kernels.sync.store import NotFound, Store

T = TypeVar("T")

_LEADING_ZERO = 10**7  # keys of versions below it begin with 0, so that those of all above come behind them as text
_AHEAD = 4  # versions whose parts are fetched at once
_ANCHORS = 3  # to consider: the nearest, and those before it should that be damaged
_CACHED_BYTES = 64 << 20  # of manifests; one is never changed, so a copy stays true
_LONGEST = 10_000  # patches in a row


@dataclass(frozen=True)
class Route:
    """How to get to a version: an anchor to begin with, or None to begin at the version held; then patches in order."""

    anchor: Manifest | None
    patches: tuple[Manifest, ...]

    @property
    def manifests(self) -> list[Manifest]:
        """The anchor, if it begins with one, and the patches."""
        return [*([self.anchor] if self.anchor else []), *self.patches]

    @property
    def nbytes(self) -> int:
        """Bytes to fetch, manifests not counted."""
        parts = [part for manifest in self.patches for part in manifest.patch]
        return sum(part.bytes for part in (*(self.anchor.anchor if self.anchor else ()), *parts))


def next_version(head: int | None, asked: int | None) -> int:
    """The number of the version after ``head``, the one committed last; ``asked`` where that is given.

    Raises TypeError, ValueError where ``asked`` is no number above ``head``.
    """
    least = -1 if head is None else head
    if asked is None:
        return least + 1
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise TypeError(f"version is {asked!r:.50}, expected an integer")
    if not least < asked < 1 << 53:
        raise ValueError(
            f"version is {asked}, expected more than {least}, the version committed last; leave it out to count on"
        )
    return asked


def first_sound(routes: Iterable[Route], take: Callable[[Route], T]) -> T:
    """What ``take`` makes of the first of ``routes`` that is sound: where one is damaged, another may not be.

    TrustError ends it at once; where none is sound, what was wrong with the first is raised.
    """
    failure: ChainError | StoreError | None = None
    for route in routes:
        try:
            return take(route)
        except TrustError:
            raise
        except (ChainError, NotFound) as error:
            failure = failure or error
    assert failure is not None
    raise failure


class Chain:
    """The versions in ``store``.

    chain: the id that all of them must carry; without it, that of the first manifest read is kept. trust: raw public
    keys, one of which must have signed every manifest; None checks no signature.
    """

    def __init__(self, store: Store, *, trust: frozenset[bytes] | None = None, chain: str | None = None) -> None:
        self.store = store
        self.trust = trust
        self.id = chain
        self._cache: dict[int, tuple[Manifest, int]] = {}
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def versions(self, since: int = 0) -> list[int]:
        """Every committed version from ``since`` on that is still there, ascending."""
        after = manifest_key(since - 1) if 0 < since <= _LEADING_ZERO else ""
        found = (version_of(entry.key) for entry in self.store.list("manifests", after=after))
        return sorted(version for version in found if version is not None and version >= since)

    def newest(self, known: int | None = None) -> int | None:
        """The version committed last, None in an empty store. known: a version that was there: only it and those above
        are listed, unless it is gone."""
        versions = self.versions() if known is None else self.versions(known) or self.versions()
        return versions[-1] if versions else None

    def since(self, head: int, base: int | None) -> tuple[int | None, bool]:
        """(the newest version, whether ``head`` can be relied on as the end of a patch from ``base``): not where
        somebody committed in between, whose retention may have removed what ``head`` is rebuilt from, nor where
        ``base`` is gone. base: None for an anchor.
        """
        first = head if base is None else base
        versions = self.versions(first)
        newest = versions[-1] if versions else self.newest()
        return newest, base is None or [version for version in versions if version <= head] == [base, head]

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version. ChainError (damaged, another chain), TrustError, or NotFound."""
        with self._lock:
            if version in self._cache:
                return self._cache[version][0]
        data = self.store.read(manifest_key(version), MAX_MANIFEST_BYTES)
        manifest = Manifest.from_bytes(data, version=version, chain=self.id, trust=self.trust)
        with self._lock:
            if self.id is None:
                self.id = manifest.chain
            self._drop(version)
            while self._cache and self._cached_bytes + len(data) > _CACHED_BYTES:
                self._drop(next(iter(self._cache)))
            self._cache[version] = manifest, len(data)
            self._cached_bytes += len(data)
        return manifest

    def committed(self, version: int, ours: Iterable[bytes] = ()) -> bytes | None:
        """The bytes of a version's manifest as the store has them now, unchecked; None where there is none.

        ours: what it may be. What is none of them is read again: an answer damaged on its way must not look like
        another publisher's commit.
        """
        expected = list(ours)
        found = None
        for _ in range(2):
            try:
                found = self.store.read(manifest_key(version), MAX_MANIFEST_BYTES)
            except NotFound:
                return None
            if not expected or found in expected:
                break
        return found

    def require_unsigned(self, version: int) -> None:
        """TrustError where the manifest of ``version`` is signed: unsigned versions after it would end the trust of all
        who follow."""
        data = self.store.read(manifest_key(version), MAX_MANIFEST_BYTES)
        Manifest.from_bytes(data, version=version, chain=self.id)
        if "signature" in json.loads(data):
            raise TrustError(
                f"version {version} in {self.store.describe()} is signed, and this publisher has no key: subscribers "
                "that trust the one it was signed with would refuse all that follows. Pass signer=..., or use another "
                "prefix for a chain of its own"
            )

    def forget(self, version: int) -> None:
        """Read the manifest of ``version`` anew next time."""
        with self._lock:
            self._drop(version)

    def let_go(self, chain: str | None) -> None:
        """Forget all manifests, one of which was no good, and follow ``chain``, None for the next that is seen."""
        with self._lock:
            self.id, self._cached_bytes = chain, 0
            self._cache.clear()

    def _drop(self, version: int) -> None:
        _, size = self._cache.pop(version, (None, 0))
        self._cached_bytes -= size

    def since_anchor(self, manifest: Manifest, most: int) -> int:
        """Versions from the last anchor to ``manifest``, up to ``most``, which also counts where one cannot be read."""
        for count in range(most):
            if manifest.anchor or manifest.base_version is None:
                return count if manifest.anchor else most
            try:
                manifest = self.manifest(manifest.base_version)
            except (NotFound, PulseError):
                break  # mended by an anchor
        return most

    def fetch(self, part: Part) -> memoryview:
        """A part's bytes, whose size and BLAKE3 are the manifest's; ChainError where the store has others."""
        from blake3 import blake3

        for last in (False, True):
            data = self.store.get(part.key, part.bytes)
            found = blake3(data, max_threads=blake3.AUTO).hexdigest()
            if found == part.blake3:
                return data
            if last:
                break
        raise ChainError(
            f"{part.key}: its BLAKE3 is {found}, the manifest says {part.blake3}; the part was damaged or replaced. "
            "Run `pulse-kernels fsck` on the store; the next anchor mends the chain"
        )

    def fetch_ahead(self, manifests: Sequence[Manifest]) -> Generator[tuple[Manifest, list[memoryview]], None, None]:
        """The patch parts of each manifest in order, those of the next ones on their way meanwhile."""
        with ThreadPoolExecutor(_AHEAD, "pulse-fetch") as pool:
            ahead: deque[tuple[Manifest, list[Future[memoryview]]]] = deque()
            waiting = iter(manifests)
            try:
                while True:
                    while len(ahead) < _AHEAD and (manifest := next(waiting, None)) is not None:
                        ahead.append((manifest, [pool.submit(self.fetch, part) for part in manifest.patch]))
                    if not ahead:
                        return
                    manifest, parts = ahead.popleft()
                    yield manifest, [part.result() for part in parts]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def routes(self, want: int, have: int | None = None) -> list[Route]:
        """The ways to version ``want``, from version ``have`` and from anchors; those that fetch fewer bytes first.

        Raises ChainError where there is none: a version is gone and no anchor lies behind it.
        """
        patches: list[Manifest] = []
        routes: list[Route] = []
        version: int | None = want
        why = ""
        fetched = 0  # bytes of the patches so far
        while version is not None and version != have:
            if len(routes) == _ANCHORS or (routes and have is not None and fetched > routes[0].nbytes):
                break  # what lies further back is no shorter way
            if len(patches) == _LONGEST:
                why = f"there are {_LONGEST} patches in a row after version {version}"
                break
            try:
                manifest = self.manifest(version)
            except NotFound:
                why = f"version {version} is not in the store"
                break
            except (ChainError, TrustError):
                if not routes:
                    raise
                break  # what is further back may be damaged; it is not needed
            if manifest.anchor:
                routes.append(Route(manifest, tuple(reversed(patches))))
            patches.append(manifest)
            fetched += sum(part.bytes for part in manifest.patch)
            version = manifest.base_version
        if version is not None and version == have:
            routes.append(Route(None, tuple(reversed(patches))))
        if not routes:
            raise ChainError(
                f"no way to version {want}: {why or 'the chain has no anchor'}, and there is no anchor after it. Wait "
                "for the next anchor; the publisher's anchor_every and retention decide how long that takes"
            )
        return sorted(routes, key=lambda route: route.nbytes)

    def require(self, manifests: Iterable[Manifest]) -> None:
        """ChainError unless each manifest begins where the one before it ends."""
        last: Manifest | None = None
        for manifest in manifests:
            if last is not None and (manifest.base_version, manifest.base_digest) != (last.version, last.digest):
                raise ChainError(
                    f"version {manifest.version} begins at version {manifest.base_version} with digest "
                    f"{manifest.base_digest}, but version {last.version} has {last.digest}; the chain is damaged: run "
                    "`pulse-kernels fsck`"
                )
            last = manifest
