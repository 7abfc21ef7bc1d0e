"""A PulseLoCo's state as a dict, and the states of all ranks on disk, through torch.distributed.checkpoint.

In the folder, by key: ``theta.NAME`` and ``outer.F.N`` (tensors of fragment F's outer optimizer) once,
``residual.RRRRR.NAME`` for every rank, ``facts`` (JSON as bytes) for the rest. Nothing is pickled but DCP's own index.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pulse_kernels.errors import CheckpointError, GroupError
from pulse_kernels.loco.optimizers import empty_of, from_facts, optimizer_facts, tensor_facts
from pulse_kernels.ranks.together import Together

if TYPE_CHECKING:
    from pulse_kernels.loco.loco import PulseLoCo

_FORMAT = 1
_Kind: TypeAlias = tuple[torch.Size, torch.dtype]


def _facts(loco: PulseLoCo) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "world": loco.world,
        "gated": loco.fragments[0].residual is not None,
        "fragments": [list(fragment.theta) for fragment in loco.fragments],
        "rounds": [fragment.rounds for fragment in loco.fragments],
        "history": [list(fragment.history) for fragment in loco.fragments],
        "steps": loco.steps,
        "due": sorted(loco.due),
        "density": loco.density,
    }


def state_dict(loco: PulseLoCo) -> dict[str, Any]:
    loco._check_sound()
    return {
        **_facts(loco),
        "theta": dict(loco.theta),
        "residual": dict(loco.residual),
        "outer": [fragment.outer.state_dict() for fragment in loco.fragments],
    }


def _check_fits(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    """ValueError unless all but the tensors is a state's, and of this model."""
    mine = _facts(loco)
    if missing := (mine.keys() | {"outer"}) - state.keys():
        raise ValueError(f"the state is damaged: it has no {min(missing)!r}")
    if state["format"] != _FORMAT:
        raise ValueError(f"a PulseLoCo state of format {state['format']!r:.40}, expected {_FORMAT}")
    if state["fragments"] != mine["fragments"]:
        raise ValueError("the state is of another model or of other fragments; use the same params and fragments=")
    if state["gated"] != mine["gated"]:
        raise ValueError(f"the state is of gate {'on' if state['gated'] else 'None'}; use the same gate=")
    count = len(loco.fragments)
    for key, sound in (
        ("world", _counts([state["world"]]) and 0 < state["world"] < 1 << 20),
        ("rounds", _counts(state["rounds"]) and len(state["rounds"]) == count),
        ("history", _is_history(state["history"], count)),
        ("steps", _counts([state["steps"]])),
        ("due", _counts(state["due"]) and all(k < count for k in state["due"])),
        ("density", type(state["density"]) in (int, float) and 0 <= state["density"] <= 1),
        ("outer", isinstance(state["outer"], list) and len(state["outer"]) == count),
    ):
        if not sound:
            raise ValueError(f"the state is damaged: its {key} is {state[key]!r:.80}")


def _is_history(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(own, list) and all(isinstance(each, str) for each in own) for own in values)
    )


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_tensors(found: Any, expected: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in expected.items():
        given = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise _misfit(f"{what} of {name!r:.200}", tensor)


def _misfit(what: str, tensor: Tensor) -> ValueError:
    return ValueError(f"{what} does not fit: expected float32 {list(tensor.shape)}")


def load_state_dict(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    _check(loco, state)
    _take(loco, state)


def _check(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    """Raises where the state does not fit; changes nothing."""
    _check_fits(loco, state)
    _check_tensors(state.get("theta"), loco.theta, "theta")
    _check_tensors(state.get("residual"), loco.residual, "residual")
    if state["world"] != loco.world:
        raise ValueError(
            f"the state is of one of {state['world']} ranks, there are {loco.world} now; use save() and load(), which "
            "share the residuals out"
        )


def _take(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    # Copies: torch's optimizers keep the tensors they are given, and the state would change with the next round.
    outer = copy.deepcopy(state["outer"])
    before = [copy.copy(fragment.outer.state_dict()) for fragment in loco.fragments]
    try:
        for fragment, own in zip(loco.fragments, outer, strict=True):
            fragment.outer.load_state_dict(own)
    except BaseException:
        for fragment, own in zip(loco.fragments, before, strict=True):
            fragment.outer.load_state_dict(own)
        raise
    loco._broken = "loading a state was interrupted, so that this rank has half of it; load it again"
    for name, tensor in loco.theta.items():
        tensor.copy_(state["theta"][name])
    for name, tensor in loco.residual.items():
        tensor.copy_(state["residual"][name])
    for fragment in loco.fragments:
        fragment.reset()
    loco._to_local(loco.fragments)
    for fragment, rounds, history in zip(loco.fragments, state["rounds"], state["history"], strict=True):
        fragment.rounds, fragment.history, fragment.sent = rounds, list(history), []
    loco.steps, loco.due, loco.density = state["steps"], set(state["due"]), float(state["density"])
    loco._broken = ""


def save(loco: PulseLoCo, folder: str | os.PathLike[str]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    tensors: dict[str, Any] = {}

    def ready() -> dict[str, Any]:
        loco._check_sound()
        facts = _facts(loco)
        tensors.update({f"theta.{name}": tensor for name, tensor in loco.theta.items()})
        facts["outer"] = []
        for k, fragment in enumerate(loco.fragments):
            outer, parts = optimizer_facts(fragment.outer)
            facts["outer"].append(outer)
            tensors.update({f"outer.{k}.{n}": part for n, part in enumerate(parts)})
        tensors.update({f"residual.{loco.rank:05d}.{name}": tensor for name, tensor in loco.residual.items()})
        if loco.rank == 0:
            tensors["facts"] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        return {"rounds": facts["rounds"]}

    rows = _all(loco, ready, "saving")
    if any(row != rows[0] for row in rows):
        raise GroupError("the ranks are at different rounds, there is no state to save; call regroup() on all ranks")
    _raising(lambda: dcp_save(tensors, checkpoint_id=folder, process_group=loco.process_group, no_dist=loco.alone),
             folder, "written")  # fmt: skip


def load(loco: PulseLoCo, folder: str | os.PathLike[str], residuals: str) -> None:
    kinds: dict[str, _Kind] = {}

    def look() -> dict[str, Any]:
        if residuals not in ("sum", "drop"):
            raise ValueError(f"residuals is {residuals!r}, expected 'sum' or 'drop'")
        kinds.update(_kinds(folder))
        if "facts" not in kinds or kinds["facts"][1] != torch.uint8:
            raise CheckpointError(f"{os.fspath(folder)} is no checkpoint of PulseLoCo: it has no 'facts'")
        return {"residuals": residuals}

    rows = _all(loco, look, "loading")
    if any(row != rows[0] for row in rows):
        raise GroupError("the ranks give different residuals=; call load alike on all")
    data = _read(loco, folder, {"facts": torch.empty(kinds["facts"][0], dtype=torch.uint8)})["facts"]
    facts: dict[str, Any] = {}
    outer: list[dict[str, Tensor]] = []  # by fragment, to be read

    def fit() -> dict[str, Any]:
        facts.update(_parsed(bytes(data.numpy()), folder))
        _check_fits(loco, facts)
        for name, tensor in loco.theta.items():
            if kinds.get(f"theta.{name}") != (tensor.shape, tensor.dtype):
                raise _misfit(f"theta of {name!r:.200}", tensor)
        for rank, (name, tensor) in itertools.product(range(facts["world"]), loco.residual.items()):
            if kinds.get(f"residual.{rank:05d}.{name}") != (tensor.shape, tensor.dtype):
                raise _misfit(f"residual of {name!r:.200} of rank {rank}", tensor)
        outer.extend(_places(facts["outer"], kinds, folder))
        return {"facts": hashlib.blake2b(bytes(data.numpy())).hexdigest()}

    rows = _all(loco, fit, "loading: what the folder holds")
    if any(row != rows[0] for row in rows):
        raise GroupError("the ranks see different checkpoints in the folder; give one that all ranks share")
    theta = _read(loco, folder, {f"theta.{name}": torch.empty_like(tensor) for name, tensor in loco.theta.items()})
    parts = [list(_read(loco, folder, places).values()) for places in outer]
    state = {
        **facts,
        "world": loco.world,
        "theta": {name.removeprefix("theta."): tensor for name, tensor in theta.items()},
        "residual": _residuals(loco, folder, facts, residuals),
        "outer": [from_facts(own, tensors) for own, tensors in zip(facts["outer"], parts, strict=True)],
    }

    def check() -> dict[str, Any]:
        _check(loco, state)
        return {}

    _all(loco, check, "loading: the state")
    _take(loco, state)


def _all(loco: PulseLoCo, act: Callable[[], dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [act()] if loco.alone else Together(loco.process_group).each(act, what)


def _raising(act: Callable[[], Any], folder: Any, what: str) -> None:
    """torch's CheckpointException is no Exception, which nobody expects of a damaged file."""
    try:
        with warnings.catch_warnings():
            # What no_dist asks for.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            act()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{os.fspath(folder)} could not be {what}: {error!s:.1000}") from error


def _parsed(data: bytes, folder: Any) -> dict[str, Any]:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(folder)}: its 'facts' are damaged: {error}") from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"{os.fspath(folder)}: its 'facts' are a {type(facts).__name__}, expected an object")
    return facts


def _places(outer: Any, kinds: Mapping[str, _Kind], folder: Any) -> list[dict[str, Tensor]]:
    """Memory for the tensors of the outer optimizers, by fragment and key; no more than the folder has."""
    try:
        places = []
        for k, own in enumerate(outer):
            facts = {f"outer.{k}.{n}": fact for n, fact in enumerate(tensor_facts(own))}
            if any(
                (list(kinds[key][0]), str(kinds[key][1])) != (fact["shape"], f"torch.{fact['dtype']}")
                for key, fact in facts.items()
            ):
                raise ValueError("its tensors have other shapes or dtypes")
            from_facts(own, [torch.empty(0)] * len(facts))
            places.append({key: empty_of(fact, "cpu") for key, fact in facts.items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(folder)}: the outer optimizers' state is damaged: {error}") from error
    return places


def _residuals(loco: PulseLoCo, folder: Any, facts: Mapping[str, Any], policy: str) -> dict[str, Tensor]:
    """This rank's residual, out of those of the ranks that saved."""
    total = {name: torch.zeros_like(tensor) for name, tensor in loco.residual.items()}
    if not total:
        return total
    if facts["world"] != loco.world and policy == "drop":
        warnings.warn(
            f"{os.fspath(folder)} was saved by {facts['world']} ranks and there are {loco.world}: all residuals, what "
            "the ranks had not sent, are dropped. residuals='sum' keeps them",
            stacklevel=4,
        )
        return total
    # All ranks read equally often: reading is collective.
    for first in range(0, facts["world"], loco.world):
        old = first + loco.rank
        wanted = {f"residual.{old:05d}.{name}": torch.empty_like(tensor) for name, tensor in total.items()}
        read = _read(loco, folder, wanted if old < facts["world"] else {})
        for key, tensor in read.items():
            name = key.split(".", 2)[2]
            if facts["world"] == loco.world:
                total[name] = tensor  # bit for bit, a zero's sign too
            else:
                total[name] += tensor
    return total


def _kinds(folder: str | os.PathLike[str]) -> dict[str, _Kind]:
    """Shape and dtype of every tensor in the folder."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        found = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        return {k: (one.size, one.properties.dtype) for k, one in found if isinstance(one, TensorStorageMetadata)}
    except Exception as error:
        raise CheckpointError(f"{os.fspath(folder)} is no checkpoint that can be read: {error}") from error


def _read(loco: PulseLoCo, folder: Any, into: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    state: dict[str, Any] = dict(into)
    if not loco.alone and not into:  # reading is collective
        state = {"facts": torch.empty(_kinds(folder)["facts"][0], dtype=torch.uint8)}
    if state:
        _raising(lambda: dcp_load(state, checkpoint_id=folder, process_group=loco.process_group, no_dist=loco.alone),
                 folder, "read")  # fmt: skip
    return into


__all__ = ["load", "load_state_dict", "save", "state_dict"]
