"""Consecutive patches as one: what becomes of each tensor, and its changes merged; the last writer wins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pulse_kernels import checks
from pulse_kernels.backends import reference
from pulse_kernels.errors import BaseMismatchError


class Changes(Protocol):
    """What has the fields of a TensorPatch."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def indices(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    @property
    def old_values(self) -> Tensor | None: ...


class Step(Protocol):
    """What has the fields of a Patch."""

    @property
    def base_version(self) -> int | None: ...

    @property
    def version(self) -> int | None: ...

    @property
    def tensors(self) -> Mapping[str, Changes]: ...

    @property
    def added(self) -> Mapping[str, Tensor]: ...

    @property
    def removed(self) -> Sequence[str]: ...

    @property
    def base_digest(self) -> str: ...

    @property
    def digest(self) -> str: ...


def check_chain(patches: Sequence[Step]) -> None:
    """BaseMismatchError unless each patch begins where the one before it ends, as far as they know."""
    for k, (last, patch) in enumerate(itertools.pairwise(patches), 1):
        if None not in (last.version, patch.base_version) and last.version != patch.base_version:
            raise BaseMismatchError(
                f"patches[{k}] is made for version {patch.base_version}, the one before it makes version "
                f"{last.version}; fold consecutive patches, in order"
            )
        if last.digest and patch.base_digest and last.digest != patch.base_digest:
            raise BaseMismatchError(
                f"patches[{k}] has a base of digest {patch.base_digest}, the one before it makes {last.digest}; fold "
                "consecutive patches, in order"
            )


@dataclass
class Fate:
    """What becomes of a tensor. changes: in order, to the base's tensor, or to ``added`` where that is there.
    in_base: whether the base has the name, None where the patches do not show it."""

    in_base: bool | None
    changes: list[Changes] = field(default_factory=list)
    added: Tensor | None = None
    removed: bool = False

    def remove(self) -> None:
        self.changes, self.added, self.removed = [], None, True

    def add(self, tensor: Tensor) -> None:
        self.changes, self.added, self.removed = [], tensor, False

    def change(self, name: str, item: Changes) -> None:
        if self.removed:
            raise BaseMismatchError(f"{name!r} is changed after it was removed; fold consecutive patches, in order")
        like: Changes | Tensor = item
        if self.added is not None:
            like = self.added
        elif self.changes:
            like = self.changes[0]
        if tuple(like.shape) != item.shape or like.dtype != item.dtype:
            raise BaseMismatchError(
                f"{name!r} is changed as {checks.short(item.dtype)} {list(item.shape)}, before that it is "
                f"{checks.short(like.dtype)} {list(like.shape)}; fold consecutive patches, in order"
            )
        self.changes.append(item)


def fates(patches: Sequence[Step]) -> dict[str, Fate]:
    """What becomes of every tensor that any of the patches names."""
    found: dict[str, Fate] = {}
    for patch in patches:
        for name in patch.removed:
            fate = found.setdefault(name, Fate(in_base=True))
            if fate.removed:
                raise BaseMismatchError(f"{name!r} is removed twice; fold consecutive patches, in order")
            fate.remove()
        for name, tensor in patch.added.items():  # one that is there is replaced
            found.setdefault(name, Fate(in_base=None)).add(tensor)
        for name, item in patch.tensors.items():
            found.setdefault(name, Fate(in_base=True)).change(name, item)
    return found


def changed(tensor: Tensor, items: Sequence[Changes]) -> Tensor:
    """A copy of ``tensor`` with all changes, in order; itself where there are none. Positions are checked."""
    if not any(item.indices.numel() for item in items):
        return tensor
    tensor = reference.dense(checks.copied(tensor))
    flat = reference.bits(tensor)
    for item in items:
        flat[item.indices.to(flat.device).long()] = _bits(item.values).to(flat.device)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    return reference.bits(reference.dense(tensor))


def fold_changes(items: Sequence[Changes], numel: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(indices, values, old values) of changes to one tensor of ``numel`` elements, merged, where the last ones are.

    Old values are those before the first change, None unless all know theirs; positions that have their old bits again
    are left out then. Positions are checked. One stable sort; about 100 bytes of memory a change.
    """
    items = [item for item in items if item.indices.numel()] or items[-1:]
    if len(items) == 1:
        return items[0].indices, items[0].values, items[0].old_values
    device, dtype = items[-1].values.device, items[-1].dtype
    positions, entries = _in_order([item.indices.to(device) for item in items], numel)
    differs = positions[1:] != positions[:-1]
    edge = differs.new_ones(1)
    last = torch.cat([differs, edge])
    indices, winners = _where(last, positions, entries)
    values = torch.cat([_bits(item.values).to(device) for item in items])[winners]
    known = [_bits(item.old_values).to(device) for item in items if item.old_values is not None]
    old_values = None
    if len(known) == len(items):
        old_values = torch.cat(known)[_where(torch.cat([edge, differs]), entries)[0]]
        moved = old_values != values
        if not moved.all():
            indices, values, old_values = _where(moved, indices, values, old_values)
        old_values = old_values.view(dtype)
    return indices.to(checks.index_dtype("fold", numel, None)), values.view(dtype), old_values


def _where(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """``tensor[mask]`` of each; on the CPU by numpy, in half the time."""
    if mask.device.type != "cpu":
        return [tensor[mask] for tensor in tensors]
    chosen = mask.numpy()
    return [torch.from_numpy(tensor.numpy()[chosen]) for tensor in tensors]


def _in_order(indices: Sequence[Tensor], numel: int) -> tuple[Tensor, Tensor]:
    """The entries of all lists by position, those of one position in the lists' order: (positions, entry numbers)."""
    total = sum(one.numel() for one in indices)
    joined = torch.cat([one.long() for one in indices])
    shift = total.bit_length()
    if joined.device.type != "cpu" or numel.bit_length() + shift > 63:
        positions, entries = torch.sort(joined, stable=True)
        return positions, entries
    # Position and entry number in one integer. numpy's stable sort finds the runs that are in order and merges them.
    joined <<= shift
    joined |= torch.arange(total, device=joined.device)
    joined.numpy().sort(kind="stable")
    return joined >> shift, joined & ((1 << shift) - 1)


__all__ = ["Fate", "changed", "check_chain", "fates", "fold_changes"]
