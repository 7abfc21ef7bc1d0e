"""The tensors of a safetensors file that is in memory as bytes: views of them, nothing is copied or believed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pulse_kernels.errors import CheckpointError

from .layout import MAX_HEADER_BYTES, TensorSpec
from .validate import check_spec, parse_json, show


def tensors_in(buffer: Any, where: str) -> dict[str, Tensor]:
    """name -> tensor of the safetensors file that ``buffer`` holds, in the order of their bytes.

    buffer: contiguous bytes, writable where the tensors are to be written. where: what messages call it. Raises
    CheckpointError unless header and data fit each other to the last byte.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < 8:
        raise CheckpointError(f"{where}: {len(view)} bytes, expected a safetensors file; restore it")
    length = int.from_bytes(view[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise CheckpointError(f"{where}: a header of {length} bytes in a file of {len(view)}; it was cut, restore it")
    header = parse_json(bytes(view[8 : 8 + length]), where)
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: its header is {show(header)}, expected an object; restore it")
    data = view[8 + length :]
    places = sorted(
        (_place(name, fields, where) for name, fields in header.items() if name != "__metadata__"),
        key=lambda place: place[1:],
    )
    tensors: dict[str, Tensor] = {}
    end = 0
    for spec, first, last in places:
        if first != end or last - first != spec.nbytes or last > len(data):
            raise CheckpointError(
                f"{where}: tensor {show(spec.name)} of {spec.nbytes} bytes is said to lie at {first} to {last}, after "
                f"{end}, in {len(data)} bytes of data; restore the file"
            )
        end = last
        tensors[spec.name] = _view(data[first:last], spec)
    if end != len(data):
        raise CheckpointError(f"{where}: {len(data)} bytes of data, its header describes {end}; restore the file")
    return tensors


def _place(name: str, fields: Any, where: str) -> tuple[TensorSpec, int, int]:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: tensor {show(name)} is described by {show(fields)}; restore the file")
    spec = check_spec(name, fields["dtype"], fields["shape"], where)
    offsets = fields["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int and at >= 0 for at in offsets):
        raise CheckpointError(f"{where}: tensor {show(name)} lies at {show(offsets)}; restore the file")
    return spec, offsets[0], offsets[1]


def _view(data: memoryview, spec: TensorSpec) -> Tensor:
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % spec.itemsize:  # a foreign writer's header may leave the data unaligned
        flat = flat.clone()
    return flat.view(spec.dtype).view(spec.shape)
