"""The live table: one row a step, drawn with rich on a terminal, else printed as plain lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, TextIO

from pulse_kernels.demo.messages import Accuracy, StepRecord

COLUMNS = ("step", "reward", "changed", "payload KB", "of dense", "gate ms", "encode ms", "apply ms", "digest")
VISIBLE_ROWS = 12


def cells(step: StepRecord) -> tuple[str, ...]:
    return (
        str(step.step),
        f"{step.reward:.3f}",
        f"{100 * step.density:.2f}%",
        f"{step.payload_bytes / 1e3:.1f}",
        f"1/{step.ratio_to_dense:.0f}",
        f"{1e3 * step.gate_seconds:.2f}",
        f"{1e3 * step.encode_seconds:.2f}",
        f"{1e3 * step.apply_seconds:.2f}",
        "ok" if step.digest_ok else "WRONG",
    )


class PlainTable:
    """A line every few steps, for logs and for machines without rich."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self.steps = steps
        self.every = max(1, steps // 20)
        self.stream = stream

    def __enter__(self) -> PlainTable:
        self.say("  ".join(f"{column:>10}" for column in COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def accuracy(self, accuracy: Accuracy) -> None:
        self.say(f"version {accuracy.version}: {describe(accuracy)}")

    def step(self, step: StepRecord) -> None:
        if step.step == 1 or step.step % self.every == 0 or step.step == self.steps:
            self.say("  ".join(f"{cell:>10}" for cell in cells(step)))


class RichTable:
    """The last rows and a progress bar, redrawn in place."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.steps = steps
        self.rows: list[StepRecord] = []
        self.accuracies: list[Accuracy] = []
        self.live = Live(console=Console(file=stream), get_renderable=self.render, refresh_per_second=8)

    def __enter__(self) -> RichTable:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def accuracy(self, accuracy: Accuracy) -> None:
        self.accuracies.append(accuracy)

    def step(self, step: StepRecord) -> None:
        self.rows.append(step)

    def render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS, title="PULSE: one trainer, its rollout processes following by patches")
        for column in table.columns:
            column.justify = "right"
        for step in self.rows[-VISIBLE_ROWS:]:
            *row, verdict = cells(step)
            table.add_row(*row, Text(verdict, style="green" if step.digest_ok else "bold red"))
        lines = [Text(f"version {accuracy.version}: {describe(accuracy)}") for accuracy in self.accuracies]
        done = self.rows[-1].step if self.rows else 0
        state = Text("starting processes" if not self.accuracies else f"step {done} of {self.steps}")
        return Group(table, *lines, state, ProgressBar(total=self.steps, completed=done, width=60))


def describe(accuracy: Accuracy) -> str:
    return f"pass@1 {accuracy.greedy:.3f} greedy, {accuracy.sampled:.3f} sampled"


def live_table(steps: int, stream: TextIO | None = None) -> PlainTable | RichTable:
    stream = stream or sys.stdout
    if stream.isatty():
        try:
            return RichTable(steps, stream)
        except ImportError:
            pass
    return PlainTable(steps, stream)
