"""Tensors of random bits, comparison by bits, and small segments, for the codec's tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from independent_reader import State
from torch import Tensor

from pulse_kernels import Patch, codec
from pulse_kernels.codec import segment
from pulse_kernels.dtypes import DTYPES, dtype_name

PROFILES = ("fast", "balanced")
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(dtype_name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bit pattern of the dtype, NaN payloads and all; booleans are 0 or 1: torch itself makes 1 of others."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * DTYPES[dtype_name].itemsize
    high = 2 if dtype_name == "BOOL" else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(DTYPES[dtype_name]).reshape(shape)


def changed_bits(old: Tensor, density: float, seed: int) -> Tensor:
    """``old`` with other bits at a fraction ``density`` of its positions: half of them differ by one, half anyhow."""
    generator = torch.Generator().manual_seed(seed)
    raw = old.reshape(-1).view(INT_OF_SIZE[old.element_size()]).clone()
    numel = raw.numel()
    step = torch.where(
        torch.rand(numel, generator=generator) < 0.5, 1, torch.randint(1, 127, (numel,), generator=generator)
    )
    moved = torch.rand(numel, generator=generator) < density
    if old.dtype is torch.bool:
        raw ^= moved
    else:
        raw += (step * moved).to(raw.dtype)
    return raw.view(old.dtype).reshape(old.shape)


def raw_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))


def bits(tensor: Tensor) -> list[int]:
    size = tensor.element_size()
    mask = (1 << 8 * size) - 1
    return [value & mask for value in tensor.detach().contiguous().reshape(-1).view(INT_OF_SIZE[size]).tolist()]


def independent_state(tensors: Mapping[str, Tensor]) -> State:
    return {name: (dtype_name(t.dtype), tuple(t.shape), bits(t)) for name, t in tensors.items()}


def assert_same_patch(found: Patch, expected: Patch) -> None:
    """Equal in everything but ``old_values``."""
    for field in ("base_version", "version", "removed", "base_digest", "digest", "layout"):
        assert getattr(found, field) == getattr(expected, field), field
    assert list(found.tensors) == list(expected.tensors)
    assert list(found.added) == list(expected.added)
    for name, item in expected.tensors.items():
        other = found.tensors[name]
        assert (other.name, other.shape, other.dtype) == (item.name, item.shape, item.dtype)
        assert torch.equal(other.indices.long(), item.indices.long()), name
        assert same_bits(other.values, item.values), name
    for name, tensor in expected.added.items():
        assert same_bits(found.added[name], tensor), name


@contextmanager
def segments_of(numel: int) -> Iterator[None]:
    """Cut tensors into segments of ``numel`` elements."""
    with mock.patch.object(segment, "SEGMENT_NUMEL", numel), mock.patch.object(codec, "SEGMENT_NUMEL", numel):
        yield
