"""The operators through the Triton kernels: contiguous tensors go straight in, others through a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pulse_kernels.backends import tiles, two_pass
from pulse_kernels.backends.reference import bits, dense
from pulse_kernels.backends.tiles import Tiles
from pulse_kernels.backends.triton import compaction, patches
from pulse_kernels.backends.triton import digest as dense_digest
from pulse_kernels.backends.triton.launch import constant, launch
from pulse_kernels.backends.two_pass import GATE, RESIDUAL, TILE, Job

_NEVER = torch.iinfo(torch.int64).max


# ---- gate and compaction ---------------------------------------------------------------------------------------------


class _Kernels:
    def mark(self, job: Job, mask: Tensor, counts: Tensor) -> None:
        arguments = (job.table, job.tile_rows, *_four(job.row), mask, counts)
        # Rounding to FP16 takes so many registers that only half a step's loads fit beside them.
        step = {"STEP": 2048} if job.kind == RESIDUAL[torch.float16] else {}
        launch(compaction.mark, mask.device, job.tiles, *arguments, KIND=job.kind, **_sizes(job), **step)

    def collect(
        self,
        job: Job,
        mask: Tensor,
        ends: Tensor,
        indices: Tensor,
        values: Tensor,
        old_values: Tensor | None,
        update: bool,
    ) -> None:
        source, target, third, _ = _four(job.row)
        raw = bits(values), None if old_values is None else bits(old_values)
        arguments = (
            job.table,
            job.tile_rows,
            source,
            target,
            third,
            mask,
            ends,
            job.tiles,
            len(indices),
            indices,
            *raw,
        )
        launch(compaction.collect, mask.device, job.tiles, *arguments, KIND=job.kind, UPDATE=update, **_sizes(job))


def _four(row: tuple[int, ...]) -> tuple[int, ...]:
    return row[:4] if row else (0, 0, 0, 0)


def _sizes(job: Job) -> dict[str, int]:
    return {"SIZE": job.size, "SOURCE_SIZE": 4 if job.kind in GATE.values() else job.size}


_operators = two_pass.TwoPass(_Kernels())
compact_many = _operators.compact_many
compact_out = _operators.compact_out
gate_residual_many = _operators.gate_residual_many


def visibility_mask_many(masters: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    masks = [torch.empty(weight.shape, dtype=torch.bool, device=weight.device) for weight in weights]
    sources, targets = [dense(t) for t in masters], [dense(t) for t in weights]
    for dtype in {weight.dtype for weight in weights}:
        rows = [k for k, weight in enumerate(weights) if weight.dtype is dtype]
        columns = [(sources[k].data_ptr(), targets[k].data_ptr(), masks[k].data_ptr(), masks[k].numel()) for k in rows]
        cut = tiles.cut(columns, [column[3] for column in columns], TILE, weights[0].device)
        if cut.count:
            arguments = (cut.table, cut.tile_rows, *_four(cut.row))
            launch(compaction.visibility, weights[0].device, cut.count, *arguments, KIND=GATE[dtype])
    return masks


def commit_residual_many_(
    thetas: list[Tensor], locals_: list[Tensor], residuals: list[Tensor], indices: list[Tensor]
) -> None:
    written = [dense(t) for t in residuals]
    sources, targets = [dense(t) for t in thetas], [dense(t) for t in locals_]
    columns = [
        (source.data_ptr(), target.data_ptr(), residual.data_ptr(), residual.numel())
        for source, target, residual in zip(sources, targets, written, strict=True)
    ]
    cut = tiles.cut(columns, [column[3] for column in columns], TILE, residuals[0].device)
    clear = _scattering(written, indices, None, None)
    if cut.count:
        launch(compaction.commit, residuals[0].device, cut.count, cut.table, cut.tile_rows, *_four(cut.row))
    clear()
    for residual, result in zip(residuals, written, strict=True):
        if not residual.is_contiguous():
            residual.detach().copy_(result)


# ---- patches ---------------------------------------------------------------------------------------------------------


def _by_sizes(indices: list[Tensor], values: list[Tensor]) -> dict[tuple[int, int], list[int]]:
    """Rows that one launch can take: by size of an index and of a value."""
    groups: dict[tuple[int, int], list[int]] = {}
    for k, (index, value) in enumerate(zip(indices, values, strict=True)):
        groups.setdefault((index.element_size(), value.element_size()), []).append(k)
    return groups


def _address(tensors: list[Tensor] | None, k: int) -> int:
    return tensors[k].data_ptr() if tensors is not None else 0


def _cut_changes(
    kernel: Any, rows: list[int], indices: list[Tensor], pointers: list[list[Tensor] | None], parameters: list[int]
) -> Tiles:
    """Table of kernels in patches.py: a row for each tensor that changes."""
    columns = [
        (
            indices[k].data_ptr(),
            *(_address(tensors, k) for tensors in pointers),
            indices[k].numel(),
            parameters[k] if parameters else 0,
        )
        for k in rows
    ]
    device = indices[0].device
    return tiles.cut(columns, [column[4] for column in columns], constant(kernel, "TILE", device), device)


def _scattering(
    weights: list[Tensor], indices: list[Tensor], values: list[Tensor] | None, old_values: list[Tensor] | None
) -> Callable[[], None]:
    """What writes values, or zeros where there are none. All memory it takes is had here: the launches that follow
    cannot stop half way for want of it."""
    indices = [dense(t) if w.is_contiguous() else _offsets(w, t) for w, t in zip(weights, indices, strict=True)]
    values = None if values is None else [dense(t) for t in values]
    launches = []
    for (index_size, size), rows in _by_sizes(indices, weights).items():
        cut = _cut_changes(patches.scatter, rows, indices, [weights, values, old_values], [])
        if cut.count:
            row = cut.row[:5] if cut.row else (0,) * 5
            options = {"INDEX_SIZE": index_size, "SIZE": size, "ZERO": values is None, "OLD": old_values is not None}
            launches.append((cut, row, options))

    def write() -> None:
        _kept_alive = indices, values
        for cut, row, options in launches:
            launch(patches.scatter, weights[0].device, cut.count, cut.table, cut.tile_rows, *row, **options)

    return write


def _offsets(weight: Tensor, indices: Tensor) -> Tensor:
    """Where logical positions lie behind the first element of a strided weight, in elements."""
    rest, offsets = indices.long(), torch.zeros_like(indices, dtype=torch.int64, memory_format=torch.contiguous_format)
    for size, stride in zip(reversed(weight.shape), reversed(weight.stride()), strict=True):
        offsets += rest % size * stride
        rest = rest // size
    return offsets


def apply_patch_many_(weights: list[Tensor], indices: list[Tensor], values: list[Tensor]) -> None:
    _patch(weights, indices, values, keep_old=False)


def exchange_patch_many_(weights: list[Tensor], indices: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    return _patch(weights, indices, values, keep_old=True)


def _patch(weights: list[Tensor], indices: list[Tensor], values: list[Tensor], keep_old: bool) -> list[Tensor]:
    old = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in values] if keep_old else []
    _scattering(weights, indices, values, old if keep_old else None)()
    return old


def gather(weight: Tensor, indices: Tensor) -> Tensor:
    weight, indices = dense(weight), dense(indices)
    values = torch.empty(indices.shape, dtype=weight.dtype, device=weight.device)
    if len(indices):
        programs = -(-len(indices) // constant(patches.gather, "TILE", weight.device))
        arguments = indices.data_ptr(), weight.data_ptr(), values.data_ptr(), len(indices)
        sizes = {"INDEX_SIZE": indices.element_size(), "SIZE": weight.element_size()}
        launch(patches.gather, weight.device, programs, *arguments, **sizes)
    return values


def first_bad_index_many(indices: list[Tensor], numels: list[int]) -> list[int]:
    indices = [dense(t) for t in indices]
    found = [-1] * len(indices)
    for (index_size, _), rows in _by_sizes(indices, indices).items():
        cut = _cut_changes(patches.order, rows, indices, [None, None, None], numels)
        if cut.count:
            bad = torch.full([len(cut.rows)], _NEVER, dtype=torch.int64, device=indices[0].device)
            row = (cut.row[0], cut.row[4], cut.row[5]) if cut.row else (0, 0, 0)
            launch(patches.order, bad.device, cut.count, cut.table, cut.tile_rows, *row, bad, INDEX_SIZE=index_size)
            for k, place in zip(cut.rows, bad.tolist(), strict=True):  # raising costs this synchronisation
                found[rows[k]] = -1 if place == _NEVER else place
    return found


# ---- state digest ----------------------------------------------------------------------------------------------------


def digest_many(tensors: list[Tensor], keys: list[int], starts: list[int]) -> list[Tensor]:
    flat = [dense(t) for t in tensors]
    device = flat[0].device
    tile = constant(dense_digest.digest, "TILE", device)
    results = flat[:]
    for size in {t.element_size() for t in flat}:
        rows = [k for k, t in enumerate(flat) if t.element_size() == size]
        columns = [(flat[k].data_ptr(), flat[k].numel(), keys[k], starts[k]) for k in rows]
        # A tensor's tiles begin at multiples of 256 positions.
        extents = [flat[k].numel() and flat[k].numel() + starts[k] % 256 for k in rows]
        cut = tiles.cut(columns, extents, tile, device)
        sums = torch.zeros([len(rows), 2], dtype=torch.int64, device=device)
        if cut.count:
            arguments = (cut.table, cut.tile_rows, *_four(cut.row), sums)
            launch(dense_digest.digest, device, cut.count, *arguments, SIZE=size)
        # The sums of those that have elements come first, in the table's order; the others' stay zeros.
        places = [*cut.rows, *(at for at, extent in enumerate(extents) if not extent)]
        for at, lanes in zip(places, sums.unbind(), strict=True):
            results[rows[at]] = lanes
    return results


def diff_digest_many(
    new: list[Tensor], old: list[Tensor], keys: list[int], index_dtypes: list[torch.dtype], digest_before: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    indices, values, old_values = compact_many("diff_compact", new, old, index_dtypes, False, True)
    zeros = torch.zeros([len(old), 2], dtype=torch.int64, device=old[0].device)
    before = digest_many(old, keys, [0] * len(old)) if digest_before else list(zeros)
    change = digest_update_many(list(zeros), indices, old_values, values, keys)
    return indices, values, old_values, list(torch.cat([torch.stack(before), torch.stack(change)], 1))


def digest_update_many(
    digests: list[Tensor], indices: list[Tensor], old: list[Tensor], new: list[Tensor], keys: list[int]
) -> list[Tensor]:
    indices, old, new = [dense(t) for t in indices], [dense(t) for t in old], [dense(t) for t in new]
    results = list(torch.stack(digests).unbind())
    for (index_size, size), rows in _by_sizes(indices, old).items():
        cut = _cut_changes(patches.digest_changes, rows, indices, [old, new, None], keys)
        if cut.count:
            sums = torch.stack([digests[rows[k]] for k in cut.rows])  # to which the kernel adds
            row = (*cut.row[:3], *cut.row[4:6]) if cut.row else (0,) * 5
            arguments = (cut.table, cut.tile_rows, *row, sums)
            launch(patches.digest_changes, sums.device, cut.count, *arguments, INDEX_SIZE=index_size, SIZE=size)
            for k, lanes in zip(cut.rows, sums.unbind(), strict=True):
                results[rows[k]] = lanes
    return results
