"""The device that the tests here run on: a GPU, or with PULSE_GPU_DRYRUN=1 the CPU through Triton's interpreter.

They need pytest alone, no hypothesis: machines with GPUs often cannot download. A dry run exercises the tests' own code
at small sizes; what only a GPU has (graphs, streams, synchronisation) is called plainly there.
"""

from __future__ import annotations

import os

import gpu_helpers
import pytest
import torch

if gpu_helpers.DRY_RUN:  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PULSE_BACKEND"] = "triton"


@pytest.fixture(scope="session")
def device() -> torch.device:
    if gpu_helpers.DRY_RUN:
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "torch finds no CUDA device" if torch.version.cuda else "torch is a CPU-only build"
        pytest.skip(f"no GPU: {build}; PULSE_GPU_DRYRUN=1 runs these tests on the CPU")
    return torch.device("cuda:0")


@pytest.fixture
def packing(device: torch.device) -> None:
    """Packed indices in csrc/cuda: without it the CPU packs, and would be compared with itself."""
    from pulse_kernels.backends import native

    if device.type == "cuda" and not native.cuda_library().loaded:
        pytest.skip(f"no CUDA library: {native.cuda_library().reason}")
