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


def _load(name: str, operator: str, not_built: str, why_not: str = "") -> Library:
    """Load ``_<name>.abi3.so`` and look for one of its operators; ``why_not`` tells why that cannot succeed here."""
    if os.environ.get("PULSE_NATIVE") == "0":
        return Library(name, None, False, "PULSE_NATIVE=0 is set")
    found = sorted(_PACKAGE.glob(f"_{name}*.so")) + sorted(_PACKAGE.glob(f"_{name}*.dylib"))
    if not found:
        return Library(name, None, False, f"not built: {not_built}")
    if why_not:
        return Library(name, found[0], False, why_not)
    try:
        torch.ops.load_library(str(found[0]))
        missing = not hasattr(getattr(torch.ops, f"pulse_kernels_{name}"), operator)
    except (OSError, RuntimeError) as error:
        # load_library says only that it failed; what it was raised from tells the symbol or library that is missing.
        cause = error.__cause__ or error
        return Library(name, found[0], False, f"{found[0].name} does not load in torch {torch.__version__}: {cause}")
    if missing:
        return Library(name, found[0], False, f"{found[0].name} is of another version; reinstall pulse_kernels")
    return Library(name, found[0], True, "")


@functools.cache
def cpu_library() -> Library:
    """Load ``_cpu.abi3.so`` once; never raises."""
    not_built = "no C++ compiler at install time; install one and run `pip install --force-reinstall .`"
    return _load("cpu", "compact_many", not_built)


@functools.cache
def cuda_library() -> Library:
    """Load ``_cuda.abi3.so`` once; never raises. It needs a CUDA build of torch, but no GPU to load.

    Where there are GPUs it must have code for each: one without would fail at its first launch.
    """
    not_built = (
        "no nvcc of CUDA 12.8 or later at install time, or PULSE_CUDA=0; set CUDA_HOME and run "
        "`PULSE_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .`"
    )
    cpu_only = f"torch {torch.__version__} is a CPU-only build; with a CUDA build of torch the library loads"
    library = _load("cuda", "runtime_version", not_built, "" if torch.version.cuda else cpu_only)
    if not library.loaded:
        return library
    raw = torch.ops.pulse_kernels_cuda
    reason = why_too_new(raw.runtime_version()) or why_no_code(raw.architectures())
    return Library("cuda", library.path, False, reason) if reason else library


def why_too_new(runtime: int) -> str:
    """Why a CUDA runtime (1000 * major + 10 * minor) may be too new for the driver under this torch; else ""."""
    torch_cuda = torch.version.cuda or "0"
    major = torch_cuda.split(".")[0]
    if int(major) >= runtime // 1000:
        return ""
    return (
        f"built with CUDA {runtime // 1000}.{runtime % 1000 // 10}, which a driver for CUDA {torch_cuda} (torch "
        f"{torch.__version__}) may refuse; install a torch of CUDA {runtime // 1000}.x, or build with an "
        f"nvcc of CUDA {major}.x"
    )


def why_no_code(architectures: str) -> str:
    """Why a library with code for these architectures ("80,90,100") and PTX of the last cannot run on every visible
    GPU; else ""."""
    built = [int(number) for number in architectures.split(",") if number.isdigit()]
    if not built or not torch.cuda.is_available():
        return ""
    try:
        capabilities = [torch.cuda.get_device_capability(k) for k in range(torch.cuda.device_count())]
    except RuntimeError as error:  # such as CUDA in a forked process
        return f"torch cannot ask the GPUs for their compute capability: {error}"
    for k, (major, minor) in enumerate(capabilities):
        # Code runs on its own and higher minor versions of one major version, PTX on whatever is later.
        same_major = any(number // 10 == major and number % 10 <= minor for number in built)
        if not same_major and 10 * major + minor < built[-1]:
            return (
                f"GPU {k} has compute capability {major}.{minor}, the library has code for "
                f"sm_{', sm_'.join(map(str, built))} and later ones; hide that GPU by CUDA_VISIBLE_DEVICES, or leave "
                "its tensors to the other back ends"
            )
    return ""


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
