"""PulseLoCo: counts the inner steps, and runs a round when one is due."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pulse_kernels.errors import GroupError, PulseError
from pulse_kernels.loco import membership
from pulse_kernels.loco.exchange import Exchange, Traffic, reduce_is_smaller
from pulse_kernels.loco.fragment import Fragment, OuterOptimizer
from pulse_kernels.loco.reports import SyncReport
from pulse_kernels.loco.tensors import check_same_memory, trained
from pulse_kernels.loco.tensors import fragments as in_fragments
from pulse_kernels.loco.wire import Entries
from pulse_kernels.ranks.collectives import Group, group_device
from pulse_kernels.ranks.together import Together
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, StateDigest

_VIEWS = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}
_MODES = ("auto", "gather", "reduce")
_FIRST_DENSITY = 0.05  # what a round is taken to fire before there was one (arXiv 2602.03839: 4 to 5%)

nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimizer (arXiv 2311.08105)."""


@dataclass(frozen=True)
class _Found:
    """A round up to the commit. sent: this rank's entries, by fragment and bucket. means: over all ranks, by bucket.
    counts: entries of all ranks. exchange: None alone."""

    sent: list[list[Entries]]
    means: list[Entries]
    traffic: Traffic
    counts: int
    exchange: Exchange | None
    committed: bool

    @property
    def mode(self) -> str:
        if self.exchange is None:
            return "alone"
        return "reduce" if self.exchange.parts > 1 else "gather"


def _ballot(hook: Callable[[], bool]) -> bool | Exception:
    try:
        return bool(hook())
    except Exception as error:
        return error


_CALLABLES = {
    "outer_optimizer": "what makes a torch optimizer of a list of tensors, as partial(torch.optim.SGD, lr=0.7)",
    "commit": "a function without arguments that returns a bool, as manager.should_commit",
    "on_report": "a function of a SyncReport",
}


def _check_meant_to_be_alone() -> None:
    """GroupError where a launcher started several processes that would each train on its own."""
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdecimal() and int(world) > 1:
        raise GroupError(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialised, so that each process would train alone; "
            "call torch.distributed.init_process_group() first"
        )


class PulseLoCo:
    """Keeps trainers that step apart on common weights: every ``sync_every`` steps they exchange, of how far each has
    moved, what the BF16 view of the weights can see; the rest stays with each as its residual (arXiv 2602.03839).

        loco = PulseLoCo(model, sync_every=8)
        loco.attach(optimizer)          # from here on optimizer.step() also counts and synchronises

    Of every parameter, all FP32: ``s = residual + (theta - local)``. Entries fire where ``bf16(theta - s)`` has other
    bits than ``bf16(theta)``; those are sent, the others become the residual. The mean over all ranks is the gradient
    of ``outer_optimizer``'s step of theta, the global weights; local weights restart from there.

    params: nn.Module, dict or (name, tensor) pairs; frozen parameters take no part, tied ones once. masters: FP32
    weights under the names of low-precision parameters, which are cast from them after every round. sync_every: inner
    steps a round (H). outer_optimizer: makes a torch optimizer of a list of tensors; SGD(lr=0.7, momentum=0.9,
    nesterov=True) by default. process_group: the trainers, None for all ranks; without torch.distributed this process
    works alone. gate: "bf16", "fp16": the view; None sends all, which is DiLoCo. fragments: groups of tensors, each
    synchronised at its own offset within the H steps, so that peak traffic falls by their number. bucket_numel:
    elements gated and exchanged at once. exchange: "gather", "reduce", or "auto" for what takes fewer bytes. compress:
    zstd on the values' byte planes; None: where the bytes travel from host memory. offload: global weights, residual
    and momentum in host memory, pinned where there is a GPU; gate and outer step then run on the CPU. commit: asked on
    every rank once all have everything, as a torchft manager's ``should_commit``; the round counts if all say True.
    verify: compare the digests of the global weights of all ranks after every round. threads: for zstd.

    Making one is collective, as ``sync`` is: all start from the global weights of those who already are in the group,
    or else from rank 0's. Keeps, in FP32, the global weights, the residual (not with gate=None) and the outer
    optimizer's state; a round needs one bucket more and what fired.

    Raises ValueError, TypeError (arguments), GroupError (ranks differ in model or settings).
    """

    @torch.inference_mode(False)  # a tensor made in it could not be written to outside it
    def __init__(
        self,
        params: Params,
        *,
        masters: Params | None = None,
        sync_every: int = 8,
        outer_optimizer: OuterOptimizer | None = None,
        process_group: Group = None,
        gate: str | None = "bf16",
        fragments: int = 1,
        bucket_numel: int = 1 << 24,
        exchange: str = "auto",
        compress: bool | None = None,
        offload: bool = False,
        commit: Callable[[], bool] | None = None,
        verify: bool = True,
        threads: int = 4,
        on_report: Callable[[SyncReport], None] | None = None,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every is {sync_every}, expected at least 1")
        if gate not in _VIEWS:
            raise ValueError(f"gate is {gate!r}, expected 'bf16', 'fp16' or None")
        if not 1 <= fragments <= sync_every:
            raise ValueError(f"fragments is {fragments}, expected 1 to sync_every ({sync_every})")
        if not 1 <= bucket_numel < 1 << 31:
            raise ValueError(f"bucket_numel is {bucket_numel}, expected 1 to 2^31 - 1")
        if exchange not in _MODES:
            raise ValueError(f"exchange is {exchange!r}, expected one of {', '.join(map(repr, _MODES))}")
        if threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        self.sync_every = sync_every
        self.process_group = process_group
        if self.alone:
            _check_meant_to_be_alone()
        try:
            for name, hook in (("outer_optimizer", outer_optimizer), ("commit", commit), ("on_report", on_report)):
                if hook is not None and not callable(hook):
                    raise TypeError(f"{name} is a {type(hook).__name__}, expected {_CALLABLES[name]}")
            self._make(params, masters, outer_optimizer, _VIEWS[gate], fragments, bucket_numel, offload)
        except Exception as error:
            if not self.alone:
                with contextlib.suppress(Exception):
                    Together(process_group).gather({}, error, "meeting")  # the others wait in regroup
            raise
        self._mode, self._compress, self._threads = exchange, compress, threads
        self._commit_hook, self._verify, self._on_report = commit, verify, on_report
        self.steps = 0
        self.due: set[int] = set()
        self.last_report: SyncReport | None = None
        self.density = _FIRST_DENSITY  # of all ranks in the round before
        self._tensors = [[name, list(tensor.shape)] for name, tensor in self.theta.items()]
        self._settings = [gate, sync_every, fragments, bucket_numel, exchange]
        self._settings += [type(self.fragments[0].outer).__qualname__, verify, commit is not None]
        self._identity = hashlib.blake2b(repr((self._tensors, self._settings)).encode()).digest()
        self._broken = ""
        self._attached: Callable[[], bool] | None = None
        self._met: Callable[[], Any] = lambda: None  # the process group of the last meeting, while there is one
        self.regroup(process_group, joining=True)
        self._to_local(self.fragments)

    def _make(
        self,
        params: Params,
        masters: Params | None,
        outer_optimizer: OuterOptimizer | None,
        view: torch.dtype | None,
        fragments: int,
        bucket_numel: int,
        offload: bool,
    ) -> None:
        tensors = trained(params, masters)
        self.local, self._owners, self._casts, self.tied = tensors.local, tensors.owners, tensors.casts, tensors.tied
        self._device = next(iter(self.local.values())).device
        self._offload = offload
        work = {name: self._host_copy(tensor) for name, tensor in self.local.items()} if offload else self.local
        make = nesterov if outer_optimizer is None else outer_optimizer
        groups = in_fragments({name: tensor.numel() for name, tensor in self.local.items()}, fragments)
        self.fragments = []
        for names in groups:
            theta = {name: self._host_copy(work[name]) if offload else work[name].clone() for name in names}
            part = {name: work[name] for name in names}
            self.fragments.append(Fragment.of(part, theta, make, view, bucket_numel))

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def theta(self) -> dict[str, Tensor]:
        """The global weights by name, FP32; read only."""
        return {name: tensor for fragment in self.fragments for name, tensor in fragment.theta.items()}

    @property
    def residual(self) -> dict[str, Tensor]:
        """By name what did not fire yet, FP32; empty with gate=None. Read only."""
        return {name: tensor for part in self.fragments for name, tensor in (part.residual or {}).items()}

    @property
    def outer_optimizers(self) -> list[Optimizer]:
        """One a fragment, as for a schedule of learning rates."""
        return [fragment.outer for fragment in self.fragments]

    @property
    def rounds(self) -> int:
        """Rounds committed by the fragment that has fewest."""
        return min(fragment.rounds for fragment in self.fragments)

    @property
    def alone(self) -> bool:
        return not (dist.is_available() and dist.is_initialized())

    @property
    def world(self) -> int:
        """Ranks that take part."""
        return 1 if self.alone else dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        """This one's, in the group."""
        return 0 if self.alone else dist.get_rank(self.process_group)

    @property
    def _group(self) -> Any:
        if self.alone:
            return None
        return dist.group.WORLD if self.process_group is None else self.process_group

    # ---- what users call ------------------------------------------------------------------------------------------

    def attach(self, inner_optimizer: Optimizer) -> Any:
        """Call ``step`` after every step of ``inner_optimizer``. Returns a handle whose ``remove()`` ends that.

        Where several optimizers share the weights, attach to the one that steps last. All ranks must step equally
        often. Raises TypeError for what is no torch optimizer, ValueError where it steps none of these weights, or
        where another is attached.
        """
        if not isinstance(inner_optimizer, Optimizer):
            raise TypeError(f"attach: a {type(inner_optimizer).__name__}, expected the torch optimizer of the weights")
        stepped_here = {id(tensor) for group in inner_optimizer.param_groups for tensor in group["params"]}
        if not any(id(tensor) in stepped_here for tensor in self._owners.values()):
            raise ValueError(
                f"attach: this {type(inner_optimizer).__name__} steps none of the {len(self._owners)} weights that are "
                "synchronised; with masters= it must step those"
            )
        if self._attached is not None and self._attached():
            raise ValueError("attach: an optimizer is attached already; steps would count twice. Call remove() first")

        def stepped(*_: Any) -> None:
            self.step()

        handle = inner_optimizer.register_step_post_hook(stepped)
        hooks = inner_optimizer._optimizer_step_post_hooks
        self._attached = lambda: handle.id in hooks
        return handle

    def step(self) -> SyncReport | None:
        """Count an inner step, and synchronise what is due; the round's report, None where there was none.

        What a failed round had to send stays due: the next step tries again. Raises what ``sync`` raises.
        """
        self.steps += 1
        count = len(self.fragments)
        for k in range(count):
            if self.steps % self.sync_every == (k + 1) * self.sync_every // count % self.sync_every:
                self.due.add(k)
        return self.sync(sorted(self.due)) if self.due else None

    @torch.inference_mode(False)
    def sync(self, fragments: int | Iterable[int] | None = None) -> SyncReport:
        """One round, now, on all ranks: of the given fragments, by default of all.

        fragments: their numbers. Either every rank's residual, global weights and local weights go on, or nothing
        changes on any, and what was to be sent goes with the next round.

        Raises NonFiniteError (this rank's update is infinite or NaN), PulseError (a commit was interrupted; a parameter
        has other memory), GroupError (another rank failed, or is out of
        step, or is gone; names the rank and the reason). After a rank has gone, or a time-out, the process group is of
        no use any more: make a new one and call ``regroup``.
        """
        chosen = self._chosen(fragments)
        parts = [self.fragments[k] for k in chosen]
        self._check_usable(parts)
        phases = Phases(time.perf_counter)
        found = self._alone(parts, phases) if self.alone else self._together(chosen, phases)
        digest = self._committed(chosen, found, phases) if found.committed else ""
        numel = sum(part.numel for part in parts)
        report = SyncReport(
            round=parts[0].rounds + (not found.committed),
            fragments=tuple(chosen),
            committed=found.committed,
            world=self.world,
            num_fired=found.traffic.count,
            numel=numel,
            density=found.traffic.count / max(1, numel),
            mean_density=found.counts / max(1, numel * self.world),
            payload_bytes=found.traffic.payload,
            sent_bytes=found.traffic.sent,
            dense_bytes=4 * numel,
            ratio=4 * numel / found.traffic.payload if found.traffic.payload else 0.0,
            mode=found.mode,
            digest=digest,
            seconds=dict(phases.seconds),
        )
        self.last_report = report
        if self._on_report is not None:
            self._on_report(report)
        return report

    @torch.inference_mode(False)
    def regroup(self, process_group: Group = None, *, joining: bool = False) -> None:
        """Go on with the ranks of a new process group; collective over it.

        Ranks that are new in it (that call the constructor, or ``joining``) get the global weights and the outer
        optimizer's state of those who were there, and begin with a zero residual. A rank that had not heard that the
        last round was committed makes up for it, one whose commit was interrupted starts as a new one. All then have
        the same steps and due fragments. Raises GroupError where the ranks' models or settings differ, where one fails,
        and where none has a sound state.
        """
        self.process_group = process_group
        self._met = lambda: None
        if not self.alone:
            membership.meet(self, joining)
            self._met = weakref.ref(self._group)

    @torch.inference_mode(False)
    def hand_over(self, leaving: Sequence[int], to: int | None = None) -> dict[int, float]:
        """Before ranks leave: what they have not sent goes to the rank ``to``, or is lost; collective.

        leaving, to: ranks of the group, the same on all. Returns by leaving rank the sum of magnitudes of what it had
        not sent (``residual + (theta - local)``), which is what was handed over, or with ``to`` None what is lost with
        it. The leaving ranks' residuals are zero then. Raises ValueError (ranks), NonFiniteError, GroupError.
        """
        return membership.hand_over(self, list(leaving), to)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, the tensors themselves: global weights, outer optimizer, residual, counters.

        The local weights are the model's and the inner optimizer's own state_dicts. ``save`` writes all ranks' states.
        PulseError where a commit was interrupted.
        """
        from pulse_kernels.loco import checkpoint

        return checkpoint.state_dict(self)

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a ``state_dict`` of the same model and fragments. Local weights become the global ones: where it
        was taken between two rounds, load the model's own afterwards. ValueError, TypeError where it does not fit; all
        is then as it was."""
        from pulse_kernels.loco import checkpoint

        checkpoint.load_state_dict(self, state)

    def save(self, folder: Any) -> None:
        """Write the state of all ranks with torch.distributed.checkpoint; collective. docs/pulseloco.md: layout.

        Raises CheckpointError (writing failed), PulseError (a commit was interrupted), GroupError (on another rank).
        """
        from pulse_kernels.loco import checkpoint

        checkpoint.save(self, folder)

    @torch.inference_mode(False)
    def load(self, folder: Any, *, residuals: str = "sum") -> None:
        """Read what ``save`` wrote; collective. With as many ranks as then, each gets its own residual again.

        Local weights become the global ones. Where it was saved between two rounds, load each rank's own local weights
        afterwards.

        residuals: for another number of ranks. "sum": rank r gets the sum of the residuals of the old ranks r, r + K,
        r + 2K, ..., K being the ranks now, so that nothing is lost. "drop": all begin at zero, with a warning. Raises
        CheckpointError, ValueError where the folder is damaged or of another model, GroupError where another rank
        raises; all is then as it was.
        """
        from pulse_kernels.loco import checkpoint

        checkpoint.load(self, folder, residuals)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _host_copy(self, tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=torch.float32, device="cpu", pin_memory=torch.cuda.is_available())
        return copy.copy_(tensor)

    def _chosen(self, fragments: int | Iterable[int] | None) -> list[int]:
        if fragments is None:
            return list(range(len(self.fragments)))
        given = [fragments] if isinstance(fragments, int) else list(fragments)
        if not all(type(each) is int for each in given):
            raise TypeError(f"fragments {given!r:.80}: expected their numbers, 0 to {len(self.fragments) - 1}")
        chosen = sorted(set(given))
        if not chosen or chosen[0] < 0 or chosen[-1] >= len(self.fragments):
            raise ValueError(f"fragments {chosen}: expected some of 0 to {len(self.fragments) - 1}")
        return chosen

    def _check_usable(self, parts: Sequence[Fragment]) -> None:
        """What needs another process group. What else can be wrong with this rank, the others are told."""
        if self._group is not self._met():
            raise GroupError(
                "the process group is not the one of the last regroup(), or of the constructor: this rank may have "
                "other weights than the others. Call regroup() on all ranks"
            )
        if any(part.sent for part in parts):
            raise GroupError(
                "the round before failed when all ranks were about to commit it, and others may have: make a new "
                "process group and call regroup() on all ranks first"
            )

    def _check_sound(self) -> None:
        if self._broken:
            raise PulseError(self._broken)

    def _bring_local(self, parts: Sequence[Fragment]) -> None:
        """With offload, the local weights to where theta is. PulseError where this rank cannot take part."""
        self._check_sound()
        for part in parts:
            for name, work in part.work.items():
                check_same_memory(name, self._owners[name], self.local[name])
                if work is not self.local[name]:
                    work.copy_(self.local[name])

    def _alone(self, parts: Sequence[Fragment], phases: Phases) -> _Found:
        self._bring_local(parts)
        sent = [[part.gate(bucket) for bucket in part.buckets] for part in parts]
        phases.end("gate")
        means = [entries for own in sent for entries in own]
        count = sum(entries.count for entries in means)
        committed = self._commit_hook is None or bool(self._commit_hook())
        phases.end("agree")
        return _Found(sent, means, Traffic(count=count), count, None, committed)

    def _together(self, chosen: Sequence[int], phases: Phases) -> _Found:
        parts = [self.fragments[k] for k in chosen]
        places = [(k, bucket) for k, part in enumerate(parts) for bucket in part.buckets]
        sent: list[list[Entries]] = [[] for _ in parts]

        def gate(place: int) -> Entries:
            k, bucket = places[place]
            sent[k].append(parts[k].gate(bucket))
            return sent[k][-1]

        exchange = self._exchange(chosen)
        try:
            self._bring_local(parts)
        except Exception as error:
            exchange.failure = error
        try:
            sums = exchange.run([bucket.numel for _, bucket in places], gate, phases)
            means = exchange.means(sums)
            # From here on the others may have all they need to commit, even if this rank is interrupted.
            for part, own in zip(parts, sent, strict=True):
                part.sent, part.doubt = own, exchange.identity
            exchange.agree()
            committed = self._commit_hook is None or all(exchange.vote(_ballot(self._commit_hook)))
            phases.end("agree")
        except Exception as error:
            if isinstance(error, PulseError) or exchange.failure is not None:  # then no rank commits
                for part in parts:
                    part.sent = []
                if error is not exchange.failure and exchange.failure is not None:
                    raise exchange.failure from error
                raise
            raise GroupError(
                f"round {parts[0].rounds + 1} failed: {type(error).__name__}: {error}. Nothing was changed and nothing "
                "is lost. If a rank is gone or was too late, make a new process group and call regroup() on the ranks "
                "that are left"
            ) from error
        if not committed:
            for part in parts:
                part.sent = []
        return _Found(sent, means, exchange.traffic, exchange.counts, exchange, committed)

    def _exchange(self, chosen: Sequence[int]) -> Exchange:
        dense = self.fragments[0].view is None
        reduce = self._mode == "reduce" or (
            self._mode == "auto" and reduce_is_smaller(self.world, self.density, dense=dense)
        )
        compress = self._compress
        if compress is None:
            compress = group_device(self.process_group).type == "cpu"
        what = hashlib.blake2b(self._identity + repr(list(chosen)).encode(), digest_size=8).digest()
        tag = (sum(self.fragments[k].rounds for k in chosen) + 1, what)
        return Exchange(
            self.process_group, self._work_device, tag, reduce=reduce, compress=compress, threads=self._threads
        )

    @property
    def _work_device(self) -> torch.device:
        return torch.device("cpu") if self._offload else self._device

    def _committed(self, chosen: Sequence[int], found: _Found, phases: Phases) -> str:
        """The round is committed, the digests compared; this rank's. A rank that fails here tells the others, who wait
        for its digest."""
        parts = [self.fragments[k] for k in chosen]
        digest = ""
        try:
            self._commit(chosen, found)
            phases.end("commit")
            if self._verify:
                digest = StateDigest.of({n: tensor for part in parts for n, tensor in part.theta.items()}).hexdigest()
        except BaseException as error:
            if found.exchange is None or not self._verify:
                raise
            found.exchange.failure = error
        if self._verify:
            if found.exchange is not None:
                self._compare(parts, found.exchange, digest)
            phases.end("verify")
        return digest

    def _commit(self, chosen: Sequence[int], found: _Found) -> None:
        parts = [self.fragments[k] for k in chosen]
        self._broken = (
            "a round was interrupted while it was committed, so that this rank's state is neither the old nor the new "
            "one; call regroup() on all ranks, which gives it the others' state, or load a checkpoint on all"
        )
        for part in parts:
            part.sent = []  # no longer in doubt
        self.density = found.counts / max(1, sum(part.numel for part in parts) * self.world)
        means = iter(found.means)
        identity = "" if found.exchange is None else found.exchange.identity
        for part, sent in zip(parts, found.sent, strict=True):
            part.keep_residual(sent)
            part.step([next(means) for _ in part.buckets], identity)
        self._to_local(parts)
        self.due -= set(chosen)
        self._broken = ""

    def _to_local(self, parts: Sequence[Fragment]) -> None:
        """Local weights and their casts as ``work``, which the commit leaves as theta."""
        for part in parts:
            for name, work in part.work.items():
                if self.local[name] is not work:
                    self.local[name].copy_(work)
                if name in self._casts:
                    self._casts[name].detach().copy_(self.local[name])

    def _compare(self, parts: Sequence[Fragment], exchange: Exchange, digest: str) -> None:
        rows = [row.hex() for row in exchange.digests(bytes.fromhex(digest) or bytes(16))]
        if len(set(rows)) > 1:
            common = max(sorted(set(rows)), key=rows.count)
            others = {rank: f"digest {row}" for rank, row in enumerate(rows) if row != common}
            self._broken = (
                f"after round {parts[0].rounds} the global weights of ranks {sorted(others)} have another digest than "
                f"those of the others ({common}): memory was damaged, or something else writes to theta or to the "
                "outer optimizer's state. Load a checkpoint on all ranks"
            )
            raise GroupError(self._broken, others)
