"""Versions over a process group: one trainer rank, and inference ranks whose weights follow it; no store is needed.

A version is one exchange of 512-byte records (sizes, digests), one broadcast of the patch, and one exchange in which
every rank says whether it has the new state. Only if all have does it count: else all ranks go back to the version
before, the trainer keeps what changed for the next version, and all ranks raise. Where a rank has other weights than
the patch begins at, as a new one has, the version is sent as the whole state; digests tell whether that is needed.

A rank that dies, or is interrupted, takes the group along: the others' collective raises once its time-out has passed
(the one given to ``init_process_group`` or ``new_group``). Their weights are whole then, at the version before, or at
the new one where the trainer had heard of all. Make a new group and hand it to ``join``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pulse_kernels import codec
from pulse_kernels.errors import ChainError, GroupError, VerificationError
from pulse_kernels.patch import Patch
from pulse_kernels.ranks.collectives import Group, broadcast_payload, broadcast_tensor, gather_rows
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, StateDigest
from pulse_kernels.sync.agreement import (
    NOTHING,
    PATCH,
    RECEIVER,
    TRAINER,
    WHOLE,
    Agreement,
    Record,
    agree,
    confirm,
    layout_of,
)
from pulse_kernels.sync.chain import next_version
from pulse_kernels.sync.receiver import Receiver, Staged
from pulse_kernels.sync.reports import ApplyReport, PublishReport
from pulse_kernels.sync.source import Change, Source

_CHUNK = 64 << 20  # bytes of a tensor that one broadcast of the whole state carries


class _Member:
    """A rank's place in the group."""

    def __init__(self, group: Group, src: int) -> None:
        self.join(group, src)

    def join(self, group: Group = None, src: int = 0) -> None:
        """Go on in another group, as after a rank died; the weights, and what was not sent yet, stay.

        Raises ValueError where this rank is not in the group or has the other role there.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("this process is not in the group; pass a group that it belongs to")
        if not 0 <= src < size:
            raise ValueError(f"src is {src}, expected the trainer's rank in the group, 0 to {size - 1}")
        if (rank == src) != isinstance(self, GroupPublisher):
            role = "the trainer: use GroupPublisher" if rank == src else "a receiver: use GroupSubscriber"
            raise ValueError(f"this is rank {rank} of the group and src is {src}, which makes it {role}")
        self._group, self._src, self._rank = group, src, rank

    def _exchange(self, mine: Record) -> list[Record]:
        rows = gather_rows(mine.to_bytes(), self._group)
        return [Record.from_bytes(row, rank) for rank, row in enumerate(rows)]


@dataclass
class _Offer:
    """What the trainer has to send: data, where there is a patch that is smaller than the state."""

    change: Change
    digests: dict[str, StateDigest]
    data: bytes | None
    note: str

    @property
    def digest(self) -> str:
        return StateDigest.sum(self.digests.values()).hexdigest()


class GroupPublisher(_Member):
    """The trainer's end, on one rank of the group; each ``publish`` meets a ``receive`` of every other rank.

    params: the weights: nn.Module, dict or (name, tensor) pairs. masters: FP32 masters of some or all weights, cast
    by ``publish`` as in ``Publisher``. group: a torch.distributed group, best one for this alone; None: all ranks. src:
    this rank's number in the group. profile, on_nonfinite: see ``Publisher``; "fast" suits a network inside a cluster.

    Raises ValueError, TypeError (arguments). All other ranks' places are checked with the first version.
    """

    def __init__(
        self,
        params: Params,
        *,
        masters: Params | None = None,
        group: Group = None,
        src: int = 0,
        profile: str = "fast",
        on_nonfinite: str = "error",
    ) -> None:
        codec.check_profile(profile)
        super().__init__(group, src)
        self._source = Source(params, masters, profile=profile, on_nonfinite=on_nonfinite)
        self._profile = profile
        self._digest: str | None = None
        self.version: int | None = None

    def publish(self, version: int | None = None) -> PublishReport:
        """Make the weights as they are (with masters: as the masters cast to them) every rank's next version.

        version: its number; by default one above all that any rank has seen.

        Raises NonFiniteError (the weights are as they were), GroupError (a rank failed, or the ranks do not fit; nobody
        has the new version, and what changed goes with the next call), or what the group's back end raises.
        """
        phases = Phases(time.perf_counter)
        try:
            number = next_version(self.version, version)
            offer = self._offer(number, phases)
            mine = Record(
                role=TRAINER,
                size=-1 if offer.data is None else len(offer.data),
                version=number,
                base=self._digest or "",
                digest=offer.digest,
                layout=layout_of(self._source.weights()),
                fixed=version is not None,
            )
        except Exception as error:
            self._exchange(Record(TRAINER, error=_told(error)))
            raise
        agreed = agree(self._exchange(mine), self._src)
        phases.end("exchange")
        if agreed.mode == PATCH:
            broadcast_payload(offer.data, mine.size, self._src, self._group)
        elif agreed.mode == WHOLE:
            for chunk in _chunks(self._source.weights()):
                broadcast_tensor(chunk, self._src, self._group)
        phases.end("send")
        done = self._exchange(Record(TRAINER, digest=mine.digest, layout=mine.layout))
        try:
            confirm(done, self._src, mine.digest, agreed.version)
        except GroupError:
            if agreed.mode == WHOLE:
                self._source.distrust("the whole state was refused")  # whose digest then is measured anew
            raise
        phases.end("confirm")
        self._source.commit(offer.change, offer.digests)
        before, self.version, self._digest = self.version, agreed.version, mine.digest
        phases.end("commit")
        return self._report(offer, agreed, before, phases)

    def _offer(self, version: int, phases: Phases) -> _Offer:
        change = self._source.change(version)
        if change.patch is not None and change.patch.base_digest != self._digest:
            self._source.distrust("the publisher was interrupted while it recorded what was sent")
            change = self._source.change(version)
        phases.end("gate")
        if change.patch is None:
            digests = self._source.tensor_digests(change)
            phases.end("digest")
            return _Offer(change, digests, None, change.note)
        # Receivers that are ahead may raise the version: the record has it.
        change.patch.base_version = change.patch.version = None
        data = codec.encode(change.patch, self._profile, None, with_values_digest=True)
        phases.end("encode")
        if len(data) < self._source.dense_bytes:
            return _Offer(change, self._source.tensor_digests(change), data, "")
        note = f"dense was cheaper: the patch would take {len(data)} bytes"
        return _Offer(change, self._source.tensor_digests(change), None, note)

    def _report(self, offer: _Offer, agreed: Agreement, before: int | None, phases: Phases) -> PublishReport:
        patch, dense = offer.change.patch, self._source.dense_bytes
        num_changed = 0 if patch is None else patch.num_changed
        payload = {NOTHING: 0, PATCH: len(offer.data or b""), WHOLE: dense}[agreed.mode]
        notes = {NOTHING: "all ranks had it", PATCH: "", WHOLE: offer.note or "a rank had other weights than the last"}
        return PublishReport(
            version=agreed.version,
            kind="anchor" if patch is None or agreed.mode == WHOLE else "patch",
            base_version=before if agreed.mode == PATCH else None,
            digest=offer.digest,
            num_changed=num_changed,
            numel=self._source.numel,
            density=num_changed / max(1, self._source.numel),
            payload_bytes=payload,
            anchor_bytes=payload if agreed.mode == WHOLE else 0,
            dense_bytes=dense,
            ratio=dense / payload if payload else 0.0,
            folded=offer.change.folded,
            committed=True,
            note=notes[agreed.mode],
            seconds=dict(phases.seconds),
        )


class GroupSubscriber(_Member):
    """An inference rank's end: each ``receive`` meets a ``publish`` of the trainer.

    params: the weights, written in place: nn.Module, dict or (name, tensor) pairs; whatever they hold at first. group:
    as in ``GroupPublisher``. src: the trainer's rank in the group. verify: "digest" checks every changed element's old
    and new bits; "full" also sweeps all weights after every version.
    """

    def __init__(self, params: Params, *, group: Group = None, src: int = 0, verify: str = "digest") -> None:
        if verify not in ("digest", "full"):
            raise ValueError(f"verify is {verify!r}, expected 'digest' or 'full'")
        super().__init__(group, src)
        self._full = verify == "full"
        self._receiver = Receiver(params)

    @property
    def version(self) -> int | None:
        """The version the weights are at; None where that is not known."""
        return self._receiver.version

    @property
    def digest(self) -> str | None:
        """The digest of the weights; None where that is not known."""
        return self._receiver.digest

    def receive(self) -> ApplyReport:
        """Take part in the trainer's next version; the weights have it when this returns.

        Raises VerificationError (something else wrote these weights; the next version mends them), MemoryError and
        whatever else happens on this rank, GroupError (another rank failed, or the ranks do not fit), or what the
        group's back end raises. The weights are as they were then.
        """
        phases = Phases(time.perf_counter)
        receiver = self._receiver
        try:
            named = receiver.weights()
            dense = sum(tensor.nbytes for tensor in named.values())
            digest = receiver.measure() if receiver.digest is None else receiver.digest
            version = -1 if receiver.version is None else receiver.version
            mine = Record(RECEIVER, dense, version, digest=digest, layout=layout_of(named))
        except Exception as error:
            self._exchange(Record(RECEIVER, error=_told(error)))
            raise
        phases.end("wait")
        records = self._exchange(mine)
        agreed = agree(records, self._src)
        trainer = records[self._src]
        stage = self._take(agreed, trainer, mine.digest == trainer.digest)
        phases.end("fetch")
        before = receiver.version
        failure: Exception | None = None
        staged: Staged | None = None
        applied = False
        try:
            staged = stage()
            phases.end("decode")
            if staged is not None:
                receiver.apply(staged, phases, sweep=self._full)
                applied = True
            elif self._full:
                receiver.check(agreed.version, trainer.digest, {})
                phases.end("verify")
        except Exception as error:
            failure = error
        try:
            told = "" if failure is None else _told(failure)
            done = Record(RECEIVER, digest=receiver.digest or "", layout=mine.layout, error=told)
            confirm(self._exchange(done), self._src, trainer.digest, agreed.version)
        except BaseException as error:
            if applied:
                receiver.rollback()
            if failure is not None and isinstance(error, GroupError):
                raise failure from error
            raise
        receiver.version = agreed.version
        receiver.forget()
        phases.end("confirm")
        num_changed = 0 if staged is None else staged.num_changed
        return ApplyReport(agreed.version, before, trainer.digest, num_changed, dict(phases.seconds))

    def _take(self, agreed: Agreement, trainer: Record, there: bool) -> Callable[[], Staged | None]:
        """Take part in what is sent; returns what makes it ready, or raises what went wrong."""
        if agreed.mode == PATCH:
            data = broadcast_payload(None, trainer.size, self._src, self._group)
            return lambda: None if there else self._staged_patch(data, trainer, agreed.version)
        if agreed.mode == NOTHING:
            return lambda: None
        weights = self._receiver.weights()
        state: dict[str, Tensor] = {}
        failure: Exception | None = None
        try:
            if not there:
                state = {
                    name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    for name, tensor in weights.items()
                }
        except Exception as error:
            failure, state = error, {}
        # Without room for it, or need of it, a rank takes part all the same: a broadcast needs every one.
        for chunk in _chunks(state or weights):
            broadcast_tensor(chunk if state else torch.empty_like(chunk, device="cpu"), self._src, self._group)

        def ready() -> Staged | None:
            if failure is not None:
                raise failure
            return None if there else self._staged_state(state, trainer, agreed.version)

        return ready

    def _staged_patch(self, data: memoryview, trainer: Record, version: int) -> Staged:
        held = self._receiver.digest
        header = Patch.peek(data)
        if (header.base_digest, header.digest) != (held, trainer.digest):
            raise ChainError(
                f"the patch leads from digest {header.base_digest} to {header.digest}, the trainer announced {held} to "
                f"{trainer.digest}; it was damaged on its way"
            )
        try:
            patch = Patch.from_bytes(data, self._receiver.weights(), current_digest=held)
        except VerificationError:
            self._receiver.distrust()
            raise
        return self._receiver.stage_patch(patch, version, {})

    def _staged_state(self, state: dict[str, Tensor], trainer: Record, version: int) -> Staged:
        found = StateDigest.of(state).hexdigest()
        if found != trainer.digest:
            raise ChainError(
                f"the state that arrived has digest {found}, the trainer announced {trainer.digest}: its weights "
                "were written while they were sent, or it was damaged on its way; publish again"
            )
        return self._receiver.stage_state(state, version, found, {})


def _chunks(named: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """All tensors' bytes in order of their names, as uint8 [n] of up to _CHUNK; views where these are contiguous."""
    for name in sorted(named):
        tensor = named[name].detach()
        flat = tensor.resolve_conj().resolve_neg().reshape(-1)
        step = max(1, _CHUNK // tensor.element_size())
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step].view(torch.uint8)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
