"""Who computes an operator on which device, and why a back end is absent.

A back end is a module with functions of ``reference.py``, or their forms over lists of tensors: ``apply_patch_many_``
beside ``apply_patch_``. It need not have all: the next one down stands in. PULSE_BACKEND=triton, cuda, cpu or reference
asks for one to be the first on the devices it serves: Triton serves CPU tensors under TRITON_INTERPRET=1 only.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pulse_kernels.backends import cpu, cuda, native, reference, triton, two_pass
from pulse_kernels.errors import BackEndError, PatchFormatError

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
        results = []
        for k, row in enumerate(zip(*columns, strict=True)):
            try:
                results.append(function(*row))
            except PatchFormatError as error:
                error.row = k
                raise
        return results

    return many


def _one_row(function: Callable[..., Any]) -> Callable[..., Any]:
    def one(*row: Any) -> Any:
        results = function(*([item] for item in row))
        return None if results is None else results[0]

    return one


class _ThroughHost:
    """Packed indices of CUDA tensors where csrc/cuda is not in use: block by block work, which the CPU does well."""

    @staticmethod
    def pack_indices_many(indices: list[Tensor], numels: list[int]) -> list[Tensor]:
        blobs = for_device("cpu").pack_indices_many([index.cpu() for index in indices], numels)
        return [blob.to(index.device) for blob, index in zip(blobs, indices, strict=True)]

    @staticmethod
    def unpack_indices_many(
        packed: list[Tensor], index_dtypes: list[torch.dtype], headers: list[tuple[int, int]] | None = None
    ) -> list[Tensor]:
        lists = for_device("cpu").unpack_indices_many([blob.cpu() for blob in packed], index_dtypes)
        return [index.to(blob.device) for index, blob in zip(lists, packed, strict=True)]


def _layers_of(name: str) -> list[Any]:
    if name == "triton":
        from pulse_kernels.backends.triton import operators

        return [operators]
    layers: dict[str, list[Any]] = {"cuda": [two_pass.TwoPass(cuda), cuda], "cpu": [cpu], "reference": [reference]}
    return layers[name]


def _serves(name: str, device_type: str) -> bool:
    if name == "triton":
        return device_type == ("cpu" if triton.interpreted() else "cuda")
    return name in (device_type, "reference")


def _why_not(name: str) -> str:
    """Why a back end is absent; "" where it is not."""
    if name == "triton":
        return triton.why_not()
    if name == "reference":
        return ""
    return (native.cuda_library() if name == "cuda" else native.cpu_library()).reason


def asked_for() -> str | None:
    """What PULSE_BACKEND names; BackEndError where there is no such back end."""
    asked = os.environ.get("PULSE_BACKEND") or None
    if asked not in (None, *NAMES):
        raise BackEndError(f"PULSE_BACKEND is {asked!r}, expected one of {', '.join(NAMES)}; or unset it")
    return asked


def order(device_type: str) -> tuple[list[str], list[str]]:
    """(back ends that would serve a device type, first to last; those of them that are present). BackEndError where
    PULSE_BACKEND asks for one that is not."""
    asked = asked_for()
    wanted = [name for name in NAMES if _serves(name, device_type)]
    if asked in wanted:
        if reason := _why_not(asked):
            raise BackEndError(f"PULSE_BACKEND={asked} cannot compute {device_type} tensors: {reason}")
        wanted = wanted[wanted.index(asked) :]
    elif device_type == "cpu":
        wanted = [name for name in wanted if name != "triton"]  # the interpreter, for tests, only where it is asked for
    return wanted, [name for name in wanted if not _why_not(name)]


@functools.cache
def for_device(device_type: str) -> BackEnd:
    """What computes operators on tensors of this device type."""
    wanted, names = order(device_type)
    if device_type == "cpu" and "cpu" in wanted:
        native.cpu_library_or_warn()
    elif names != wanted and os.environ.get("PULSE_NATIVE") != "0":
        reasons = "; ".join(f"{name}: {_why_not(name)}" for name in wanted if name not in names)
        warnings.warn(f"pulse_kernels: a slower back end stands in on CUDA tensors ({reasons})", stacklevel=3)
    layers = [layer for name in names for layer in _layers_of(name)]
    if device_type == "cuda" and wanted != ["reference"]:
        layers.insert(-1, _ThroughHost)  # before the reference
    return BackEnd(names, layers)


__all__ = ["BackEnd", "asked_for", "cpu", "cuda", "for_device", "native", "order", "reference", "triton"]
