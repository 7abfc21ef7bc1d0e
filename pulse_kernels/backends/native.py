"""Finds and loads the compiled libraries; keeps the reason where one is absent.

``PULSE_NATIVE=0`` in the environment leaves the compiled libraries alone, at install time and at run time. Nothing is
loaded before the first operator call (or ``status()``) that wants it.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Library:
    """One compiled library: where it is, or why it is not in use."""

    name: str
    path: Path | None
    loaded: bool
    reason: str


@functools.cache
def cpu_library() -> Library:
    """Load ``_cpu.abi3.so`` once; never raises."""
    if os.environ.get("PULSE_NATIVE") == "0":
        return Library("cpu", None, False, "PULSE_NATIVE=0 is set")
    found = sorted(_PACKAGE.glob("_cpu*.so")) + sorted(_PACKAGE.glob("_cpu*.dylib"))
    if not found:
        reason = "not built: no C++ compiler at install time; install one and run `pip install --force-reinstall .`"
        return Library("cpu", None, False, reason)
    try:
        torch.ops.load_library(str(found[0]))
        missing = not hasattr(torch.ops.pulse_kernels_cpu, "compact_many")
    except (OSError, RuntimeError) as error:
        return Library("cpu", found[0], False, f"{found[0].name} does not load in torch {torch.__version__}: {error}")
    if missing:
        return Library("cpu", found[0], False, f"{found[0].name} is of another version; reinstall pulse_kernels")
    return Library("cpu", found[0], True, "")


@functools.cache
def cpu_library_or_warn() -> bool:
    """Whether the CPU library is in use; says once when a slower back end stands in for it unasked."""
    library = cpu_library()
    if not library.loaded and os.environ.get("PULSE_NATIVE") != "0":
        warnings.warn(
            f"pulse_kernels: CPU tensors use the slow reference ({library.reason}); see `pulse-kernels doctor`",
            stacklevel=2,
        )
    return library.loaded
