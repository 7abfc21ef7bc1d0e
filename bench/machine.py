"""What the report says of the machine, and how much of it other processes took while it measured."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from pulse_kernels.backends import cpu, native


def facts() -> dict[str, Any]:
    """CPU, cores, memory, instruction set in use, versions, threads."""
    library = native.cpu_library()
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "instruction_set": cpu.instruction_set() if library.loaded else f"none ({library.reason})",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name") or platform.processor() or "unknown"
    if {"cpu family", "model"} <= found.keys():
        name += f" (family {found['cpu family']}, model {found['model']})"
    return name


class OtherProcesses:
    """CPU time that went to other processes since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.perf_counter()

    def seconds(self) -> tuple[float, float] | None:
        """(CPU seconds of others, CPU seconds there were); None where the system does not say."""
        now = self._now()
        if now is None or self._start is None:
            return None
        busy, own, wall = (end - start for end, start in zip(now, self._start, strict=True))
        return max(0.0, busy - own), wall * (os.cpu_count() or 1)
