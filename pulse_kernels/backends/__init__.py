"""Who computes an operator on which device, and why a back end is absent.

A back end is a module with functions of ``reference.py``, or their forms over lists of tensors: ``apply_patch_many_``
beside ``apply_patch_``. It need not have all: the next one down stands in. PULSE_BACKEND=triton, cuda, cpu or reference
asks for one to be the first; Triton computes CPU tensors under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pulse_kernels.backends import cpu, cuda, native, reference, triton, two_pass

NAMES = ("triton", "cuda", "cpu", "reference")


class BackEnd:
    """The operators of one device: each function from the first of ``layers`` that has it."""

    def __init__(self, names: Sequence[str], layers: Sequence[Any]):
        self.names, self._layers = tuple(names), tuple(layers)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        lone = name.replace("_many", "")
        many = f"{lone[:-1]}_many_" if lone.endswith("_") else f"{lone}_many"
        for layer in self._layers:
            function: Callable[..., Any] | None = getattr(layer, name, None)
            if function is None and hasattr(layer, lone):
                function = _row_by_row(getattr(layer, lone))
            if function is None and hasattr(layer, many):
                function = _one_row(getattr(layer, many))
            if function is not None:
                setattr(self, name, function)
                return function
        raise AttributeError(f"no back end has {name}")


def _row_by_row(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    def many(*columns: Sequence[Any]) -> list[Any]:
        return [function(*row) for row in zip(*columns, strict=True)]

    return many


def _one_row(function: Callable[..., Any]) -> Callable[..., Any]:
    def one(*row: Any) -> Any:
        results = function(*([item] for item in row))
        return None if results is None else results[0]

    return one


def _layers_of(name: str) -> list[Any]:
    if name == "triton":
        from pulse_kernels.backends.triton import operators

        return [operators]
    layers: dict[str, list[Any]] = {"cuda": [two_pass.TwoPass(cuda), cuda], "cpu": [cpu], "reference": [reference]}
    return layers[name]


def _why_not(name: str, device_type: str) -> str:
    """Why a back end cannot compute on a device; "" where it can."""
    if name == "reference":
        return ""
    if name == "triton":
        if device_type == "cpu" and not triton.interpreted():
            return "Triton computes CPU tensors with TRITON_INTERPRET=1 only"
        return triton.why_not()
    if name != device_type:
        return f"it computes {name.upper()} tensors"
    library = native.cuda_library() if name == "cuda" else native.cpu_library()
    return library.reason


@functools.cache
def for_device(device_type: str) -> BackEnd:
    """What computes operators on tensors of this device type."""
    asked = os.environ.get("PULSE_BACKEND")
    wanted: tuple[str, ...] = NAMES if device_type == "cuda" else NAMES[2:]
    if asked:
        if asked not in NAMES:
            raise ValueError(f"PULSE_BACKEND is {asked!r}, expected one of {', '.join(NAMES)}")
        if reason := _why_not(asked, device_type):
            raise RuntimeError(f"PULSE_BACKEND={asked} cannot compute {device_type} tensors: {reason}")
        wanted = (asked, *(name for name in NAMES[NAMES.index(asked) + 1 :] if name in wanted))
    names = [name for name in wanted if not _why_not(name, device_type)]
    missing = [name for name in wanted if name not in names]
    if device_type == "cpu" and not asked:
        native.cpu_library_or_warn()
    elif device_type == "cuda" and missing and not asked:
        reasons = "; ".join(f"{name}: {_why_not(name, device_type)}" for name in missing if name != "cpu")
        if reasons:
            warnings.warn(f"pulse_kernels: a slower back end stands in on CUDA tensors ({reasons})", stacklevel=3)
    return BackEnd(names, [layer for name in names for layer in _layers_of(name)])


__all__ = ["BackEnd", "cpu", "cuda", "for_device", "native", "reference", "triton"]
