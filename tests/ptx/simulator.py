"""Finds ptxsim, the PTX simulator that runs compiled kernels on the CPU: in $PULSE_PTXSIM or beside the checkout."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "tools" / "ptxsim"


def folder() -> Path:
    return Path(os.environ.get("PULSE_PTXSIM") or BESIDE)


def why_not() -> str | None:
    """Why compiled kernels cannot run here; None where they can."""
    if not (folder() / "ptxsim.py").exists():
        return f"no ptxsim.py in {folder()}; name its folder in PULSE_PTXSIM"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "ptxsim needs g++"
    return None


def load() -> Any:
    """The module ptxsim."""
    if str(folder()) not in sys.path:
        sys.path.insert(0, str(folder()))
    return importlib.import_module("ptxsim")
