"""Work spread over threads: the codec's libraries let go of Python's lock while they compress and decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def parallel_map(function: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
    """``[function(item) for item in items]`` on up to ``threads`` threads, this one among them.

    Raises what ``function`` raised for the first item, in order, for which it did; items behind may then be left out.
    """
    threads = min(threads, len(items))
    if threads <= 1:
        return [function(item) for item in items]
    left = deque(range(len(items)))
    results: dict[int, _R] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            try:
                k = left.popleft()
            except IndexError:
                return
            try:
                results[k] = function(items[k])
            except BaseException as error:
                errors[k] = error
                left.clear()

    with ThreadPoolExecutor(threads - 1) as pool:
        with suppress(RuntimeError):  # no more threads, or the interpreter is on its way out: this one does it all
            for _ in range(threads - 1):
                pool.submit(work)
        work()
    if errors:
        raise errors[min(errors)]
    return [results[k] for k in range(len(items))]
