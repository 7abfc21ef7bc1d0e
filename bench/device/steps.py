"""Steps of the device check: child processes under one time budget, each with an outcome that the report shows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "device_check.py"
OK, SKIPPED, FAILED = "ok", "skipped", "failed"
NOT_RUN = "NOT RUN"  # unlike what is skipped it was wanted, and nothing says that it would have passed
_TAIL_LINES = 40


class Budget:
    """Seconds for everything, from when it was made."""

    def __init__(self, seconds: float):
        self._whole, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def part(self, share: float, keep: float = 0) -> float:
        """Seconds for a step: a share of the whole, or what is left of it less the share that is kept for others."""
        return max(min(share * self._whole, self.left() - keep * self._whole), 0)


@dataclass
class Step:
    """outcome: one of those above. detail: one line for the table. output: the tail of what a failed one printed."""

    name: str
    outcome: str
    detail: str
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Finished:
    """A child process. code: None where its time was over."""

    code: int | None
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-_TAIL_LINES:])

    def why_failed(self) -> str:
        if self.code is None:
            return f"stopped after {self.seconds:.0f} s: its time was over"
        return f"exit status {self.code}"


def run(command: Sequence[str], seconds: float, environment: dict[str, str]) -> Finished:
    """Run to the end or until ``seconds`` are over; then it and what it started are stopped."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return Finished(code, output, time.monotonic() - start)


def child(part: str, *arguments: str) -> list[str]:
    """The command that runs one part of the check in a process of its own: device_check.py says which there are."""
    return [sys.executable, str(SCRIPT), "--part", part, *arguments]


def build(budget_seconds: float) -> Step:
    """An editable install, with what is on the machine alone."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-build-isolation"]
    done = run([*command, "--no-deps", "--no-index", "-e", str(ROOT)], budget_seconds, {})
    libraries = sorted(path.name for path in (ROOT / "pulse_kernels").glob("*.so"))
    if done.code == 0:
        return Step("build", OK, f"libraries: {', '.join(libraries) or 'none'}", done.seconds)
    return Step("build", FAILED, f"pip install: {done.why_failed()}", done.seconds, output=done.tail)


def doctor(budget_seconds: float, environment: dict[str, str]) -> Step:
    done = run(child("doctor"), budget_seconds, environment)
    if done.code:
        return Step("doctor", FAILED, f"pulse-kernels doctor: {done.why_failed()}", done.seconds, output=done.tail)
    lines = [line.strip() for line in done.output.splitlines()]
    present = [line.split()[1] for line in lines if line.startswith("yes ")]
    return Step("doctor", OK, f"back ends: {', '.join(present)}", done.seconds, {"output": done.output})


def sanitizer(budget_seconds: float, environment: dict[str, str], dry_run: bool) -> Step:
    """The small case under memcheck and racecheck; in a dry run the small case alone."""
    tool = shutil.which("compute-sanitizer")
    if dry_run:
        done = run(child("small-case"), budget_seconds, environment)
        detail = "the small case alone: compute-sanitizer watches GPUs only"
        if done.code == 0:
            return Step("sanitizer", OK, detail, done.seconds)
        return Step("sanitizer", FAILED, f"small case: {done.why_failed()}", done.seconds, output=done.tail)
    if tool is None:
        return Step("sanitizer", SKIPPED, "compute-sanitizer is not on PATH")
    # Without caching every tensor is an allocation of its own, and an access behind its end is seen.
    environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    seconds, details, output, outcome = 0.0, [], "", OK
    for check in ("memcheck", "racecheck"):
        done = run(
            [tool, "--tool", check, "--error-exitcode", "9", *child("small-case")],
            (budget_seconds - seconds) / (2 if check == "memcheck" else 1),
            environment,
        )
        seconds += done.seconds
        if done.code is None:
            details.append(f"{check}: no time left")
            outcome = NOT_RUN if outcome == OK else outcome
        elif done.code:
            details.append(f"{check}: {'findings' if done.code == 9 else done.why_failed()}")
            outcome, output = FAILED, output + done.tail
        else:
            details.append(f"{check}: clean")
    return Step("sanitizer", outcome, ", ".join(details), seconds, output=output)
