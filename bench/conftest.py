"""Options and the ``compare`` fixture: ours by pytest-benchmark, everybody else in turns with it.

pytest-benchmark times ours; its setup hook, which runs ahead of every round and outside the timing, runs the peers and
times them the same way. So all contenders of one comparison share their minutes, and ratios of their medians survive a
machine that does other things as well. The peers' seconds go into the benchmark's ``extra_info``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench import machine
from pulse_kernels.cli.bench_quick import Contender, rotated, time_once

FULL_SIZE = 100_000_000
ROUNDS = 9

Compare = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pulse_kernels")
    group.addoption(
        "--elements",
        type=lambda text: int(float(text)),
        default=int(float(os.environ.get("PULSE_BENCH_ELEMENTS", FULL_SIZE))),
        help="weights in the large tensors; default PULSE_BENCH_ELEMENTS or 1e8, for which the floors are stated",
    )
    group.addoption("--rounds", type=int, default=ROUNDS, help="rounds of each comparison")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    options = {name: config.getoption(f"--{name}") for name in ("elements", "rounds")}
    machine_info["pulse_kernels"] = {**machine.facts(), **options}


@pytest.fixture(scope="session")
def elements(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--elements")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compare(benchmark: Any, request: pytest.FixtureRequest) -> Compare:
    """``compare(ours, *peers, section=, title=, num_bytes=, **facts)``.

    section, title: where the report shows it. num_bytes: what GB/s counts; 0 leaves it out. facts: what a floor or the
    report needs besides. A peer named "numpy" takes long at most things and runs in every third round only.
    """
    rounds = request.config.getoption("--rounds")

    def run(ours: Contender, *peers: Contender, section: str, title: str, num_bytes: int = 0, **facts: Any) -> None:
        seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for contender in (*peers, ours):
            time_once(contender)
        done = 0

        def peers_first() -> None:
            nonlocal done
            for peer in rotated(peers, done):
                if peer.name != "numpy" or done % 3 == 0:
                    seconds[peer.name].append(time_once(peer))
            if ours.before is not None:
                ours.before()
            done += 1

        def calls() -> None:
            for _ in range(ours.calls):
                ours.run()

        benchmark.group = section
        gc.collect()
        gc.disable()
        others = machine.OtherProcesses()
        try:
            benchmark.pedantic(calls, setup=peers_first, rounds=rounds, iterations=1, warmup_rounds=0)
        finally:
            gc.enable()
        benchmark.extra_info.update(
            {"section": section, "title": title, "ours": ours.name, "num_bytes": num_bytes, "calls": ours.calls},
            peers=seconds,
            other_processes=others.seconds(),
            facts=facts,
        )

    return run
