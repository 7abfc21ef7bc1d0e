"""Run the demo: start the processes, show the table while they work, gather the report."""

from __future__ import annotations

import json as json_module
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulse_kernels.demo.chart import ChartUnavailable, save_chart
from pulse_kernels.demo.messages import Accuracy, DemoError, Settings, StepRecord, Summary
from pulse_kernels.demo.processes import ProcessGroup, receive
from pulse_kernels.demo.report import DemoReport
from pulse_kernels.demo.rollout import rollout_process
from pulse_kernels.demo.table import PlainTable, RichTable, live_table
from pulse_kernels.demo.task import HELD_OUT
from pulse_kernels.demo.trainer import trainer_process
from pulse_kernels.sync import Chain, open_store

STEPS = 150
CHART_NAME = "pulse-demo.png"


def run_demo(
    steps: int = STEPS,
    seed: int = 0,
    out_dir: str | Path | None = None,
    workers: int = 2,
    json: bool = False,
    *,
    store: str | Path | None = None,
    prompts_per_step: int = 16,
    samples_per_prompt: int = 8,
    held_out: int = HELD_OUT,
    chart: bool = True,
    damage_version: int | None = None,
) -> DemoReport:
    """Train a small model with GRPO in one process while `workers` rollout processes follow through a store.

    out_dir: keeps every version (in `store`), the final weights, the chart and report.json. Without it the versions
    live in a temporary folder that is removed, and the chart goes to ./pulse-demo.png. json: the table goes to stderr,
    so that stdout stays free. store: folder or URL without versions where they go instead, and stay. held_out: how many
    of the held-out problems measure pass@1. damage_version: flip one bit in each part of this version, to see the
    receivers refuse it.

    Raises a PulseError if a receiver refuses a version, a digest or the final hash differs, or a process fails. No
    process outlives the call. Processes are spawned: a script calls this under ``if __name__ == "__main__":``.
    """
    for name, value in (("steps", steps), ("workers", workers), ("prompts_per_step", prompts_per_step)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    if samples_per_prompt < 2:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; a group needs at least 2 to compare")
    if not workers <= prompts_per_step:
        raise ValueError(f"{workers} workers share {prompts_per_step} prompts a step; use at most one worker a prompt")
    if not workers <= held_out <= HELD_OUT:
        raise ValueError(f"held_out is {held_out}, expected {workers} to {HELD_OUT}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed is {seed}, expected 0 to 2**31 - 1")
    started = time.perf_counter()
    with _folder(out_dir) as folder:
        place = _own_store(folder) if store is None else _empty_store(store)
        keep = out_dir is not None
        settings = Settings(
            steps=steps,
            seed=seed,
            workers=workers,
            prompts_per_step=prompts_per_step,
            samples_per_prompt=samples_per_prompt,
            held_out=held_out,
            store=place,
            temporary=None if keep else folder,
            final_weights=folder / "final.safetensors" if keep else None,
            damage_version=damage_version,
        )
        with live_table(steps, sys.stderr if json else sys.stdout) as table:
            accuracies, records, summary = _follow(settings, table)
        # Work in the store is done; what follows are files about the run.
        total = time.perf_counter() - started
        seconds = dict(summary.seconds)
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        report = DemoReport(
            seed=seed,
            workers=workers,
            held_out=held_out,
            before=accuracies[0],
            after=accuracies[-1],
            steps=records,
            summary_of_trainer=summary,
            seconds=seconds,
            total_seconds=total,
            chart=None,
            out_dir=folder if keep else None,
            notes=[],
        )
        if chart:
            _add_chart(report, folder / CHART_NAME if keep else Path(CHART_NAME))
        if keep:
            (folder / "report.json").write_text(json_module.dumps(report.to_dict(), indent=1) + "\n")
        return report


def _follow(settings: Settings, table: PlainTable | RichTable) -> tuple[list[Accuracy], list[StepRecord], Summary]:
    """Start the processes and read the trainer's events until the last one."""
    accuracies: list[Accuracy] = []
    records: list[StepRecord] = []
    with ProcessGroup() as group:
        events, reporting = group.pipe()
        pipes = [group.pipe() for _ in range(settings.workers)]
        group.start("pulse-trainer", trainer_process, reporting, [pipe[0] for pipe in pipes], settings)
        for worker, pipe in enumerate(pipes):
            group.start(f"pulse-rollout-{worker}", rollout_process, worker, pipe[1], settings)
        # Only the children hold these ends now, so a child's end closes its pipes.
        for connection in (reporting, *(end for pipe in pipes for end in pipe)):
            connection.close()
        while True:
            event = receive(events, object, "trainer")
            if isinstance(event, Summary):
                return accuracies, records, event
            if isinstance(event, StepRecord):
                records.append(event)
                table.step(event)
            elif isinstance(event, Accuracy):
                accuracies.append(event)
                table.accuracy(event)


def _add_chart(report: DemoReport, path: Path) -> None:
    try:
        save_chart(report, path)
        report.chart = path
    except ChartUnavailable as error:
        report.notes.append(str(error))


@contextmanager
def _folder(out_dir: str | Path | None) -> Iterator[Path]:
    """The run's folder: `out_dir`, made where there is none, or a temporary one."""
    if out_dir is None:
        temporary = Path(tempfile.mkdtemp(prefix="pulse-demo-"))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"the folder {folder} cannot be made: {error}; choose another one") from None
    yield folder


def _own_store(folder: Path) -> str:
    """The store in the run's folder, cleared of an earlier run's versions."""
    place = folder / "store"
    for name in ("manifests", "patches", "anchors"):
        shutil.rmtree(place / name, ignore_errors=True)
    place.mkdir(exist_ok=True)
    return str(place)


def _empty_store(store: str | Path) -> str:
    place = str(store)
    if place.lower().startswith("memory:"):
        raise ValueError("store is in memory, which only one process sees; give a folder or the URL of a server")
    with open_store(place) as opened:
        if (newest := Chain(opened).newest()) is not None:
            raise DemoError(f"{opened.describe()} has versions up to {newest}; give the demo a place of its own")
    return place
