"""What commands that run until Ctrl-C share: lines as things happen, patience with a store, the clean end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pulse_kernels.errors import PulseError, StoreError

if TYPE_CHECKING:
    from pulse_kernels.sync import Store
    from pulse_kernels.sync.metrics import Metrics

EXIT_INTERRUPTED = 130

_LONGEST_PAUSE = 60.0  # seconds between attempts at a store that cannot be reached

Result = tuple[int, dict[str, Any] | None, str]


class Lines:
    """What is printed: a line a version on stdout; on stderr what is waited for, once a reason."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.at = ""  # how far it got, for who interrupts
        self._said = ""

    def version(self, data: dict[str, Any], text: str) -> None:
        self._said = ""
        print(json.dumps(data) if self.as_json else text, flush=True)

    def note(self, text: str) -> None:
        if text and text != self._said:
            print(f"pulse-kernels: {text}", file=sys.stderr, flush=True)
        self._said = text


class Retry:
    """Growing pauses between attempts at a store that cannot be reached."""

    def __init__(self, lines: Lines, interval: float, metrics: Metrics | None) -> None:
        self._lines, self._interval, self.metrics, self._failures = lines, interval, metrics, 0

    def pause(self, error: StoreError) -> None:
        if self.metrics is not None:
            self.metrics.failure("store", error)
        seconds = min(max(self._interval, 0.1) * 2**self._failures, _LONGEST_PAUSE)
        self._failures = min(self._failures + 1, 32)
        self._lines.note(f"{error}; trying again in {seconds:.1f} s")
        time.sleep(seconds)

    def reset(self) -> None:
        self._failures = 0


def run_endless(
    arguments: argparse.Namespace, loop: Callable[[argparse.Namespace, Store, Lines, Retry], int], *, create: bool
) -> Result:
    """Open the store and run ``loop`` until it ends or Ctrl-C does."""
    lines = Lines(arguments.json)
    with ExitStack() as stack:
        try:
            metrics: Metrics | None = None
            if arguments.metrics_port is not None:
                from pulse_kernels.sync.metrics import Metrics

                metrics = Metrics()
                try:
                    server = stack.enter_context(metrics.serve(port=arguments.metrics_port))
                except OSError as error:
                    raise PulseError(f"--metrics-port {arguments.metrics_port}: {error.strerror or error}") from error
                lines.note(f"metrics are at {server.url}")
            retry = Retry(lines, arguments.interval, metrics)
            store = stack.enter_context(_opened(arguments, retry, create))
            return loop(arguments, store, lines, retry), None, ""
        except KeyboardInterrupt:
            lines.note(f"stopped; {lines.at}" if lines.at else "stopped")
            return EXIT_INTERRUPTED, None, ""


def _opened(arguments: argparse.Namespace, retry: Retry, create: bool) -> Store:
    """The store. An address that cannot be used is a StoreError; a folder that nobody has made yet is waited for."""
    from pulse_kernels.sync import open_store

    while True:
        try:
            return open_store(arguments.store, create=create)
        except StoreError as error:
            if create or arguments.once or "://" in arguments.store or os.path.lexists(arguments.store):
                raise
            retry.pause(error)
