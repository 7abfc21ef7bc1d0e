"""The chart: reward, density and payload by step, as a PNG."""

from __future__ import annotations

from pathlib import Path

from pulse_kernels.demo.messages import DemoError
from pulse_kernels.demo.report import DemoReport

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9822b", "#3a8f5c", "#b9bfc7"
WINDOW = 10


class ChartUnavailable(DemoError):
    """matplotlib is missing."""


def running_mean(values: list[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and up to window - 1 before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def save_chart(report: DemoReport, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ChartUnavailable(
            f"no chart: matplotlib is missing ({error}); pip install 'pulse_kernels[demo]'"
        ) from None
    steps = [step.step for step in report.steps]
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    reward, density, payload = figure.subplots(1, 3)

    rewards = [step.reward for step in report.steps]
    reward.plot(steps, rewards, color=GREY, linewidth=0.8, label="batch, sampled")
    reward.plot(steps, running_mean(rewards), color=GREEN, linewidth=2, label=f"mean of {WINDOW}")
    ends = [0, len(steps)], [report.before.greedy, report.after.greedy]
    reward.plot(*ends, color=GREEN, linestyle="none", marker="o", label="held-out pass@1, greedy")
    reward.set_title(f"reward: held-out pass@1 {report.before.greedy:.2f} to {report.after.greedy:.2f}", fontsize=10)
    reward.set_ylim(0, 1)
    reward.legend(fontsize=7, loc="lower right", frameon=False)

    density.plot(steps, [100 * step.density for step in report.steps], color=BLUE, linewidth=1.5)
    density.set_ylim(bottom=0)
    density.set_ylabel("% of BF16 weights changed", fontsize=8)
    density.set_title(f"density: {100 * report.density:.2f}% a step", fontsize=10)

    payload.plot(steps, [step.payload_bytes / 1e3 for step in report.steps], color=ORANGE, linewidth=1.5, label="patch")
    payload.axhline(report.dense_bytes / 1e3, color=GREY, linestyle="--", label="whole checkpoint")
    payload.set_yscale("log")
    payload.set_ylabel("KB a step", fontsize=8)
    payload.set_title(f"payload: 1/{report.ratio_to_dense:.0f} of the dense checkpoint", fontsize=10)
    payload.legend(fontsize=7, frameon=False)

    for axis in (reward, density, payload):
        axis.set_xlabel("optimizer step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DemoError(f"the chart cannot be written to {path}: {error}") from None
