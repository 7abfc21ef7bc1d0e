"""Real processes on a local folder, killed at any moment; a disk that is full."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import StoreError
from pulse_kernels.sync import Publisher, Subscriber

PUBLISH = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from sync_models import Trainer
from pulse_kernels.sync import Publisher
trainer = Trainer(masters=True, seed=int(sys.argv[3]))
publisher = Publisher(sys.argv[1], trainer.weights, masters=trainer.masters, anchor_every=3)
print("ready", flush=True)
while True:
    publisher.publish()
    trainer.step()
"""


def test_a_killed_publisher_leaves_whole_versions(tmp_path: Path) -> None:
    """Every committed version can be fetched and has its digest; a new publisher goes on."""
    dice = random.Random(5)
    for round_ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(tmp_path / "run"), str(Path(__file__).parent), str(round_)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(dice.uniform(0.02, 0.4))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        trainer = Trainer(masters=True, seed=40 + round_)
        publisher = Publisher(tmp_path / "run", trainer.weights, masters=trainer.masters)
        last = publisher.version
        subscriber = Subscriber(tmp_path / "run", blank(trainer.weights), verify="full")
        for version in subscriber.chain.versions():
            subscriber.stage(version)
            subscriber.apply()
            subscriber.check()
        assert subscriber.version == last
        publisher.publish()
        subscriber.poll()
        assert_same_bits(subscriber.params, trainer.weights)  # type: ignore[arg-type]


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: nothing is committed, and once there is room all goes on."""
    trainer = Trainer(masters=True, seed=6)
    publisher = Publisher(tmp_path / "run", trainer.weights, masters=trainer.masters, anchor_every=2)
    subscriber = Subscriber(tmp_path / "run", blank(trainer.weights))
    publisher.publish()
    subscriber.poll()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        for _ in range(2):
            trainer.step()
            with pytest.raises(StoreError):
                publisher.publish()
            assert publisher.version == 0
            assert subscriber.poll() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    report = publisher.publish()
    assert (report.version, report.folded) == (1, 3)
    subscriber.poll()
    assert_same_bits(subscriber.params, trainer.weights)  # type: ignore[arg-type]
