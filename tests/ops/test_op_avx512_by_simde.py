"""The AVX-512 kernels on any x86 CPU: compiled through the SIMDe headers and run by the C++ tests (tests/csrc)."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "csrc" / "run.py"
MISSING = 77


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="for x86 CPUs")
def test_the_avx512_table_through_simde():
    result = subprocess.run([sys.executable, str(RUN), "simde"], capture_output=True, text=True, check=False)
    if result.returncode == MISSING:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "portable: passed" in result.stdout
    assert "avx512 through SIMDe: passed" in result.stdout
