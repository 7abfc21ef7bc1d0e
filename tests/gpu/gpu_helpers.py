"""Tensors on the CPU with any bits, laid out on the device in any way; graphs and streams that a CPU can play."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

DRY_RUN = os.environ.get("PULSE_GPU_DRYRUN") == "1"
# Around a tile of 8192 elements; the last has tiles for many processors, and a tail.
SIZES = [0, 1, 300, 8193] if DRY_RUN else [0, 1, 31, 257, 8191, 8192, 8193, 65537, 3_000_017]
GATE_DTYPES = [torch.bfloat16, torch.float16]
DIFF_DTYPES = [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float32, torch.float64]
LAYOUTS = ["whole", "misaligned", "strided"]


def int_bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(integer).cpu()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Wherever they are."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(int_bits(a), int_bits(b))


def all_same_bits(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def random_bits(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, NaNs and denormals among them (bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    return torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def altered(tensor: Tensor, density: float, seed: int) -> Tensor:
    """A copy with the lowest bit flipped in about ``density`` of the elements, the last one among them."""
    generator = torch.Generator().manual_seed(seed + 1)
    raw = int_bits(tensor)
    hit = torch.rand(raw.shape, generator=generator) < density
    hit[-1:] = True
    return torch.where(hit, raw ^ 1, raw).view(tensor.dtype)


def random_positions(n: int, numel: int, seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """At most ``n`` sorted unique positions below ``numel``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(numel, 1), (n if numel else 0,), generator=generator).unique().to(dtype)


def laid(flat: Tensor, layout: str, device: torch.device) -> Tensor:
    """``flat`` on the device: as it is, one element behind an aligned address, or every second element of a buffer."""
    if layout == "whole":
        return flat.to(device, copy=True)
    n = flat.numel()
    buffer = torch.zeros(2 * n + 1, dtype=flat.dtype, device=device)
    view = buffer[1 : n + 1] if layout == "misaligned" else buffer[: 2 * n : 2]
    view.copy_(flat)
    if flat.dtype.is_floating_point:  # a copy of floats might make NaNs quiet
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        view.view(raw).copy_(flat.view(raw))
    return view


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``call`` as a CUDA graph's replay; on a CPU itself."""
    call()  # compiles
    if device.type == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """An error for each call of torch that waits for the device; on a CPU nothing."""
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def needs_memory(num_bytes: int, device: torch.device) -> None:
    """Skip where the device has not that much to spare."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < num_bytes:
            pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of the device's memory, {free / 1e9:.0f} GB are free")
