"""Asynchronous publishing: one upload in flight, errors told once, nothing lost, weights free at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faults import Fault, FaultyBackend, Outage
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import ConflictError, StoreError
from pulse_kernels.sync import Publisher, Store, Subscriber, open_store
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.retries import Retries


class Gate:
    """A store whose uploads wait until they are let through, or fail."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.open, self.reached = threading.Event(), threading.Semaphore(0)
        self.open.set()
        self.down = False
        self.running = self.most = 0
        backend = FaultyBackend(ObstoreBackend(self.memory), self._plan)
        self.store = Store(backend, "memory://", retries=Retries(attempts=1))

    def _plan(self, number: int, name: str, key: str) -> Fault | None:
        if not key.startswith("patches/") or name != "put":
            return None
        return Fault(before=Outage("down") if self.down else None, run=self._wait)

    def _wait(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.reached.release()
        assert self.open.wait(30)
        self.running -= 1


@pytest.fixture(params=[True, False], ids=["masters", "snapshot"])
def setting(request: pytest.FixtureRequest) -> tuple[Gate, Trainer, Publisher]:
    gate, trainer = Gate(), Trainer(masters=request.param, seed=4)
    publisher = Publisher(gate.store, trainer.weights, masters=trainer.masters, asynchronous=True, anchor_every=100)
    assert publisher.publish().committed  # an anchor is read from the weights: it is there when the call returns
    return gate, trainer, publisher


Setting = tuple[Gate, Trainer, Publisher]


def test_one_upload_runs_and_the_next_call_waits_for_it(setting: Setting) -> None:
    gate, trainer, publisher = setting
    gate.open.clear()
    trainer.step()
    report = publisher.publish()
    assert (report.version, report.committed) == (1, False)
    # not known yet, which must not look like figures
    assert (report.payload_bytes, report.ratio) == (None, None)
    assert report.to_dict()["payload_bytes"] is report.to_dict()["ratio"] is None
    assert gate.reached.acquire(timeout=30)
    assert publisher.version == 0
    trainer.step()
    done = threading.Event()

    def second() -> None:
        publisher.publish()
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.3)
    gate.open.set()
    thread.join(30)
    assert done.is_set()
    publisher.wait()
    assert gate.most == 1
    assert publisher.version == 2
    weights = blank(trainer.weights)
    Subscriber(gate.memory, weights).poll()
    assert_same_bits(weights, trainer.weights)


def test_what_was_published_is_what_the_weights_were(setting: Setting) -> None:
    gate, trainer, publisher = setting
    weights = blank(trainer.weights)
    subscriber = Subscriber(gate.memory, weights)
    for version in range(1, 5):
        gate.open.clear()
        trainer.step()
        publisher.publish()
        expected = trainer.saved_weights()
        trainer.step()
        trainer.step()
        gate.open.set()
        report = publisher.wait()
        assert report is not None
        assert (report.version, report.committed) == (version, True)
        sent = publisher.chain.manifest(version).patch
        assert report.payload_bytes == sum(part.bytes for part in sent) > 0
        assert report.ratio == report.dense_bytes / report.payload_bytes
        subscriber.poll()
        assert_same_bits(weights, expected)


@pytest.mark.parametrize("told_by", ["publish", "wait", "close"])
@pytest.mark.parametrize("anchor_every", [1, 100], ids=["anchor", "patch"])
def test_an_upload_that_meets_a_rivals_commit(setting: Setting, anchor_every: int, told_by: str) -> None:
    gate, trainer, publisher = setting
    held = trainer.saved_weights()
    other = Trainer(masters=True, seed=9)
    other.restore(held)
    rival = Publisher(gate.memory, other.weights, masters=other.masters, anchor_every=anchor_every)
    gate.open.clear()
    trainer.step()
    report = publisher.publish()
    assert (report.version, report.committed) == (1, False)
    assert gate.reached.acquire(timeout=30)  # the upload runs, and knew of nobody when it began
    other.step()
    assert rival.publish().version == 1
    gate.open.set()
    trainer.step()
    expected = trainer.rounded()
    with pytest.raises(ConflictError, match="version 1 was committed by another publisher"):
        getattr(publisher, told_by)()
    if told_by == "publish" and trainer.masters is not None:
        assert_same_bits(trainer.weights, expected)  # cast all the same
    for _ in range(2):
        assert publisher.wait() is None  # told once
        with pytest.raises(ConflictError, match="another publisher"):
            publisher.publish()
    assert_same_bits(trainer.weights, expected)
    assert publisher.version == 0
    assert fsck(open_store(gate.memory)).problems == []  # the loser's parts are gone
    followers = [Subscriber(gate.memory, blank(held)), Subscriber(gate.memory, held)]
    for version in (1, 2):
        for follower in followers:
            follower.poll()
            assert follower.version == version
            assert_same_bits(follower.params, other.weights)  # type: ignore[arg-type]
        other.step()
        rival.publish()


def test_an_upload_under_a_rivals_higher_number(setting: Setting) -> None:
    """Version 1 comes to exist below the rival's 2: it was not in the way, but its publisher has to stop."""
    gate, trainer, publisher = setting
    other = Trainer(masters=True, seed=9)
    other.restore(trainer.saved_weights())
    rival = Publisher(gate.memory, other.weights, masters=other.masters, anchor_every=100)
    gate.open.clear()
    trainer.step()
    publisher.publish()
    sent = trainer.saved_weights()
    assert gate.reached.acquire(timeout=30)
    other.step()
    assert rival.publish(2).version == 2
    gate.open.set()
    report = publisher.wait()
    assert report is not None
    assert (report.version, report.committed) == (1, True)
    trainer.step()
    with pytest.raises(ConflictError, match="version 2 was committed by another publisher"):
        publisher.publish()
    assert publisher.wait() is None
    weights = blank(sent)
    subscriber = Subscriber(gate.memory, weights)
    subscriber.stage(1)
    subscriber.apply()
    assert_same_bits(weights, sent)
    subscriber.poll()
    assert subscriber.version == 2
    assert_same_bits(weights, other.weights)
    assert fsck(open_store(gate.memory)).problems == []


@pytest.mark.parametrize("told_by", ["publish", "wait", "close"])
def test_an_error_is_told_once_and_nothing_is_lost(setting: Setting, told_by: str) -> None:
    gate, trainer, publisher = setting
    gate.down = True
    trainer.step()
    publisher.publish()
    trainer.step()
    expected = trainer.rounded()
    with pytest.raises(StoreError, match="down"):
        getattr(publisher, told_by)()
    if told_by == "publish" and trainer.masters is not None:
        assert_same_bits(trainer.weights, expected)  # cast all the same
    gate.down = False
    assert publisher.wait() is None
    report = publisher.publish()
    assert report.version == 1
    publisher.close()
    weights = blank(trainer.weights)
    Subscriber(gate.memory, weights).poll()
    assert_same_bits(weights, expected)


def test_wait_tells_of_no_upload_before_the_last(setting: Setting) -> None:
    _, trainer, publisher = setting
    trainer.step()
    publisher.publish()
    publisher._anchor_every = 1  # the next is an anchor, and there when the call returns
    trainer.step()
    assert publisher.publish().committed
    assert publisher.wait() is None


def test_leaving_the_block_waits(setting: Setting) -> None:
    gate, trainer, publisher = setting
    gate.open.clear()
    threading.Timer(0.2, gate.open.set).start()
    with publisher:
        trainer.step()
        publisher.publish()
    assert publisher.version == 1


def test_the_blocks_own_error_comes_first(setting: Setting) -> None:
    gate, trainer, publisher = setting
    gate.down = True
    trainer.step()
    publisher.publish()
    with pytest.raises(ZeroDivisionError), publisher:
        raise ZeroDivisionError


ENDS = """
import sys
import torch
from pulse_kernels.sync import Publisher

weights = {f"w{k}": torch.randn(1_000_000).bfloat16() for k in range(8)}
publisher = Publisher(sys.argv[1], weights, asynchronous=True)
publisher.publish()
for tensor in weights.values():
    tensor.view(-1)[::7] += 1
print(publisher.publish().version)
if sys.argv[2] == "error":
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("end", ["return", "error"])
def test_an_interpreter_that_ends_finishes_the_upload(tmp_path: Path, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "run"), end], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1\n"
    assert done.returncode == (end == "error")
    assert Subscriber(tmp_path / "run").version == 1
