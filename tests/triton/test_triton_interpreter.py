"""The Triton kernels in Triton's interpreter: test_triton_operators.py once more, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulse_kernels.backends import triton


@pytest.mark.skipif(triton.interpreted(), reason="this is that process")
@pytest.mark.timeout(600)
def test_operators_in_the_interpreter():
    pytest.importorskip("triton")
    tests = Path(__file__).parent / "test_triton_operators.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
