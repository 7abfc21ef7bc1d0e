"""Two publishers of one chain: each version has one winner, and the loser stops for good."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faults import Fault, FaultyBackend, Plan
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank
from torch import Tensor

from pulse_kernels import ChainError, ConflictError, StateDigest
from pulse_kernels.sync import Publisher, PublishReport, Store, Subscriber, open_store
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.retention import prune


def publisher_of(store: object, seed: int) -> tuple[Publisher, Trainer]:
    trainer = Trainer(masters=True, seed=seed)
    return Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=2), trainer


def assert_sound(store: object) -> None:
    opened = open_store(store)
    assert not fsck(opened).damaged
    prune(Chain(opened))  # what the loser left behind
    assert fsck(opened).problems == []


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_of_two_threads_one_wins(where: str, tmp_path: Path) -> None:
    for round_ in range(6):
        store = MemoryStore() if where == "memory" else tmp_path / str(round_)
        rivals = [publisher_of(store, seed) for seed in (1, 2)]
        if round_ % 2:  # both know a first version
            rivals[0][0].publish()
            rivals = [publisher_of(store, seed) for seed in (1, 2)]
        barrier, outcomes = threading.Barrier(2), ["", ""]

        def publish(k: int, rivals: object = rivals, barrier: object = barrier, outcomes: list[str] = outcomes) -> None:
            barrier.wait()  # type: ignore[attr-defined]
            try:
                rivals[k][0].publish()  # type: ignore[index]
                outcomes[k] = "won"
            except ConflictError:
                outcomes[k] = "lost"

        threads = [threading.Thread(target=publish, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if sorted(outcomes) == ["won", "won"]:  # one after the other, of which the second may have seen the first
            pytest.fail("both committed")
        assert sorted(outcomes) == ["lost", "won"]
        winner, trainer = rivals[outcomes.index("won")]
        loser, _ = rivals[outcomes.index("lost")]
        for _ in range(2):
            with pytest.raises(ConflictError, match="another publisher"):
                loser.publish()
        weights = blank(trainer.weights)
        subscriber = Subscriber(store, weights)
        subscriber.poll()
        assert_same_bits(weights, trainer.weights)
        trainer.step()
        winner.publish()
        subscriber.poll()
        assert_same_bits(weights, trainer.weights)
        assert_sound(store)


@pytest.mark.parametrize(("first", "second"), [(7, 6), (6, 7), (7, 7)])
def test_numbers_that_interleave(first: int, second: int) -> None:
    store = MemoryStore()
    one, _ = publisher_of(store, 1)
    one.publish(5)
    two, _ = publisher_of(store, 2)
    one.publish(first)
    with pytest.raises(ConflictError):
        two.publish(second)
    assert one.publish().version == first + 1
    successor, trainer = publisher_of(store, 3)
    assert successor.publish().version == first + 2
    weights = blank(trainer.weights)
    Subscriber(store, weights).poll()
    assert_same_bits(weights, trainer.weights)
    assert_sound(store)


def test_a_number_with_a_digit_more_is_seen() -> None:
    """As text its key comes before those of eight digits."""
    store = MemoryStore()
    one, trainer = publisher_of(store, 1)
    one.publish(99_999_990)
    two, _ = publisher_of(store, 2)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    subscriber.poll()
    trainer.step()
    one.publish(100_000_001)
    with pytest.raises(ConflictError, match="100000001"):
        two.publish()
    subscriber.poll()
    assert subscriber.version == 100_000_001
    assert_same_bits(weights, trainer.weights)


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from sync_models import Trainer
from pulse_kernels import ConflictError, StateDigest
from pulse_kernels.sync import Publisher

trainer = Trainer(masters=True, seed=int(sys.argv[3]))
publisher = Publisher(sys.argv[2], trainer.weights, masters=trainer.masters, anchor_every=3)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(12):
    try:
        report = publisher.publish()
    except ConflictError:
        print("fenced", flush=True)
        break
    print(report.version, StateDigest.of(trainer.weights).hexdigest(), flush=True)
    trainer.step()
"""


def test_of_two_processes_one_is_left(tmp_path: Path) -> None:
    here, store = str(Path(__file__).parent), tmp_path / "run"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, here, str(store), str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    committed: dict[int, str] = {}
    for lines in said:
        for line in lines:
            if line != "fenced":
                version, digest = line.split()
                assert int(version) not in committed
                committed[int(version)] = digest
    assert sum(lines[-1] == "fenced" for lines in said) == 1
    assert sorted(committed) == list(range(len(committed)))
    assert len(committed) >= 12
    opened = open_store(store)
    report = fsck(opened)
    assert not report.damaged
    assert report.versions == len(committed)
    subscriber = Subscriber(store)
    assert StateDigest.of(subscriber.params).hexdigest() == committed[max(committed)]


class Rivals:
    """Two publishers that hold version 5 and come to the commit of their next at the same moment.

    first: which of them then commits first, by its place; None: nobody waits.
    """

    def __init__(self, *, first: int | None, anchor_every: tuple[int, int], keep_anchors: int | None = None) -> None:
        self.memory = MemoryStore()
        self.barrier, self.done, self.first = threading.Barrier(2), threading.Event(), first
        self.met = [False, False]
        trainer = Trainer(masters=True, seed=1)
        with Publisher(self.memory, trainer.weights, masters=trainer.masters, anchor_every=4) as publisher:
            for _ in range(6):
                publisher.publish()
                self.held = trainer.saved_weights()
                saved = trainer.saved()
                trainer.step()
        self.trainers = [Trainer(masters=True, seed=seed) for seed in (2, 3)]
        for each in self.trainers:
            each.restore(saved)
        self.publishers = [
            Publisher(
                Store(FaultyBackend(ObstoreBackend(self.memory), self.plan(k)), f"memory://{k}"),
                each.weights, masters=each.masters, anchor_every=anchor_every[k], keep_anchors=keep_anchors,
            )
            for k, each in enumerate(self.trainers)
        ]  # fmt: skip
        for each in self.trainers:
            each.step()

    def plan(self, k: int) -> Plan:
        def meet() -> None:
            self.met[k] = True
            self.barrier.wait(30)
            if self.first is not None and self.first != k:
                assert self.done.wait(30)

        return lambda number, name, key: Fault(run=meet) if name == "create" and not self.met[k] else None

    def race(self, *versions: int) -> list[PublishReport | ConflictError]:
        outcomes: dict[int, PublishReport | ConflictError] = {}

        def publish(k: int) -> None:
            try:
                outcomes[k] = self.publishers[k].publish(versions[k])
            except ConflictError as error:
                outcomes[k] = error
            if k == self.first:
                self.done.set()

        threads = [threading.Thread(target=publish, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert self.met == [True, True]
        return [outcomes[k] for k in range(2)]

    def subscriber(self, state: dict[str, Tensor] | None = None) -> Subscriber:
        weights = blank(self.held) if state is None else {name: tensor.clone() for name, tensor in state.items()}
        return Subscriber(self.memory, weights, verify="full")


@pytest.mark.parametrize("first", [0, 1, None])
@pytest.mark.parametrize("anchor_every", [(100, 100), (1, 100), (100, 1), (1, 1)])
def test_one_number_at_the_same_moment(anchor_every: tuple[int, int], first: int | None) -> None:
    rivals = Rivals(first=first, anchor_every=anchor_every)
    outcomes = rivals.race(6, 6)
    (winner,) = [k for k, outcome in enumerate(outcomes) if isinstance(outcome, PublishReport)]
    assert first in (None, winner)
    with pytest.raises(ConflictError, match="version 6 was committed by another"):
        rivals.publishers[1 - winner].publish()
    followers = [rivals.subscriber(), rivals.subscriber(rivals.held)]
    for _ in range(2):
        for follower in followers:
            follower.poll()
            assert_same_bits(follower.params, rivals.trainers[winner].weights)  # type: ignore[arg-type]
        rivals.trainers[winner].step()
        rivals.publishers[winner].publish()
    assert_sound(rivals.memory)


@pytest.mark.parametrize("first", [0, 1, None])
@pytest.mark.parametrize("anchor_every", [(100, 100), (1, 100), (100, 1), (1, 1)])
def test_two_numbers_at_the_same_moment(anchor_every: tuple[int, int], first: int | None) -> None:
    """Both versions exist, each from version 5. The higher is the newest; who committed the lower has to stop."""
    rivals = Rivals(first=first, anchor_every=anchor_every)
    outcomes = rivals.race(6, 7)
    committed = [trainer.saved_weights() for trainer in rivals.trainers]
    for version, outcome, state in zip((6, 7), outcomes, committed, strict=True):
        assert isinstance(outcome, PublishReport)
        assert (outcome.version, outcome.digest) == (version, StateDigest.of(state).hexdigest())
    for start in (None, rivals.held, committed[0]):
        follower = rivals.subscriber(start)
        follower.poll()
        assert follower.version == 7
        assert_same_bits(follower.params, committed[1])  # type: ignore[arg-type]
    followers = [rivals.subscriber() for _ in range(2)]
    for follower, version, state in zip(followers, (6, 7), committed, strict=True):
        follower.stage(version)
        follower.apply()
        assert_same_bits(follower.params, state)  # type: ignore[arg-type]
    for trainer in rivals.trainers:
        trainer.step()
    for _ in range(2):
        with pytest.raises(ConflictError, match="version 7 was committed by another"):
            rivals.publishers[0].publish()
    assert rivals.publishers[1].publish().version == 8
    for follower in (*followers, rivals.subscriber()):
        follower.poll()
        assert_same_bits(follower.params, rivals.trainers[1].weights)  # type: ignore[arg-type]
    assert Subscriber(rivals.memory).chain.versions() == list(range(9))
    assert_sound(rivals.memory)


def test_the_lower_of_two_numbers_removes_what_the_higher_begins_at() -> None:
    """Version 6 is an anchor and its publisher keeps no other; version 7 is a patch from 5. It says that there is no
    way to it, until the version after it, which is an anchor."""
    rivals = Rivals(first=0, anchor_every=(1, 100), keep_anchors=1)
    assert all(isinstance(outcome, PublishReport) for outcome in rivals.race(6, 7))
    newest = rivals.trainers[1].saved_weights()
    chain = Chain(open_store(rivals.memory))
    assert chain.versions() == [6, 7]
    holder, late = rivals.subscriber(rivals.held), rivals.subscriber()
    with pytest.raises(ChainError, match="no way to version 7: version 5 is not in the store"):
        late.poll()
    assert_same_bits(late.params, blank(rivals.held))  # type: ignore[arg-type]
    rivals.trainers[1].step()
    report = rivals.publishers[1].publish()
    assert (report.version, report.kind, report.base_version) == (8, "anchor", 7)
    for follower in (holder, late, rivals.subscriber(newest)):
        follower.poll()
        assert follower.version == 8
        assert_same_bits(follower.params, rivals.trainers[1].weights)  # type: ignore[arg-type]
    assert chain.versions() == [8]  # its retention, too
    assert fsck(chain.store).problems == []
    rivals.trainers[1].step()
    assert rivals.publishers[1].publish().kind == "patch"  # one anchor is enough
