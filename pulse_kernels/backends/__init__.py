"""Who computes an operator on which device, and why a back end is absent."""

from __future__ import annotations

from types import ModuleType

from pulse_kernels.backends import cpu, native, reference


def for_device(device_type: str) -> ModuleType:
    """The module that computes operators on tensors of this device type."""
    if device_type == "cpu" and native.cpu_library_or_warn():
        return cpu
    return reference


__all__ = ["cpu", "for_device", "native", "reference"]
