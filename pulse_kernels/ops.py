"""Every operator on one page: schema, checks, fake implementation and the public function with its documentation.

An operator is ``torch.ops.pulse_kernels.<name>``; the public functions below are thin calls of these. What an operator
means is in ``backends/reference.py``; which back end computes it, in ``backends/__init__.py``. ``update=True`` and the
pure form are two operators, so that the schemas' mutation marks are honest: a trailing underscore writes its weight.

Positions ("indices") are row-major logical positions, sorted, unique, int32 up to 2^31-1 elements and int64 above,
unless ``index_dtype`` asks for one. All operators take tensors of any shape, contiguous or not, empty ones included.
None is differentiable. Errors: TypeError for dtypes, ValueError for shapes and devices, IndexError for positions out of
order or range; after an error in the arguments every tensor is as it was. So it is where memory runs out, except that
the plain PyTorch back end, and a ``_many`` form whose tensors overlap or lie on several devices, may have written some
of them; so may one that is interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pulse_kernels import backends, checks
from pulse_kernels.checks import short
from pulse_kernels.errors import PatchFormatError

_NAMESPACE = "pulse_kernels"
_library = torch.library.Library(_NAMESPACE, "DEF")
_registered: list[str] = []


def _operator(schema: str, fake: Callable[..., Any], writes: Sequence[int] = ()) -> Callable[..., Any]:
    """Register ``schema``; the decorated function computes it on real tensors. ``writes``: mutated arguments."""
    name = schema.split("(", 1)[0]

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

        overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        arguments = overload._schema.arguments
        required = [k for k, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)]

        def compute(*args: Any, **kwargs: Any) -> Any:
            for position in required:  # torch lets None through for a tensor
                if position < len(args) and args[position] is None:
                    raise TypeError(f"{name}: {arguments[position].name} is None, expected a tensor")
            result = kernel(*args, **kwargs)
            _bump_versions([args[position] for position in writes if position < len(args)])
            return result

        def without_autograd(*args: Any, **kwargs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*args, **kwargs)

        def of_lazy_tensors(*args: Any, **kwargs: Any) -> Any:
            for position in writes:
                if any(tensor.is_conj() or tensor.is_neg() for tensor in _listed(args[position : position + 1])):
                    raise ValueError(
                        f"{name}: {arguments[position].name} is lazily conjugated or negated, so that its bits are not "
                        "its values; write into .resolve_conj().resolve_neg()"
                    )
            return overload(*pytree.tree_map_only(Tensor, lambda t: t.resolve_conj().resolve_neg(), args), **kwargs)

        def traced(*args: Any, **kwargs: Any) -> Any:
            if "_many" in name:  # a lone row's checks say more
                devices = sorted({tensor.device.type for tensor in _listed(args)})
                if len(devices) > 1 and "meta" in devices:  # torch would make up results for all of them
                    raise ValueError(
                        f"{name}: tensors on {' and '.join(devices)}, of which meta holds no data; move them to one "
                        "device"
                    )
            return fake(*args, **kwargs)

        _library.impl(name, compute, "CompositeExplicitAutograd")
        _library.impl(name, without_autograd, "Autograd")
        if writes:
            for key in ("Conjugate", "Negative"):
                _library.impl(name, of_lazy_tensors, key)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", traced, lib=_library)
        _registered.append(name)
        return overload

    return register


def _listed(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments and in their lists."""
    items = [
        item for argument in arguments for item in (argument if isinstance(argument, list | tuple) else [argument])
    ]
    return [item for item in items if isinstance(item, Tensor)]


def _bump_versions(written: Sequence[Tensor | list[Tensor] | None]) -> None:
    """Tell autograd of writes that it did not see; inference tensors keep no version."""
    torch.autograd.graph.increment_version([tensor for tensor in _listed(written) if not tensor.is_inference()])


def registered_operators() -> list[str]:
    """Names of all operators under ``torch.ops.pulse_kernels``."""
    return list(_registered)


def _changes(count: Any, like: Tensor, index_dtype: torch.dtype, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    return (like.new_empty([count], dtype=index_dtype), *(like.new_empty([count], dtype=dtype) for dtype in dtypes))


def _dynamic() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


def _each(function: Callable[..., None], *columns: Sequence[Any]) -> None:
    for row in zip(*columns, strict=True):
        function(*row)


def _trace_row_by_row(many: Any, one: Any) -> None:
    """Show ``many`` to torch.compile as ``one`` a row: it cannot make pure what both writes and returns lists."""

    def rows(context: Any, *columns: Sequence[Any], **options: Any) -> Any:
        with getattr(context, "mode", None) or contextlib.nullcontext():
            results = [one(*row, **options) for row in zip(*columns, strict=True)]
        return _columns(results, len(results[0])) if results and isinstance(results[0], tuple) else results

    many.py_functionalize_impl(rows)


def _by_device(function: str, tensors: Sequence[Tensor], *columns: Sequence[Any]) -> list[Any]:
    """The back ends' ``function`` of the rows of ``columns``, a call for each device that ``tensors`` are on."""
    results: list[Any] = [None] * len(tensors)
    for device, rows in checks.rows_by_device(tensors).items():
        call = getattr(backends.for_device(device.type), function)
        try:
            found = call(*([column[k] for k in rows] for column in columns))
        except PatchFormatError as error:
            error.row = rows[error.row]
            raise
        for k, result in zip(rows, found or [], strict=False):
            results[k] = result
    return results


def _columns(rows: list[tuple[Tensor, ...]], width: int) -> tuple[list[Tensor], ...]:
    return tuple([row[k] for row in rows] for k in range(width))


# ---- visibility ------------------------------------------------------------------------------------------------------


def _visibility_fake(master: Tensor, weight: Tensor) -> Tensor:
    checks.gate("visibility_mask", master, weight)
    return weight.new_empty(weight.shape, dtype=torch.bool)


@_operator("visibility_mask(Tensor master, Tensor weight) -> Tensor", _visibility_fake)
def _visibility_mask(master: Tensor, weight: Tensor) -> Tensor:
    return _visibility_masks([master], [weight])[0]


def _visibility_masks(masters: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    for master, weight in zip(masters, weights, strict=True):
        checks.gate("visibility_mask", master, weight)
    return _by_device("visibility_mask_many", weights, masters, weights)


@_operator(
    "visibility_mask_many(Tensor[] masters, Tensor[] weights) -> Tensor[]",
    lambda masters, weights: [_visibility_fake(m, w) for m, w in zip(masters, weights, strict=True)],
)
def _visibility_mask_many(masters: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    return _visibility_masks(masters, weights)


def visibility_mask(master: Tensor, weight: Tensor) -> Tensor:
    """Where rounding ``master`` to the weight's dtype gives other bits than ``weight`` holds.

    master: FP32, any shape. weight: BF16 or FP16, same shape. Returns bool, same shape.
    """
    return _visibility_mask(master, weight)


def visibility_mask_many(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """``visibility_mask`` of each pair."""
    checks.equally_many("visibility_mask_many", masters=masters, weights=weights)
    return _visibility_mask_many(list(masters), list(weights)) if masters else []


# ---- compaction: gate_compact and diff_compact -----------------------------------------------------------------------
#
# Both compare a source (FP32 master, or new tensor) with a target (weight, or old tensor) and share everything but the
# comparison.

_COMPACT_CHECKS: dict[str, Callable[[str, Tensor, Tensor], None]] = {
    "gate_compact": checks.gate,
    "diff_compact": checks.diff,
}


def _check_compact(op: str, source: Tensor, target: Tensor, update: bool) -> None:
    _COMPACT_CHECKS[op](op, source, target)
    if update:
        checks.writable(op, "weight" if op == "gate_compact" else "old", target)


def _register_compact(op: str, source_name: str, target_name: str, update: bool) -> tuple[Any, Any, Any]:
    suffix = "_" if update else ""
    target = f"Tensor(a!) {target_name}" if update else f"Tensor {target_name}"
    targets = f"Tensor(a!)[] {target_name}s" if update else f"Tensor[] {target_name}s"
    options = "*, ScalarType? index_dtype=None, bool return_old=False"
    writes = (1,) if update else ()

    def fake(
        source: Tensor, target: Tensor, *, index_dtype: torch.dtype | None = None, return_old: bool = False
    ) -> tuple[Tensor, ...]:
        _check_compact(op, source, target, update)
        count, dtype = _dynamic(), target.dtype
        indices, values = _changes(count, target, checks.index_dtype(op, target.numel(), index_dtype), dtype)
        return indices, values, target.new_empty([count if return_old else 0], dtype=dtype)

    @_operator(f"{op}{suffix}(Tensor {source_name}, {target}, {options}) -> (Tensor, Tensor, Tensor)", fake, writes)
    def one(
        source: Tensor, target: Tensor, *, index_dtype: torch.dtype | None = None, return_old: bool = False
    ) -> tuple[Tensor, ...]:
        _check_compact(op, source, target, update)
        if update:
            (source,) = checks.apart([target], [source])
        dtype = checks.index_dtype(op, target.numel(), index_dtype)
        back_end = backends.for_device(target.device.type)
        return _columns_of_one(back_end.compact_many(op, [source], [target], [dtype], update, return_old))

    def many_fake(
        sources: list[Tensor],
        targets: list[Tensor],
        *,
        index_dtype: torch.dtype | None = None,
        return_old: bool = False,
    ) -> tuple[list[Tensor], ...]:
        rows = [
            fake(source, target, index_dtype=index_dtype, return_old=return_old)
            for source, target in zip(sources, targets, strict=True)
        ]
        return _columns(rows, 3)

    @_operator(
        f"{op}_many{suffix}(Tensor[] {source_name}s, {targets}, {options}) -> (Tensor[], Tensor[], Tensor[])",
        many_fake,
        writes,
    )
    def many(
        sources: list[Tensor],
        targets: list[Tensor],
        *,
        index_dtype: torch.dtype | None = None,
        return_old: bool = False,
    ) -> tuple[list[Tensor], ...]:
        for source, target in zip(sources, targets, strict=True):
            _check_compact(op, source, target, update)
        _one_device(op, targets)
        dtypes = checks.index_dtypes(op, targets, index_dtype)
        back_end = backends.for_device(targets[0].device.type)
        if update and checks.share_memory([*targets, *sources]):
            rows = [
                _columns_of_one(back_end.compact_many(op, checks.apart([t], [s]), [t], [d], update, return_old))
                for s, t, d in zip(sources, targets, dtypes, strict=True)
            ]
            return _columns(rows, 3)
        result: tuple[list[Tensor], ...] = back_end.compact_many(op, sources, targets, dtypes, update, return_old)
        return result

    def check_out(
        source: Tensor, target: Tensor, indices: Tensor, values: Tensor, count: Tensor, old_values: Tensor | None
    ) -> None:
        name = f"{op}_out"
        _check_compact(op, source, target, update)
        checks.indices(name, indices)
        checks.index_dtype(name, target.numel(), indices.dtype)
        checks.has_dtype(name, "count", count, (torch.int64,))
        if count.numel() != 1:
            raise ValueError(f"{name}: count has {count.numel()} elements, expected one int64")
        for label, buffer in (("values", values), ("old_values", old_values)):
            if buffer is not None:
                checks.has_dtype(name, label, buffer, (target.dtype,))
                checks.vector(name, label, buffer, ("indices", indices))
        buffers = {"indices": indices, "values": values, "count": count}
        if old_values is not None:
            buffers["old_values"] = old_values
        for label, buffer in buffers.items():
            if not buffer.is_contiguous():
                raise ValueError(f"{name}: {label} is not contiguous; pass a contiguous buffer")
        checks.same_place(name, weight=target, **buffers)

    def out_fake(
        source: Tensor, target: Tensor, indices: Tensor, values: Tensor, count: Tensor, old_values: Tensor | None = None
    ) -> None:
        check_out(source, target, indices, values, count, old_values)

    @_operator(
        f"{op}_out{suffix}(Tensor {source_name}, {target}, Tensor(b!) indices, Tensor(c!) values, Tensor(d!) count, "
        "Tensor(e!)? old_values=None) -> ()",
        out_fake,
        (1, 2, 3, 4, 5) if update else (2, 3, 4, 5),
    )
    def out(
        source: Tensor, target: Tensor, indices: Tensor, values: Tensor, count: Tensor, old_values: Tensor | None = None
    ) -> None:
        check_out(source, target, indices, values, count, old_values)
        written = [indices, values, count] + ([] if old_values is None else [old_values])
        if any(
            checks.share_memory([target, *written[:k], buffer]) or checks.share_memory([source, buffer])
            for k, buffer in enumerate(written)
        ):
            raise ValueError(f"{op}_out: a buffer shares memory with an input or another; pass separate buffers")
        if update:
            (source,) = checks.apart([target], [source])
        back_end = backends.for_device(target.device.type)
        back_end.compact_out(op, source, target, indices, values, count, old_values, update)

    if update:
        _trace_row_by_row(many, one)
    return one, many, out


def _columns_of_one(columns: tuple[list[Tensor], ...]) -> tuple[Tensor, ...]:
    return tuple(column[0] for column in columns)


def _one_device(op: str, tensors: Sequence[Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{op}_many: tensors on {', '.join(sorted(map(str, devices)))}; call it once per device")


_GATE = [_register_compact("gate_compact", "master", "weight", update) for update in (False, True)]
_DIFF = [_register_compact("diff_compact", "new", "old", update) for update in (False, True)]


def gate_compact(
    master: Tensor,
    weight: Tensor,
    *,
    update: bool = False,
    return_old: bool = False,
    index_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Fused cast, compare and compact: which weights the next forward pass sees changed, and their new values.

    master: FP32, any shape. weight: BF16 or FP16, same shape. Returns (indices [n], values [n] of the weight's dtype),
    with ``return_old=True`` also (old_values [n]). ``update=True`` writes the new bits into ``weight``: it replaces the
    trainer's own cast. Rounding is to nearest even; a NaN becomes quiet with its sign (0x7FC0 in BF16, 0x7E00 in FP16).
    """
    result = _GATE[update][0](master, weight, index_dtype=index_dtype, return_old=return_old)
    return tuple(result) if return_old else tuple(result[:2])


def gate_compact_many(
    masters: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    update: bool = False,
    return_old: bool = False,
    index_dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], ...]:
    """``gate_compact`` of each pair in one launch: (list of indices, list of values[, list of old values])."""
    checks.equally_many("gate_compact_many", masters=masters, weights=weights)
    if not masters:
        return ([], [], []) if return_old else ([], [])
    result = _GATE[update][1](list(masters), list(weights), index_dtype=index_dtype, return_old=return_old)
    return tuple(result) if return_old else tuple(result[:2])


def gate_compact_out(
    master: Tensor,
    weight: Tensor,
    indices: Tensor,
    values: Tensor,
    count: Tensor,
    *,
    update: bool = False,
    old_values: Tensor | None = None,
) -> None:
    """``gate_compact`` into the caller's buffers, without synchronisation; a CUDA graph can capture it, once a call
    before has compiled its kernels.

    indices: int32 or int64 [capacity]. values, old_values: the weight's dtype, [capacity]. count: int64, one element;
    it receives the number of changes. If that exceeds the capacity, ``weight`` is as it was and the buffers' content
    is unspecified: call again with larger ones.
    """
    _GATE[update][2](master, weight, indices, values, count, old_values)


def diff_compact(
    new: Tensor,
    old: Tensor,
    *,
    update: bool = False,
    return_old: bool = False,
    index_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Where the bits of two tensors of one dtype (of 1, 2, 4 or 8 bytes) and shape differ, and the new values there.

    Compares bits: +0 and -0 differ, a NaN equals itself. Returns (indices [n], values [n][, old_values [n]]).
    ``update=True`` writes the new bits into ``old``.
    """
    result = _DIFF[update][0](new, old, index_dtype=index_dtype, return_old=return_old)
    return tuple(result) if return_old else tuple(result[:2])


def diff_compact_many(
    new: Sequence[Tensor],
    old: Sequence[Tensor],
    *,
    update: bool = False,
    return_old: bool = False,
    index_dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], ...]:
    """``diff_compact`` of each pair in one launch: (list of indices, list of values[, list of old values])."""
    checks.equally_many("diff_compact_many", new=new, old=old)
    if not new:
        return ([], [], []) if return_old else ([], [])
    result = _DIFF[update][1](list(new), list(old), index_dtype=index_dtype, return_old=return_old)
    return tuple(result) if return_old else tuple(result[:2])


def diff_compact_out(
    new: Tensor,
    old: Tensor,
    indices: Tensor,
    values: Tensor,
    count: Tensor,
    *,
    update: bool = False,
    old_values: Tensor | None = None,
) -> None:
    """``diff_compact`` into the caller's buffers; buffers and overflow as in ``gate_compact_out``."""
    _DIFF[update][2](new, old, indices, values, count, old_values)


# ---- PULSELoCo's gate ------------------------------------------------------------------------------------------------


def _residual_fake(
    theta: Tensor,
    local: Tensor,
    residual: Tensor,
    *,
    view: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    _check_residual(theta, local, residual, view)
    dtype = checks.index_dtype("gate_residual", theta.numel(), index_dtype)
    return _changes(_dynamic(), theta, dtype, torch.float32)


def _check_residual(theta: Tensor, local: Tensor, residual: Tensor, view: torch.dtype) -> None:
    checks.residual("gate_residual", theta, local, residual)
    if view not in checks.GATE_DTYPES:
        raise TypeError(f"gate_residual: view is {short(view)}, expected bfloat16 or float16")


_RESIDUAL_OPTIONS = "*, ScalarType view=bfloat16, ScalarType? index_dtype=None"


@_operator(
    f"gate_residual(Tensor theta, Tensor local, Tensor residual, {_RESIDUAL_OPTIONS}) -> (Tensor, Tensor)",
    _residual_fake,
)
def _gate_residual(
    theta: Tensor,
    local: Tensor,
    residual: Tensor,
    *,
    view: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    columns = _residual_columns([theta], [local], [residual], view, index_dtype)
    return columns[0][0], columns[1][0]


def _residual_columns(
    thetas: list[Tensor],
    locals_: list[Tensor],
    residuals: list[Tensor],
    view: torch.dtype,
    index_dtype: torch.dtype | None,
) -> tuple[list[Tensor], ...]:
    for theta, local, residual in zip(thetas, locals_, residuals, strict=True):
        _check_residual(theta, local, residual, view)
    _one_device("gate_residual", thetas)
    dtypes = checks.index_dtypes("gate_residual", thetas, index_dtype)
    back_end = backends.for_device(thetas[0].device.type)
    result: tuple[list[Tensor], ...] = back_end.gate_residual_many(thetas, locals_, residuals, view, dtypes)
    return result


@_operator(
    f"gate_residual_many(Tensor[] thetas, Tensor[] locals, Tensor[] residuals, {_RESIDUAL_OPTIONS})"
    " -> (Tensor[], Tensor[])",
    lambda thetas, locals, residuals, **options: _columns(
        [_residual_fake(*row, **options) for row in zip(thetas, locals, residuals, strict=True)], 2
    ),
)
def _gate_residual_many(
    thetas: list[Tensor],
    locals: list[Tensor],
    residuals: list[Tensor],
    *,
    view: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], ...]:
    return _residual_columns(thetas, locals, residuals, view, index_dtype)


def _check_commit(theta: Tensor, local: Tensor, residual: Tensor, indices: Tensor) -> None:
    checks.residual("commit_residual_", theta, local, residual)
    checks.writable("commit_residual_", "residual", residual)
    checks.indices("commit_residual_", indices)
    checks.same_place("commit_residual_", residual=residual, indices=indices)


def _commit_fake(theta: Tensor, local: Tensor, residual: Tensor, indices: Tensor, *, check: bool = True) -> None:
    _check_commit(theta, local, residual, indices)


def _check_order(op: str, indices: list[Tensor], targets: list[Tensor], check: bool) -> None:
    if check:
        _check_order_below(op, indices, [target.numel() for target in targets])


def _check_order_below(op: str, indices: list[Tensor], numels: list[int]) -> None:
    found = _by_device("first_bad_index_many", indices, indices, numels)
    for index, numel, bad in zip(indices, numels, found, strict=True):
        checks.index_order(op, index, numel, bad)


@_operator(
    "commit_residual_(Tensor theta, Tensor local, Tensor(a!) residual, Tensor indices, *, bool check=True) -> ()",
    _commit_fake,
    (2,),
)
def _commit_residual_(theta: Tensor, local: Tensor, residual: Tensor, indices: Tensor, *, check: bool = True) -> None:
    _check_commit(theta, local, residual, indices)
    _check_order("commit_residual_", [indices], [residual], check)
    _write("commit_residual_many_", residual, theta, local, indices)


def _write(function: str, written: Any, *read: Any) -> list[Any]:
    """The back ends' ``function``, which writes some tensors (the third column in a commit, else the first) and reads
    others: one call where none of them overlap, else row by row, each reading what was there before it."""
    columns = [[column] if isinstance(column, Tensor) else column for column in (written, *read)]
    if len(columns[0]) > 1 and not checks.share_memory([tensor for column in columns for tensor in column]):
        return _by_device(function, columns[0], *_in_order(function, columns))
    # Positions were checked; a write to one weight must not change another's, which may lie in its memory.
    where = 3 if function.startswith("commit") else 1
    columns[where] = checks.apart(columns[0], columns[where])
    results = []
    for target, *others in zip(*columns, strict=True):
        row = [[tensor] for tensor in (target, *checks.apart([target], others))]
        results += _by_device(function, [target], *_in_order(function, row))
    return results


def _in_order(function: str, columns: list[Any]) -> list[Any]:
    return [*columns[1:3], columns[0], *columns[3:]] if function.startswith("commit") else columns


@_operator(
    "commit_residual_many_(Tensor[] thetas, Tensor[] locals, Tensor(a!)[] residuals, Tensor[] indices, *, "
    "bool check=True) -> ()",
    lambda thetas, locals, residuals, indices, *, check=True: _each(_commit_fake, thetas, locals, residuals, indices),
    (2,),
)
def _commit_residual_many_(
    thetas: list[Tensor], locals: list[Tensor], residuals: list[Tensor], indices: list[Tensor], *, check: bool = True
) -> None:
    for row in zip(thetas, locals, residuals, indices, strict=True):
        _check_commit(*row)
    _check_order("commit_residual_many_", indices, residuals, check)
    _write("commit_residual_many_", residuals, thetas, locals, indices)


def gate_residual(
    theta: Tensor,
    local: Tensor,
    residual: Tensor,
    *,
    view: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """PULSELoCo's gate: which entries of the pending pseudo-gradient would change the low-precision view of theta.

    theta, local, residual: FP32, one shape. With ``s = residual + (theta - local)``, an entry fires where
    ``view(theta - s)`` has other bits than ``view(theta)`` (arXiv 2602.03839). Returns (indices [n], s [n] in FP32).
    Reads only. A NaN ``s`` is returned as 0x7FC00000.
    """
    indices, values = _gate_residual(theta, local, residual, view=view, index_dtype=index_dtype)
    return indices, values


def gate_residual_many(
    thetas: Sequence[Tensor],
    locals: Sequence[Tensor],
    residuals: Sequence[Tensor],
    *,
    view: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """``gate_residual`` of each triple in one launch: (list of indices, list of s)."""
    checks.equally_many("gate_residual_many", thetas=thetas, locals=locals, residuals=residuals)
    if not thetas:
        return [], []
    options = {"view": view, "index_dtype": index_dtype}
    indices, values = _gate_residual_many(list(thetas), list(locals), list(residuals), **options)
    return indices, values


def commit_residual_(theta: Tensor, local: Tensor, residual: Tensor, indices: Tensor, *, check: bool = True) -> None:
    """Write ``s = residual + (theta - local)`` into ``residual``, and 0 at ``indices``: the entries that were sent.

    theta, local, residual: FP32, one shape. indices: sorted int32 or int64 [n], as ``gate_residual`` gave them.
    ``check=False`` skips order and bounds, for indices this package made itself.
    """
    _commit_residual_(theta, local, residual, indices, check=check)


def commit_residual_many_(
    thetas: Sequence[Tensor],
    locals: Sequence[Tensor],
    residuals: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    check: bool = True,
) -> None:
    """``commit_residual_`` of each; all arguments are checked before the first is written."""
    checks.equally_many("commit_residual_many_", thetas=thetas, locals=locals, residuals=residuals, indices=indices)
    if thetas:
        _commit_residual_many_(list(thetas), list(locals), list(residuals), list(indices), check=check)


# ---- patches ---------------------------------------------------------------------------------------------------------


def _apply_fake(weight: Tensor, indices: Tensor, values: Tensor, *, check: bool = True) -> None:
    checks.patch("apply_patch_", weight, indices, values)


@_operator(
    "apply_patch_(Tensor(a!) weight, Tensor indices, Tensor values, *, bool check=True) -> ()", _apply_fake, (0,)
)
def _apply_patch_(weight: Tensor, indices: Tensor, values: Tensor, *, check: bool = True) -> None:
    checks.patch("apply_patch_", weight, indices, values)
    _check_order("apply_patch_", [indices], [weight], check)
    _write("apply_patch_many_", weight, indices, values)


@_operator(
    "apply_patch_many_(Tensor(a!)[] weights, Tensor[] indices, Tensor[] values, *, bool check=True) -> ()",
    lambda weights, indices, values, *, check=True: _each(_apply_fake, weights, indices, values),
    (0,),
)
def _apply_patch_many_(
    weights: list[Tensor], indices: list[Tensor], values: list[Tensor], *, check: bool = True
) -> None:
    for row in zip(weights, indices, values, strict=True):
        checks.patch("apply_patch_many_", *row)
    _check_order("apply_patch_many_", indices, weights, check)
    _write("apply_patch_many_", weights, indices, values)


def _exchange_fake(weight: Tensor, indices: Tensor, values: Tensor, *, check: bool = True) -> Tensor:
    checks.patch("exchange_patch_", weight, indices, values)
    return values.new_empty(values.shape)


@_operator(
    "exchange_patch_(Tensor(a!) weight, Tensor indices, Tensor values, *, bool check=True) -> Tensor",
    _exchange_fake,
    (0,),
)
def _exchange_patch_(weight: Tensor, indices: Tensor, values: Tensor, *, check: bool = True) -> Tensor:
    checks.patch("exchange_patch_", weight, indices, values)
    _check_order("exchange_patch_", [indices], [weight], check)
    result: Tensor = _write("exchange_patch_many_", weight, indices, values)[0]
    return result


@_operator(
    "exchange_patch_many_(Tensor(a!)[] weights, Tensor[] indices, Tensor[] values, *, bool check=True) -> Tensor[]",
    lambda weights, indices, values, *, check=True: [
        _exchange_fake(*row) for row in zip(weights, indices, values, strict=True)
    ],
    (0,),
)
def _exchange_patch_many_(
    weights: list[Tensor], indices: list[Tensor], values: list[Tensor], *, check: bool = True
) -> list[Tensor]:
    for row in zip(weights, indices, values, strict=True):
        checks.patch("exchange_patch_many_", *row)
    _check_order("exchange_patch_many_", indices, weights, check)
    return _write("exchange_patch_many_", weights, indices, values)


_trace_row_by_row(_exchange_patch_many_, _exchange_patch_)


def apply_patch_(weight: Tensor, indices: Tensor, values: Tensor, *, check: bool = True) -> None:
    """Write ``values`` at ``indices`` of ``weight``; time follows the number of changes, not the weight's size.

    weight: any shape, a dtype of 1, 2, 4 or 8 bytes. indices: sorted unique int32 or int64 [n]. values: [n], the
    weight's dtype. Order, uniqueness and bounds are checked before anything is written; ``check=False`` skips that, for
    indices this package made itself (out-of-range ones are then undefined).
    """
    _apply_patch_(weight, indices, values, check=check)


def apply_patch_many_(
    weights: Sequence[Tensor], indices: Sequence[Tensor], values: Sequence[Tensor], *, check: bool = True
) -> None:
    """``apply_patch_`` of each; all arguments are checked before the first weight is written."""
    checks.equally_many("apply_patch_many_", weights=weights, indices=indices, values=values)
    if weights:
        _apply_patch_many_(list(weights), list(indices), list(values), check=check)


def exchange_patch_(weight: Tensor, indices: Tensor, values: Tensor, *, check: bool = True) -> Tensor:
    """``apply_patch_`` that returns the overwritten values [n]: applying them at ``indices`` undoes the patch."""
    return _exchange_patch_(weight, indices, values, check=check)


def exchange_patch_many_(
    weights: Sequence[Tensor], indices: Sequence[Tensor], values: Sequence[Tensor], *, check: bool = True
) -> list[Tensor]:
    """``exchange_patch_`` of each; all arguments are checked before the first weight is written."""
    checks.equally_many("exchange_patch_many_", weights=weights, indices=indices, values=values)
    return _exchange_patch_many_(list(weights), list(indices), list(values), check=check) if weights else []


# ---- packed indices --------------------------------------------------------------------------------------------------


def _check_numel(op: str, numel: int) -> None:
    if not 0 <= numel <= 1 << 62:
        raise ValueError(f"{op}: numel is {numel}, expected 0 <= numel <= 2^62")


def _pack_fake(indices: Tensor, numel: int) -> Tensor:
    checks.indices("pack_indices", indices)
    return indices.new_empty([_dynamic()], dtype=torch.uint8)


@_operator("pack_indices(Tensor indices, SymInt numel) -> Tensor", _pack_fake)
def _pack_indices(indices: Tensor, numel: int) -> Tensor:
    result: Tensor = _pack([indices], [numel])[0]
    return result


def _pack(indices: list[Tensor], numels: list[int]) -> list[Any]:
    for index, numel in zip(indices, numels, strict=True):
        checks.indices("pack_indices", index)
        _check_numel("pack_indices", numel)
    _check_order_below("pack_indices", indices, numels)
    return _by_device("pack_indices_many", indices, indices, numels)


@_operator(
    "pack_indices_many(Tensor[] indices, SymInt[] numels) -> Tensor[]",
    lambda indices, numels: [_pack_fake(*row) for row in zip(indices, numels, strict=True)],
)
def _pack_indices_many(indices: list[Tensor], numels: list[int]) -> list[Tensor]:
    return _pack(indices, numels)


@contextlib.contextmanager
def _naming_blob(op: str) -> Iterator[None]:
    """A PatchFormatError from inside also says which operator was given the blob, and where in its list."""
    try:
        yield
    except PatchFormatError as error:
        place = f"{op}: packed[{error.row}]" if "_many" in op else op
        raise PatchFormatError(f"{place}: {error}", error.row) from None


def _check_packed(op: str, packed: Tensor) -> None:
    checks.has_dtype(op, "packed", packed, (torch.uint8,))
    checks.vector(op, "packed", packed)


def _unpack_fake(packed: Tensor, *, index_dtype: torch.dtype | None = None) -> Tensor:
    _check_packed("unpack_indices", packed)
    # A blob's numel is data; a traced graph takes int64 unless told otherwise.
    return packed.new_empty([_dynamic()], dtype=index_dtype or torch.int64)


def _unpack(op: str, packed: list[Tensor], index_dtype: torch.dtype | None) -> list[Any]:
    for blob in packed:
        _check_packed(op, blob)
        if blob.is_meta:
            raise ValueError(f"{op}: packed is on meta, where no header can be read; pass index_dtype and meta alone")
    with _naming_blob(op):
        headers = backends.reference.packed_headers(packed)
        dtypes = [checks.index_dtype(op, numel, index_dtype) for _, numel in headers]
        return _by_device("unpack_indices_many", packed, packed, dtypes, headers)


@_operator("unpack_indices(Tensor packed, *, ScalarType index_dtype=int64) -> Tensor", _unpack_fake)
def _unpack_indices(packed: Tensor, *, index_dtype: torch.dtype = torch.int64) -> Tensor:
    result: Tensor = _unpack("unpack_indices", [packed], index_dtype)[0]
    return result


@_operator(
    "unpack_indices_many(Tensor[] packed, *, ScalarType index_dtype=int64) -> Tensor[]",
    lambda packed, *, index_dtype=torch.int64: [_unpack_fake(item, index_dtype=index_dtype) for item in packed],
)
def _unpack_indices_many(packed: list[Tensor], *, index_dtype: torch.dtype = torch.int64) -> list[Tensor]:
    return _unpack("unpack_indices_many", packed, index_dtype)


def pack_indices(indices: Tensor, numel: int) -> Tensor:
    """Delta-encode and bit-pack sorted unique ``indices`` (int32 or int64 [n]) of a tensor of ``numel`` elements.

    numel: at most 2^62. Returns uint8 [bytes]: blocks of 256 indices, each with its own width, base and offset
    (docs/format.md). IndexError where the indices are unsorted, repeated or out of range.
    """
    return _pack_indices(indices, numel)


def pack_indices_many(indices: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    """``pack_indices`` of each."""
    checks.equally_many("pack_indices_many", indices=indices, numels=numels)
    return _pack_indices_many(list(indices), list(numels)) if indices else []


def unpack_indices(packed: Tensor, *, index_dtype: torch.dtype | None = None) -> Tensor:
    """The indices that ``pack_indices`` packed; int32 where the packed numel allows, unless asked otherwise.

    packed: uint8 [bytes]. Trusts nothing: raises PatchFormatError where any size, width, offset or index is off.
    """
    if index_dtype is None:
        if (
            not torch.compiler.is_compiling()
        ):  # the operator needs a dtype, and a look at the header for it costs a copy
            result: Tensor = _unpack("unpack_indices", [packed], None)[0]
            return result
        _check_packed("unpack_indices", packed)
        _, numel = backends.reference.packed_header(packed)
        index_dtype = checks.index_dtype("unpack_indices", numel, None)
    return _unpack_indices(packed, index_dtype=index_dtype)


def unpack_indices_many(packed: Sequence[Tensor], *, index_dtype: torch.dtype | None = None) -> list[Tensor]:
    """``unpack_indices`` of each, the headers of all read at once. PatchFormatError names the place of the bad one."""
    checks.equally_many("unpack_indices_many", packed=packed)
    if index_dtype is None:
        if not torch.compiler.is_compiling():
            return _unpack("unpack_indices_many", list(packed), None)
        return [unpack_indices(item) for item in packed]
    return _unpack_indices_many(list(packed), index_dtype=index_dtype) if packed else []


# ---- patches whose indices are packed --------------------------------------------------------------------------------


def _check_packed_patch(op: str, weight: Tensor, packed: Tensor, values: Tensor) -> None:
    checks.plain_dtype(op, "weight", weight)
    checks.writable(op, "weight", weight)
    checks.has_dtype(op, "packed", packed, (torch.uint8,))
    checks.vector(op, "packed", packed)
    checks.has_dtype(op, "values", values, (weight.dtype,))
    checks.vector(op, "values", values)
    checks.same_place(op, weight=weight, packed=packed, values=values)


def _write_packed(
    op: str, weights: list[Tensor], packed: list[Tensor], values: list[Tensor], keep_old: bool
) -> list[Any]:
    """Every blob is checked before the first weight is written. Back ends that can apply without laying the indices
    out do so, for weights that nothing else of the call overlaps."""
    for row in zip(weights, packed, values, strict=True):
        _check_packed_patch(op, *row)
    back_end = backends.for_device(weights[0].device.type)
    together = len({weight.device for weight in weights}) == 1 and all(weight.is_contiguous() for weight in weights)
    with _naming_blob(op):
        if "cuda" in back_end.names and together and not checks.share_memory([*weights, *packed, *values]):
            return list(back_end.exchange_packed_many_(weights, packed, values, keep_old))
        headers = backends.reference.packed_headers(packed)
        backends.reference.check_packed_fit(weights, values, headers)
        dtypes = [checks.index_dtype(op, numel, None) for _, numel in headers]
        indices = _by_device("unpack_indices_many", packed, packed, dtypes, headers)
    return _write("exchange_patch_many_" if keep_old else "apply_patch_many_", weights, indices, values)


def _exchange_packed_fake(weight: Tensor, packed: Tensor, values: Tensor) -> Tensor:
    _check_packed_patch("exchange_packed_patch_", weight, packed, values)
    return values.new_empty(values.shape)


@_operator(
    "apply_packed_patch_(Tensor(a!) weight, Tensor packed, Tensor values) -> ()",
    lambda weight, packed, values: _check_packed_patch("apply_packed_patch_", weight, packed, values),
    (0,),
)
def _apply_packed_patch_(weight: Tensor, packed: Tensor, values: Tensor) -> None:
    _write_packed("apply_packed_patch_", [weight], [packed], [values], False)


@_operator(
    "apply_packed_patch_many_(Tensor(a!)[] weights, Tensor[] packed, Tensor[] values) -> ()",
    lambda weights, packed, values: _each(
        lambda *row: _check_packed_patch("apply_packed_patch_many_", *row), weights, packed, values
    ),
    (0,),
)
def _apply_packed_patch_many_(weights: list[Tensor], packed: list[Tensor], values: list[Tensor]) -> None:
    _write_packed("apply_packed_patch_many_", weights, packed, values, False)


@_operator(
    "exchange_packed_patch_(Tensor(a!) weight, Tensor packed, Tensor values) -> Tensor", _exchange_packed_fake, (0,)
)
def _exchange_packed_patch_(weight: Tensor, packed: Tensor, values: Tensor) -> Tensor:
    result: Tensor = _write_packed("exchange_packed_patch_", [weight], [packed], [values], True)[0]
    return result


@_operator(
    "exchange_packed_patch_many_(Tensor(a!)[] weights, Tensor[] packed, Tensor[] values) -> Tensor[]",
    lambda weights, packed, values: [_exchange_packed_fake(*row) for row in zip(weights, packed, values, strict=True)],
    (0,),
)
def _exchange_packed_patch_many_(weights: list[Tensor], packed: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    return _write_packed("exchange_packed_patch_many_", weights, packed, values, True)


_trace_row_by_row(_exchange_packed_patch_many_, _exchange_packed_patch_)


def apply_packed_patch_(weight: Tensor, packed: Tensor, values: Tensor) -> None:
    """``apply_patch_(weight, unpack_indices(packed), values)``; with the CUDA library the indices of a contiguous
    weight are never laid out in memory.

    weight: any shape, a dtype of 1, 2, 4 or 8 bytes, of as many elements as the indices were packed for. packed: uint8
    [bytes], from ``pack_indices``. values: [n], the weight's dtype, as many as there are indices. Trusts nothing:
    raises PatchFormatError where the bytes are off in any bit or do not fit weight and values; nothing is written then.
    """
    _apply_packed_patch_(weight, packed, values)


def apply_packed_patch_many_(weights: Sequence[Tensor], packed: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """``apply_packed_patch_`` of each; all arguments are checked before the first weight is written."""
    checks.equally_many("apply_packed_patch_many_", weights=weights, packed=packed, values=values)
    if weights:
        _apply_packed_patch_many_(list(weights), list(packed), list(values))


def exchange_packed_patch_(weight: Tensor, packed: Tensor, values: Tensor) -> Tensor:
    """``apply_packed_patch_`` that returns the overwritten values [n]: applying them with ``packed`` undoes the
    patch."""
    return _exchange_packed_patch_(weight, packed, values)


def exchange_packed_patch_many_(
    weights: Sequence[Tensor], packed: Sequence[Tensor], values: Sequence[Tensor]
) -> list[Tensor]:
    """``exchange_packed_patch_`` of each; all arguments are checked before the first weight is written."""
    checks.equally_many("exchange_packed_patch_many_", weights=weights, packed=packed, values=values)
    return _exchange_packed_patch_many_(list(weights), list(packed), list(values)) if weights else []


# ---- state digest ----------------------------------------------------------------------------------------------------


def _digest_fake(tensor: Tensor, key: int, start: int = 0) -> Tensor:
    checks.plain_dtype("digest", "tensor", tensor)
    return tensor.new_empty([2], dtype=torch.int64)


@_operator("digest(Tensor tensor, int key, int start=0) -> Tensor", _digest_fake)
def _digest(tensor: Tensor, key: int, start: int = 0) -> Tensor:
    if start < 0:
        raise ValueError(f"digest: start is {start}, expected a position >= 0")
    return _digests([tensor], [key], [start])[0]


def _digests(tensors: list[Tensor], keys: list[int], starts: list[int]) -> list[Tensor]:
    for tensor in tensors:
        checks.plain_dtype("digest", "tensor", tensor)
    return _by_device("digest_many", tensors, tensors, keys, starts)


@_operator(
    "digest_many(Tensor[] tensors, int[] keys) -> Tensor[]",
    lambda tensors, keys: [_digest_fake(*row) for row in zip(tensors, keys, strict=True)],
)
def _digest_many(tensors: list[Tensor], keys: list[int]) -> list[Tensor]:
    return _digests(tensors, keys, [0] * len(tensors))


def _check_digest_update(digest: Tensor, indices: Tensor, old: Tensor, new: Tensor) -> None:
    op = "digest_update"
    checks.has_dtype(op, "digest", digest, (torch.int64,))
    if tuple(digest.shape) != (2,):
        raise ValueError(f"{op}: digest has shape {list(digest.shape)}, expected [2] as digest() returns it")
    checks.indices(op, indices)
    checks.plain_dtype(op, "old", old)
    if old.dtype != new.dtype:
        raise TypeError(f"{op}: old is {short(old.dtype)} and new is {short(new.dtype)}; both must have one dtype")
    checks.vector(op, "old", old, ("indices", indices))
    checks.vector(op, "new", new, ("indices", indices))
    checks.same_place(op, digest=digest, indices=indices, old=old, new=new)


def _digest_update_fake(digest: Tensor, indices: Tensor, old: Tensor, new: Tensor, key: int) -> Tensor:
    _check_digest_update(digest, indices, old, new)
    return torch.empty_like(digest)


@_operator(
    "digest_update(Tensor digest, Tensor indices, Tensor old, Tensor new, int key) -> Tensor", _digest_update_fake
)
def _digest_update(digest: Tensor, indices: Tensor, old: Tensor, new: Tensor, key: int) -> Tensor:
    return _digest_updates([digest], [indices], [old], [new], [key])[0]


def _digest_updates(
    digests: list[Tensor], indices: list[Tensor], old: list[Tensor], new: list[Tensor], keys: list[int]
) -> list[Tensor]:
    for row in zip(digests, indices, old, new, strict=True):
        _check_digest_update(*row)
    _check_order_below("digest_update", indices, [backends.reference.MAX_NUMEL] * len(indices))
    return _by_device("digest_update_many", digests, digests, indices, old, new, keys)


@_operator(
    "digest_update_many(Tensor[] digests, Tensor[] indices, Tensor[] old, Tensor[] new, int[] keys) -> Tensor[]",
    lambda digests, indices, old, new, keys: [
        _digest_update_fake(*row) for row in zip(digests, indices, old, new, keys, strict=True)
    ],
)
def _digest_update_many(
    digests: list[Tensor], indices: list[Tensor], old: list[Tensor], new: list[Tensor], keys: list[int]
) -> list[Tensor]:
    return _digest_updates(digests, indices, old, new, keys)


def digest(tensor: Tensor, key: int, start: int = 0) -> Tensor:
    """Order-independent state digest: ``sum_i bits_i * K(key, start + i) mod 2^64`` in two lanes, int64 [2].

    tensor: any shape and any dtype of 1, 2, 4 or 8 bytes. key: int64, names the tensor. start: position of the first
    element, so that slices of a tensor add up to its digest. K is odd, so one changed element always changes both
    lanes. Not cryptographic. Definition: docs/format.md.
    """
    return _digest(tensor, key, start)


def digest_many(tensors: Sequence[Tensor], keys: Sequence[int]) -> list[Tensor]:
    """``digest`` of each tensor under its key."""
    checks.equally_many("digest_many", tensors=tensors, keys=keys)
    return _digest_many(list(tensors), list(keys)) if tensors else []


def digest_update(digest: Tensor, indices: Tensor, old: Tensor, new: Tensor, key: int) -> Tensor:
    """The digest after ``old`` became ``new`` at ``indices``, in O(changed): digest + sum (new - old) * K.

    digest: int64 [2]. indices: int32 or int64 [n]. old, new: [n], one dtype. Returns a new int64 [2].
    """
    return _digest_update(digest, indices, old, new, key)


def digest_update_many(
    digests: Sequence[Tensor],
    indices: Sequence[Tensor],
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    keys: Sequence[int],
) -> list[Tensor]:
    """``digest_update`` of each."""
    checks.equally_many("digest_update_many", digests=digests, indices=indices, old=old, new=new, keys=keys)
    return _digest_update_many(list(digests), list(indices), list(old), list(new), list(keys)) if digests else []
