"""PULSESync over a local folder: what a publish costs beside the gate alone, and how long a receiver pauses."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor

import pulse_kernels as pk
from bench.conftest import Compare
from bench.hosts.link import link
from bench.hosts.namespaces import NotPermitted
from bench.workloads import percent
from pulse_kernels.cli.bench_quick import Contender, changed_positions, random_masters
from pulse_kernels.sync import Publisher, Subscriber

SECTION = "Sync"
DENSITY = 0.01


class Steps:
    """FP32 masters of which the same 1% of the weights' last places flip back and forth, a step a call."""

    def __init__(self, numel: int) -> None:
        self.master = random_masters(numel).bfloat16().float()
        self.positions = changed_positions(numel, DENSITY)
        bits = self.master.view(torch.int32)[self.positions]
        self._sides = [bits, bits ^ (1 << 16)]  # the last place that BF16 keeps
        self._side = 0

    def step(self) -> None:
        self._side ^= 1
        self.master.view(torch.int32)[self.positions] = self._sides[self._side]


@pytest.fixture
def steps(elements: int) -> Steps:
    return Steps(elements)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def phase_share(steps: Steps, publisher: Publisher, rounds: int = 7) -> float:
    """Phase seconds that reports name, as a share of the wall time around them: the median."""
    shares = []
    for _ in range(rounds):
        steps.step()
        start = time.perf_counter()
        report = publisher.publish()
        shares.append(report.total_seconds / (time.perf_counter() - start))
    return statistics.median(shares)


def test_publish(compare: Compare, steps: Steps, store: Path, tmp_path: Path) -> None:
    """All phases, to the committed manifest, against the gate alone and against the dense file with its hash."""
    weights = {"weight": steps.master.bfloat16()}
    publisher = Publisher(store, weights, masters={"weight": steps.master}, anchor_every=10_000)
    publisher.publish()
    gated = weights["weight"].clone()

    def dense() -> None:
        path = tmp_path / "dense.safetensors"
        save_file(weights, path)
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(path)
        hasher.digest()

    def step_at_rest() -> None:
        """The dense file's pages are on the disk before we are timed, who wait for ours to be there."""
        os.sync()
        steps.step()

    compare(
        Contender("publish", publisher.publish, step_at_rest),
        Contender(
            "gate_compact",
            lambda: pk.gate_compact(steps.master, gated, update=True),
            lambda: _flip(gated, steps),
        ),
        Contender("dense file and BLAKE3", dense),
        section=SECTION,
        title=f"`publish` with masters, {percent(DENSITY)} changed",
        density=DENSITY,
        num_changed=steps.positions.numel(),
        phase_share=phase_share(steps, publisher),
    )


def _flip(weight: Tensor, steps: Steps) -> None:
    """Make ``weight`` differ from the masters where a step does."""
    weight.view(torch.int16)[steps.positions] = steps.master[steps.positions].bfloat16().view(torch.int16) ^ 1


def test_pause(compare: Compare, steps: Steps, store: Path) -> None:
    """The subscriber's ``apply``: undo log, scatter, digest; fetched and decoded before."""
    weights = {"weight": steps.master.bfloat16()}
    publisher = Publisher(store, weights, masters={"weight": steps.master}, anchor_every=10_000)
    publisher.publish()
    replica = {"weight": weights["weight"].clone()}
    subscriber = Subscriber(store, replica)
    bare, values = weights["weight"].clone(), weights["weight"][steps.positions]

    def stage() -> None:
        steps.step()
        publisher.publish()
        assert subscriber.stage() is not None

    compare(
        Contender("apply", subscriber.apply, stage),
        Contender("index_put_", lambda: bare.index_put_((steps.positions,), values)),
        section=SECTION,
        title=f"the subscriber's pause, {percent(DENSITY)} changed",
        density=DENSITY,
        num_changed=steps.positions.numel(),
    )


LINK_NUMEL = 25_000_000


def test_over_a_cable(compare: Compare) -> None:
    """Trainer and rollout in two network namespaces, S3 protocol, 100 Mbit/s: from ``publish`` to applied."""
    try:
        with link(LINK_NUMEL, DENSITY) as cable:
            compare(
                Contender("publish to applied", cable.publish_and_apply, cable.step),
                Contender("dense", cable.dense),
                section=SECTION,
                title=f"25 million weights over 100 Mbit/s, {percent(DENSITY)} changed",
                density=DENSITY,
            )
    except NotPermitted as why:
        pytest.skip(f"network namespaces: {why}")
