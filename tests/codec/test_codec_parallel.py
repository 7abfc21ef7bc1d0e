"""parallel_map: order, errors, and places where no thread can be started."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pulse_kernels.codec.parallel import parallel_map


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_order(threads: int) -> None:
    assert parallel_map(lambda k: k * k, range(100), threads) == [k * k for k in range(100)]
    assert parallel_map(lambda k: k, [], threads) == []


def test_this_thread_takes_part() -> None:
    both = threading.Barrier(2, timeout=30)
    seen = parallel_map(lambda k: (both.wait(), threading.current_thread())[1], range(2), 2)
    assert threading.main_thread() in seen
    assert len(set(seen)) == 2


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_first_error_in_order(threads: int) -> None:
    def fail(k: int) -> None:
        if k in (3, 4, 50):
            raise ValueError(k)

    with pytest.raises(ValueError, match=r"^3$"):
        parallel_map(fail, range(100), threads)


def test_without_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert parallel_map(lambda k: k, range(9), 3) == list(range(9))


def test_at_exit() -> None:
    program = """
import atexit
from pulse_kernels.codec.parallel import parallel_map
atexit.register(lambda: print(parallel_map(abs, range(5), 2)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout == "[0, 1, 2, 3, 4]\n", result.stderr
