"""An optimizer's state as JSON-able facts and the tensors in it: how it travels and is saved, without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pulse_kernels.errors import GroupError


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
