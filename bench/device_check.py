"""One command that settles on a GPU what no other machine can: ``python bench/device_check.py``.

Environment, build, doctor, ``pytest -m gpu``, compute-sanitizer and measurements, in under 8 minutes; prints a short
table last, writes JSON and Markdown under bench/results/. ``--dry-run`` walks all of it on a CPU. Each part runs in a
process of its own, so that one that dies takes no other with it.

Exit codes: 0 all ran and was right; 1 something failed or was wrong; 2 there is nothing to check, or wrong usage; 3 all
that ran was right, but not everything ran: the table says NOT RUN where time was over or pytest is absent. Skipped, and
no reason for 3, are a build that is not needed, the sanitizer without compute-sanitizer, rows without the CUDA library
and rows that do not fit into the GPU's memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
# Behind what is installed: a wheel has the compiled libraries, this folder may have none.
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent), str(ROOT)]

from bench.device import steps  # noqa: E402
from bench.device.steps import FAILED, NOT_RUN, OK, SKIPPED, Budget, Step  # noqa: E402

NEEDS = """\
needs on the GPU's machine: a CUDA build of torch >= 2.11, triton >= 3.6, numpy and safetensors, which images with torch
have; Python >= 3.10. Nothing is downloaded. Bring wheels, for the Python there, of what `pip list` lacks:

  zstandard    always (pip download --no-deps --only-binary :all: --python-version 3.12 zstandard)
  pytest       with iniconfig, pluggy and packaging, for the tests; without it they do not run: exit code 3
  setuptools   >= 77, for --build
  pulse_kernels itself, as `make wheel` builds it: its CUDA library packs indices and is the CUB contender; without it,
               or nvcc and --build, those rows are skipped

install them with `pip install --no-index --no-deps *.whl`. The tests under tests/gpu need no hypothesis. A dry run with
triton 3.6 needs numpy < 2.4, whose stricter conversions break that interpreter; on a GPU any numpy will do.
"""
DRY_RUN = {
    "TRITON_INTERPRET": "1",
    "PULSE_BACKEND": "triton",
    "PULSE_GPU_DRYRUN": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
MEASURING = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # blocks of many sizes follow one another
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else torch.compile starts a pool for a few kernels
}
MINUTES = 7.5
# Shares of the whole time: at most for a step, and what is kept for the measurements, which matter most.
MOST = {"environment": 0.15, "build": 0.5, "doctor": 0.15, "tests": 0.33, "sanitizer": 0.25}
KEPT_FOR_MEASURING = 0.33
LAST_SECONDS = 5  # the report


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.part:
        return _part(options)
    report = _check(options)
    if report is None:
        return 2
    folder = options.out or (Path(tempfile.mkdtemp(prefix="device-check-")) if options.dry_run else _results())
    paths = report.write(folder)
    print(f"\n{report.table()}\n\n" + "\n".join(str(path) for path in paths))
    return 1 if report.failed else 3 if report.not_run else 0


def _results() -> Path:
    return ROOT / "bench" / "results"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=NEEDS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="for everything (%(default)s); less important rows go first"
    )
    parser.add_argument(
        "--build", action="store_true", help="build and install in place, even if a package is installed"
    )
    parser.add_argument("--out", type=Path, help="folder of the report (bench/results; a temporary one in a dry run)")
    parser.add_argument(
        "--dry-run", action="store_true", help="walk every step on the CPU at small sizes; times mean nothing"
    )
    parser.add_argument(
        "--part", choices=("environment", "doctor", "tests", "small-case", "measure"), help=argparse.SUPPRESS
    )
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser


# ---- the check -------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> Any:
    """The report; None where there is nothing to check."""
    budget = Budget(60 * options.minutes - LAST_SECONDS)
    variables = DRY_RUN if options.dry_run else {}
    environment = _say(_environment(budget, variables))
    facts = environment.facts
    if environment.outcome == FAILED:
        print(environment.output)
        return None
    if not facts["devices"] and not options.dry_run:
        print(f"no GPU to check: {facts['no_device']}; --dry-run walks every step on the CPU")
        return None
    done = [environment]
    if options.build or (facts["installed"] is None and not options.dry_run):
        done.append(_say(steps.build(_share(budget, "build"))))
    else:
        done.append(_say(Step("build", SKIPPED, f"imported from {facts['installed'] or ROOT}")))
    done.append(_say(steps.doctor(budget.part(MOST["doctor"]), variables)))
    with ThreadPoolExecutor(3 if options.dry_run else 1) as pool:  # times of a dry run mean nothing: side by side
        tests = pool.submit(_tests, budget, variables, facts)
        sanitizer = pool.submit(_sanitizer, budget, variables, options.dry_run)
        measure = pool.submit(_measure, budget, variables | MEASURING, options.dry_run)
        done += [_say(tests.result()), _say(sanitizer.result())]
        measured, rows = measure.result()
        done.append(_say(measured))

    from bench.device.report import Report

    device = "dry run" if options.dry_run else facts["devices"][0]["name"]
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return Report(device, date, options.dry_run, options.minutes, facts, done, rows)


def _say(step: Step) -> Step:
    print(f"{step.name:<12} {step.outcome:<8} {step.seconds:5.0f} s  {step.detail}", flush=True)
    return step


def _share(budget: Budget, name: str) -> float:
    """What a step may take at most, if the measurements are to keep theirs."""
    return budget.part(MOST[name], keep=KEPT_FOR_MEASURING)


def _environment(budget: Budget, variables: dict[str, str]) -> Step:
    done = steps.run(steps.child("environment"), budget.part(MOST["environment"]), variables)
    if done.code:
        return Step("environment", FAILED, f"no torch here? {done.why_failed()}", done.seconds, output=done.tail)
    facts = json.loads(next(line for line in reversed(done.output.splitlines()) if line.startswith("{")))
    packages = facts["packages"]
    names = [device["name"] for device in facts["devices"]] or ["no GPU"]
    detail = f"{', '.join(names)}; torch {packages['torch']}, triton {packages['triton']}, driver {facts['driver']}"
    return Step("environment", OK, detail, done.seconds, facts)


def _tests(budget: Budget, variables: dict[str, str], facts: dict[str, Any]) -> Step:
    if facts["packages"]["pytest"] is None:
        return Step("tests", NOT_RUN, "pytest is not installed; --help names the wheels to bring")
    seconds = _share(budget, "tests")
    if seconds < 20:
        return Step("tests", NOT_RUN, "no time left beside the measurements")
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "tests.xml"
        done = steps.run(steps.child("tests", "--into", str(into)), seconds, variables)
        counts = _counts(into) if into.exists() else {}
    passed = counts.get("tests", 0) - sum(counts.get(name, 0) for name in ("failures", "errors", "skipped"))
    detail = f"{passed} passed, {counts.get('skipped', 0)} skipped, {counts.get('failures', 0)} failed"
    if done.code == 0 and passed:
        return Step(
            "tests", OK, detail, done.seconds, {"passed": passed, **counts}, done.tail if counts["skipped"] else ""
        )
    return Step("tests", FAILED, f"{detail}: {done.why_failed()}", done.seconds, counts, done.tail)


def _counts(path: Path) -> dict[str, int]:
    suite = ElementTree.parse(path).getroot().find("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    return {name: int(suite.get(name, 0)) for name in names} if suite is not None else {}


def _sanitizer(budget: Budget, variables: dict[str, str], dry_run: bool) -> Step:
    seconds = _share(budget, "sanitizer")
    if seconds < 20 and (dry_run or shutil.which("compute-sanitizer")):
        return Step("sanitizer", NOT_RUN, "no time left beside the measurements")
    return steps.sanitizer(seconds, variables, dry_run)


def _measure(budget: Budget, variables: dict[str, str], dry_run: bool) -> tuple[Step, dict[str, dict[str, Any]]]:
    """The step, and the rows by their keys: all that were planned, also where the process died on the way."""
    seconds = budget.left()
    # A row is begun where its guess fits; the margin is for guesses that were too low.
    limit = max(seconds - 15, 1)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "rows.jsonl"
        done = steps.run(
            steps.child("measure", "--seconds", f"{limit:.0f}", "--into", str(into), *_flag(dry_run)),
            seconds,
            variables,
        )
        lines = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
    if not lines:
        return Step("measure", FAILED, f"nothing measured: {done.why_failed()}", done.seconds, output=done.tail), {}
    rows = {row.pop("key"): row for row in lines[1:]}
    for key, section in lines[0]["plan"]:
        rows.setdefault(key, {"section": section, "not_run": f"the process ended before: {done.why_failed()}"})
    measured = sum("contenders" in row for row in rows.values())
    detail = f"{measured} of {len(rows)} rows"
    if done.code == 0:
        return Step("measure", OK, detail, done.seconds), rows
    return Step("measure", FAILED, f"{detail}: {done.why_failed()}", done.seconds, output=done.tail), rows


def _flag(dry_run: bool) -> list[str]:
    return ["--dry-run"] if dry_run else []


# ---- parts, each in a process of its own -----------------------------------------------------------------------------


def _part(options: argparse.Namespace) -> int:
    if options.part == "environment":
        from bench.device.environment import facts

        print(json.dumps(facts()))
        return 0
    if options.part == "doctor":
        from pulse_kernels.cli import main as command_line

        return command_line(["doctor"])
    if options.part == "tests":
        import pytest

        # tests/conftest.py is left out: it needs hypothesis, and nothing here needs it.
        folder = str(ROOT / "tests" / "gpu")
        return pytest.main(
            [
                "-q",
                "-m",
                "gpu",
                "-p",
                "no:cacheprovider",
                f"--confcutdir={folder}",
                f"--junitxml={options.into}",
                folder,
            ]
        )
    import torch

    dry_run = os.environ.get("PULSE_GPU_DRYRUN") == "1"
    if options.part == "small-case":
        from bench.device import small_case

        return small_case.main(torch.device("cpu" if dry_run else "cuda:0"))
    from bench.device import measure

    with options.into.open("w") as out:
        measure.measure(options.seconds, dry_run, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
