"""The experiment of docs/pulseloco.md in miniature, and that the document shows the results that are committed."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from examples.loco import __main__ as command  # noqa: E402
from examples.loco.plots import BY_BYTES, BY_STEPS, by_window  # noqa: E402
from examples.loco.runs import check_equal_tokens, experiment, joined  # noqa: E402
from examples.loco.settings import (  # noqa: E402
    DDP,
    DILOCO,
    METHODS,
    PULSELOCO,
    Order,
    RankAccount,
    Results,
    RoundAccount,
    RunResult,
    Settings,
)
from examples.loco.tables import BEGIN, END, put_tables, tables  # noqa: E402
from examples.loco.worker import bf16_spacing, gate_figures  # noqa: E402
from pulse_kernels.errors import PulseError, VerificationError  # noqa: E402

SMALL = Settings(
    steps=6, window=3, workers=2, seeds=(0,), prompts=2, samples=4, held_out=8, learning_rate=3e-6, other_rates=()
)
PARAMETERS = 1_333_440


@pytest.fixture(scope="module")
def results() -> Results:
    return experiment(SMALL, lambda line: None)


def run_of(results: Results, name: str) -> RunResult:
    (run,) = (run for run in results.runs if run.method == name)
    return run


def test_all_methods_see_the_same_tokens(results: Results) -> None:
    # A step of a worker: 2 prompts of 6 tokens, and 4 completions of 4 tokens for each.
    assert {run.method: run.tokens for run in results.runs} == {
        method.name: 6 * (2 * 6 + 2 * 4 * 4) for method in METHODS
    }
    assert all(len(run.reward) == 6 for run in results.runs)


def test_rounds_are_due_when_they_should(results: Results) -> None:
    due = {run.method: run.rounds["step"] for run in results.runs}
    assert due.pop("DDP") == [1, 2, 3, 4, 5, 6]
    assert due == {method.name: [3, 6] for method in METHODS[1:]}


def test_bytes_of_a_window(results: Results) -> None:
    sent = {run.method: by_window(run, SMALL.window)[1] for run in results.runs}
    for window in range(2):
        of_window = {name: each[window] - (each[window - 1] if window else 0) for name, each in sent.items()}
        assert 0 < of_window["PULSELoCo"] < of_window["DiLoCo"] < of_window["DDP"]
    for name, rounds in (("DDP", 6), ("DiLoCo", 2), ("PULSELoCo", 2)):
        assert run_of(results, name).rounds["dense_bytes"] == [4 * PARAMETERS] * rounds


def test_methods_part_where_they_should(results: Results) -> None:
    """Equal prompts and draws: the same until weights were exchanged, and not after."""
    ddp, diloco, pulse = (run_of(results, method.name) for method in (DDP, DILOCO, PULSELOCO))
    assert ddp.reward[0] == diloco.reward[0]
    assert ddp.step_density[0] == diloco.step_density[0]
    assert diloco.reward[:3] == pulse.reward[:3]
    assert diloco.step_density[:3] == pulse.step_density[:3]
    assert diloco.step_density[3] != pulse.step_density[3]
    assert len({run.weights_hash for run in results.runs}) == len({run.digest for run in results.runs}) == len(METHODS)
    assert ddp.rounds["density"] == [1.0] * 6
    assert diloco.rounds["density"] == [1.0] * 2


def test_account_of_the_gate(results: Results) -> None:
    rounds = run_of(results, "PULSELoCo").rounds
    # There is no residual before the first round; in the second it lets more weights fire.
    assert rounds["visible_without_residual"][0] == pytest.approx(rounds["density"][0], rel=1e-5)
    assert 0 < rounds["visible_without_residual"][1] < rounds["density"][1] < 1
    # 3 steps of Adam move no weight by much more than 3 learning rates.
    assert 0 < rounds["median_s"][0] < 3 * 1.1 * SMALL.learning_rate
    assert 0 < rounds["held_back"][0] < 1
    assert "expected_density" not in run_of(results, "DiLoCo").rounds


def test_figures_of_the_gate_by_hand() -> None:
    # BF16 numbers are 2^-7 apart from 1 up to 2, 2^-6 from 2 on, 2^-8 below 1; ties go to the even neighbour.
    theta = torch.tensor([1.0, 2.0, 1.0, 0.75])
    local = torch.tensor([1 - 2.0**-6, 2 - 2.0**-9, 1 + 2.0**-9, 0.75])
    residual = torch.tensor([0.0, 0.0, -(2.0**-9) - 2.0**-20, 0.0])
    # s: 2^-6 fires; 2^-9 is silent; -2^-8 - 2^-20 fires, for its residual alone; 0 is silent.
    assert gate_figures(theta, local, residual) == {
        "visible_without_residual": 0.25,
        "expected_density": pytest.approx((1 + 1 / 8 + 1 / 2 + 2.0**-13) / 4),
        "held_back": pytest.approx(2.0**-9 / (2.0**-6 + 2.0**-9 + 2.0**-8 + 2.0**-20)),
        "median_s": 2.0**-9,
        "median_spacing": 2.0**-7,
    }


def test_spacing_of_bf16_numbers() -> None:
    values = torch.tensor([1.0, 1.99, 2.0, -0.75, 3e-2, 1e-30, 0.0]).bfloat16()
    above = (values.abs().view(torch.int16) + 1).view(torch.bfloat16)
    spacing = bf16_spacing(values.float())
    assert spacing[:-1].tolist() == (above.float() - values.abs().float())[:-1].tolist()
    assert spacing[-1] == 2.0**-133


def test_results_as_json(results: Results) -> None:
    data = json.loads(json.dumps(results.to_dict()))
    assert data["report"] == "loco-experiment"
    assert data.keys() == {"report", "settings", "environment", "runs", "rates", "seconds"}
    assert data["settings"]["seeds"] == [0]
    fields = {"method", "seed", "learning_rate", "workers", "parameters", "tokens", "reward", "step_density", "rounds"}
    fields |= {"held_out_before", "held_out_after", "digest", "weights_hash", "seconds"}
    columns = {"step", "num_fired", "density", "payload_bytes", "sent_bytes", "dense_bytes"}
    for run in data["runs"]:
        assert run.keys() == fields
        assert columns <= run["rounds"].keys()
        assert {len(column) for column in run["rounds"].values()} == {len(run["rounds"]["step"])}
        assert run["parameters"] == PARAMETERS
        assert 0 <= run["held_out_before"] <= 1
        assert all(map(math.isfinite, (*run["reward"], run["held_out_after"])))
    assert Results.from_dict(data) == results


def test_files_of_a_run(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, doc, out = tmp_path / "earlier.json", tmp_path / "doc.md", tmp_path / "out"
    earlier.write_text(json.dumps(results.to_dict()))
    doc.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["loco", "--from", str(earlier), "--out", str(out), "--doc", str(doc)])
    assert command.main() == 0
    assert Results.from_dict(json.loads((out / "results.json").read_text())) == results
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in (BY_STEPS, BY_BYTES))
    text = doc.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| tokens | 264 | 264 | 264 | 264 | 264 |" in text
    doc.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the tables"):
        put_tables(results, doc)


def account(rank: int, digest: str = "d") -> RankAccount:
    rounds = [RoundAccount(1, 5, 20, 20, 40, digest)]
    return RankAccount(rank, 10, 6, 4, [1.0], [5], rounds, 2, 1, 2, "h")


def test_a_worker_that_differs_is_found() -> None:
    order = Order(DILOCO, 0, 1e-6)
    run = joined(order, [account(0), account(1)], 1.0)
    assert (run.tokens, run.held_out_before, run.held_out_after, run.rounds["density"]) == (10, 0.5, 1.0, [0.5])
    for other in (account(1, "e"), replace(account(1), weights_hash="i")):
        with pytest.raises(VerificationError, match="worker 1 does not have worker 0's weights"):
            joined(order, [account(0), other], 1.0)
    with pytest.raises(VerificationError, match="does not have"):
        joined(order, [account(0, ""), account(1, "")], 1.0)
    with pytest.raises(VerificationError, match=r"\[10, 11\] tokens"):
        joined(order, [account(0), replace(account(1), prompt_tokens=7)], 1.0)
    with pytest.raises(VerificationError, match="the same for all methods"):
        check_equal_tokens([run, replace(run, tokens=11)])


def test_a_worker_that_fails_ends_the_experiment() -> None:
    with pytest.raises(PulseError, match=r"infinite or NaN|not finite"):
        experiment(replace(SMALL, learning_rate=math.inf), lambda line: None)


@pytest.mark.parametrize("wrong", [{"steps": 7}, {"workers": 1}, {"samples": 1}, {"held_out": 1}, {"seeds": ()}])
def test_settings_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expected|at least"):
        Settings(**{**asdict(SMALL), **wrong})


def test_the_document_shows_the_committed_results() -> None:
    results = Results.from_dict(json.loads((ROOT / "docs/loco/results.json").read_text()))
    assert results.settings == Settings()
    assert tables(results) in (ROOT / "docs/pulseloco.md").read_text()
