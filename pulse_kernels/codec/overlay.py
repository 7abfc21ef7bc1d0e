"""A base with a patch imagined on top of it: what the next patch's values are coded against, while the base stays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulse_kernels.backends import reference
from pulse_kernels.checks import INT32_NUMEL
from pulse_kernels.codec.header import PatchHeader
from pulse_kernels.codec.sending import base_tensor
from pulse_kernels.errors import BaseMismatchError
from pulse_kernels.patch import Patch, TensorPatch, check_order
from pulse_kernels.state import StateDigest


def imagined_tensors(base: Mapping[str, Tensor], pending: Patch | None) -> Mapping[str, Tensor]:
    """``base`` with the names that ``pending`` leaves: added and replaced tensors are the patch's own."""
    if pending is None or not (pending.added or pending.removed):
        return base
    gone = set(pending.removed)
    return {name: tensor for name, tensor in base.items() if name not in gone} | pending.added


def imagined_changes(base: Mapping[str, Tensor], pending: Patch | None, header: PatchHeader) -> dict[str, TensorPatch]:
    """What ``pending`` changes of the tensors that the coded patch changes, on the host; BaseMismatchError or
    IndexError where it does not fit ``base``."""
    if pending is None or not header.needs_base:
        return {}
    items = {tensor.name: pending.tensors[tensor.name] for tensor in header.tensors if tensor.name in pending.tensors}
    for name, item in items.items():
        base_tensor(base, name, item.dtype, item.shape)
    check_order(items)
    return {name: _searchable(item) for name, item in items.items() if item.num_changed}


def _searchable(item: TensorPatch) -> TensorPatch:
    """The changes on the host, their positions of a dtype that holds any position of the tensor."""
    indices = item.indices.cpu().contiguous()
    indices = indices.long() if item.numel > INT32_NUMEL else indices
    return TensorPatch(item.name, item.shape, item.dtype, indices, reference.dense(item.values.cpu()))


def imagine(before: Tensor, local: Tensor, start: int, numel: int, item: TensorPatch) -> None:
    """Put into ``before``, the base's values at ``local`` of the segment of ``numel`` elements from ``start`` on, those
    that ``item`` changes. All on the host; local: int32, in order."""
    # Searched by positions in the segment: one behind it may not fit the indices' dtype.
    first = int(torch.searchsorted(item.indices, item.indices.new_tensor([start])))
    behind = int(torch.searchsorted(item.indices, item.indices.new_tensor([start + numel - 1]), right=True))
    if first == behind or not local.numel():
        return
    where = (item.indices[first:behind] - start).to(torch.int32)
    places = torch.searchsorted(where, local).clamp_(max=where.numel() - 1)
    hits = (where[places] == local).nonzero().view(-1)
    reference.bits(before)[hits] = reference.bits(item.values)[first:behind][places[hits]]


def check_base_digest(
    header: PatchHeader, base: Mapping[str, Tensor], current_digest: str | None, pending: Patch | None
) -> None:
    """BaseMismatchError unless ``base``, with ``pending`` on top, is the coded patch's base, as far as digests are
    known. ``current_digest`` is that of ``base``; without it, it takes a pass over ``base``."""
    current = None if current_digest is None else StateDigest.fromhex(current_digest).hexdigest()
    if pending is not None:
        if pending.base_digest and (current is not None or header.base_digest):
            found = current or StateDigest.of(base).hexdigest()
            if found != pending.base_digest:
                raise BaseMismatchError(
                    f"the base has digest {found}, the pending patch was made against {pending.base_digest}"
                    f"{_version(pending.base_version)}; pass the base that the pending patch follows"
                )
        if header.base_digest and not pending.digest:
            raise ValueError(
                f"the pending patch does not know its digest, so that it cannot be told whether it makes the base "
                f"{header.base_digest} of this patch; pass one that does"
            )
        current = pending.digest
    if not header.base_digest:
        return
    found = current or StateDigest.of(base).hexdigest()
    if found != header.base_digest:
        raise BaseMismatchError(
            f"the base{'' if pending is None else ' with the pending patch'} has digest {found}, the patch was made "
            f"against {header.base_digest}{_version(header.base_version)}; pass the patch's own base"
        )


def _version(version: int | None) -> str:
    return "" if version is None else f" (version {version})"


__all__ = ["check_base_digest", "imagine", "imagined_changes", "imagined_tensors"]
