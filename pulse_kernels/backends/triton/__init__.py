"""Triton kernels bound to the operators; CUDA tensors, or CPU tensors under TRITON_INTERPRET=1.

Importing this package imports nothing of triton: ``why_not()`` tells whether ``operators`` can be imported and run.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

import torch


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")  # as Triton reads it


@functools.cache
def why_not() -> str:
    """Why Triton kernels cannot run here; "" where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if interpreted():
        return ""
    if torch.version.hip:
        return "the kernels are not tested on ROCm"
    # Triton compiles its launcher with a C compiler at the first launch.
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name):
        return "no C compiler for Triton's launcher (tried $CC, cc, gcc, clang); install one"
    return ""
