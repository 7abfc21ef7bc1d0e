"""The rollout's end: fetches and decodes beside the weights that serve, then applies in one short step."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from pulse_kernels.errors import (
    ChainError,
    CheckpointError,
    PulseError,
    StoreError,
    TrustError,
    VerificationError,
)
from pulse_kernels.patch import Patch
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, named_tensors
from pulse_kernels.sync.bounds import check_sizes
from pulse_kernels.sync.chain import Chain, Route, first_sound
from pulse_kernels.sync.manifest import Manifest
from pulse_kernels.sync.persist import Saved, StateFolder
from pulse_kernels.sync.receiver import Receiver, Staged
from pulse_kernels.sync.replay import decoded, state_along, state_at
from pulse_kernels.sync.reports import ApplyReport, StageReport
from pulse_kernels.sync.signing import trusted_keys
from pulse_kernels.sync.store import NotFound, StoreLike, open_store

_CHAIN_ID = re.compile(r"[0-9a-f]{32}\Z")
_LOOK_BACK = 64  # manifests to compare with weights of unknown version
_LONGEST_PAUSE = 60.0  # seconds


@dataclass
class _Ready:
    staged: Staged
    report: StageReport


class Subscriber:
    """Keeps a rollout's weights at the versions a ``Publisher`` sends: bit-identical, or an error says that they are
    not.

        subscriber = Subscriber("s3://bucket/run1", model)
        report = subscriber.poll()        # None if nothing is new; else the weights are at report.version

    store: URL, folder, obstore object or ``Store``. params: the weights, written in place: nn.Module, dict or (name,
    tensor) pairs; whatever they hold at first. None: CPU tensors made from the chain's newest version, in ``params``.
    verify: "digest" checks every changed element's old and new bits, in O(changed); "full" also sweeps all weights
    after every apply, and so finds what others wrote anywhere. trust: public keys (see ``trusted_keys``), one of which
    must have signed every version. chain: the chain's id, where it is known; else the first one seen is kept.
    min_version: refuse anything older. on_report: called with every report.

    state_dir: a folder that keeps the weights as a safetensors checkpoint with its version, see ``save``. A state that
    is there is loaded into params (params=None: makes them), and only what came after it is fetched; versions before
    it, and another chain, are refused. A damaged one is ignored with a warning. save_every: save after every so many
    applies; not in ``apply``, but at the beginning of the next ``stage`` or ``poll``, or in ``close``.

    ``stage`` may run in another thread than the one that serves; ``apply`` is the only pause.

    Raises StoreError, ChainError (damaged, foreign, or gone back), TrustError, BaseMismatchError (another model's
    weights), VerificationError (the weights were written by others); the weights are then as they were.
    """

    def __init__(
        self,
        store: StoreLike,
        params: Params | None = None,
        *,
        verify: str = "digest",
        trust: Iterable[Any] | None = None,
        chain: str | None = None,
        min_version: int | None = None,
        on_report: Callable[[StageReport | ApplyReport], None] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
    ) -> None:
        if verify not in ("digest", "full"):
            raise ValueError(f"verify is {verify!r}, expected 'digest' or 'full'")
        if save_every is not None and (save_every < 1 or state_dir is None):
            raise ValueError(f"save_every is {save_every}, expected at least 1, with a state_dir")
        self._full = verify == "full"
        keys = None if trust is None else trusted_keys(trust)
        if chain is not None and not (isinstance(chain, str) and _CHAIN_ID.match(chain)):
            raise ValueError(
                f"chain is {chain!r:.60}, expected the chain's id, 32 hexadecimal digits: publisher.chain.id, or what "
                "`pulse-kernels log` shows"
            )
        self.store = open_store(store, create=False)
        self.chain = Chain(self.store, trust=keys, chain=chain)
        self._on_report = on_report
        self._lock = threading.RLock()
        self._ready: _Ready | None = None
        self._newest_seen = -1
        self._min_version = min_version
        self._doubted: int | None = None  # the version whose next patches did not lead where their manifests say
        self._save_every = save_every
        self._unsaved = 0  # applies since the last save
        self._folder = None if state_dir is None else StateFolder(state_dir)
        if params is not None and not isinstance(params, nn.Module | Mapping):
            params = named_tensors(params)
        saved = None
        if self._folder is not None:
            saved = self._folder.load(None if params is None else named_tensors(params), chain=chain)
        self._first: Manifest | None = None
        if params is None:
            params = self._first_state() if saved is None else saved.tensors
        self.params: Params = params
        self._receiver = Receiver(self.params)
        self.saved_version = None if saved is None else saved.version  # what state_dir held at first
        if saved is not None:
            self._resume(saved)
        elif self._first is not None:
            self._receiver.version, self._receiver.digest = self._first.version, self._first.digest

    # ---- what users call ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version the weights are at; None where that is not known."""
        return self._receiver.version

    @property
    def digest(self) -> str | None:
        """The digest of the weights' version; None where that is not known."""
        return self._receiver.digest

    def latest(self) -> int | None:
        """The newest version in the store, None while there is none. ChainError where the store has gone back."""
        newest = self.chain.newest(self._newest_seen)
        if (-1 if newest is None else newest) < self._newest_seen:
            raise ChainError(
                f"the newest version in {self.store.describe()} is {newest}, but version {self._newest_seen} was seen "
                "there before: the store was restored from older data, or somebody serves old versions again. If that "
                "is meant, make a new Subscriber"
            )
        return newest

    def stage(self, version: int | None = None) -> StageReport | None:
        """Fetch, check and decode a version, by default the newest; the weights are not touched.

        None where the weights are at that version already (or no version exists). Versions older than the one held are
        refused: ``rollback`` goes back.
        """
        with self._lock, self._chain_kept_if_used():
            self._save_due()
            phases = Phases(time.perf_counter)
            want = self.latest() if version is None else version
            if want is None:
                return None
            if self._receiver.digest is None:
                self._locate(want)
            have = self._receiver.version
            self._refuse_older(want, have)
            if want == have:
                self._ready = None
                self._newest_seen = max(self._newest_seen, want)
                return None
            staged, route, fetched = self._make(want, phases)
            self._newest_seen = max(self._newest_seen, want)
            report = StageReport(
                version=want,
                from_version=have,
                from_anchor=route.anchor is not None,
                patches=len(route.patches),
                fetched_bytes=fetched,
                num_changed=staged.num_changed,
                seconds=dict(phases.seconds),
            )
            self._ready = _Ready(staged, report)
            self._tell(report)
            return report

    def apply(self) -> ApplyReport:
        """Bring the weights to the staged version: the only pause. PulseError where nothing is staged."""
        with self._lock:
            ready, self._ready = self._ready, None
            if ready is None:
                raise PulseError("nothing is staged; call stage() first, or poll(), which does both")
            before = self._receiver.version
            if before != ready.report.from_version:
                raise PulseError(
                    f"version {ready.report.version} was staged from version {ready.report.from_version}, the weights "
                    f"are at {before} now; stage it again"
                )
            phases = Phases(time.perf_counter)
            digest = self._receiver.digest
            try:
                self._receiver.apply(ready.staged, phases, sweep=self._full)
            except VerificationError as error:
                if ready.staged.from_anchor:  # its digest was checked before
                    self._receiver.distrust()
                else:
                    self._blame(ready.staged, (before, digest), error)
                raise
            self._doubted = None
            self._unsaved += 1
            report = ApplyReport(
                version=ready.report.version,
                from_version=before,
                digest=ready.staged.digest,
                num_changed=ready.report.num_changed,
                seconds=dict(phases.seconds),
            )
            self._tell(report)
            return report

    def poll(self) -> ApplyReport | None:
        """Stage and apply the newest version; None where the weights are at it already. The report has all phases."""
        with self._lock:
            staged = self.stage()
            if staged is None:
                return None
            applied = self.apply()
            return replace(applied, seconds={**staged.seconds, **applied.seconds})

    def rollback(self) -> int | None:
        """Go back to the version before the last ``apply``; returns it. PulseError where there is none."""
        with self._lock:
            self._ready = None
            self._receiver.rollback()
            return self._receiver.version

    def check(self) -> None:
        """Sweep all weights: VerificationError, naming tensors, unless they are the version's, bit for bit."""
        with self._lock:
            version = self._receiver.version
            if version is None:
                raise PulseError("the weights are at no known version; call poll() first")
            manifest = self.chain.manifest(version)
            self._receiver.check(version, manifest.digest, manifest.tensor_digests)

    def save(self) -> int:
        """Write the weights to ``state_dir``; returns their version. Old or new is there, whole, at every moment.

        ``apply`` waits meanwhile. Raises PulseError (no state_dir, or no known version), CheckpointError (no space, or
        another process at work there), VerificationError (something else wrote the weights); the old state then stays.
        """
        with self._lock:
            version, digest = self._receiver.version, self._receiver.digest
            if self._folder is None:
                raise PulseError("there is no folder to save to; give the Subscriber a state_dir")
            if version is None or digest is None or self.chain.id is None:
                raise PulseError("the weights are at no known version, which could be saved; call poll() first")
            try:
                self._folder.save(self._receiver.weights(), version, digest, self.chain.id)
            except VerificationError:
                self._receiver.distrust()
                raise
            self._unsaved = 0
            return version

    def follow(
        self,
        callback: Callable[[ApplyReport], None] | None = None,
        stop: threading.Event | None = None,
        *,
        interval: float = 1.0,
    ) -> None:
        """``poll`` every ``interval`` seconds until ``stop`` is set; ``callback`` gets every report.

        A store that cannot be reached is tried again, with growing pauses of up to a minute; other errors are raised.
        """
        stop = threading.Event() if stop is None else stop
        failures = 0
        while not stop.is_set():
            try:
                report = self.poll()
                failures = 0
            except StoreError:
                failures += 1
                if stop.wait(min(interval * 2**failures, _LONGEST_PAUSE)):
                    return
                continue
            if report is not None and callback is not None:
                callback(report)
            if report is None:
                stop.wait(interval)

    def close(self) -> None:
        """Save what ``save_every`` made due, and let go of the store's connections."""
        try:
            self._save_due()
        finally:
            self.store.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _tell(self, report: StageReport | ApplyReport) -> None:
        if self._on_report is not None:
            self._on_report(report)

    def _resume(self, saved: Saved) -> None:
        """Go on where the process that saved this state left off."""
        if saved.version is None or saved.chain is None:
            return
        self._receiver.version, self._receiver.digest = saved.version, saved.digest
        self.chain.id = saved.chain
        self._newest_seen = saved.version

    def _save_due(self) -> None:
        if self._save_every is None or self._unsaved < self._save_every or self._receiver.version is None:
            return
        try:
            self.save()
        except (CheckpointError, OSError) as error:  # serving goes on; the next time tries again
            warnings.warn(f"the state was not saved: {error}", RuntimeWarning, stacklevel=4)

    @contextmanager
    def _chain_kept_if_used(self) -> Iterator[None]:
        """The first chain seen is the one to follow only once something of it has passed all checks; manifests of what
        has not are read anew next time."""
        known = self.chain.id
        try:
            yield
        except BaseException:
            self.chain.let_go(known)
            raise

    def _blame(self, want: Staged | Manifest, held: tuple[int | None, str | None], error: VerificationError) -> None:
        """After a patch that came out wrong: ChainError where the weights are those of ``held``, a version and its
        digest, to the bit, so that it is the patch that lies; else something wrote them, and their version is unknown.
        """
        version, digest = held
        if self._receiver.measure() != digest:
            self._receiver.distrust()
            return
        self._receiver.version = self._doubted = version
        self.chain.let_go(self.chain.id)
        raise ChainError(
            f"version {want.version}: its patch does not lead to its digest, {want.digest}; the weights are at version "
            f"{version}, untouched. Run `pulse-kernels fsck`; the next anchor mends the chain"
        ) from error

    def _locate(self, want: int) -> None:
        """Find out which version the weights are, by their digest."""
        digest = self._receiver.measure()
        for version in [version for version in self.chain.versions() if version <= want][: -_LOOK_BACK - 1 : -1]:
            try:
                manifest = self.chain.manifest(version)
            except (NotFound, ChainError, TrustError):  # not the one we look for, then
                continue
            if manifest.digest == digest:
                self._receiver.version = version
                return

    def _refuse_older(self, want: int, have: int | None) -> None:
        least = self._min_version
        if have is not None and want < have:
            raise ChainError(
                f"version {want} is older than version {have}, which the weights are at; versions only go forward "
                "(rollback() takes back the last one)"
            )
        if least is not None and want < least:
            raise ChainError(f"version {want} is older than min_version, {least}; it is refused")

    def _make(self, want: int, phases: Phases) -> tuple[Staged, Route, int]:
        """The version, staged by the way that fetches the fewest bytes; where that is damaged, by another."""
        held, digest = self._receiver.version, self._receiver.digest
        routes = self.chain.routes(want, None if held is not None and held == self._doubted else held)
        usable = [route for route in routes if route.anchor or route.patches[0].base_digest == digest]
        if not usable:  # what the store calls our version is another state
            usable = self.chain.routes(want, None)
        phases.end("route")
        return first_sound(usable, lambda route: (self._stage_route(route, phases), route, route.nbytes))

    def _stage_route(self, route: Route, phases: Phases) -> Staged:
        manifests = route.manifests
        self.chain.require(manifests)
        want = manifests[-1]
        check_sizes(self._receiver.weights(), manifests)
        if route.anchor is None:
            try:
                patch = self._fold(route.patches, phases)
            except VerificationError as error:
                self._blame(want, (self._receiver.version, self._receiver.digest), error)
                raise
            staged = self._receiver.stage_patch(patch, want.version, want.tensor_digests)
        else:
            state = state_along(self.chain, route, phases)
            staged = self._receiver.stage_state(state, want.version, want.digest, want.tensor_digests)
        phases.end("decode")
        return staged

    def _fold(self, manifests: Sequence[Manifest], phases: Phases) -> Patch:
        """The patches of ``manifests`` as one, decoded without touching the weights."""
        base, digest = self._receiver.weights(), self._receiver.digest
        assert digest is not None
        folded: Patch | None = None
        with closing(self.chain.fetch_ahead(manifests)) as fetched:
            for manifest, parts in fetched:
                phases.end("fetch")
                patch = decoded(manifest, parts, base, digest, folded)
                folded = patch if folded is None else Patch.fold([folded, patch])
                phases.end("decode")
        assert folded is not None
        return folded

    def _first_state(self) -> dict[str, Tensor]:
        """The newest version as tensors of its own, for who has none."""
        newest = self.latest()
        if newest is None:
            raise PulseError(
                f"{self.store.describe()} has no version yet, so that there is nothing to make tensors from; wait for "
                "the first, or pass params"
            )
        self._refuse_older(newest, None)
        state = state_at(self.chain, newest)
        self._first, self._newest_seen = self.chain.manifest(newest), newest
        return state
