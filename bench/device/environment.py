"""What the check runs on: versions, driver, device."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from bench.device.steps import ROOT

PACKAGES = ("torch", "triton", "numpy", "zstandard", "safetensors", "pytest", "setuptools")


def facts() -> dict[str, Any]:
    """Needs torch. ``device`` is the GPU's name, or why there is none."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda_of_torch": torch.version.cuda,
        "driver": _driver(),
        "nvcc": _first_line("nvcc", "--version", last=True),
        "compute_sanitizer": shutil.which("compute-sanitizer"),
        "commit": _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "installed": _installed(),
        "devices": [],
    }
    if torch.cuda.is_available():
        for k in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(k)
            found["devices"].append(
                {
                    "name": device.name,
                    "architecture": f"sm_{device.major}{device.minor}",
                    "memory_bytes": device.total_memory,
                    "multiprocessors": device.multi_processor_count,
                    "l2_bytes": getattr(device, "L2_cache_size", None),
                }
            )
    else:
        found["no_device"] = "torch is a CPU-only build" if torch.version.cuda is None else "torch finds no CUDA device"
    return found


def _installed() -> str | None:
    """Where pulse_kernels is imported from, if from an install and not from this folder's mere presence."""
    try:
        metadata.distribution("pulse_kernels")
    except metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("pulse_kernels")
    return spec.origin if spec else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first_line(*command: str, last: bool = False) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0] if done.returncode == 0 and lines else None


def _driver() -> str | None:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
