"""The patches of several publishing ranks, each with its own part of the state, as the one patch they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pulse_kernels.errors import ChainError
from pulse_kernels.patch import Patch, TensorPatch


def merge_parts(patches: Sequence[Patch], where: str) -> Patch:
    """One patch that changes what all of ``patches`` do. ChainError where two set the same element or disagree on what
    a tensor is. where: what messages call it."""
    if len(patches) == 1:
        return patches[0]
    by_name: dict[str, list[TensorPatch]] = {}
    for patch in patches:
        if patch.added or patch.removed:
            raise ChainError(f"{where}: a part adds or removes tensors, which the part of a rank cannot")
        for name, item in patch.tensors.items():
            by_name.setdefault(name, []).append(item)
    return Patch(tensors={name: _merged(items, where) for name, items in by_name.items()})


def _merged(items: list[TensorPatch], where: str) -> TensorPatch:
    first = items[0]
    if len(items) == 1:
        return first
    for item in items:
        if (item.shape, item.dtype) != (first.shape, first.dtype):
            raise ChainError(
                f"{where}: {first.name!r:.200} is {first.dtype} {list(first.shape)} in one part and {item.dtype} "
                f"{list(item.shape)} in another"
            )
    wide = torch.int64 if any(item.indices.dtype == torch.int64 for item in items) else torch.int32
    indices, order = torch.cat([item.indices.to(wide) for item in items]).sort()
    if bool((indices[1:] == indices[:-1]).any()):
        raise ChainError(f"{where}: two parts set the same element of {first.name!r:.200}")
    # Joined as integers: not every dtype can be indexed.
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
    values = torch.cat([item.values.view(kind) for item in items])[order].view(first.dtype)
    return replace(first, indices=indices, values=values, old_values=None)
