"""Reward against steps, and against bytes."""

from __future__ import annotations

from pathlib import Path

from examples.loco.settings import (
    DDP,
    DILOCO,
    DILOCO_SOFT,
    METHODS,
    PULSELOCO,
    PULSELOCO_SOFT,
    Method,
    Results,
    RunResult,
)
from pulse_kernels.demo.chart import BLUE, GREEN, ORANGE, ChartUnavailable

COLOURS = {DDP: ORANGE, DILOCO: BLUE, PULSELOCO: GREEN, DILOCO_SOFT: BLUE, PULSELOCO_SOFT: GREEN}
BY_STEPS, BY_BYTES = "reward_by_steps.png", "reward_by_bytes.png"


def by_window(run: RunResult, window: int) -> tuple[list[float], list[float]]:
    """Of each window of steps: the mean reward in it, and the payload bytes that a worker had sent by its end."""
    rewards, sent, total = [], [], 0.0
    rounds = dict(zip(run.rounds["step"], run.rounds["payload_bytes"], strict=True))
    for start in range(0, len(run.reward), window):
        rewards.append(sum(run.reward[start : start + window]) / window)
        total += sum(rounds.get(step, 0) for step in range(start + 1, start + window + 1))
        sent.append(total)
    return rewards, sent


def band(results: Results, method: Method) -> tuple[list[float], list[tuple[float, float, float]]]:
    """Of each window: bytes (mean over seeds), and reward as (least, mean, most) of the seeds."""
    windows = [by_window(run, results.settings.window) for run in results.of(method)]
    rewards = zip(*(rewards for rewards, _ in windows), strict=True)
    sent = zip(*(sent for _, sent in windows), strict=True)
    return [sum(each) / len(each) for each in sent], [(min(each), sum(each) / len(each), max(each)) for each in rewards]


def save_plots(results: Results, folder: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ChartUnavailable(
            f"no plots: matplotlib is missing ({error}); pip install 'pulse_kernels[demo]'"
        ) from None
    settings = results.settings
    for name, by_bytes in ((BY_STEPS, False), (BY_BYTES, True)):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        for method in METHODS:
            sent, rewards = band(results, method)
            steps = [settings.window * (k + 1) for k in range(len(rewards))]
            x = [each / 1e6 for each in sent] if by_bytes else steps
            low, mean, high = zip(*rewards, strict=True)
            style = "--" if method in (DILOCO_SOFT, PULSELOCO_SOFT) else "-"
            axis.fill_between(x, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
            axis.plot(x, mean, color=COLOURS[method], linestyle=style, linewidth=1.5, label=method.name)
        if by_bytes:
            axis.set_xscale("log")
        axis.set_xlabel("MB sent by a worker, as coded" if by_bytes else "inner steps", fontsize=8)
        axis.set_ylabel(f"reward, mean of {settings.window} steps", fontsize=8)
        seeds = len(settings.seeds)
        axis.set_title(f"{settings.workers} workers, {seeds} seed{'s' * (seeds > 1)}: mean, least to most", fontsize=9)
        axis.legend(fontsize=7, frameon=False)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / name, dpi=90)
