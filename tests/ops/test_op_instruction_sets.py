"""The operators' tests once more for every other instruction set of this CPU, and without the compiled library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulse_kernels.backends import cpu, native

ORDER = ["portable", "avx2", "avx512"]
LOOPS = ["hard_values", "gate", "residual", "packing", "digest"]  # what has loops of its own in each set
OTHERS = ["out", "patch", "streams", "layouts", "bad_input"]


def here():
    """What this process runs."""
    return cpu.instruction_set() if native.cpu_library().loaded else "reference"


def test_what_was_asked_for_runs():
    asked = os.environ.get("PULSE_CPU")
    if os.environ.get("PULSE_NATIVE") == "0":
        assert here() == "reference"
    elif asked is not None:
        assert here() == asked


def why_not(name):
    """Why this process need not or cannot ask for a run with ``name``; None where it should."""
    best = here()
    if name == best:
        return f"{name} is what all other tests run"
    if best == "reference":
        return f"the compiled library is not in use: {native.cpu_library().reason}"
    if name != "reference" and ORDER.index(name) > ORDER.index(best):
        return f"this CPU runs {best} at best; test_op_avx512_by_simde.py runs the AVX-512 loops on any"
    return None


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs at once, on one thread each, with their reports in files."""
    folder = Path(__file__).parent
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", "not 2-threads and not 4-threads"]
    running = {}
    for name in [*ORDER, "reference"]:
        if why_not(name) is not None:
            continue
        if name == "reference":
            files, ours = LOOPS + OTHERS, {"PULSE_NATIVE": "0"}
        else:
            files, ours = LOOPS, {"PULSE_CPU": name}
        tests = [f"{Path(__file__)}::test_what_was_asked_for_runs"]
        tests += [str(folder / f"test_op_{file}.py") for file in files]
        report = tmp_path_factory.mktemp("runs") / f"{name}.txt"
        with report.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                env=os.environ | ours | {"PULSE_TEST_EXAMPLES": "15"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running[name] = process, report
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


@pytest.mark.skipif("PULSE_CPU" in os.environ or "PULSE_NATIVE" in os.environ, reason="this is one of those runs")
@pytest.mark.parametrize("name", [*ORDER, "reference"])
def test_operators(name, runs):
    if reason := why_not(name):
        pytest.skip(reason)
    process, report = runs[name]
    status = process.wait(timeout=250)
    assert status == 0, report.read_text()[-5000:]
