"""Figures, summary and table of a run worked out by hand."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from pulse_kernels.demo.chart import ChartUnavailable, running_mean, save_chart
from pulse_kernels.demo.messages import Accuracy, StepRecord, Summary
from pulse_kernels.demo.report import DemoReport
from pulse_kernels.demo.table import RichTable, live_table


def step(number: int, num_changed: int, payload_bytes: int) -> StepRecord:
    return StepRecord(
        step=number,
        reward=0.5,
        num_changed=num_changed,
        density=num_changed / 1000,
        payload_bytes=payload_bytes,
        dense_bytes=2000,
        rollout_seconds=0.1,
        train_seconds=0.2,
        gate_seconds=0.001,
        encode_seconds=0.002,
        fetch_seconds=0.003,
        apply_seconds=0.004,
        digest="d" * 32,
        digest_ok=True,
    )


@pytest.fixture
def report() -> DemoReport:
    return DemoReport(
        seed=0,
        workers=2,
        held_out=100,
        before=Accuracy(0, 0.5, 0.4),
        after=Accuracy(2, 0.75, 0.6),
        steps=[step(1, 10, 30), step(2, 30, 50)],
        summary_of_trainer=Summary(1000, "d" * 32, "b" * 64, {"train": 0.4}),
        seconds={"train": 0.4, "other": 1.0},
        total_seconds=1.4,
        chart=None,
        out_dir=None,
        notes=["no chart"],
    )


def test_the_figures(report: DemoReport) -> None:
    assert report.improved
    assert report.density == pytest.approx(0.02)
    assert report.payload_bytes == 40
    assert report.ratio_to_dense == 50
    assert report.bits_per_change == 8 * 80 / 40


def test_the_dict_is_json(report: DemoReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["pass_at_1"]["after"] == {"greedy": 0.75, "sampled": 0.6}
    assert data["digests_checked"] == 4
    assert data["seconds"]["total"] == 1.4
    assert data["steps"][1]["ratio_to_dense"] == 40


def test_the_summary_says_what_changed(report: DemoReport) -> None:
    text = report.summary()
    for part in ("0.500 -> 0.750 greedy", "2.00%", "1/50", "16.0 bits", "note          no chart"):
        assert part in text
    assert "NOT IMPROVED" not in text
    report.after = Accuracy(2, 0.5, 0.6)
    assert "NOT IMPROVED" in report.summary()


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with live_table(2, stream) as table:
        table.accuracy(Accuracy(0, 0.5, 0.4))
        table.step(step(1, 10, 30))
    header, accuracy, row = stream.getvalue().splitlines()
    assert header.split()[:3] == ["step", "reward", "changed"]
    assert accuracy == "version 0: pass@1 0.500 greedy, 0.400 sampled"
    assert row.split() == ["1", "0.500", "1.00%", "0.0", "1/67", "1.00", "2.00", "4.00", "ok"]


def test_a_live_table_on_a_terminal() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with live_table(2, stream) as table:
        assert isinstance(table, RichTable)
        table.accuracy(Accuracy(0, 0.5, 0.4))
        table.step(step(1, 10, 30))
    assert "1.00%" in stream.getvalue()
    assert "step 1 of 2" in stream.getvalue()


def test_running_mean() -> None:
    assert running_mean([1.0, 2.0, 3.0, 6.0], window=2) == [1.0, 1.5, 2.5, 4.5]


def test_without_matplotlib_the_error_names_the_extra(
    report: DemoReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ChartUnavailable, match=r"pulse_kernels\[demo\]"):
        save_chart(report, tmp_path / "chart.png")
    assert not list(tmp_path.iterdir())
