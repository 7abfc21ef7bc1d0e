"""Small checkpoints for the tests here, and a loader that follows transformers' rule with the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pulse_kernels.checkpoint import Checkpoint, CheckpointWriter
from pulse_kernels.dtypes import DTYPES

Tensors = dict[str, torch.Tensor]


def values(dtype_name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits of a dtype (NaNs and all); booleans are 0 or 1."""
    dtype = DTYPES[dtype_name]
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def layout_of(
    *files: tuple[str, Tensors],
    index: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
    folder: bool = True,
) -> dict[str, Any]:
    """The layout of files given as (name, tensors)."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        "format": 1,
        "folder": folder,
        "files": [
            {
                "name": name,
                "metadata": metadata,
                "tensors": [[key, names[t.dtype], list(t.shape)] for key, t in tensors.items()],
            }
            for name, tensors in files
        ],
        "index": None if index is None else {"metadata": index},
    }


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    raw = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(raw.view(torch.uint8).tolist()) if raw.numel() else b""


def all_bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def write(path: Path, layout: dict[str, Any], tensors: Tensors, **options: Any) -> None:
    with CheckpointWriter(path, layout, **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def load_as_transformers(folder: Path) -> Tensors:
    """What `from_pretrained` would load from a folder: model.safetensors, or else what the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return load_file(single)
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors: Tensors = {}
    for name in sorted(set(weight_map.values())):
        tensors.update(load_file(folder / name))
    assert set(tensors) == set(weight_map)
    return tensors


def load_with_reader(path: Path) -> Tensors:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name).reshape(info.shape) for name, info in checkpoint.tensors.items()}


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
