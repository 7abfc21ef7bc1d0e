"""bench/device_check.py as far as it goes without a GPU: a dry run of all of it, and what it does with bad news."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import device_check  # noqa: E402
from bench.device import cases, data, goals, measure, steps, timing  # noqa: E402
from bench.device.report import Report, status  # noqa: E402

UPDATES, DENSITIES = ("pure", "update"), ("0.1%", "1%", "5%")
ROWS = {
    "copy",
    *(f"gate/{size}/{density}/{update}" for size in ("1e8", "1e9") for density in DENSITIES for update in UPDATES),
    *(f"model/{density}/{update}" for density in DENSITIES for update in UPDATES),
    *(f"apply/{changes}" for changes in ("1e5", "1e6", "1e7", "1e8", "model")),
    *("host/model", "digest/1e9", "digest/model", "pack/1e9", "pack/model", "unpack/1e9"),
}
STEPS = ["environment", "build", "doctor", "tests", "sanitizer", "measure"]


def run(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "device_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """(what it printed, its JSON, its Markdown)"""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("dry-run")
    done = run("--dry-run", "--minutes", "30", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    paths = sorted(folder.iterdir())
    assert [path.suffix for path in paths] == [".json", ".md"]
    return done.stdout, json.loads(paths[0].read_text()), paths[1].read_text()


def test_every_step_was_walked(dry_run):
    _, found, _ = dry_run
    assert [step["name"] for step in found["steps"]] == STEPS
    outcomes = {step["name"]: step["outcome"] for step in found["steps"]}
    assert outcomes.pop("build") in ("ok", "skipped")
    assert set(outcomes.values()) == {"ok"}
    assert not found["failed"]
    assert found["not_run"] == []
    tests = next(step for step in found["steps"] if step["name"] == "tests")
    assert tests["facts"]["passed"] > 80
    assert tests["facts"]["failures"] == tests["facts"]["errors"] == 0


def test_every_row_was_measured_and_right(dry_run):
    _, found, _ = dry_run
    rows = {row["key"]: row for row in found["rows"]}
    assert set(rows) == ROWS
    for key, row in rows.items():
        assert row["status"] == "ok", key
        assert row["correct"] is True
        contenders = row["contenders"]
        assert contenders[row["ours"]]["correct"] is True
        assert contenders[row["ours"]]["seconds"] > 0
        for name, contender in contenders.items():
            assert contender["correct"] is True or contender["reason"], (key, name)
        if key != "copy":
            assert contenders["eager"]["correct"] is True
        if key.startswith("gate"):
            assert contenders["torch.compile"]["correct"] is True
            assert contenders["CUB"]["reason"] == "it computes CUDA tensors"


def test_the_report_says_that_its_times_mean_nothing(dry_run):
    printed, found, markdown = dry_run
    assert found["dry_run"] is True
    assert all("DRY RUN" in text and "mean nothing" in text for text in (printed, markdown, found["note"]))
    assert {goal["met"] for goal in found["goals"]} == {None}
    # The table comes last, then the paths alone.
    assert "not judged" in printed[-1500:]
    assert not (ROOT / "bench" / "results" / "dry-run.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert "--dry-run" in done.stdout
    assert not list(tmp_path.iterdir())


def test_help_names_the_wheels():
    done = run("--help")
    assert done.returncode == 0
    assert "zstandard" in done.stdout
    assert "pytest" in done.stdout


def test_the_list_of_shapes_is_the_real_one():
    data.check_qwen()
    shapes = data.QWEN_7B.shapes()
    assert len(shapes) == 339
    assert shapes["model.layers.27.self_attn.k_proj.weight"] == (512, 3584)
    assert shapes["model.layers.0.self_attn.q_proj.bias"] == (3584,)
    assert shapes["lm_head.weight"] == (152064, 3584)


# ---- wrong, failing, late ----


def row_with(*entrants):
    case = cases.Case("gate/1e9/1%/update", "Gate", 1, lambda: cases.Comparison("a row", 8, list(entrants)))
    return measure.row_of(case, timing.wall, 1, 0) | {"section": "Gate"}


def report_of(rows, *done):
    return Report("a GPU", "2026-01-01", False, 7.5, {}, list(done), rows)


def entrant(name, right=True):
    return cases.Entrant(name, lambda: 1, lambda result: right)


def raises():
    raise RuntimeError("it broke\nsecond line")


@pytest.mark.parametrize("wrong", ["gate_compact", "CUB", "eager"])
def test_a_wrong_result_is_shown_and_fails(wrong):
    row = row_with(*(entrant(name, name != wrong) for name in ("gate_compact", "CUB", "eager")))
    report = report_of({"gate/1e9/1%/update": row})
    assert status(row) == "WRONG"
    assert report.failed
    assert "WRONG" in report.table()
    assert "seconds" not in row["contenders"][wrong]  # what is wrong has no time


def test_of_failures_only_ours_count():
    row = row_with(entrant("gate_compact"), cases.Entrant("torch.compile", raises))
    assert status(row) == "ok"
    assert row["contenders"]["torch.compile"]["reason"] == "RuntimeError: it broke"
    row = row_with(entrant("gate_compact"), cases.Entrant("CUB", raises))
    assert status(row) == "FAILED: CUB"
    assert report_of({"gate/1e9/1%/update": row}).failed


def test_a_failed_step_fails():
    assert report_of({}, steps.Step("tests", steps.FAILED, "")).failed
    assert not report_of({}, steps.Step("tests", steps.SKIPPED, ""), steps.Step("doctor", steps.OK, "")).failed


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """Runs main with steps in place of the real ones: (exit code, what it printed, its JSON)."""

    def run_main(*done, rows=None):
        report = report_of(rows or {}, *done)
        monkeypatch.setattr(device_check, "_check", lambda options: report)
        code = device_check.main(["--out", str(tmp_path)])
        (found,) = tmp_path.glob("*.json")
        (markdown,) = tmp_path.glob("*.md")
        return code, capsys.readouterr().out, json.loads(found.read_text()), markdown.read_text()

    return run_main


LATE = {"section": "Gate", "not_run": "no time: takes about 9 s, 2 s are left"}


def test_what_did_not_run_is_told_and_has_a_code_of_its_own(check):
    tests = steps.Step("tests", steps.NOT_RUN, "no time left beside the measurements")
    rows = {"copy": row_with(entrant("copy")), "gate/1e9/1%/update": LATE}
    code, printed, found, markdown = check(steps.Step("doctor", steps.OK, ""), tests, rows=rows)
    assert code == 3
    assert found["not_run"] == ["tests", "gate/1e9/1%/update"]
    assert not found["failed"]
    last = "NOT EVERYTHING RAN in 7.5 minutes: tests, gate/1e9/1%/update"
    assert last in printed.splitlines()[-5:]
    assert f"**{last}.**" in markdown
    assert "tests   NOT RUN  no time left" in printed
    assert "NOT RUN: no time: takes about 9 s" in printed


def test_a_failure_comes_before_what_did_not_run(check):
    failed = steps.Step("doctor", steps.FAILED, "")
    assert check(failed, steps.Step("tests", steps.NOT_RUN, ""))[0] == 1


def test_what_may_be_skipped_changes_no_exit_code(check):
    done = [steps.Step(name, steps.SKIPPED, "documented") for name in ("build", "sanitizer")]
    code, printed, found, _ = check(*done, rows={"copy": {"section": "Copy", "skipped": "memory: takes 90 GB"}})
    assert (code, found["not_run"]) == (0, [])
    assert "NOT EVERYTHING" not in printed


def test_steps_without_time_did_not_run(monkeypatch):
    late = steps.Budget(0)
    everything = {"packages": {"pytest": "9"}}
    assert device_check._tests(late, {}, everything).outcome == steps.NOT_RUN
    assert device_check._tests(steps.Budget(600), {}, {"packages": {"pytest": None}}).outcome == steps.NOT_RUN
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert device_check._sanitizer(late, {}, False).outcome == steps.SKIPPED  # with all the time it would be no other
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert device_check._sanitizer(late, {}, False).outcome == steps.NOT_RUN
    stopped = steps.Finished(None, "", 1.0)
    monkeypatch.setattr(steps, "run", lambda *arguments: stopped)
    found = steps.sanitizer(60, {}, False)
    assert (found.outcome, found.detail) == (steps.NOT_RUN, "memcheck: no time left, racecheck: no time left")


def test_what_does_not_fit_is_skipped_with_the_reason():
    def too_large():
        raise cases.DoesNotFit("takes 90 GB")

    row = measure.row_of(cases.Case("copy", "Copy", 1, too_large), timing.wall, 1, 0)
    assert status(row) == "skipped: memory: takes 90 GB"


def test_a_row_that_breaks_does_not_end_the_others():
    row = measure.row_of(cases.Case("copy", "Copy", 1, raises), timing.wall, 1, 0) | {"section": "Copy"}
    assert status(row) == "FAILED: RuntimeError: it broke"
    report = report_of({"copy": row})
    assert report.failed
    assert "it broke" in report.table()
    assert "it broke" in report.markdown()


def test_rows_without_time_say_so():
    out = io.StringIO()
    measure.measure(-1, True, out)
    plan, *rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {key for key, _ in plan["plan"]} == ROWS
    assert [row["key"] for row in rows] == [key for key, _ in plan["plan"]]
    assert all(status(row).startswith("NOT RUN: no time") for row in rows)
    assert plan["plan"][0][0] == "copy"  # the most important come first
    assert plan["plan"][1][0] == goals.GATE


def test_the_measurements_keep_their_share():
    budget = steps.Budget(100)
    assert budget.part(0.5) == pytest.approx(50)
    assert budget.part(0.9, keep=0.4) == pytest.approx(60, abs=1)
    assert steps.Budget(0).part(0.5) == 0


def test_a_process_that_takes_too_long_is_stopped():
    done = steps.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 3, {})
    assert done.code is None
    assert done.output == "begun\n"
    assert "time was over" in done.why_failed()
    assert done.seconds < 30


def test_goals_are_judged_by_their_bounds():
    def row(ours, **peers):
        found = {name: {"correct": True, "seconds": seconds} for name, seconds in {"ours": ours, **peers}.items()}
        return {"section": "", "ours": "ours", "num_bytes": 600, "contenders": found, "facts": {}}

    rows = {"copy": row(1.0) | {"num_bytes": 1000}, goals.GATE: row(0.65, eager=1.4)}
    judged = {goal.what: goal.judged(rows) for goal in goals.GOALS}
    share = judged["gate, 1e9, 1%: share of copy bandwidth"]
    assert share["value"] == pytest.approx(600 / 650)
    assert share["met"] is True
    assert judged["gate, 1e9, 1%: eager takes"]["met"] is True
    assert judged["apply of 76 M changes"]["met"] is None
    rows[goals.GATE] = row(0.75, eager=1.4)
    judged = {goal.what: goal.judged(rows) for goal in goals.GOALS}
    assert judged["gate, 1e9, 1%: share of copy bandwidth"]["met"] is False
    assert judged["gate, 1e9, 1%: eager takes"]["met"] is False
    # Fewer layers than the model's are no measurement of the model.
    rows["apply/model"] = row(0.001) | {"facts": {"numel": 1000}}
    assert goals.GOALS[3].judged(rows)["met"] is None
    rows["apply/model"] = row(0.001) | {"facts": {"numel": data.QWEN_7B_PARAMETERS}}
    assert goals.GOALS[3].judged(rows)["met"] is True


def test_a_pair_notices_each_kind_of_damage():
    pair = data.Pair(data.random_master(500, torch.device("cpu")), 0.1)
    assert pair.is_old()
    assert not pair.is_new()
    assert pair.is_right(pair.positions.int(), pair.new_values)
    assert not pair.is_right(pair.positions[1:], pair.new_values[1:])
    assert not pair.is_right(pair.positions + 1, pair.new_values)
    assert not pair.is_right(pair.positions, pair.old_values)
    pair.weight[pair.positions] = pair.new_values
    assert pair.is_new()
    assert not pair.is_old()
    pair.put_back()
    assert pair.is_old()
    untouched = next(k for k in range(500) if k not in pair.positions.tolist())
    pair.bits[untouched] ^= 1
    assert not pair.is_old()
    pair.weight[pair.positions] = pair.new_values
    assert not pair.is_new()
