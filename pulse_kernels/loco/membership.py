"""Ranks that join, that leave, and that were left behind: all meet, and agree on whose state counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pulse_kernels.errors import GroupError
from pulse_kernels.loco.exchange import check_finite
from pulse_kernels.loco.fragment import Fragment
from pulse_kernels.loco.optimizers import empty_of, from_facts, optimizer_facts, tensor_facts
from pulse_kernels.loco.tensors import Bucket
from pulse_kernels.loco.wire import Entries
from pulse_kernels.ranks.collectives import Group, broadcast_tensor, group_device
from pulse_kernels.ranks.together import Together
from pulse_kernels.state import StateDigest

if TYPE_CHECKING:
    from pulse_kernels.loco.loco import PulseLoCo

_HALF = (
    "meeting the other ranks was interrupted, so that this rank's state is neither its own nor theirs; make a new "
    "process group and call regroup(), which gives it theirs"
)


def meet(loco: PulseLoCo, joining: bool) -> None:
    """All ranks of the group come to the state of the one that is furthest, the lowest of those."""
    joining = joining or bool(loco._broken)
    together = Together(loco.process_group)
    rows = together.each(lambda: _row(loco, joining), "meeting")
    _check_same(rows)
    leader = _leader(rows)
    stale = [
        [
            rank != leader and (each["joining"] or _at(each, k) != _at(rows[leader], k))
            for k in range(len(loco.fragments))
        ]
        for rank, each in enumerate(rows)
    ]
    if any(map(any, stale)):
        _send_states(loco, together, leader, rows[leader], stale, joining)
    for fragment in loco.fragments:
        fragment.sent = []
    # Ranks whose steps or due fragments differ would go into different rounds.
    loco.steps, loco.due, loco.density = (rows[leader][key] for key in ("steps", "due", "density"))
    loco.due = set(loco.due)
    if any(stale[loco.rank]):
        loco._broken = ""


def _row(loco: PulseLoCo, joining: bool) -> dict[str, Any]:
    return {
        "joining": joining,
        "broken": bool(loco._broken),
        "tensors": loco._tensors,
        "settings": loco._settings,
        "rounds": [fragment.rounds for fragment in loco.fragments],
        "history": [fragment.history for fragment in loco.fragments],
        "digests": [StateDigest.of(fragment.theta).hexdigest() for fragment in loco.fragments],
        "steps": loco.steps,
        "due": sorted(loco.due),
        "density": loco.density,
    }


def _leader(rows: Sequence[dict[str, Any]]) -> int:
    old = [rank for rank, row in enumerate(rows) if not row["joining"]]
    broken = {rank: "was interrupted" for rank, row in enumerate(rows) if row["broken"]}
    if not old and broken:
        raise GroupError(
            f"no rank has a sound state: a commit was interrupted on ranks {sorted(broken)}, and the others are new. "
            "Load a checkpoint on all ranks",
            broken,
        )
    return max(old, key=lambda rank: (sum(rows[rank]["rounds"]), -rank), default=0)


def _at(row: dict[str, Any], fragment: int) -> tuple[int, str]:
    return row["rounds"][fragment], row["digests"][fragment]


def _check_same(rows: Sequence[dict[str, Any]]) -> None:
    for rank, row in enumerate(rows):
        for what, fix in (("tensors", "give the same model"), ("settings", "give the same arguments")):
            if row[what] != rows[0][what]:
                odd = next((pair for pair in zip(rows[0][what], row[what], strict=False) if pair[0] != pair[1]), None)
                differs = (
                    f"{odd[1]} where rank 0 has {odd[0]}" if odd else f"{len(row[what])}, rank 0 {len(rows[0][what])}"
                )
                raise GroupError(f"rank {rank} has other {what} than rank 0: {differs}; {fix}", {rank: f"other {what}"})


def _send_states(
    loco: PulseLoCo, together: Together, leader: int, row: dict[str, Any], stale: list[list[bool]], joining: bool
) -> None:
    """theta and the outer optimizers' states of the leader, to those whose are stale. All is made ready, and what fails
    is told, before anything is sent."""
    sent = [k for k in range(len(loco.fragments)) if any(each[k] for each in stale)]
    mine = [k for k in sent if stale[loco.rank][k]]
    pending: dict[str, Tensor] = {}
    tensors: dict[int, list[Tensor]] = {}

    def ready() -> dict[str, Any]:
        if loco.rank == leader:
            found = {k: optimizer_facts(loco.fragments[k].outer) for k in sent}
            tensors.update({k: parts for k, (_, parts) in found.items()})
            return {"outer": {str(k): facts for k, (facts, _) in found.items()}}
        if not joining:
            for k in mine:
                pending.update(_pending(loco, loco.fragments[k], row["history"][k]))
        return {}

    facts = together.each(ready, "making ready to meet")[leader].get("outer", {})

    def memory() -> dict[str, Any]:
        if loco.rank != leader:
            tensors.update({k: [empty_of(fact, "cpu") for fact in tensor_facts(facts[str(k)])] for k in sent})
        return {}

    together.each(memory, "making room for the outer optimizer's state")
    if mine:
        loco._broken = _HALF
    for k in sent:
        for tensor in [*loco.fragments[k].theta.values(), *tensors[k]]:
            broadcast_flat(tensor, leader, loco.process_group)

    def take() -> dict[str, Any]:
        for k in mine:
            fragment = loco.fragments[k]
            fragment.outer.load_state_dict(from_facts(facts[str(k)], tensors[k]))
            fragment.rounds, fragment.history = row["rounds"][k], row["history"][k]
            for name, residual in (fragment.residual or {}).items():
                residual.zero_()
                if name in pending:
                    residual.copy_(pending[name])
            fragment.reset()
            if fragment.residual is None:
                for name in fragment.theta.keys() & pending.keys():
                    fragment.work[name] -= pending[name]
            loco._to_local([fragment])
        return {}

    together.each(take, "taking over the state")


def _pending(loco: PulseLoCo, fragment: Fragment, history: Sequence[str]) -> dict[str, Tensor]:
    """What a rank that was left behind has not sent. history: what identifies the last rounds of the others."""
    loco._bring_local([fragment])
    pending = {name: fragment.pending(name) for name in fragment.theta}
    if fragment.sent and fragment.doubt in history:  # the others have committed it
        for bucket, sent in zip(fragment.buckets, fragment.sent, strict=True):
            for part, values in zip(bucket.of(pending), _dense(bucket, sent), strict=True):
                part -= values
    return pending


def _dense(bucket: Bucket, sent: Entries) -> list[Tensor]:
    """The entries of each piece of a bucket, 0 where there are none."""
    values = sent.values
    if sent.indices is not None:
        values = torch.zeros(bucket.numel, dtype=torch.float32, device=values.device)
        values[sent.indices.long()] = sent.values
    return list(values.split([piece.stop - piece.start for piece in bucket.pieces]))


def hand_over(loco: PulseLoCo, leaving: Sequence[int], to: int | None) -> dict[int, float]:
    loco._check_usable(loco.fragments)
    failure: Exception | None = None
    ranks = range(loco.world)
    if not leaving or any(rank not in ranks for rank in leaving) or (to is not None and to not in ranks):
        failure = ValueError(f"leaving {list(leaving)}, to {to}: expected ranks of the group, 0 to {loco.world - 1}")
    elif to in leaving or len(set(leaving)) < len(leaving):
        failure = ValueError(f"leaving {list(leaving)}, to {to}: name each rank once, and hand over to one that stays")

    def ready() -> dict[str, Any]:
        if failure is not None:
            raise failure
        loco._bring_local(loco.fragments)
        for fragment in loco.fragments if loco.rank in leaving else []:
            for name in fragment.theta:
                check_finite(fragment.pending(name), f"what this rank has not sent of {name!r:.200}")
        return {"leaving": list(leaving), "to": to}

    if loco.alone:
        ready()
    else:
        together = Together(loco.process_group)
        rows = together.each(ready, "handing over")
        if any(row != rows[0] for row in rows):
            raise GroupError("the ranks name different ranks to leave or to hand over to; call hand_over alike on all")
    mass = 0.0
    for fragment in loco.fragments:
        for name in fragment.theta:
            pending = fragment.pending(name) if loco.rank in leaving else None
            if pending is not None:
                mass += float(pending.abs().sum(dtype=torch.float64))
            if to is not None:
                _hand_over(loco, fragment, name, pending, leaving, to)
            if pending is not None:
                fragment.work[name].copy_(fragment.theta[name])
                if fragment.residual is not None:
                    fragment.residual[name].zero_()
    loco._to_local(loco.fragments if loco.rank in leaving else [])
    if loco.alone:
        return {0: mass}
    masses = together.gather({"mass": mass}, None, "handing over, done")
    return {rank: masses[rank]["mass"] for rank in leaving}


def _hand_over(
    loco: PulseLoCo, fragment: Fragment, name: str, pending: Tensor | None, leaving: Sequence[int], to: int
) -> None:
    device = group_device(loco.process_group)
    if pending is not None:
        dist.send(pending.to(device), group=loco.process_group, group_dst=to)
    elif loco.rank == to:
        for rank in leaving:
            theta = fragment.theta[name]
            received = torch.empty(theta.shape, dtype=torch.float32, device=device)
            dist.recv(received, group=loco.process_group, group_src=rank)
            if fragment.residual is not None:
                fragment.residual[name] += received.to(theta.device)
            else:
                fragment.work[name] -= received.to(theta.device)
                if loco._offload:
                    loco.local[name].copy_(fragment.work[name])


def broadcast_flat(tensor: Tensor, leader: int, group: Group) -> None:
    """A contiguous tensor's bytes, in place."""
    if tensor.numel():
        broadcast_tensor(tensor.detach().reshape(-1).view(torch.uint8), leader, group)
