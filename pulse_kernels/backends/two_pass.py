"""The host's side of compaction in two passes, for whoever has the kernels: Triton, or csrc/cuda with CUB.

``mark`` leaves a bit an element and a count a tile, a running sum tells each tile where its changes go, ``collect``
writes them. Nothing is written to a weight before all counts are known: too many changes for the caller's buffers, or
no memory for the results, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pulse_kernels.backends import tiles
from pulse_kernels.backends.reference import bits, dense

TILE = 8192  # elements a program; csrc/cuda has the same
GATE = {torch.bfloat16: 0, torch.float16: 1}
DIFF = 2
RESIDUAL = {torch.bfloat16: 3, torch.float16: 4}


@dataclass(frozen=True)
class Job:
    """What one launch compares: kind as above, element size of target and values, and the tensors' tiles."""

    kind: int
    size: int
    tiles: int
    table: Tensor | None
    tile_rows: Tensor | None
    row: tuple[int, ...]  # source, target, third, numel, first tile: of a lone tensor


class Kernels(Protocol):
    """The two passes. mask: int32 [tiles * TILE / 32]. counts: int32 [tiles]. ends: int64 [tiles]."""

    def mark(self, job: Job, mask: Tensor, counts: Tensor) -> None: ...

    def collect(
        self,
        job: Job,
        mask: Tensor,
        ends: Tensor,
        indices: Tensor,
        values: Tensor,
        old_values: Tensor | None,
        update: bool,
    ) -> None: ...


def kind_of(op: str, target: Tensor) -> int:
    return GATE[target.dtype] if op == "gate_compact" else DIFF


class _Pass:
    """One launch over tensors of one kind, element size and index dtype: marked when made, collected once counted."""

    def __init__(self, kernels: Kernels, kind: int, sources: list[Tensor], targets: list[Tensor], thirds: list[Tensor]):
        device = targets[0].device
        self.kernels, self.kept_alive = kernels, (sources, targets, thirds)
        addresses = [
            (s.data_ptr(), t.data_ptr(), thirds[k].data_ptr() if thirds else 0, t.numel())
            for k, (s, t) in enumerate(zip(sources, targets, strict=True))
        ]
        self.cut = tiles.cut(addresses, [address[3] for address in addresses], TILE, device, keep=True)
        cut = self.cut
        self.job = Job(kind, targets[0].element_size(), cut.count, cut.table, cut.tile_rows, cut.row)
        if cut.count:
            self.mask = torch.empty(cut.count * (TILE // 32), dtype=torch.int32, device=device)
            counts = torch.empty(cut.count, dtype=torch.int32, device=device)
            kernels.mark(self.job, self.mask, counts)
            self.ends = counts.cumsum(0)  # int64

    def row_ends(self) -> Tensor:
        """int64: changes up to the end of each row, on the device."""
        return self.ends[-1:] if self.cut.last is None else self.ends[self.cut.last]

    def collect(self, indices: Tensor, values: Tensor, old_values: Tensor | None, update: bool) -> None:
        self.kernels.collect(self.job, self.mask, self.ends, indices, values, old_values, update)


def _find(
    kernels: Kernels,
    kinds: list[int],
    inputs: tuple[list[Tensor], list[Tensor], list[Tensor]],
    value_dtypes: list[torch.dtype],
    index_dtypes: list[torch.dtype],
    update: bool,
    return_old: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Changes of contiguous tensors on one device: a launch a pass for each kind and dtype, and one synchronisation.

    The results of a launch are parts of one allocation.
    """
    device = inputs[1][0].device
    groups: dict[tuple[int, torch.dtype, torch.dtype], list[int]] = {}
    for k, key in enumerate(zip(kinds, value_dtypes, index_dtypes, strict=True)):
        groups.setdefault(key, []).append(k)
    passes = [
        _Pass(kernels, key[0], *([tensors[k] for k in members] if tensors else [] for tensors in inputs))
        for key, members in groups.items()
    ]
    counted = [item.row_ends() for item in passes if item.cut.count]
    row_ends = iter(torch.cat(counted).tolist() if counted else [])  # the synchronisation
    columns: tuple[list[Tensor], ...] = tuple([inputs[1][0]] * len(kinds) for _ in range(3))
    outputs = []
    for ((_, value_dtype, index_dtype), members), item in zip(groups.items(), passes, strict=True):
        sizes, total = [0] * len(members), 0
        for row in item.cut.rows:
            end = next(row_ends)
            sizes[row], total = end - total, end
        flats = [
            torch.empty(total, dtype=index_dtype, device=device),
            torch.empty(total, dtype=value_dtype, device=device),
            torch.empty(total if return_old else 0, dtype=value_dtype, device=device),
        ]
        for column, flat in zip(columns, flats, strict=True):
            parts = flat.split(sizes) if len(flat) == total else [flat] * len(members)
            for k, part in zip(members, parts, strict=True):
                column[k] = part
        outputs.append((item, flats))
    for item, (indices, values, old_values) in outputs:  # all results have their memory: now the weights may change
        if len(indices):
            item.collect(indices, values, old_values if return_old else None, update)
    return columns[0], columns[1], columns[2]


class TwoPass:
    """The compacting operators over a pair of kernels."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels

    def compact_many(
        self,
        op: str,
        sources: list[Tensor],
        targets: list[Tensor],
        index_dtypes: list[torch.dtype],
        update: bool,
        return_old: bool,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """See ``reference.compact_many``."""
        wholes = [dense(t) for t in targets]
        found = _find(
            self.kernels,
            [kind_of(op, target) for target in targets],
            ([dense(t) for t in sources], wholes, []),
            [target.dtype for target in targets],
            index_dtypes,
            update,
            return_old,
        )
        if update:
            for target, whole, indices in zip(targets, wholes, found[0], strict=True):
                if whole is not target and len(indices):
                    _copy_back(whole, target)
        return found

    def gate_residual_many(
        self,
        thetas: list[Tensor],
        locals_: list[Tensor],
        residuals: list[Tensor],
        view: torch.dtype,
        index_dtypes: list[torch.dtype],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See ``reference.gate_residual_many``."""
        inputs = ([dense(t) for t in thetas], [dense(t) for t in locals_], [dense(t) for t in residuals])
        dtypes = [torch.float32] * len(thetas)
        indices, values, _ = _find(
            self.kernels, [RESIDUAL[view]] * len(thetas), inputs, dtypes, index_dtypes, False, False
        )
        return indices, values

    def compact_out(
        self,
        op: str,
        source: Tensor,
        target: Tensor,
        indices: Tensor,
        values: Tensor,
        count: Tensor,
        old_values: Tensor | None,
        update: bool,
    ) -> None:
        """See ``reference.compact_out``. No synchronisation; the tensors are arguments, which a CUDA graph captures."""
        whole = dense(target)
        item = _Pass(self.kernels, kind_of(op, target), [dense(source)], [whole], [])
        if not item.cut.count:
            count.detach().zero_()
            return
        count.detach().view(1).copy_(item.row_ends())
        item.collect(indices, values, old_values, update)
        if update:
            _copy_back(whole, target)


def _copy_back(whole: Tensor, target: Tensor) -> None:
    """What was written into the dense copy of a strided target. A pass over all of it, which takes no memory."""
    if not target.is_contiguous():
        raw = target.detach().view(bits(whole).dtype)
        raw.copy_(bits(whole).view(raw.shape))
