"""Random steps of a trainer, its publisher and subscribers that join, lag and crash, over a store that fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from faults import Fault, FaultyBackend, Outage
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, bits, blank
from torch import Tensor

from pulse_kernels import ChainError, ConflictError, PulseError, StateDigest, StoreError, VerificationError, ops
from pulse_kernels.sync import Publisher, Store, Subscriber, open_store
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.manifest import Manifest, manifest_key
from pulse_kernels.sync.retries import Retries

State = dict[str, Tensor]


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


class Recorder(ObstoreBackend):
    """Knows which manifests came to exist, whatever the caller was told."""

    def __init__(self, memory: MemoryStore, committed: Callable[[str, bytes], None]) -> None:
        super().__init__(memory)
        self.committed = committed

    def put(self, key: str, data: Any, *, create: bool) -> None:
        super().put(key, data, create=create)
        if create:
            self.committed(key, bytes(data))


class World:
    def __init__(self, seed: int, *, masters: bool, asynchronous: bool) -> None:
        self.random = random.Random(seed)
        self.trainer = Trainer(masters=masters, seed=seed)
        self.asynchronous = asynchronous
        self.memory = MemoryStore()
        self.fault: Fault | None = None  # of one of the next calls
        self.after = 0
        self.truth: dict[str, State] = {}  # what has which digest
        self.sending: dict[str, StateDigest] = {}  # of each of the trainer's tensors, as the publisher last got them
        self.committed: dict[int, tuple[dict[str, StateDigest], Manifest]] = {}  # what each version has to be, and says
        self.reported: dict[int, str] = {}
        self.saved = self.trainer.saved()
        self.publisher = self.restarted()
        self.subscribers: list[Subscriber] = []

    def store(self) -> Store:
        backend = FaultyBackend(Recorder(self.memory, self.commits), self.plan)
        return Store(backend, "memory://", retries=Retries(attempts=1))

    def commits(self, key: str, data: bytes) -> None:
        manifest = Manifest.from_bytes(data)
        assert key == manifest_key(manifest.version)
        self.committed[manifest.version] = self.sending, manifest

    def plan(self, number: int, name: str, key: str) -> Fault | None:
        if self.fault is None:
            return None
        self.after -= 1
        if self.after >= 0:
            return None
        fault, self.fault = self.fault, None
        if fault.change is not None and name != "get":
            return Fault(before=Outage("down"))
        return fault

    def restarted(self) -> Publisher:
        trainer = self.trainer
        return Publisher(
            self.store(),
            trainer.weights,
            masters=trainer.masters,
            anchor_every=5,
            asynchronous=self.asynchronous,
            on_report=lambda report: self.reported.update({report.version: report.digest}),
        )

    def hit(self) -> None:
        """Plan a fault."""
        self.after = self.random.randrange(6)
        self.fault = self.random.choice(
            [
                Fault(before=Outage("down")),
                Fault(after=Outage("reset")),
                Fault(before=KeyboardInterrupt()),
                Fault(after=KeyboardInterrupt()),
                Fault(change=lambda data: data[:-1]),
                Fault(change=lambda data: bytes([data[0] ^ 16]) + data[1:] if data else data),
            ]
        )

    def publish(self) -> None:
        expected = self.trainer.rounded()
        self.publisher._join_worker()  # as publish does first: until then the upload before it is on its way
        self.sending = StateDigest.of_each(expected)
        self.truth[StateDigest.sum(self.sending.values()).hexdigest()] = expected
        with suppress(PulseError, KeyboardInterrupt):
            try:
                self.publisher.publish()
            except ConflictError:
                pytest.fail("there is one publisher")

    def step(self) -> None:
        action = self.random.choice(
            ["train", "train", "publish", "publish", "faulty publish", "restart", "older", "join", "join trained"]
            + ["poll"] * 4
            + ["faulty poll", "stage", "broken apply", "rollback", "leave", "damage"]
        )
        subscriber = self.random.choice(self.subscribers) if self.subscribers else None
        if action == "train":
            self.trainer.step()
            if self.random.random() < 0.3:
                self.saved = self.trainer.saved()
        elif action in ("publish", "faulty publish"):
            if action[0] == "f":
                self.hit()
            self.publish()
        elif action in ("restart", "older"):
            with suppress(PulseError, KeyboardInterrupt):
                self.publisher.wait()
            self.fault = None
            if action == "older":
                self.trainer.restore(self.saved)
            self.publisher = self.restarted()
        elif action[:4] == "join":
            state = blank(self.trainer.weights) if action == "join" else copied(self.trainer.weights)
            verify = self.random.choice(["digest", "full"])
            self.subscribers.append(Subscriber(self.store(), state, verify=verify))
        elif subscriber is not None:
            self.use(subscriber, action)
        self.check()

    def use(self, subscriber: Subscriber, action: str) -> None:
        weights: Any = subscriber.params
        before, version = copied(weights), subscriber.version
        if action == "leave":
            self.subscribers.remove(subscriber)
            return
        if action == "damage":
            flat = bits(weights["embed.weight"])
            flat[self.random.randrange(flat.numel())] ^= 1 << self.random.randrange(15)
            weights["embed.weight"].view(-1).view(torch.int16).copy_(flat)
            with pytest.raises(PulseError):
                subscriber.check()
            return
        if action == "faulty poll":
            self.hit()
        try:
            if action == "stage":
                subscriber.stage()
                assert_same_bits(weights, before)
            elif action == "rollback":
                subscriber.rollback()
            elif action == "broken apply":
                subscriber.stage()
                with pytest.MonkeyPatch.context() as patched:

                    def broken(*_: Any, **__: Any) -> None:
                        raise MemoryError("planned")

                    patched.setattr(ops, "digest_many", broken)
                    subscriber.apply()
            else:
                subscriber.poll()
        except (PulseError, MemoryError, KeyboardInterrupt) as error:
            assert_same_bits(weights, before)
            if version is not None and isinstance(error, StoreError | MemoryError):
                assert subscriber.version == version
        finally:
            self.fault = None

    def check(self) -> None:
        fault, self.fault = self.fault, None
        for subscriber in self.subscribers:
            if subscriber.version is not None:
                assert subscriber.digest is not None
                assert subscriber.digest == self.committed[subscriber.version][1].digest
                assert_same_bits(subscriber.params, self.truth[subscriber.digest])  # type: ignore[arg-type]
        for version, (expected, manifest) in list(self.committed.items()):
            assert manifest.digest == StateDigest.sum(expected.values()).hexdigest(), version
            assert manifest.tensor_digests == {name: each.hexdigest() for name, each in expected.items()}, version
        for version, digest in list(self.reported.items()):
            assert self.committed[version][1].digest == digest, version
        self.fault = fault

    def check_store(self) -> None:
        """Every version that was committed is there, and is made anew of its parts."""
        assert Subscriber(self.memory).chain.versions() == sorted(self.committed)
        report = fsck(open_store(self.memory))
        assert (report.versions, report.unverified) == (len(self.committed), [])
        # A publisher that ended behind a commit left an anchor without its index.
        assert {problem.kind for problem in report.problems} <= {"orphan", "index-missing"}

    def settle(self) -> None:
        self.fault = None
        with suppress(PulseError, KeyboardInterrupt):
            self.publisher.wait()
        for _ in range(2):  # the first may only say that an earlier version came through
            self.publish()
        self.publisher.wait()
        for subscriber in [*self.subscribers, Subscriber(self.store(), blank(self.trainer.weights))]:
            subscriber.poll()
            assert subscriber.version == self.publisher.version
            assert_same_bits(subscriber.params, self.trainer.rounded())  # type: ignore[arg-type]


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "snapshot"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", [1, 5])
def test_random_steps(seed: int, masters: bool, asynchronous: bool) -> None:
    world = World(seed, masters=masters, asynchronous=asynchronous)
    for k in range(200):
        world.step()
        if k % 50 == 49:
            world.settle()
    assert len(world.committed) >= len(world.reported) > 20
    world.check_store()


def test_a_rollback_of_weights_that_others_wrote_is_refused() -> None:
    trainer, store = Trainer(masters=True, seed=4), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights, verify="full")
    for _ in range(2):
        publisher.publish()
        subscriber.poll()
        trainer.step()
    weights["layer.0.bias"][40] = 3.0
    damaged = copied(weights)
    with pytest.raises(VerificationError):
        subscriber.check()
    with pytest.raises(VerificationError, match="something else wrote them"):
        subscriber.rollback()
    assert_same_bits(weights, damaged)
    assert subscriber.version is None


def test_an_interrupted_rollback_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, store = Trainer(masters=True, seed=4), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    publisher.publish()
    subscriber.poll()
    first = copied(weights)
    trainer.step()
    publisher.publish()
    subscriber.poll()
    real, calls = ops.apply_patch_many_, [0]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        real(*arguments, **options)
        if calls[0] == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ops, "apply_patch_many_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subscriber.rollback()
    assert subscriber.version == 0
    assert_same_bits(weights, first)


@pytest.mark.parametrize("now", [-1e9, 0.0, 4e9, 1e15])
def test_clocks_that_jump(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    trainer, store = Trainer(masters=True, seed=4), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=2)
    subscriber = Subscriber(store, blank(trainer.weights))
    for jump in (time.time(), now, time.time()):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        publisher.publish()
        subscriber.poll()
        assert subscriber.version == publisher.version
        assert_same_bits(subscriber.params, trainer.weights)  # type: ignore[arg-type]
        trainer.step()


def test_versions_that_interleave_fence_the_lower_publisher() -> None:
    trainer, other, store = Trainer(masters=True, seed=4), Trainer(masters=True, seed=5), MemoryStore()
    first = Publisher(store, trainer.weights, masters=trainer.masters)
    first.publish(3)
    second = Publisher(store, other.weights, masters=other.masters)
    first.publish(7)
    for _ in range(2):
        with pytest.raises(ConflictError):
            second.publish(6)
    trainer.step()
    assert first.publish().version == 8
    third = Publisher(store, other.weights, masters=other.masters)
    assert third.publish().version == 9
    with pytest.raises(ConflictError):
        first.publish()
    assert Subscriber(store).chain.versions() == [3, 7, 8, 9]


def test_a_flipped_manifest_behind_an_anchor_is_not_needed() -> None:
    trainer, store = Trainer(masters=True, seed=4), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=3)
    for _ in range(4):
        publisher.publish()
        trainer.step()
    backend = ObstoreBackend(store)
    backend.put("manifests/00000001.json", b"{}", create=False)
    subscriber = Subscriber(store, blank(trainer.weights))
    subscriber.poll()
    assert subscriber.version == 3
    with pytest.raises(ChainError):
        Subscriber(store, blank(trainer.weights)).stage(2)
