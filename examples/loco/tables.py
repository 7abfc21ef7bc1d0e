"""The results as Markdown: beside the paper's, by round, by learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from examples.loco.plots import by_window
from examples.loco.settings import DDP, DILOCO, METHODS, PULSELOCO, Method, Results, RunResult

BEGIN, END = "<!-- written by make loco -->", "<!-- end of what make loco writes -->"
PAPER = {"density": "3.6 to 5.2%", "diloco": "> 17x", "ddp": "> 100x"}  # arXiv 2602.03839
SHOWN_ROUNDS = 6


def tables(results: Results) -> str:
    return "\n".join([comparison(results), by_round(results), by_rate(results)]) + "\n"


def put_tables(results: Results, path: Path) -> None:
    """Replace what stands between the marks. ValueError where the file lacks them."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} has no place for the tables; put the lines {BEGIN!r} and {END!r} there, once")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n{END}{rest.split(END)[1]}")


# ---- figures of a run -----------------------------------------------------------------------------------------------


def total(run: RunResult, name: str) -> float:
    return float(sum(run.rounds[name]))


def windows(run: RunResult, results: Results) -> int:
    return len(run.reward) // results.settings.window


def a_window(name: str, results: Results) -> Callable[[RunResult], float]:
    return lambda run: total(run, name) / windows(run, results)


def density(run: RunResult) -> float:
    return total(run, "num_fired") / (run.parameters * len(run.rounds["num_fired"]))


def bytes_an_entry(run: RunResult) -> float:
    return total(run, "payload_bytes") / total(run, "num_fired")


# ---- tables ---------------------------------------------------------------------------------------------------------


def comparison(results: Results) -> str:
    settings = results.settings
    payload, sent, dense = (a_window(name, results) for name in ("payload_bytes", "sent_bytes", "dense_bytes"))

    def row(label: str, figure: Callable[[RunResult], float], show: Callable[[float], str], paper: str = "") -> str:
        cells = [spread([figure(run) for run in results.of(method)], show) for method in METHODS]
        return line([label, *cells, paper])

    def times(label: str, of: Method, figure: Callable[[RunResult], float], paper: str = "") -> str:
        """How many times the bytes of a run of ``of``, the seed being the same."""
        theirs = {run.seed: figure(run) for run in results.of(of)}
        return row(label, lambda run: theirs[run.seed] / payload(run), lambda value: f"{value:.3g}x", paper)

    steps = settings.window
    rows = [
        line(["a worker", *(method.name for method in METHODS), "PULSELoCo in the paper"]),
        line(["---", *["---:"] * (len(METHODS) + 1)]),
        row("tokens", lambda run: run.tokens, lambda value: f"{value:,.0f}"),
        row(
            f"rounds in {steps} steps",
            lambda run: len(run.rounds["step"]) / windows(run, results),
            lambda v: f"{v:.0f}",
        ),
        row("density: share of weights sent in a round", density, percent, PAPER["density"]),
        row(f"FP32 of all weights, {steps} steps", dense, megabytes),
        row(f"bytes sent, {steps} steps, as coded", payload, megabytes),
        row("the same with copies to each worker", sent, megabytes),
        row("bytes a sent weight", bytes_an_entry, lambda value: f"{value:.2f}"),
        row(f"bytes sent, {settings.steps} steps", lambda run: total(run, "payload_bytes"), megabytes),
        times("FP32 of DiLoCo takes", DILOCO, dense, PAPER["diloco"]),
        times("DiLoCo as coded here takes", DILOCO, payload),
        times("FP32 of DDP takes", DDP, dense, PAPER["ddp"]),
        times("DDP as coded here takes", DDP, payload),
        row(f"reward, steps 1 to {steps}", lambda run: by_window(run, steps)[0][0], third),
        row(f"reward, last {steps} steps", lambda run: by_window(run, steps)[0][-1], third),
        row("held-out pass@1 before, greedy", lambda run: run.held_out_before, third),
        row("held-out pass@1 after, greedy", lambda run: run.held_out_after, third),
    ]
    return "\n".join(rows) + "\n"


def by_round(results: Results) -> str:
    """PULSELoCo, round by round."""
    runs = results.of(PULSELOCO)
    count = len(runs[0].rounds["step"])
    shown = sorted({1, *(max(1, round(count * k / (SHOWN_ROUNDS - 1))) for k in range(SHOWN_ROUNDS))})
    head = [
        "PULSELoCo, round", "density", "without residual", "were theta anywhere", "held back", "median \\|s\\|",
        "median spacing", "KB", "bytes a sent weight",
    ]  # fmt: skip

    def cell(name: str, k: int, show: Callable[[float], str]) -> str:
        return spread([run.rounds[name][k] for run in runs], show)

    rows = [line(head), line(["---:"] * len(head))]
    for number in shown:
        k = number - 1
        each = [run.rounds["payload_bytes"][k] / run.rounds["num_fired"][k] for run in runs]
        rows.append(
            line(
                [
                    str(number),
                    cell("density", k, percent),
                    cell("visible_without_residual", k, percent),
                    cell("expected_density", k, percent),
                    cell("held_back", k, percent),
                    cell("median_s", k, small),
                    cell("median_spacing", k, small),
                    cell("payload_bytes", k, lambda value: f"{value / 1e3:.0f}"),
                    spread(each, lambda value: f"{value:.2f}"),
                ]
            )
        )
    return "\n".join(rows) + "\n"


def by_rate(results: Results) -> str:
    """PULSELoCo with the first seed, by learning rate."""
    runs = sorted([*results.rates, results.of(PULSELOCO)[0]], key=lambda run: run.learning_rate)
    head = [
        "PULSELoCo, learning rate", "BF16 weights changed by a step", "density", "first round", "last round",
        "FP32 of DiLoCo takes", "FP32 of DDP takes", "held-out pass@1 after",
    ]  # fmt: skip
    rows = [line(head), line(["---:"] * len(head))]
    for run in runs:
        payload, dense = total(run, "payload_bytes"), total(run, "dense_bytes")
        cells = [
            f"{run.learning_rate:.0e}".replace("e-0", "e-"),
            percent(sum(run.step_density) / len(run.step_density)),
            percent(density(run)),
            percent(run.rounds["density"][0]),
            percent(run.rounds["density"][-1]),
            f"{dense / payload:.3g}x",
            f"{results.settings.window * dense / payload:.3g}x",
            third(run.held_out_after),
        ]
        rows.append(line(cells))
    return "\n".join(rows) + "\n"


# ---- cells ----------------------------------------------------------------------------------------------------------


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The mean, and in brackets least and most where they read differently."""
    mean, least, most = show(sum(values) / len(values)), show(min(values)), show(max(values))
    return mean if least == most else f"{mean} ({least} to {most})"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.3g} MB"


def third(value: float) -> str:
    return f"{value:.3f}"


def small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")
