"""Where a rank's tensors lie in the model: boxes, their positions and digests in global coordinates."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulse_kernels import ops
from pulse_kernels.checks import INT32_NUMEL, short
from pulse_kernels.state import Params, named_tensors, tensor_key, unsigned

_CHUNK = 1 << 22  # elements whose positions are made at once


@dataclass(frozen=True)
class Shard:
    """This rank holds a box of a tensor: the tensor's global ``shape``, and where the box starts in each dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor: ``shape`` of the whole, ``offset`` where the box starts, ``local`` its own shape.

    Flat positions inside the box are in the order of the whole tensor's, as both are row-major.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.local == self.shape

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.local)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes the box in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.local, strict=True))

    def _cut(self) -> int:
        """The dimensions before the ones that the box has all of."""
        cut = len(self.shape)
        while cut and self.local[cut - 1] == self.shape[cut - 1]:
            cut -= 1
        return cut

    def positions(self, indices: Tensor) -> Tensor:
        """Flat positions in the whole tensor of flat ``indices`` in the box: int32, or int64 in large tensors, [n]."""
        dtype = torch.int32 if prod(self.shape) <= INT32_NUMEL else torch.int64
        cut = self._cut()
        if not cut or not indices.numel():
            return indices.to(dtype)
        strides = [prod(self.shape[k + 1 :]) for k in range(cut)]
        run = self.local[cut - 1] * strides[cut - 1]  # elements that lie side by side in both
        rest = indices.long()
        found = rest % run + self.offset[cut - 1] * strides[cut - 1]
        rest = rest // run
        for k in reversed(range(cut - 1)):
            found += (rest % self.local[k] + self.offset[k]) * strides[k]
            rest = rest // self.local[k]
        return found.to(dtype)

    def lanes(self, name: str, tensor: Tensor) -> tuple[int, int]:
        """What the box's values add to the digest of the whole tensor, whose presence is not counted; two lanes."""
        flat = tensor.detach().reshape(-1)
        key = tensor_key(name, self.dtype, self.shape)
        cut = self._cut()
        total = torch.zeros(2, dtype=torch.int64, device=flat.device)
        if prod(self.local[: max(0, cut - 1)]) == 1:  # one run
            start = sum(begin * prod(self.shape[k + 1 :]) for k, begin in enumerate(self.offset))
            total = ops.digest(flat, key, start)
        else:
            for start in range(0, flat.numel(), _CHUNK):
                part = flat[start : start + _CHUNK]
                inside = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
                total = ops.digest_update(total, self.positions(inside), torch.zeros_like(part), part, key)
        return unsigned(total.tolist())


class Local(Mapping[str, Tensor]):
    """``params`` with the local part in place of each DTensor, looked up anew at every access."""

    def __init__(self, params: Params, what: str = "params") -> None:
        given = hasattr(params, "state_dict") or isinstance(params, Mapping)
        self._params, self._what = params if given else named_tensors(params, what), what

    def _now(self) -> dict[str, Tensor]:
        return {name: _local(tensor) for name, tensor in named_tensors(self._params, self._what).items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def items(self) -> Any:  # once through the parameters, not once a name
        return self._now().items()


def boxes_of(params: Params, shards: Mapping[str, Shard] | None) -> dict[str, Box]:
    """The box of each tensor of ``params``: from ``shards``, from a DTensor's placement, else the whole tensor.

    Raises ValueError where a shard does not fit its tensor, or a DTensor is not a box.
    """
    named = named_tensors(params)
    shards = {} if shards is None else shards
    if unknown := shards.keys() - named.keys():
        raise ValueError(f"shards: {min(unknown)!r:.200} is not among params; name tensors that this rank has")
    boxes = {}
    for name, tensor in named.items():
        if _is_dtensor(tensor):
            if name in shards:
                raise ValueError(f"shards: {name!r:.200} is a DTensor, which knows its place; leave it out")
            boxes[name] = _box_of_dtensor(name, tensor)
            continue
        local = tuple(tensor.shape)
        shard = shards.get(name)
        shape, offset = (local, (0,) * len(local)) if shard is None else (tuple(shard.shape), tuple(shard.offset))
        if not len(shape) == len(offset) == len(local) or not all(
            start >= 0 and start + size <= whole for start, size, whole in zip(offset, local, shape, strict=True)
        ):
            raise ValueError(
                f"shards: {name!r:.200} has shape {list(local)} here, which does not fit into {list(shape)} at "
                f"{list(offset)}; give the global shape, and the start of this rank's box in each dimension"
            )
        boxes[name] = Box(tensor.dtype, shape, offset, local)
    return boxes


def owners(boxes: Sequence[Mapping[str, Box]]) -> dict[str, dict[int, Box]]:
    """Who sends what, from the boxes of all ranks: name -> rank -> its box; of equal boxes that of the lowest rank.

    Boxes without elements are left out, unless the tensor has none. Raises ValueError where the boxes of a tensor
    disagree on its kind, overlap or leave gaps.
    """
    result: dict[str, dict[int, Box]] = {}
    for rank, mine in enumerate(boxes):
        for name, box in mine.items():
            found = result.setdefault(name, {})
            for other, theirs in found.items():
                if (theirs.dtype, theirs.shape) != (box.dtype, box.shape):
                    raise ValueError(
                        f"{name!r:.200} is {short(theirs.dtype)} {list(theirs.shape)} on rank {other} and "
                        f"{short(box.dtype)} {list(box.shape)} on rank {rank}; pass shards= where a rank holds a part"
                    )
                break
            if box not in found.values():
                found[rank] = box
    for name, found in result.items():
        if any(box.numel for box in found.values()):
            result[name] = {rank: box for rank, box in found.items() if box.numel}
        _check_tiling(name, list(result[name].values()))
    return result


def _check_tiling(name: str, boxes: Sequence[Box]) -> None:
    """ValueError unless the boxes cover every element once."""
    shape = boxes[0].shape
    if len(boxes) == 1 and boxes[0].whole:
        return
    cuts = [
        sorted({0, size, *(b.offset[k] for b in boxes), *(b.offset[k] + b.local[k] for b in boxes)})
        for k, size in enumerate(shape)
    ]
    cells = np.zeros([len(each) - 1 for each in cuts], dtype=np.int64)
    for box in boxes:
        where = tuple(
            slice(each.index(start), each.index(start + size))
            for each, start, size in zip(cuts, box.offset, box.local, strict=True)
        )
        cells[where] += 1
    if not bool((cells == 1).all()):
        odd = np.argwhere(cells != 1)[0]
        count = int(cells[tuple(odd)])
        at = [each[k] for each, k in zip(cuts, odd, strict=True)]
        raise ValueError(
            f"{name!r:.200} {list(shape)}: the element at {at} is in {count} of the ranks' boxes, expected one (or "
            "equal boxes); check shards= on every rank"
        )


def _is_dtensor(tensor: Tensor) -> bool:
    module: Any = sys.modules.get("torch.distributed.tensor")  # there is none unless it was imported
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Tensor) -> Tensor:
    if not _is_dtensor(tensor):
        return tensor
    placed: Any = tensor.detach()
    return placed.to_local()


def _box_of_dtensor(name: str, tensor: Any) -> Box:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{name!r:.200} is a DTensor with partial sums ({tensor.placements}); redistribute it before publishing"
        )
    shape = tuple(tensor.shape)
    local = tuple(_local(tensor).shape)
    found, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(found) != local:
        raise ValueError(
            f"{name!r:.200} is a DTensor whose local part is {list(local)}, expected {list(found)} by its placements; "
            "only DTensors whose parts are boxes can be published"
        )
    at = (0,) * len(shape) if not prod(local) else tuple(offset)  # torch puts empty parts at the end, or nowhere
    return Box(tensor.dtype, shape, at, local)
