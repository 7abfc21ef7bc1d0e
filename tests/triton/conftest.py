"""Fixtures for the Triton back end without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import simulator

from pulse_kernels.backends import triton

if TYPE_CHECKING:
    from triton_code import Launches


@pytest.fixture(scope="session")
def ptxsim():
    if reason := simulator.why_not():
        pytest.skip(reason)
    return simulator.load()


@pytest.fixture
def kernels(request) -> Iterator[Launches]:
    """All operators on CPU tensors through the Triton kernels: their PTX (sm_90) in the simulator, every access
    checked, or, under TRITON_INTERPRET=1, in Triton's interpreter."""
    pytest.importorskip("triton")
    from triton_code import Launches, Simulated

    run = Launches() if triton.interpreted() else Simulated(request.getfixturevalue("ptxsim"))
    with run.operators() as launches:
        yield launches
        assert launches.launches, "no kernel ran"
