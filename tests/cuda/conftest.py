"""Fixtures for csrc/cuda without a GPU: the compiler, and the compiled PTX run on CPU tensors by a simulator."""

from __future__ import annotations

from collections.abc import Iterator

import compiler
import device_code
import pytest
import simulator

from pulse_kernels.backends import cuda


@pytest.fixture(scope="session")
def nvcc() -> str:
    """The CUDA compiler that a build here would take."""
    found = compiler.nvcc()
    if found is None:
        pytest.skip(compiler.WHY_NOT)
    return found


@pytest.fixture(scope="session")
def kernels(nvcc: str) -> device_code.Kernels:
    """All kernels of csrc/cuda as PTX, loaded in the simulator."""
    reason = simulator.why_not()
    if reason:
        pytest.skip(reason)
    return device_code.Kernels(simulator.load(), nvcc)


@pytest.fixture
def simulated(kernels: device_code.Kernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[device_code.Simulated]:
    """backends.cuda on CPU tensors: every raw operator runs its kernel's PTX, every access and counter checked."""
    raw = device_code.Simulated(kernels)
    monkeypatch.setattr(cuda, "_raw", raw)
    # Copies whose addresses go into tables are legal memory, too.
    for name in ("dense", "_aligned"):
        monkeypatch.setattr(cuda, name, raw.remembering(getattr(cuda, name)))
    yield raw
    assert raw.launches, "no kernel ran"
