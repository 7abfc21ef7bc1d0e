"""Argument checks shared by every operator and back end: what was found, what was expected, what to do."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

GATE_DTYPES = (torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
INT32_NUMEL = 2**31 - 1


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_place(op: str, **tensors: Tensor) -> None:
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(
                f"{op}: {first_name} is on {first.device} and {name} on {tensor.device}; move them to one device"
            )


def same_shape(op: str, **tensors: Tensor) -> None:
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, {first_name} has {list(first.shape)}; "
                "both must have the same shape"
            )


def has_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        expected = " or ".join(short(dtype) for dtype in allowed)
        raise TypeError(f"{op}: {name} is {short(tensor.dtype)}, expected {expected}; convert it before the call")


def plain_dtype(op: str, name: str, tensor: Tensor) -> None:
    if tensor.element_size() not in (1, 2, 4, 8):
        raise TypeError(f"{op}: {name} is {short(tensor.dtype)}, expected a dtype of 1, 2, 4 or 8 bytes")
    if tensor.is_quantized or tensor.layout != torch.strided:
        raise TypeError(
            f"{op}: {name} is {tensor.layout} (quantized: {tensor.is_quantized}), expected a strided tensor"
        )


def writable(op: str, name: str, tensor: Tensor) -> None:
    """Refuse tensors in which two positions may share memory: a write to one would change the other."""
    if tensor.is_contiguous():
        return
    reach = 0  # of the dimensions with smaller strides; each stride must step over it
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{op}: elements of {name} share memory (expanded or overlapping: shape {list(tensor.shape)}, "
                f"strides {list(tensor.stride())}); write into a .contiguous() copy"
            )
        reach += stride * (size - 1)


def index_dtype(op: str, numel: int, asked: torch.dtype | None) -> torch.dtype:
    if asked is None:
        return torch.int32 if numel <= INT32_NUMEL else torch.int64
    if asked not in INDEX_DTYPES:
        raise TypeError(f"{op}: index_dtype is {short(asked)}, expected int32 or int64")
    if asked is torch.int32 and numel > INT32_NUMEL:
        raise ValueError(f"{op}: {numel} elements do not fit int32 indices; pass index_dtype=torch.int64")
    return asked


def vector(op: str, name: str, tensor: Tensor, length_of: tuple[str, Tensor] | None = None) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} is {tensor.layout}, expected a strided tensor; pass .to_dense()")
    if tensor.dim() != 1:
        raise ValueError(f"{op}: {name} has {tensor.dim()} dimensions, expected 1; pass .flatten()")
    if length_of is not None and tensor.numel() != length_of[1].numel():
        raise ValueError(
            f"{op}: {name} has {tensor.numel()} entries, {length_of[0]} has {length_of[1].numel()}; "
            "they must be equally long"
        )


def index_dtypes(op: str, tensors: Iterable[Tensor], asked: torch.dtype | None) -> list[torch.dtype]:
    """``index_dtype`` of each tensor's positions."""
    if asked is None:  # the usual case without a call for each of hundreds
        return [torch.int32 if tensor.numel() <= INT32_NUMEL else torch.int64 for tensor in tensors]
    return [index_dtype(op, tensor.numel(), asked) for tensor in tensors]


def indices(op: str, tensor: Tensor) -> None:
    has_dtype(op, "indices", tensor, INDEX_DTYPES)
    vector(op, "indices", tensor)


def index_order(op: str, tensor: Tensor, numel: int, bad: int) -> None:
    """Raise IndexError for the entry ``bad`` of ``tensor`` that a back end reported; -1 means none."""
    if bad < 0:
        return
    value = int(tensor[bad])
    if not 0 <= value < numel:
        raise IndexError(f"{op}: indices[{bad}] is {value}, expected 0 <= index < {numel}; nothing was changed")
    raise IndexError(
        f"{op}: indices[{bad}] is {value} after {int(tensor[bad - 1])}; indices must be strictly increasing "
        "(sorted, no duplicates); nothing was changed"
    )


def gate(op: str, master: Tensor, weight: Tensor) -> None:
    if (  # the usual case in a few comparisons: a model has hundreds of tensors
        master.dtype is torch.float32
        and weight.dtype in GATE_DTYPES
        and master.shape == weight.shape
        and master.device == weight.device
        and master.layout is weight.layout is torch.strided
    ):
        return
    has_dtype(op, "master", master, (torch.float32,))
    has_dtype(op, "weight", weight, GATE_DTYPES)
    plain_dtype(op, "master", master)
    plain_dtype(op, "weight", weight)
    same_shape(op, master=master, weight=weight)
    same_place(op, master=master, weight=weight)


def diff(op: str, new: Tensor, old: Tensor) -> None:
    plain_dtype(op, "new", new)
    plain_dtype(op, "old", old)
    if new.dtype != old.dtype:
        raise TypeError(f"{op}: new is {short(new.dtype)} and old is {short(old.dtype)}; both must have one dtype")
    same_shape(op, new=new, old=old)
    same_place(op, new=new, old=old)


def residual(op: str, theta: Tensor, local: Tensor, residual: Tensor) -> None:
    for name, tensor in (("theta", theta), ("local", local), ("residual", residual)):
        has_dtype(op, name, tensor, (torch.float32,))
        plain_dtype(op, name, tensor)
    same_shape(op, theta=theta, local=local, residual=residual)
    same_place(op, theta=theta, local=local, residual=residual)


def patch(op: str, weight: Tensor, indices_: Tensor, values: Tensor) -> None:
    plain_dtype(op, "weight", weight)
    writable(op, "weight", weight)
    indices(op, indices_)
    vector(op, "values", values, ("indices", indices_))
    if values.dtype != weight.dtype:
        raise TypeError(
            f"{op}: values are {short(values.dtype)}, weight is {short(weight.dtype)}; values must have its dtype"
        )
    same_place(op, weight=weight, indices=indices_, values=values)


def rows_by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[int]]:
    """Which of ``tensors`` are on each device."""
    places: dict[torch.device, list[int]] = {}
    for k, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(k)
    return places


def equally_many(op: str, **lists: Sequence[object]) -> None:
    for name, items in lists.items():
        if isinstance(items, Tensor) or not hasattr(items, "__len__"):
            raise TypeError(f"{op}: {name} is a {type(items).__name__}, expected a list")
    (first_name, first), *others = lists.items()
    for name, items in others:
        if len(items) != len(first):
            raise ValueError(f"{op}: {len(first)} {first_name} and {len(items)} {name}; pass equally many of each")


def apart(written: Sequence[Tensor], read: Sequence[Tensor]) -> list[Tensor]:
    """``read``, each copied where it may overlap any of ``written``: what is read is what it was before the call."""
    merged: list[tuple[int, int, int]] = []  # disjoint, in order
    for device, start, stop in sorted(memory_span(tensor) for tensor in written if _has_memory(tensor)):
        if merged and merged[-1][0] == device and start < merged[-1][2]:
            merged[-1] = device, merged[-1][1], max(stop, merged[-1][2])
        else:
            merged.append((device, start, stop))

    def overlaps(tensor: Tensor) -> bool:
        device, start, stop = memory_span(tensor)
        k = bisect.bisect_left(merged, (device, stop)) - 1  # the last that begins before the tensor's end
        return k >= 0 and merged[k][0] == device and merged[k][2] > start

    return [copied(tensor) if _has_memory(tensor) and overlaps(tensor) else tensor for tensor in read]


def _has_memory(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.is_meta


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same bits; torch's own copies turn every byte of a bool but 0 into 1."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8).clone().view(torch.bool) if tensor.dtype is torch.bool else tensor.clone()


def all_finite(values: Tensor) -> bool:
    """Whether no value of a floating-point or complex tensor is infinite or NaN."""
    if not values.numel():
        return True
    # By the extremes: one pass, where isfinite takes several; both are NaN where any value is.
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def memory_span(tensor: Tensor) -> tuple[int, int, int]:
    """(device number, first byte, byte behind the last) that a non-empty tensor reaches; sorts by place."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return tensor.get_device(), start, start + tensor.nbytes
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.get_device(), start, start + (reach + 1) * tensor.element_size()


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether any two tensors of the list may overlap (tied weights): such lists are worked through in order."""
    spans = [memory_span(tensor) for tensor in tensors if tensor.nbytes and not tensor.is_meta]
    spans.sort()
    last_device, last_stop = -2, 0
    for device, start, stop in spans:  # each begins behind its neighbour's end, or some two overlap
        if start < last_stop and device == last_device:
            return True
        last_device, last_stop = device, stop
    return False
