"""A PulseLoCo's state as a dict, and the states of all ranks on disk, through torch.distributed.checkpoint.

In the folder, by key: ``theta.NAME`` and ``outer.F.N`` (tensors of fragment F's outer optimizer) once,
``residual.RRRRR.NAME`` for every rank, ``facts`` (JSON as bytes) for the rest. Nothing is pickled but DCP's own index.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pulse_kernels.errors import CheckpointError
from pulse_kernels.loco.membership import empty_of, from_facts, optimizer_facts, tensor_facts

if TYPE_CHECKING:
    from pulse_kernels.loco.loco import PulseLoCo

_FORMAT = 1


def _facts(loco: PulseLoCo) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "world": loco.world,
        "gated": loco.fragments[0].residual is not None,
        "fragments": [list(fragment.theta) for fragment in loco.fragments],
        "rounds": [fragment.rounds for fragment in loco.fragments],
        "steps": loco.steps,
        "due": sorted(loco.due),
        "density": loco.density,
    }


def state_dict(loco: PulseLoCo) -> dict[str, Any]:
    return {
        **_facts(loco),
        "theta": dict(loco.theta),
        "residual": dict(loco.residual),
        "outer": [fragment.outer.state_dict() for fragment in loco.fragments],
    }


def _check_fits(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    mine = _facts(loco)
    if state.get("format") != _FORMAT:
        raise ValueError(f"a PulseLoCo state of format {state.get('format')!r:.40}, expected {_FORMAT}")
    if state["fragments"] != mine["fragments"]:
        raise ValueError("the state is of another model or of other fragments; use the same params and fragments=")
    if state["gated"] != mine["gated"]:
        raise ValueError(f"the state is of gate {'on' if state['gated'] else 'None'}; use the same gate=")


def _check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise ValueError(f"{what} of {name!r:.200} does not fit: expected float32 {list(tensor.shape)}")


def load_state_dict(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    _check_fits(loco, state)
    _check_tensors(state["theta"], loco.theta, "theta")
    _check_tensors(state["residual"], loco.residual, "residual")
    if state["world"] != loco.world:
        raise ValueError(
            f"the state is of one of {state['world']} ranks, there are {loco.world} now; use save() and load(), which "
            "share the residuals out"
        )
    before = [fragment.outer.state_dict() for fragment in loco.fragments]
    try:
        for fragment, outer in zip(loco.fragments, state["outer"], strict=True):
            fragment.outer.load_state_dict(outer)
    except BaseException:
        for fragment, outer in zip(loco.fragments, before, strict=True):
            fragment.outer.load_state_dict(outer)
        raise
    _take(loco, state)


def _take(loco: PulseLoCo, state: Mapping[str, Any]) -> None:
    for name, tensor in loco.theta.items():
        tensor.copy_(state["theta"][name])
    for name, tensor in loco.residual.items():
        tensor.copy_(state["residual"][name])
    for fragment, rounds in zip(loco.fragments, state["rounds"], strict=True):
        fragment.rounds, fragment.sent = rounds, []
    loco.steps, loco.due, loco.density = state["steps"], set(state["due"]), state["density"]
    loco._broken = ""


def save(loco: PulseLoCo, folder: str | os.PathLike[str]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    facts = _facts(loco)
    tensors: dict[str, Any] = {f"theta.{name}": tensor for name, tensor in loco.theta.items()}
    facts["outer"] = []
    for k, fragment in enumerate(loco.fragments):
        outer, parts = optimizer_facts(fragment.outer)
        facts["outer"].append(outer)
        tensors.update({f"outer.{k}.{n}": part for n, part in enumerate(parts)})
    tensors.update({f"residual.{loco.rank:05d}.{name}": tensor for name, tensor in loco.residual.items()})
    tensors["facts"] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    dcp_save(tensors, checkpoint_id=folder, process_group=loco.process_group, no_dist=loco.alone)


def load(loco: PulseLoCo, folder: str | os.PathLike[str], residuals: str) -> None:
    if residuals not in ("sum", "drop"):
        raise ValueError(f"residuals is {residuals!r}, expected 'sum' or 'drop'")
    sizes = _sizes(folder)
    if "facts" not in sizes:
        raise CheckpointError(f"{os.fspath(folder)} is no checkpoint of PulseLoCo: it has no 'facts'")
    data = _read(loco, folder, {"facts": torch.empty(sizes["facts"], dtype=torch.uint8)})["facts"]
    facts = json.loads(bytes(data.numpy()))
    _check_fits(loco, facts)
    for name, tensor in loco.theta.items():
        if sizes.get(f"theta.{name}") != tensor.shape:
            raise ValueError(f"theta of {name!r:.200} does not fit: expected float32 {list(tensor.shape)}")
    theta = _read(loco, folder, {f"theta.{name}": torch.empty_like(tensor) for name, tensor in loco.theta.items()})
    outer = []
    for k, own in enumerate(facts["outer"]):
        places = tensor_facts(own)
        parts = _read(loco, folder, {f"outer.{k}.{n}": empty_of(fact, "cpu") for n, fact in enumerate(places)})
        outer.append(from_facts(own, list(parts.values())))
    residual = _residuals(loco, folder, facts, residuals)
    load_state_dict(
        loco,
        {
            **facts,
            "world": loco.world,
            "theta": {name.removeprefix("theta."): tensor for name, tensor in theta.items()},
            "residual": residual,
            "outer": outer,
        },
    )


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


def _sizes(folder: str | os.PathLike[str]) -> dict[str, torch.Size]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{os.fspath(folder)} is no checkpoint that can be read: {error}") from error
    found = metadata.state_dict_metadata.items()
    return {key: each.size for key, each in found if isinstance(each, TensorStorageMetadata)}


def _read(loco: PulseLoCo, folder: Any, into: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    if not loco.alone and not into:
        into = {"facts": torch.empty(_sizes(folder)["facts"], dtype=torch.uint8)}
        dcp_load(into, checkpoint_id=folder, process_group=loco.process_group)
        return {}
    if into:
        state: dict[str, Any] = dict(into)
        dcp_load(state, checkpoint_id=folder, process_group=loco.process_group, no_dist=loco.alone)
    return into


__all__ = ["load", "load_state_dict", "save", "state_dict"]
