"""All runs, one after the other, on worker processes that live as long as the experiment."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from examples.loco.settings import METHODS, PULSELOCO, Order, RankAccount, Results, RoundAccount, RunResult, Settings
from examples.loco.worker import worker_process
from pulse_kernels.demo.processes import ProcessGroup, receive, send
from pulse_kernels.errors import VerificationError

ROUND_FIELDS = [each.name for each in fields(RoundAccount) if each.name != "digest"]


def experiment(settings: Settings, say: Callable[[str], None] = print) -> Results:
    """Every method with every seed, then PULSELoCo at the other learning rates. Raises PulseError where a worker fails,
    or where workers do not end bit-identical, or methods saw other numbers of tokens."""
    started = time.perf_counter()
    orders = [Order(method, seed, settings.learning_rate) for seed in settings.seeds for method in METHODS]
    others = [Order(PULSELOCO, settings.seeds[0], rate) for rate in settings.other_rates]
    results: list[RunResult] = []
    with tempfile.TemporaryDirectory(prefix="pulse-loco-") as folder, ProcessGroup() as group:
        pipes = []
        for rank in range(settings.workers):
            ours, theirs = group.pipe()
            group.start(f"pulse-loco-{rank}", worker_process, theirs, rank, settings, Path(folder) / "meeting")
            theirs.close()
            pipes.append(ours)
        for order in (*orders, *others):
            results.append(run(pipes, order))
            say(summary(results[-1]))
        for rank, pipe in enumerate(pipes):
            send(pipe, None, f"worker {rank}")
    check_equal_tokens(results)
    seconds = round(time.perf_counter() - started, 1)
    environment = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    return Results(settings, environment, results[: len(orders)], seconds, results[len(orders) :])


def run(pipes: Sequence[Connection], order: Order) -> RunResult:
    """One run, on all workers."""
    started = time.perf_counter()
    for rank, pipe in enumerate(pipes):
        send(pipe, order, f"worker {rank}")
    accounts: dict[int, RankAccount] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:  # whoever answers first: one that failed leaves the others waiting for it
        ready = wait(list(waiting))
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            accounts[rank] = receive(pipe, RankAccount, f"worker {rank}")
    return joined(order, [accounts[rank] for rank in range(len(pipes))], time.perf_counter() - started)


def joined(order: Order, accounts: Sequence[RankAccount], seconds: float) -> RunResult:
    """The workers' accounts as one; VerificationError where they are not of the same weights."""
    first = accounts[0]
    for account in accounts[1:]:
        theirs, expected = ([each.digest for each in one.rounds] for one in (account, first))
        if theirs != expected or not all(expected) or account.weights_hash != first.weights_hash:
            raise VerificationError(
                f"{order.method.name}, seed {order.seed}: worker {account.rank} does not have worker 0's weights: "
                f"digest {theirs[-1]}, expected {expected[-1]}"
            )
    tokens = {account.prompt_tokens + account.drawn_tokens for account in accounts}
    if len(tokens) > 1:
        raise VerificationError(f"{order.method.name}: workers saw {sorted(tokens)} tokens, expected the same number")
    held_out = sum(account.held_out for account in accounts)
    rounds = {
        name: [_mean([getattr(account.rounds[k], name) for account in accounts]) for k in range(len(first.rounds))]
        for name in ROUND_FIELDS
        if getattr(first.rounds[0], name) is not None
    }
    rounds["density"] = [_significant(count / first.parameters) for count in rounds["num_fired"]]
    steps = range(len(first.rewards))
    return RunResult(
        method=order.method.name,
        seed=order.seed,
        learning_rate=order.learning_rate,
        workers=len(accounts),
        parameters=first.parameters,
        tokens=tokens.pop(),
        reward=[_mean([account.rewards[k] for account in accounts]) for k in steps],
        step_density=[_mean([account.changed[k] / first.parameters for account in accounts]) for k in steps],
        rounds=rounds,
        held_out_before=sum(account.right_before for account in accounts) / held_out,
        held_out_after=sum(account.right_after for account in accounts) / held_out,
        digest=first.rounds[-1].digest,
        weights_hash=first.weights_hash,
        seconds=round(seconds, 1),
    )


def check_equal_tokens(results: Sequence[RunResult]) -> None:
    seen = {(run.tokens, len(run.reward)) for run in results}
    if len(seen) > 1:
        raise VerificationError(f"runs saw (tokens, steps) {sorted(seen)}, expected the same for all methods")


def summary(run: RunResult) -> str:
    total, density = sum(run.rounds["payload_bytes"]), run.rounds["density"]
    return (
        f"{run.method:23} seed {run.seed} rate {run.learning_rate:.0e}: held-out pass@1 {run.held_out_before:.3f} to "
        f"{run.held_out_after:.3f}, density {sum(density) / len(density):.4f}, {total / 1e6:.2f} MB a worker, "
        f"{run.seconds:.0f} s"
    )


def _mean(values: Sequence[float]) -> float:
    return _significant(sum(values) / len(values))


def _significant(value: float) -> float:
    """Bytes and counts whole, shares to 6 digits: what a JSON of readable size needs."""
    return round(value) if abs(value) >= 1e5 else float(f"{value:.6g}")
