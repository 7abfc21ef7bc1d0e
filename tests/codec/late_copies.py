"""A stand-in for a GPU whose copies to the host arrive as late as they may: not before they are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from pulse_kernels import transfer
from pulse_kernels.codec import sending


class LateLane:
    """What ``transfer.Lane`` does, on CPU tensors. log: what was asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.late: list[tuple[Tensor, Tensor]] = []
        self.arrived = 0
        self.lock = threading.Lock()

    def follow(self) -> None:
        self.log.append("follow")

    def copy(self, source: Tensor) -> tuple[Tensor, Callable[[], None]]:
        target = torch.full_like(source, 0xEE)  # what whoever reads too early finds
        self.late.append((target, source))
        self.log.append("copy")
        count = len(self.late)
        return target, lambda: self.wait(count)

    def wait(self, count: int) -> None:
        """A copy is there when those before it are; those behind it need not be."""
        with self.lock:
            self.log.append("wait")
            for target, source in self.late[self.arrived : count]:
                target.copy_(source)
            self.arrived = max(self.arrived, count)


@contextmanager
def late_copies(*, packs: bool = True, piece: int = 1 << 12, batch: int = 1 << 12) -> Iterator[LateLane]:
    """All tensors count as on a device, which packs indices or not; few bytes are enough to make several pieces."""
    lane = LateLane()
    with (
        mock.patch.object(transfer, "is_away", return_value=True),
        mock.patch.object(sending, "is_away", return_value=True),
        mock.patch.object(transfer, "lane", return_value=lane),
        mock.patch.object(sending, "packs_on", return_value=packs),
        mock.patch.object(transfer, "_PIECE", piece),
        mock.patch.object(sending, "_BATCH", batch),
    ):
        yield lane
