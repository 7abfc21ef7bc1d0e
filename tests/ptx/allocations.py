"""Memory that is refused: the first allocation of a call fails, then the second, and so on until the call succeeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Refusals(TorchDispatchMode):
    """Every operator that returns memory which none of its arguments has counts as an allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0  # which allocation was to fail in the call that ran last
        self._count = self._idle = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._idle += 1
        try:
            yield
        finally:
            self._idle -= 1

    def count(self, call: Callable[[], Any]) -> int:
        """How many allocations the call makes, none refused."""
        self.last = self._count = 0
        with self:
            call()
        return self._count

    def until_done(self, call: Callable[[], Any]) -> Iterator[int]:
        """Call with the first allocation refused, then the second, ...; yields after each call that failed of it."""
        while True:
            self.last += 1
            self._count = 0
            try:
                with self:
                    call()
            except torch.OutOfMemoryError:
                yield self.last
            else:
                assert self._count < self.last, "an allocation was refused, and the call went on"
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._idle:
            known = {storage_of(item) for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
            fresh = [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor) and item.numel()]
            if any(storage_of(item) not in known for item in fresh):
                self._count += 1
                if self._count == self.last:
                    raise torch.OutOfMemoryError(f"allocation {self.last} is refused, by {func}")
        return result


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
