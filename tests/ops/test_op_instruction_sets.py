"""The operators' tests once more for every other instruction set of this CPU, and without the compiled library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulse_kernels.backends import cpu, native

ORDER = ["portable", "avx2", "avx512"]
FILES = ["hard_values", "gate", "out", "patch", "residual", "packing", "streams", "digest"]


def here():
    """What this process runs."""
    return cpu.instruction_set() if native.cpu_library().loaded else "reference"


def test_what_was_asked_for_runs():
    asked = os.environ.get("PULSE_CPU")
    if os.environ.get("PULSE_NATIVE") == "0":
        assert here() == "reference"
    elif asked is not None:
        assert here() == asked


@pytest.mark.skipif("PULSE_CPU" in os.environ or "PULSE_NATIVE" in os.environ, reason="this is one of those runs")
@pytest.mark.parametrize("name", [*ORDER, "reference"])
def test_operators(name):
    best = here()
    if name == best:
        pytest.skip(f"{name} is what all other tests run")
    if best == "reference":
        pytest.skip(f"the compiled library is not in use: {native.cpu_library().reason}")
    if name != "reference" and ORDER.index(name) > ORDER.index(best):
        pytest.skip(f"this CPU runs {best} at best; test_op_avx512_by_simde.py runs the AVX-512 loops on any")
    ours = {"PULSE_NATIVE": "0"} if name == "reference" else {"PULSE_CPU": name}
    folder = Path(__file__).parent
    files = [str(folder / f"test_op_{file}.py") for file in FILES]
    asked = f"{Path(__file__)}::test_what_was_asked_for_runs"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", asked, *files],
        env=os.environ | ours | {"PULSE_TEST_EXAMPLES": "15"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
