"""csrc/cpu bound to the operators: contiguous tensors go straight in, others through a copy or a strided scatter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pulse_kernels.backends.reference import dense
from pulse_kernels.errors import PatchFormatError

_raw = torch.ops.pulse_kernels_cpu
_GATE_KIND = {torch.bfloat16: 0, torch.float16: 1}
_DIFF_KIND = 2
_RESIDUAL_KIND = {torch.bfloat16: 3, torch.float16: 4}


def instruction_set() -> str:
    """'avx512', 'avx2' or 'portable': what runs on this CPU; PULSE_CPU=<name> asks for a lesser one."""
    return str(_raw.instruction_set())


def _kind(op: str, target: Tensor) -> int:
    return _GATE_KIND[target.dtype] if op == "gate_compact" else _DIFF_KIND


def visibility_mask(master: Tensor, weight: Tensor) -> Tensor:
    mask = torch.empty(weight.shape, dtype=torch.bool, device="cpu")
    _raw.mask(_GATE_KIND[weight.dtype], dense(master), dense(weight), mask)
    return mask


def compact_many(
    op: str,
    sources: list[Tensor],
    targets: list[Tensor],
    index_dtypes: list[torch.dtype],
    update: bool,
    return_old: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    kinds = [_kind(op, target) for target in targets]
    if len(set(kinds)) > 1 or (update and not all(target.is_contiguous() for target in targets)):
        # Every row is found before the first weight is written, so that running out of memory changes nothing.
        rows = [
            compact_many(op, [source], [target], [dtype], False, return_old)
            for source, target, dtype in zip(sources, targets, index_dtypes, strict=True)
        ]
        indices, values, old = ([row[k][0] for row in rows] for k in range(3))
        if update:
            apply_patch_many_(targets, indices, values)
        return indices, values, old
    wide = [int(dtype is torch.int64) for dtype in index_dtypes]
    dense_sources, dense_targets = [dense(t) for t in sources], [dense(t) for t in targets]
    columns = _raw.compact_many(kinds[0], dense_sources, dense_targets, [], wide, [], False, update, return_old)
    indices, values, old, _ = columns
    return indices, values, old


def diff_digest_many(
    new: list[Tensor], old: list[Tensor], keys: list[int], index_dtypes: list[torch.dtype], digest_before: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    wide = [int(dtype is torch.int64) for dtype in index_dtypes]
    dense_new, dense_old = [dense(t) for t in new], [dense(t) for t in old]
    indices, values, old_values, digests = _raw.compact_many(
        _DIFF_KIND, dense_new, dense_old, [], wide, keys, digest_before, False, True
    )
    return indices, values, old_values, digests


def compact_out(
    op: str,
    source: Tensor,
    target: Tensor,
    indices: Tensor,
    values: Tensor,
    count: Tensor,
    old_values: Tensor | None,
    update: bool,
) -> None:
    in_place = update and target.is_contiguous()
    kind = _kind(op, target)
    found = _raw.compact_out(kind, dense(source), dense(target), indices, values, old_values, in_place)
    count.detach().fill_(found)  # an inference tensor itself refuses outside of inference mode, after the write
    if update and not in_place and found <= indices.numel():
        apply_patch_(target, indices[:found], values[:found])


def gate_residual_many(
    thetas: list[Tensor],
    locals_: list[Tensor],
    residuals: list[Tensor],
    view: torch.dtype,
    index_dtypes: list[torch.dtype],
) -> tuple[list[Tensor], list[Tensor]]:
    wide = [int(dtype is torch.int64) for dtype in index_dtypes]
    arguments = ([dense(t) for t in tensors] for tensors in (thetas, locals_, residuals))
    indices, values, _, _ = _raw.compact_many(_RESIDUAL_KIND[view], *arguments, wide, [], False, False, False)
    return indices, values


def commit_residual_many_(
    thetas: list[Tensor], locals_: list[Tensor], residuals: list[Tensor], indices: list[Tensor]
) -> None:
    written = [dense(t) for t in residuals]
    sources = [(dense(theta), dense(local)) for theta, local in zip(thetas, locals_, strict=True)]
    zeros = [torch.zeros(index.shape, dtype=torch.float32, device="cpu") for index in indices]
    clear = _scattering(written, indices, zeros, None)
    for (theta, local), residual in zip(sources, written, strict=True):
        _raw.commit(theta, local, residual)
    clear()
    for residual, result in zip(residuals, written, strict=True):
        if not residual.is_contiguous():
            residual.detach().copy_(result)


def first_bad_index(indices: Tensor, numel: int) -> int:
    return int(_raw.first_bad_index(dense(indices), numel))


def _scattering(
    weights: list[Tensor], indices: list[Tensor], values: list[Tensor], old_values: list[Tensor] | None
) -> Callable[[], None]:
    """What writes values, all memory it takes at hand: it cannot stop half way for want of it."""
    rows = [
        (weight.detach(), dense(index), dense(value), old_values[k] if old_values is not None else None)
        for k, (weight, index, value) in enumerate(zip(weights, indices, values, strict=True))
    ]

    def write() -> None:
        for row in rows:
            _raw.scatter(*row)

    return write


def apply_patch_many_(weights: list[Tensor], indices: list[Tensor], values: list[Tensor]) -> None:
    _scattering(weights, indices, values, None)()


def apply_patch_(weight: Tensor, indices: Tensor, values: Tensor) -> None:
    apply_patch_many_([weight], [indices], [values])


def exchange_patch_many_(weights: list[Tensor], indices: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    old = [torch.empty(value.shape, dtype=value.dtype, device="cpu") for value in values]
    _scattering(weights, indices, values, old)()
    return old


def gather(weight: Tensor, indices: Tensor) -> Tensor:
    values: Tensor = _raw.gather(dense(weight), dense(indices))
    return values


def pack_indices(indices: Tensor, numel: int) -> Tensor:
    packed: Tensor = _raw.pack(dense(indices), numel)
    return packed


def unpack_indices(packed: Tensor, index_dtype: torch.dtype, header: tuple[int, int] | None = None) -> Tensor:
    """``header`` is for devices; the library reads its own."""
    indices, error = _raw.unpack(dense(packed), index_dtype is torch.int64)
    if error:
        raise PatchFormatError(f"packed indices: {error}; the bytes are damaged or not from pack_indices")
    result: Tensor = indices
    return result


def digest(tensor: Tensor, key: int, start: int) -> Tensor:
    result: Tensor = _raw.digest(dense(tensor), key, start)
    return result


def digest_update(digest: Tensor, indices: Tensor, old: Tensor, new: Tensor, key: int) -> Tensor:
    result: Tensor = _raw.digest_update(dense(digest), dense(indices), dense(old), dense(new), key)
    return result


def encode_gaps_many(
    indices: list[Tensor], starts: list[int], shifts: list[int]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    tops, lows, escapes = _raw.encode_gaps_many([dense(t) for t in indices], starts, shifts)
    return tops, lows, escapes


def decode_gaps(top: Tensor, low: Tensor, escapes: Tensor, start: int, stop: int, index_dtype: torch.dtype) -> Tensor:
    indices, bad = _raw.decode_gaps(top, low, escapes, start, stop, index_dtype is torch.int64)
    if bad >= 0:
        raise PatchFormatError(f"gaps: entry {bad} leaves [{start}, {stop}) or its escape bytes are wrong")
    result: Tensor = indices
    return result


def encode_values_many(values: list[Tensor], bases: list[Tensor] | None) -> list[Tensor]:
    dense_bases = [] if bases is None else [dense(t) for t in bases]
    is_float = [int(tensor.dtype.is_floating_point) for tensor in values]
    planes: list[Tensor] = _raw.encode_values_many([dense(t) for t in values], dense_bases, is_float)
    return planes


def decode_values(planes: Tensor, base: Tensor | None, dtype: torch.dtype) -> Tensor:
    count = planes.numel() // dtype.itemsize if base is None else base.numel()
    values = torch.empty(count, dtype=dtype, device="cpu")
    base = None if base is None else dense(base)
    if not _raw.decode_values(planes, base, dtype.is_floating_point, values):
        raise PatchFormatError("values: the codes announce another number of large changes than there are")
    return values


def sum_entries(indices: list[Tensor], values: list[Tensor], numel: int) -> tuple[Tensor, Tensor]:
    places, sums = _raw.sum_entries([dense(t) for t in indices], [dense(t) for t in values], numel)
    return places, sums
