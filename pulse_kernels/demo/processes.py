"""Starting processes that are certain to end.

A child ends when it is told to, when the pipe to its partner closes, or when its parent is gone: a watching thread
waits for the parent and ends the child at once, also in the middle of a computation. Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pulse_kernels.demo.messages import DemoError, Failed

GRACE_SECONDS = 10.0
THREADS = 1  # a process; the tensors are small, and threads that wait for each other lose most on a busy machine


def end_with_parent(temporary: Path | None) -> None:
    """Called first in a child: from now on it cannot outlive its parent. Who outlives it for a moment cleans up."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def child(where: str, temporary: Path | None, report: Connection, work: Callable[[], None]) -> None:
    """The frame of every child process: run `work`; an error goes to `report` and makes the exit code 1."""
    end_with_parent(temporary)
    torch.set_num_threads(THREADS)
    try:
        work()
    except EOFError:  # the partner is gone, and whoever ended it knows why
        raise SystemExit(1) from None
    except Exception as error:
        with contextlib.suppress(OSError):
            report.send(Failed.of(where, error))
        raise SystemExit(1) from None


def receive(connection: Connection, kind: type[Any], where: str) -> Any:
    """The next message, which must be a `kind`; a Failed is raised as the error it reports."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        raise DemoError(f"{where} ended without an answer: killed, or crashed with the errors printed above") from None
    if isinstance(message, Failed):
        raise message.exception()
    if not isinstance(message, kind):
        raise DemoError(f"{where} sent {type(message).__name__}, expected {kind.__name__}")
    return message


def send(connection: Connection, message: object, where: str) -> None:
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        receive(connection, object, where)  # what it said before it ended, if anything
        raise DemoError(f"{where} has ended and takes no more orders") from None


class ProcessGroup:
    """Child processes that are all gone when the `with` block ends, however it ends."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []

    def pipe(self) -> tuple[Connection, Connection]:
        return self._context.Pipe()

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        process = self._context.Process(target=target, args=arguments, name=name, daemon=True)
        with _interrupts_for_parent_only():
            process.start()
        self._processes.append(process)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes:
            if kind is None:
                process.join(GRACE_SECONDS)
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _interrupts_for_parent_only() -> Iterator[None]:
    """A process started in here ignores SIGINT from its first instruction on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
