"""Measures the cases, a JSON line each to standard output, so that what was measured survives what comes after."""

from __future__ import annotations

import gc
import json
import time
import traceback
from typing import Any, TextIO

import torch

from bench.device.cases import Bench, Case, DoesNotFit, Entrant
from bench.device.timing import Clock, clock_for, medians
from pulse_kernels.cli.bench_quick import Contender

ROUNDS, WARM_UP = 15, 1  # after the call that is checked


def measure(seconds: float, dry_run: bool, out: TextIO) -> None:
    """First the plan, a line of keys; then a line for each row. Rows that no time is left for say so."""
    deadline = time.monotonic() + seconds
    device = torch.device("cpu" if dry_run else "cuda:0")
    bench, clock = Bench(device, dry_run), clock_for(device)
    cases = list(bench.cases())
    _write(out, {"plan": [[case.key, case.section] for case in cases]})
    for case in cases:
        left = deadline - time.monotonic()
        needed = 0.0 if dry_run else case.seconds
        if left < needed:
            row: dict[str, Any] = {"not_run": f"no time: takes about {needed:.0f} s, {max(left, 0):.0f} s are left"}
        else:
            row = row_of(case, clock, 1 if dry_run else ROUNDS, 0 if dry_run else WARM_UP)
        _write(out, {"key": case.key, "section": case.section, **row})


def _write(out: TextIO, item: dict[str, Any]) -> None:
    print(json.dumps(item), file=out, flush=True)


def row_of(case: Case, clock: Clock, rounds: int, warm_up: int) -> dict[str, Any]:
    """The row's figures: for each contender seconds and whether its result was right, or the reason it has none."""
    gc.collect()
    start = time.monotonic()
    try:
        return _row_of(case, clock, rounds, warm_up) | {"took": round(time.monotonic() - start, 2)}
    except (DoesNotFit, torch.cuda.OutOfMemoryError) as error:
        return {"skipped": f"memory: {_first_line(error)}"}
    except Exception as error:  # after some errors of the device nothing else will work there: each row says so
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {_first_line(error)}"}


def _row_of(case: Case, clock: Clock, rounds: int, warm_up: int) -> dict[str, Any]:
    comparison = case.make()
    found = {entrant.name: _checked(entrant) for entrant in comparison.entrants}
    right = [entrant for entrant in comparison.entrants if found[entrant.name].get("correct")]
    contenders = [Contender(entrant.name, entrant.run, entrant.before) for entrant in right]
    for name, seconds in medians(contenders, clock, rounds, warm_up).items():
        found[name]["seconds"] = seconds
    return {
        "title": comparison.title,
        "ours": comparison.entrants[0].name,
        "num_bytes": comparison.num_bytes,
        "contenders": found,
        "notes": comparison.notes,
        "facts": comparison.facts,
    }


def _checked(entrant: Entrant) -> dict[str, Any]:
    """One call whose result is checked, before any is timed. A contender that fails is left out with the reason."""
    if entrant.why_not:
        return {"correct": None, "reason": entrant.why_not}
    try:
        if entrant.before is not None:
            entrant.before()
        return {"correct": bool(entrant.check(entrant.run()))}
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {"correct": None, "reason": f"memory: {_first_line(error)}"}
    except Exception as error:
        traceback.print_exc()
        return {"correct": None, "reason": f"{type(error).__name__}: {_first_line(error)}", "failed": True}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
