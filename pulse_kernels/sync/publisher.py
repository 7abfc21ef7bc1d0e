"""The trainer's end: what changed goes into the store, and the version exists once its manifest does."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from torch import Tensor

from pulse_kernels import codec
from pulse_kernels.errors import BaseMismatchError, ConflictError, PulseError
from pulse_kernels.patch import Patch
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, StateDigest
from pulse_kernels.sync.anchor import AnchorFiles, send_anchor
from pulse_kernels.sync.aux_files import AUX_FACT, send_aux
from pulse_kernels.sync.chain import Chain, next_version
from pulse_kernels.sync.manifest import Manifest, Part, manifest_key, patch_folder
from pulse_kernels.sync.parts import send_part
from pulse_kernels.sync.reports import PublishReport
from pulse_kernels.sync.retention import check_retention, prune
from pulse_kernels.sync.signing import signer_from, trusted_keys
from pulse_kernels.sync.source import Change, Source
from pulse_kernels.sync.store import AlreadyExists, Full, StoreLike, open_store

_WORTH_A_LOOK = 1 / 4  # density from which a patch may be no smaller than the state


@dataclass
class _Attempt:
    """A version on its way: until its manifest was seen or certainly refused, it may or may not exist."""

    version: int
    change: Change
    digests: Mapping[str, StateDigest]
    anchor: AnchorFiles | None
    manifest: Manifest
    data: bytes
    report: PublishReport

    @property
    def keys(self) -> list[str]:
        """Of its parts."""
        return [part.key for part in (*self.manifest.patch, *self.manifest.anchor)]


@dataclass
class _Job:
    """What ``publish`` hands over to the upload."""

    version: int
    change: Change
    whole: dict[str, Tensor] | None  # the weights, where an anchor is to be sent
    digests: Mapping[str, StateDigest]
    note: str
    phases: Phases
    encoded: bytes | None = None


_alive: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _at_exit(publisher: Publisher) -> None:
    """See to it that the interpreter does not end in the middle of an upload."""
    if not _alive:
        # Ahead of concurrent.futures, which lets no thread begin anything once it was told of the end.
        getattr(threading, "_register_atexit", atexit.register)(_finish_uploads)
    _alive.add(publisher)


def _finish_uploads() -> None:
    for publisher in list(_alive):
        try:
            publisher.wait()
        except Exception as error:
            print(f"pulse_kernels: the last version was not published: {error}", file=sys.stderr)


class Publisher:
    """Sends a trainer's weights to a store, version by version; receivers follow with ``Subscriber``.

        publisher = Publisher("s3://bucket/run1", model, masters=masters)
        optimizer.step(); report = publisher.publish()

    store: URL, folder, obstore object or ``Store``. params: the weights: nn.Module, dict or (name, tensor) pairs.
    masters: FP32 masters of some or all weights under the same names; ``publish`` casts them into these weights in the
    pass that finds the changes, and keeps no copy of these. Weights without a master (buffers, frozen or FP32
    parameters) are compared with a copy of the version sent last. anchor_every: versions from one whole checkpoint to
    the next. profile: "balanced" or "fast" (see ``Patch.to_bytes``). signer: Ed25519 key that signs every version, see
    ``signer_from``.
    on_nonfinite: "error" refuses weights that are infinite or NaN, "allow" sends them. asynchronous: ``publish``
    returns as soon as the weights may change; one upload runs behind it, and the next call waits for it. keep_anchors,
    keep_patches: retention, applied after every anchor, see ``prune``; None keeps all; where it fails, the report's
    note says so. on_report: called with every committed version's report; what it raises comes out of ``publish``
    (asynchronous: of the call after it), but the version is committed and the next call goes on from it.
    shard_bytes: size of an anchor's files. aux_files: folder of what else belongs to the model (config, tokenizer),
    which is sent with every anchor, see aux_files.py; an attribute, too.

    One publisher at a time owns a chain. A second one that commits makes the first raise ConflictError for good.

    Raises StoreError (the store cannot be read), ChainError, TrustError (what is there cannot be continued: the newest
    version is signed by another key, or by any where no signer was given), ValueError, TypeError (arguments).
    """

    def __init__(
        self,
        store: StoreLike,
        params: Params,
        *,
        masters: Params | None = None,
        anchor_every: int = 30,
        profile: str = "balanced",
        signer: Any = None,
        on_nonfinite: str = "error",
        asynchronous: bool = False,
        keep_anchors: int | None = None,
        keep_patches: int | None = None,
        on_report: Callable[[PublishReport], None] | None = None,
        shard_bytes: int = 4 << 30,
        aux_files: str | os.PathLike[str] | None = None,
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"anchor_every is {anchor_every}, expected at least 1")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}, expected at least 1")
        codec.check_profile(profile)
        check_retention(keep_anchors, keep_patches)
        self._keep = keep_anchors, keep_patches
        self._source = Source(params, masters, profile=profile, on_nonfinite=on_nonfinite)
        self._signer = None if signer is None else signer_from(signer)
        self.store = open_store(store)
        self._anchor_every = anchor_every
        self._profile = profile
        self._asynchronous = asynchronous
        self._on_report = on_report
        self._shard_bytes = shard_bytes
        self.aux_files = aux_files
        self._attempts: list[_Attempt] = []
        self._owed: list[tuple[str, bytes]] = []  # keys and files that only whoever committed may write
        self._fenced = ""
        self._worker: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._last: PublishReport | None = None
        trust = None if self._signer is None else trusted_keys([self._signer.public_key])
        self.chain = Chain(self.store, trust=trust)
        self._head: Manifest | None = None
        self._since_anchor = 0
        self._join()

    # ---- what users call ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version committed last, None before the first."""
        return None if self._head is None else self._head.version

    def publish(self, version: int | None = None) -> PublishReport:
        """Make the weights as they are (with masters: as the masters cast to them) the next version.

        version: its number, above all before; by default one more than the last. Returns once the version can be
        fetched; asynchronous: once the weights may change, with ``committed`` False and None for sizes that are not
        known yet; ``wait()`` has the full report.

        With masters the weights are cast first, whatever becomes of sending them, so that training goes on with them.

        Raises NonFiniteError (the weights are as they were), StoreError (nothing was committed, nothing is lost: what
        changed goes with the next call), ConflictError (another publisher took over; this one is of no use any more).
        Asynchronous: the error of the upload before, once.
        """
        self._join_worker()
        phases = Phases(time.perf_counter)
        self._number(version)  # a wrong one is told before anything happens
        self._source.cast()
        phases.end("gate")
        self._raise_failure()
        if self._fenced:
            raise ConflictError(self._fenced)
        self._resolve_attempts()
        self._check_ahead()
        number = self._number(version)
        self.store.put_owed(self._owed)
        phases.end("check")
        change = self._source.change(number, cast=False)
        if change.patch is not None and (self._head is None or change.patch.base_digest != self._head.digest):
            self._source.distrust("the publisher was interrupted while it recorded what was sent")
            change = self._source.change(number)
        phases.end("gate")
        job = self._plan(number, change, phases)
        self._last = None  # of an upload before this one, which nobody waits for any more
        if not self._asynchronous or job.whole is not None:
            return self._send(job)
        _at_exit(self)
        worker = threading.Thread(target=self._send_behind, args=(job,), name="pulse-publisher", daemon=True)
        self._worker = worker
        try:
            worker.start()
        except BaseException:
            if worker.ident is None:
                self._worker = None  # nothing to wait for
            raise
        num_changed = 0 if change.patch is None else change.patch.num_changed
        return self._report(job, None, num_changed, committed=False)

    def wait(self) -> PublishReport | None:
        """Wait for the upload that runs; its report, or None where none ran. Raises what it failed with, once."""
        self._join_worker()
        self._raise_failure()
        report, self._last = self._last, None
        return report

    def _join_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                worker.join()
            except BaseException:
                self._worker = worker
                raise

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _number(self, version: int | None) -> int:
        """What the next version is called. TypeError, ValueError for what it cannot be."""
        # What was tried under a higher number may come to exist yet.
        tried = max((attempt.version - 1 for attempt in self._attempts), default=-1)
        return next_version(self.version if tried < 0 else max(tried, self.version or 0), version)

    def close(self) -> None:
        """Wait for the upload that runs, and let go of the store's connections."""
        try:
            self.wait()
        finally:
            self.store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(Exception):  # the error that ended the block is the one to report
            self.close()

    # ---- where the chain stands -----------------------------------------------------------------------------------

    def _join(self) -> None:
        """Continue the chain that is in the store, or begin one."""
        newest = self.chain.newest()
        if newest is None:
            self.chain.id = secrets.token_hex(16)
            return
        self._head = self.chain.manifest(newest)
        if self._signer is None:
            self.chain.require_unsigned(newest)
        if odd := self._source.names ^ self._head.tensor_digests.keys():
            raise BaseMismatchError(
                f"{self.store.describe()} has versions of another model: {min(odd)!r:.200} and {len(odd) - 1} more "
                "tensors are not in both. Publish to an address of its own: followers of this one could not use it"
            )
        self._source.resume(self._head.digest)
        self._since_anchor = self.chain.since_anchor(self._head, self._anchor_every)

    def _resolve_attempts(self) -> None:
        """Find out which of the versions whose commit failed are there after all: an answer may have been lost."""
        while self._attempts:
            for version in sorted({attempt.version for attempt in self._attempts}, reverse=True):
                found = self.chain.committed(version, [each.data for each in self._attempts])
                if found is None:
                    continue
                ours = [each for each in self._attempts if (each.version, each.data) == (version, found)]
                if not ours:
                    self._fence(version)
                self._adopt(ours[0], settle=ours[0].change.patch is not None)
                break
            else:
                break

    def _check_ahead(self) -> None:
        """Whoever committed a version above ours has taken over, under whatever number."""
        head = self._head
        if head is None:
            newest, sound = self.chain.newest(), True
        else:
            newest, sound = self.chain.since(head.version, None if head.anchor else head.base_version)
        if newest is not None and newest > (-1 if head is None else head.version):
            self._fence(newest)
        if not sound:
            self._since_anchor = self._anchor_every  # one is due

    def _fence(self, version: int) -> None:
        self._source.distrust("another publisher took over")
        self._fenced = (
            f"version {version} was committed by another publisher of {self.store.describe()}; this one has stopped. "
            "End the one that should not run, and make a new Publisher: it continues the chain"
        )
        raise ConflictError(self._fenced)

    def _adopt(self, attempt: _Attempt, *, settle: bool = True) -> None:
        """A version of ours exists: receivers have it. settle=False: the weights may have moved on since a whole state
        was sent, so that the source stays unsure and another anchor follows."""
        if settle:
            self._source.commit(attempt.change, attempt.digests)
        self._head = attempt.manifest
        self._since_anchor = 0 if attempt.anchor is not None else self._since_anchor + 1
        if attempt.anchor is not None:
            self._owed += attempt.anchor.late
        self._attempts.clear()

    # ---- one version ----------------------------------------------------------------------------------------------

    def _plan(self, version: int, change: Change, phases: Phases) -> _Job:
        """Decide what goes into the version; reads the weights where it is an anchor."""
        note = change.note
        patch = change.patch
        due = self._head is None or self._since_anchor + 1 >= self._anchor_every
        encoded: bytes | None = None
        if patch is not None:
            assert self._head is not None
            patch.base_version, patch.version = self._head.version, version
            if self._asynchronous and patch.num_changed > _WORTH_A_LOOK * self._source.numel:
                encoded = self._encode(patch, phases)
        whole = patch is None or due or (encoded is not None and len(encoded) >= self._source.dense_bytes)
        named = self._source.weights() if whole else None
        if patch is not None and named is not None:
            digests = StateDigest.of_each(named)
            if digests != dict(self._source.tensor_digests(change)):
                # An anchor is the moment to find out, and to begin from what is really there.
                self._source.distrust("the weights were changed by others than the publisher")
                change = Change(None, 0, "the weights were changed by others than the publisher")
                note, encoded = change.note, None
            phases.end("digest")
        else:
            digests = dict(self._source.tensor_digests(change))
            phases.end("digest" if named is not None else "gate")
        return _Job(version, change, named, digests, note, phases, encoded)

    def _encode(self, patch: Patch, phases: Phases) -> bytes:
        builder = codec.build(patch, self._profile, None, with_values_digest=True)
        phases.end("pack")
        data = b"".join(builder.chunks())
        phases.end("encode")
        return data

    def _send_behind(self, job: _Job) -> None:
        try:
            self._last = self._send(job)
        except BaseException as error:
            self._failure = error

    def _send(self, job: _Job) -> PublishReport:
        """Encode, upload, commit."""
        phases, patch, change = job.phases, job.change.patch, job.change
        data: bytes | None = None
        note, whole = job.note, job.whole
        if patch is not None:
            data = self._encode(patch, phases) if job.encoded is None else job.encoded
            if len(data) >= self._source.dense_bytes and whole is None and not self._asynchronous:
                whole = self._source.weights()
            if len(data) >= self._source.dense_bytes and whole is not None:
                note = f"dense was cheaper: the patch would take {len(data)} bytes"
                data, change = None, Change(None, change.upto, note)
        token = secrets.token_hex(4)
        parts: tuple[Part, ...] = ()
        anchor: AnchorFiles | None = None
        digest = StateDigest.sum(job.digests.values()).hexdigest()
        written: list[str] = []
        facts: dict[str, int | str] = {}
        try:
            if data is not None:
                key = f"{patch_folder(job.version)}/00000-{token}.safetensors"
                parts = (send_part(self.store, key, data),)
                written.append(key)
                phases.end("upload")
            if whole is not None:
                anchor = send_anchor(self.store, whole, job.version, digest, token=token, shard_bytes=self._shard_bytes)
                written += [part.key for part in anchor.parts]
                if (
                    self.aux_files is not None
                    and (aux := send_aux(self.store, self.aux_files, job.version)) is not None
                ):
                    facts[AUX_FACT] = aux.blake3
                    anchor = replace(anchor, late=(*aux.late, *anchor.late))
                phases.end("anchor")
        except BaseException:
            self.store.discard(written)
            raise
        assert self.chain.id is not None
        num_changed = 0 if patch is None else patch.num_changed
        manifest = Manifest(
            chain=self.chain.id,
            version=job.version,
            kind="anchor" if anchor is not None else "patch",
            base_version=None if not parts or self._head is None else self._head.version,
            base_digest=None if not parts or self._head is None else self._head.digest,
            digest=digest,
            tensor_digests={name: each.hexdigest() for name, each in job.digests.items()},
            anchor=() if anchor is None else anchor.parts,
            patch=parts,
            profile=self._profile,
            time=max(0, int(time.time())),  # a clock may be anything
            facts={
                "num_changed": num_changed,
                "numel": self._source.numel,
                "dense_bytes": self._source.dense_bytes,
                **facts,
            },
        )
        report = self._report(replace(job, change=change, note=note), manifest, num_changed, committed=True)
        attempt = _Attempt(job.version, change, job.digests, anchor, manifest, manifest.to_bytes(self._signer), report)
        self._commit(attempt, phases)
        return self._finish(attempt, phases)

    def _commit(self, attempt: _Attempt, phases: Phases) -> None:
        """The manifest, written once and by nobody else, is the commit."""
        self._attempts.append(attempt)  # from here on it may exist
        try:
            self.store.create(manifest_key(attempt.version), attempt.data)
        except AlreadyExists:
            found = self.chain.committed(attempt.version, [each.data for each in self._attempts])
            for earlier in self._attempts:
                if earlier.version == attempt.version and earlier.data == found:
                    self._adopt(earlier, settle=earlier is attempt or earlier.change.patch is not None)
                    break
            else:
                self._attempts.clear()
                self.store.discard(attempt.keys)
                self._fence(attempt.version)
            if earlier is not attempt:
                raise PulseError(
                    f"version {attempt.version} was committed by an earlier call whose answer was lost; what changed "
                    "since is not lost: publish again"
                ) from None
        except Full:
            if self.chain.committed(attempt.version) is None:  # surely refused: its parts only make the disk fuller
                self._attempts.pop()
                self.store.discard(attempt.keys)
            raise
        else:
            self._adopt(attempt)
        phases.end("commit")

    def _finish(self, attempt: _Attempt, phases: Phases) -> PublishReport:
        """What is worth doing once the version exists; none of it can undo that."""
        note = attempt.report.note
        if attempt.anchor is not None:
            try:
                self.store.put_owed(self._owed)
            except Exception as error:
                note = f"{note}; " * bool(note) + f"the anchor's index waits for the next call ({_said(error)})"
            phases.end("anchor")
            if self._keep != (None, None):
                try:
                    prune(self.chain, keep_anchors=self._keep[0], keep_patches=self._keep[1])
                except Exception as error:
                    note = f"{note}; " * bool(note) + f"old versions were not removed ({_said(error)})"
                phases.end("prune")
        report = replace(attempt.report, note=note, seconds=dict(phases.seconds))
        if self._on_report is not None:
            self._on_report(report)  # last: what it raises comes out, and finds all else settled
        return report

    def _report(self, job: _Job, manifest: Manifest | None, num_changed: int, *, committed: bool) -> PublishReport:
        patch = job.change.patch
        anchor_bytes = 0 if manifest is None else sum(part.bytes for part in manifest.anchor)
        payload = None if manifest is None else sum(part.bytes for part in manifest.patch) or anchor_bytes
        ratio = self._source.dense_bytes / payload if payload else payload  # 0 of nothing, None of what is not known
        return PublishReport(
            version=job.version,
            kind="anchor" if job.whole is not None or patch is None else "patch",
            base_version=None if patch is None else patch.base_version,
            digest=StateDigest.sum(job.digests.values()).hexdigest(),
            num_changed=num_changed,
            numel=self._source.numel,
            density=num_changed / max(1, self._source.numel),
            payload_bytes=payload,
            anchor_bytes=anchor_bytes,
            dense_bytes=self._source.dense_bytes,
            ratio=ratio,
            folded=job.change.folded,
            committed=committed,
            note=job.note,
            seconds=dict(job.phases.seconds),
        )


def _said(error: Exception) -> str:
    """What an error says, with its name where that says nothing, as MemoryError's."""
    return str(error) or type(error).__name__
