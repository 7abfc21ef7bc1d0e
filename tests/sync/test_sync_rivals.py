"""Two publishers of one chain: each version has one winner, and the loser stops for good."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import ConflictError, StateDigest
from pulse_kernels.sync import Publisher, Subscriber, open_store
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.retention import prune


def publisher_of(store: object, seed: int) -> tuple[Publisher, Trainer]:
    trainer = Trainer(masters=True, seed=seed)
    return Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=2), trainer


def assert_sound(store: object) -> None:
    opened = open_store(store)
    assert not fsck(opened).damaged
    from pulse_kernels.sync.chain import Chain

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
