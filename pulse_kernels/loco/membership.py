"""Ranks that join, that leave, and that were left behind: all meet, and agree on whose state counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pulse_kernels.errors import GroupError
from pulse_kernels.loco.exchange import check_finite
from pulse_kernels.loco.fragment import Fragment
from pulse_kernels.loco.tensors import by_pieces
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
    rows = told(together, lambda: _row(loco, joining), "meeting")
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
        _send_states(loco, together, leader, rows[leader]["rounds"], stale, joining)
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
        "digests": [StateDigest.of(fragment.theta).hexdigest() for fragment in loco.fragments],
        "steps": loco.steps,
        "due": sorted(loco.due),
        "density": loco.density,
    }


def told(together: Together, act: Callable[[], dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """What ``act`` returns on every rank; what it raises on one, all are told."""
    row: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        row = act()
    except Exception as error:
        failure = error
    return together.gather(row, failure, what)


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
    loco: PulseLoCo, together: Together, leader: int, rounds: Sequence[int], stale: list[list[bool]], joining: bool
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
                pending.update(_pending(loco, loco.fragments[k], rounds[k]))
        return {}

    facts = told(together, ready, "making ready to meet")[leader].get("outer", {})

    def memory() -> dict[str, Any]:
        if loco.rank != leader:
            tensors.update({k: [empty_of(fact, "cpu") for fact in tensor_facts(facts[str(k)])] for k in sent})
        return {}

    told(together, memory, "making room for the outer optimizer's state")
    if mine:
        loco._broken = _HALF
    for k in sent:
        for tensor in [*loco.fragments[k].theta.values(), *tensors[k]]:
            broadcast_flat(tensor, leader, loco.process_group)

    def take() -> dict[str, Any]:
        for k in mine:
            fragment = loco.fragments[k]
            fragment.outer.load_state_dict(from_facts(facts[str(k)], tensors[k]))
            fragment.rounds = rounds[k]
            for name, residual in (fragment.residual or {}).items():
                residual.zero_()
                if name in pending:
                    residual.copy_(pending[name])
            fragment.reset()
            loco._to_local([fragment])
        return {}

    told(together, take, "taking over the state")


def _pending(loco: PulseLoCo, fragment: Fragment, rounds: int) -> dict[str, Tensor]:
    """What a rank that was left behind at ``rounds`` has not sent; nothing with gate=None, where it cannot be kept."""
    if fragment.residual is None:
        return {}
    loco._bring_local([fragment])
    pending = {name: fragment.pending(name) for name in fragment.theta}
    if rounds > fragment.rounds:
        _without_sent(fragment, pending)
    return pending


def _without_sent(fragment: Fragment, pending: dict[str, Tensor]) -> None:
    """The others committed the round that this rank was in doubt about: what it had sent is not pending any more."""
    for bucket, sent in zip(fragment.buckets, fragment.sent, strict=False):
        assert sent.indices is not None
        for piece, indices, values in by_pieces(bucket, sent.indices, sent.values):
            piece.of(pending)[indices.long()] -= values


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
        rows = told(together, ready, "handing over")
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


# ---- optimizers over a group ----------------------------------------------------------------------------------------


def optimizer_facts(optimizer: Optimizer) -> tuple[dict[str, Any], list[Tensor]]:
    """Its state as JSON-able data, and the tensors in it; ``from_facts`` puts them together again."""
    state = optimizer.state_dict()
    tensors: list[Tensor] = []

    def fact(value: Any, what: str) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach().contiguous())
            return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple) and all(isinstance(each, bool | int | float | str) for each in value):
            return list(value)
        raise TypeError(
            f"the outer optimizer's {what} is a {type(value).__name__}; only tensors, numbers, strings and lists of "
            "these can be sent or saved"
        )

    facts = {
        "state": {
            str(k): {key: fact(value, key) for key, value in own.items()} for k, own in sorted(state["state"].items())
        },
        "param_groups": [{key: fact(value, key) for key, value in group.items()} for group in state["param_groups"]],
    }
    return facts, tensors


def tensor_facts(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The places of tensors in ``optimizer_facts``, in order; whoever has the tensors puts them there."""
    rows = [*facts["state"].values(), *facts["param_groups"]]
    return [value for row in rows for value in row.values() if isinstance(value, dict)]


def from_facts(facts: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The optimizer's ``state_dict``."""
    left = iter(tensors)

    def row(values: dict[str, Any]) -> dict[str, Any]:
        return {key: next(left) if isinstance(value, dict) else value for key, value in values.items()}

    return {
        "state": {int(k): row(own) for k, own in facts["state"].items()},
        "param_groups": [row(group) for group in facts["param_groups"]],
    }


def empty_of(fact: dict[str, Any], device: torch.device | str) -> Tensor:
    dtype = getattr(torch, str(fact["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise GroupError(f"a tensor of dtype {fact['dtype']!r:.40} in the outer optimizer's state, which is none")
    return torch.empty(fact["shape"], dtype=dtype, device=device)


def broadcast_flat(tensor: Tensor, leader: int, group: Group) -> None:
    """A contiguous tensor's bytes, in place."""
    if tensor.numel():
        broadcast_tensor(tensor.detach().reshape(-1).view(torch.uint8), leader, group)
