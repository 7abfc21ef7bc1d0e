"""How long a call takes: CUDA events behind a flushed L2, or a plain clock for the dry run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pulse_kernels.cli.bench_quick import Contender, rotated

PATIENCE = 1.0  # seconds of calls after which a contender has had enough rounds
FEWEST = 3


class Clock(Protocol):
    def __call__(self, run: Callable[[], Any]) -> float:
        """Seconds from before the call until all that it enqueued is done."""
        ...


class Events:
    """CUDA events around a call: kernels, copies, and the gaps in which the device waits for the host.

    Ahead of each call a buffer of more than the L2 is read: nothing of the inputs is in the cache, and what was written
    before is back in memory, where it does not compete with the call's own traffic.
    """

    def __init__(self, device: torch.device):
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._cold = torch.zeros(max(4 * size, 1 << 28) // 8, dtype=torch.int64, device=device)

    def __call__(self, run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._cold.sum()
        start.record()
        result = run()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3


def wall(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def clock_for(device: torch.device) -> Clock:
    return Events(device) if device.type == "cuda" else wall


def medians(contenders: Sequence[Contender], clock: Clock, rounds: int, warm_up: int) -> dict[str, float]:
    """Median seconds of each. They take turns, so that a changing clock rate meets all of them; one that takes long
    takes part in fewer rounds."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for k in range(-warm_up, rounds):
            for contender in rotated(contenders, k):
                taken = seconds[contender.name]
                if len(taken) >= FEWEST and sum(taken) > PATIENCE:
                    continue
                if contender.before is not None:
                    contender.before()
                elapsed = clock(contender.run)
                if k >= 0:
                    taken.append(elapsed)
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(taken) for name, taken in seconds.items()}
