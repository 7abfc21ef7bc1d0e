"""A progress bar on stderr for whatever takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_PATIENCE_SECONDS = 2.0


class ProgressBar:
    """Callable with (bytes done, bytes in all). Draws with rich on a terminal where that is installed, else prints a
    line every two seconds; nothing at all before the first two have passed, or when ``quiet``."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title = title
        self._quiet = quiet
        self._next = time.monotonic() + _PATIENCE_SECONDS
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._quiet or total <= 0:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() >= self._next:
            self._bar = _rich_bar()
            if self._bar is not None:
                self._bar.start()
                self._task = self._bar.add_task(self._title, total=total, completed=done)
            else:
                self._next = time.monotonic() + _PATIENCE_SECONDS
                print(f"{self._title}: {100 * done // total}% of {total / 1e9:.2f} GB", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rich_bar() -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)
