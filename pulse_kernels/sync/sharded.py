"""Trainers whose state lies on many ranks: each sends its own part, rank 0 commits the version they make.

All ranks take every step together; what one of them cannot do, none does, and all raise. Rank 0 alone reads and writes
manifests, and tells the others what came of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pulse_kernels import codec
from pulse_kernels.errors import ConflictError, GroupError, PulseError
from pulse_kernels.ranks.collectives import Group
from pulse_kernels.ranks.together import Together
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, StateDigest
from pulse_kernels.sync.anchor import AnchorFiles
from pulse_kernels.sync.aux_files import AUX_FACT, send_aux
from pulse_kernels.sync.chain import Chain, next_version
from pulse_kernels.sync.manifest import Manifest, Part, manifest_key, patch_folder
from pulse_kernels.sync.parts import send_part
from pulse_kernels.sync.reports import PublishReport
from pulse_kernels.sync.sharded_anchor import anchor_to_json, index_of, send_sharded_anchor
from pulse_kernels.sync.sharded_source import Offer, ShardedSource
from pulse_kernels.sync.sharding import Shard
from pulse_kernels.sync.signing import signer_from, trusted_keys
from pulse_kernels.sync.store import AlreadyExists, StoreLike, open_store


@dataclass
class _Attempt:
    """A version on its way. data: its manifest, on rank 0. late: of its anchor's files what is put last, on rank 0."""

    version: int
    offer: Offer
    digest: str
    whole: bool
    data: bytes = b""
    late: tuple[tuple[str, bytes], ...] = ()


@dataclass
class _Uploaded:
    """What this rank has put into the store for a version."""

    patch: Part | None = None
    anchor: list[AnchorFiles] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [*([self.patch.key] if self.patch else []), *(part.key for files in self.anchor for part in files.parts)]


class ShardedPublisher:
    """``Publisher`` for a trainer whose weights lie on the ranks of a process group; every rank makes one.

        publisher = ShardedPublisher("s3://bucket/run1", model, masters=masters, process_group=group)
        optimizer.step(); report = publisher.publish()        # on all ranks

    params, masters: this rank's tensors. A DTensor (FSDP2, tensor parallelism) knows which box of the whole it is; for
    other tensors of which this rank has a box, shards names its place. What several ranks have whole, or the same box
    of, is sent by the lowest of them; they must agree on it. Names may be on some ranks only (pipeline stages).

    Followers see ordinary versions, with a patch file of each rank that changed; boxes are put together for anchors, a
    few tensors at a time. process_group: a torch.distributed group, None for all ranks. The other arguments are those
    of ``Publisher``; signer and aux_files are rank 0's.

    A rank that dies, or an interrupt on one, leaves the group out of step, and the others raise after its time-out at
    the latest. Make a new group and new publishers then, which continue the chain. Raises what ``Publisher`` raises,
    and GroupError for the ranks that did not fail themselves.
    """

    def __init__(
        self,
        store: StoreLike,
        params: Params,
        *,
        process_group: Group = None,
        shards: Mapping[str, Shard] | None = None,
        masters: Params | None = None,
        anchor_every: int = 30,
        profile: str = "balanced",
        signer: Any = None,
        on_nonfinite: str = "error",
        on_report: Callable[[PublishReport], None] | None = None,
        shard_bytes: int = 4 << 30,
        aux_files: str | os.PathLike[str] | None = None,
    ) -> None:
        self._ranks = Together(process_group)
        self._profile, self._anchor_every, self._shard_bytes = profile, anchor_every, shard_bytes
        self._on_report = on_report
        self.aux_files = aux_files
        self._fenced = ""
        self._head: tuple[int, str] | None = None  # version and digest of what was committed last
        self._base: int | None = None  # the version that its patch begins at; None of an anchor
        self._attempts: list[_Attempt] = []
        self._owed: list[tuple[str, bytes]] = []
        self._since_anchor = 0
        boxes: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            for name, value in (("anchor_every", anchor_every), ("shard_bytes", shard_bytes)):
                if value < 1:
                    raise ValueError(f"{name} is {value}, expected at least 1")
            codec.check_profile(profile)
            self._source = ShardedSource(params, masters, shards, profile, on_nonfinite)
            boxes = self._source.to_json()
            self._signer = None if signer is None else signer_from(signer)
            self.store = open_store(store)
        except Exception as error:
            failure = error
        rows = self._ranks.gather(boxes, failure, "to begin")
        self._source.meet(rows, self._ranks.rank)
        self._join()

    @property
    def version(self) -> int | None:
        """The version committed last, None before the first."""
        return None if self._head is None else self._head[0]

    def publish(self, version: int | None = None) -> PublishReport:
        """Make the weights of all ranks as they are the next version; every rank must call it.

        version: its number, above all before; by default one more than the last. Rank 0's counts. Returns once the
        version can be fetched. Raises on every rank where one fails; nothing was committed then, nothing is lost: what
        changed goes with the next call. NonFiniteError, StoreError and the like on the rank they come from, GroupError
        on the others; ConflictError on all.
        """
        phases = Phases(time.perf_counter)
        if self._fenced:
            raise ConflictError(self._fenced)
        number, due = self._begin(version)
        offer: Offer | None = None
        failure: Exception | None = None
        try:
            offer = self._source.offer(self.version, number, due, phases)
        except Exception as error:
            failure = error
        rows = self._ranks.gather({} if offer is None else offer.to_json(), failure, f"to make version {number}")
        assert offer is not None
        digests = self._source.digests([row["lanes"] for row in rows])
        digest = StateDigest.sum(digests.values()).hexdigest()
        sizes = [row["bytes"] for row in rows]
        sparse = min(sizes) >= 0 and sum(sizes) < self._source.dense_bytes
        whole = due or not sparse
        phases.end("agree")
        uploaded = _Uploaded()
        try:
            self._upload(uploaded, number, digest, offer, sparse, whole, phases)
        except Exception as error:
            failure = error
        offer.data = None
        try:
            sent = self._ranks.gather(_uploaded_to_json(uploaded), failure, f"to upload version {number}")
        except Exception as error:
            if failure is not None or isinstance(error, GroupError):  # else rank 0 may commit them
                self.store.discard(uploaded.keys)
            raise
        report = self._report(number, digest, rows, sent, sparse, whole)
        attempt = _Attempt(number, offer, digest, whole)
        self._commit(attempt, digests, sent, report, uploaded)
        phases.end("commit")
        if self._ranks.rank == 0 and whole:
            with contextlib.suppress(Exception):  # the next call writes it
                self.store.put_owed(self._owed)
            phases.end("anchor")
        report.seconds.update(phases.seconds)
        if self._on_report is not None:
            self._on_report(report)
        return report

    def close(self) -> None:
        """Let go of the store's connections."""
        self.store.close()

    # ---- where the chain stands -----------------------------------------------------------------------------------

    def _join(self) -> None:
        """Continue the chain that is in the store, or begin one."""

        def look() -> dict[str, Any]:
            trust = None if self._signer is None else trusted_keys([self._signer.public_key])
            self.chain = Chain(self.store, trust=trust)
            newest = self.chain.newest()
            if newest is None:
                self.chain.id = secrets.token_hex(16)
                return {"version": None, "digest": "", "since_anchor": 0}
            manifest = self.chain.manifest(newest)
            if self._signer is None:
                self.chain.require_unsigned(newest)
            since = self.chain.since_anchor(manifest, self._anchor_every)
            return {"version": newest, "digest": manifest.digest, "since_anchor": since}

        found = self._ranks.first(look, "to read the chain")
        if found["version"] is None:
            return
        self._head = found["version"], found["digest"]
        self._since_anchor = found["since_anchor"]
        lanes = self._source.measure()
        measured = [row["lanes"] for row in self._ranks.gather({"lanes": lanes}, None, "to measure the weights")]
        if StateDigest.sum(self._source.digests(measured).values()).hexdigest() == found["digest"]:
            self._source.resume(lanes)
        else:
            self._source.distrust("the weights are not those of the newest version")

    def _begin(self, asked: int | None) -> tuple[int, bool]:
        """(the version's number, whether an anchor is due). What came of earlier attempts is found out first."""

        def look() -> dict[str, Any]:
            head, adopt = self.version, None
            for version in {attempt.version: None for attempt in self._attempts}:
                found = self.chain.committed(version, [attempt.data for attempt in self._attempts])
                if found is not None:
                    head, adopt = version, self._ours(version, found)
                    if adopt is None:
                        return {"fenced": self._taken(version)}
                    break
            base = self._base if adopt is None else self._base_of(self._attempts[adopt])
            newest, sound = (self.chain.newest(), True) if head is None else self.chain.since(head, base)
            if newest is not None and (head is None or newest > head):
                return {"fenced": self._taken(newest)}
            self.store.put_owed(self._owed)
            return {"adopt": adopt, "version": next_version(head, asked), "sound": sound}

        said = self._ranks.first(look, "to begin a version")
        if "fenced" in said:
            self._stop(said["fenced"])
        if said["adopt"] is not None:
            self._adopt(said["adopt"], settle=False)
        if not said["sound"]:
            self._since_anchor = self._anchor_every  # one is due
        return said["version"], self._head is None or self._since_anchor + 1 >= self._anchor_every

    def _base_of(self, attempt: _Attempt) -> int | None:
        return None if attempt.whole else self.version

    def _ours(self, version: int, found: bytes) -> int | None:
        """Which attempt's manifest is there as that of ``version``; None where it is another publisher's."""
        for k, attempt in enumerate(self._attempts):
            if (attempt.version, attempt.data) == (version, found):
                return k
        return None

    def _taken(self, version: int) -> str:
        return (
            f"version {version} was committed by another publisher of {self.store.describe()}; this one has stopped. "
            "End the one that should not run, and make new ones: they continue the chain"
        )

    def _stop(self, why: str) -> None:
        self._source.distrust("another publisher took over")
        self._attempts.clear()
        self._fenced = why
        raise ConflictError(why)

    def _adopt(self, k: int, *, settle: bool) -> None:
        """Attempt ``k`` is in the store: followers have it. settle=False: the weights may have moved on since a whole
        state was sent, so that the source stays unsure and another anchor follows."""
        attempt = self._attempts[k]
        if settle or attempt.offer.change.patch is not None:
            self._source.commit(attempt.offer)
        self._base = self._base_of(attempt)
        self._head = attempt.version, attempt.digest
        self._since_anchor = 0 if attempt.whole else self._since_anchor + 1
        self._owed += attempt.late
        self._attempts.clear()

    # ---- one version ----------------------------------------------------------------------------------------------

    def _upload(
        self, uploaded: _Uploaded, version: int, digest: str, offer: Offer, sparse: bool, whole: bool, phases: Phases
    ) -> None:
        """Put this rank's files into the store. What fails is raised at the end: an anchor needs every rank's boxes."""
        token = secrets.token_hex(4)
        failure: Exception | None = None
        try:
            if sparse and offer.data is not None and (offer.num_changed or self._ranks.rank == 0):
                key = f"{patch_folder(version)}/{self._ranks.rank:05d}-{token}.safetensors"
                uploaded.patch = send_part(self.store, key, offer.data)
                phases.end("upload")
            if whole and not sparse and self._source.measure() != offer.lanes:
                self._source.distrust("the weights were changed by others than the publisher")
                raise PulseError("the weights were changed by others than the publisher; publish again")
        except Exception as error:
            failure = error
        if whole:
            send_sharded_anchor(
                *(self.store, self._ranks.group, self._source.weights(), self._source.owners, version, digest),
                token=token,
                shard_bytes=self._shard_bytes,
                sent=uploaded.anchor,
                failure=failure,
            )
            phases.end("anchor")
        elif failure is not None:
            raise failure

    def _commit(
        self,
        attempt: _Attempt,
        digests: Mapping[str, StateDigest],
        sent: list[dict[str, Any]],
        report: PublishReport,
        uploaded: _Uploaded,
    ) -> None:
        """Rank 0 writes the manifest, which is the commit; all ranks do what follows from the outcome."""
        self._attempts.append(attempt)  # from here on it may exist

        def act() -> dict[str, Any]:
            if attempt.whole:
                attempt.late = (index_of([row["anchor"] for row in sent], attempt.version, attempt.digest),)
            aux = None
            if attempt.whole and self.aux_files is not None:
                aux = send_aux(self.store, self.aux_files, attempt.version)
            if aux is not None:
                attempt.late = (*aux.late, *attempt.late)
            manifest = self._manifest(attempt, digests, sent, report, {} if aux is None else {AUX_FACT: aux.blake3})
            attempt.data = manifest.to_bytes(self._signer)
            try:
                self.store.create(manifest_key(attempt.version), attempt.data)
            except AlreadyExists:
                found = self.chain.committed(attempt.version, [each.data for each in self._attempts])
                k = self._ours(attempt.version, found or b"")
                return {"fenced": self._taken(attempt.version)} if k is None else {"adopt": k}
            return {"adopt": len(self._attempts) - 1}

        said = self._ranks.first(act, f"to commit version {attempt.version}")
        if "fenced" in said:
            self.store.discard(uploaded.keys)
            self._stop(said["fenced"])
        last = said["adopt"] == len(self._attempts) - 1
        self._adopt(said["adopt"], settle=last)
        if not last:
            raise PulseError(
                f"version {attempt.version} was committed by an earlier call whose answer was lost; what changed since "
                "is not lost: publish again"
            )

    def _manifest(
        self,
        attempt: _Attempt,
        digests: Mapping[str, StateDigest],
        sent: list[dict[str, Any]],
        report: PublishReport,
        aux: Mapping[str, str],
    ) -> Manifest:
        assert self.chain.id is not None
        patch = tuple(Part(*row["patch"]) for row in sent if row["patch"] is not None)
        base = self._head if patch else None
        return Manifest(
            chain=self.chain.id,
            version=attempt.version,
            kind="anchor" if attempt.whole else "patch",
            base_version=None if base is None else base[0],
            base_digest=None if base is None else base[1],
            digest=attempt.digest,
            tensor_digests={name: digest.hexdigest() for name, digest in digests.items()},
            anchor=tuple(Part(*part) for row in sent for part in row["anchor"]["parts"]),
            patch=patch,
            profile=self._profile,
            time=max(0, int(time.time())),  # a clock may be anything
            facts={
                "num_changed": report.num_changed,
                "numel": self._source.numel,
                "dense_bytes": self._source.dense_bytes,
                **aux,
            },
        )

    def _report(
        self,
        version: int,
        digest: str,
        rows: list[dict[str, Any]],
        sent: list[dict[str, Any]],
        sparse: bool,
        whole: bool,
    ) -> PublishReport:
        num_changed = sum(row["num_changed"] for row in rows)
        anchor_bytes = sum(part[1] for row in sent for part in row["anchor"]["parts"])
        payload = sum(row["patch"][1] for row in sent if row["patch"] is not None) or anchor_bytes
        notes = {rank: row["note"] for rank, row in enumerate(rows) if row["note"]}
        note = "; ".join(f"rank {rank}: {told}" for rank, told in notes.items())
        if not sparse and not notes:
            note = f"dense was cheaper: the patch would take {sum(row['bytes'] for row in rows)} bytes"
        return PublishReport(
            version=version,
            kind="anchor" if whole else "patch",
            base_version=self.version if sparse else None,
            digest=digest,
            num_changed=num_changed,
            numel=self._source.numel,
            density=num_changed / max(1, self._source.numel),
            payload_bytes=payload,
            anchor_bytes=anchor_bytes,
            dense_bytes=self._source.dense_bytes,
            ratio=self._source.dense_bytes / payload if payload else 0.0,
            folded=max(row["folded"] for row in rows),
            committed=True,
            note=note,
        )


def _uploaded_to_json(uploaded: _Uploaded) -> dict[str, Any]:
    part = uploaded.patch
    patch = None if part is None else [part.key, part.bytes, part.blake3]
    return {"patch": patch, "anchor": anchor_to_json(uploaded.anchor)}
