"""How kernels are launched: fixed parameters for each architecture, so that nothing is tuned at start-up."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from pulse_kernels.backends.triton import compaction, digest, patches


@dataclass(frozen=True)
class Shape:
    """Warps of a program, and the constants of its kernel."""

    num_warps: int
    constants: dict[str, int]


# Dense passes: STEP elements' loads are in flight at once, 24 KB of the BF16 gate. An H200 needs about 23 KB in flight
# an SM (4.3 TB/s x 0.7 us / 132), so two programs an SM do: up to 128 registers a thread.
# collect: 2 warps hold a tile's 256 words, 4 a thread; it waits for scattered sectors, so many programs must fit.
_SHAPES = {
    compaction.mark: Shape(8, {"TILE": 8192, "STEP": 4096}),
    compaction.collect: Shape(2, {"TILE": 8192, "DENSE_STEP": 256}),
    compaction.visibility: Shape(8, {"TILE": 8192, "STEP": 4096}),
    compaction.commit: Shape(8, {"TILE": 8192, "STEP": 4096}),
    patches.scatter: Shape(4, {"TILE": 1024}),
    patches.gather: Shape(4, {"TILE": 1024}),
    patches.order: Shape(4, {"TILE": 2048}),
    patches.digest_changes: Shape(4, {"TILE": 1024}),
    digest.digest: Shape(4, {"TILE": 32768, "STEP": 2048}),
}
# By major compute capability. Not yet measured on a GPU, hence the same for all.
_BY_ARCHITECTURE: dict[int, dict[Any, Shape]] = {8: _SHAPES, 9: _SHAPES, 10: _SHAPES, 12: _SHAPES}


@functools.cache
def _shapes(device: torch.device) -> dict[Any, Shape]:
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return _BY_ARCHITECTURE[max(known for known in _BY_ARCHITECTURE if known <= max(major, 8))]


def constant(kernel: Any, name: str, device: torch.device) -> int:
    """A constant of the kernel's fixed parameters, such as its TILE."""
    return _shapes(device)[kernel].constants[name]


def launch(kernel: Any, device: torch.device, programs: int, *arguments: Any, **constants: Any) -> None:
    """Enqueue ``programs`` programs on the device's current stream."""
    shape = _shapes(device)[kernel]
    if device.type == "cuda":
        with torch.cuda.device(device):
            run(kernel, programs, arguments, shape.constants | constants, shape.num_warps)
    else:
        run(kernel, programs, arguments, shape.constants | constants, shape.num_warps)


def run(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int) -> None:
    """The launch itself. Without fused multiply-add: the reference rounds twice."""
    kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
