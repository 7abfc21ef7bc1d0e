"""Weights of which some have a master: those are gated without a copy, the others compared with one."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from faults import Fault, FaultyBackend, Outage
from obstore.store import MemoryStore
from torch import Tensor, nn

from pulse_kernels import NonFiniteError, PulseError, StateDigest, StoreError
from pulse_kernels.sync import Publisher, Store, Subscriber
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.retries import Retries
from pulse_kernels.sync.source import Source

State = dict[str, Tensor]
KINDS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "a.weight": (torch.bfloat16, (40, 30)),
    "b.weight": (torch.float16, (25, 16)),
    "c.weight": (torch.bfloat16, (64,)),
    "norm.weight": (torch.float32, (48,)),
    "seen": (torch.int64, ()),
    "mask": (torch.bool, (33,)),
    "none": (torch.bfloat16, (0, 3)),
}


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: Any, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


class Mixed:
    """A trainer whose steps change a few elements of each tensor; ``gated`` have masters."""

    def __init__(self, gated: set[str], seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in KINDS.items()}
        self.masters = {name: self.weights[name].float() for name in KINDS if name in gated}
        self.step(1.0)
        for name, master in self.masters.items():
            self.weights[name].copy_(master)

    def step(self, share: float = 0.02) -> None:
        for name, weight in self.weights.items():
            target = self.masters.get(name, weight)
            new = torch.randn(target.shape, generator=self.generator) * 3
            moved = torch.rand(target.shape, generator=self.generator) < max(share, 1 / max(1, target.numel()))
            target.copy_(torch.where(moved, new, target.float()) if target.dtype is not torch.bool else target ^ moved)

    def rounded(self) -> State:
        return {n: self.masters[n].to(w.dtype) if n in self.masters else w.clone() for n, w in self.weights.items()}


def blank() -> State:
    return {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in KINDS.items()}


class Flaky:
    """A store that fails at one of the next calls where it is told to."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.fault: Fault | None = None
        self.after = 0

    def plan(self, number: int, name: str, key: str) -> Fault | None:
        if self.fault is None:
            return None
        self.after -= 1
        if self.after >= 0:
            return None
        fault, self.fault = self.fault, None
        return fault

    def store(self) -> Store:
        return Store(FaultyBackend(ObstoreBackend(self.memory), self.plan), "memory://", retries=Retries(attempts=1))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_and_failures(seed: int, asynchronous: bool) -> None:
    rng = random.Random(seed)
    gated = {name for name in ("a.weight", "b.weight", "c.weight", "none") if rng.random() < 0.6} or {"a.weight"}
    trainer, flaky = Mixed(gated, seed), Flaky()
    truth: dict[str, State] = {}

    def publisher() -> Publisher:
        return Publisher(
            flaky.store(), trainer.weights, masters=trainer.masters, anchor_every=7, asynchronous=asynchronous
        )

    ours, follower = publisher(), Subscriber(flaky.store(), blank(), verify="full")
    kinds = []
    for k in range(40):
        trainer.step()
        expected = trainer.rounded()
        truth[StateDigest.of(expected).hexdigest()] = expected
        if rng.random() < 0.1:
            name = rng.choice(["norm.weight", *sorted(gated - {"none"})])
            with suppress(PulseError, KeyboardInterrupt):
                ours.wait()
            target = trainer.masters.get(name, trainer.weights[name]).view(-1)
            kept = target[3].clone()
            target[3] = float("nan")
            before = copied(trainer.weights)
            with pytest.raises(NonFiniteError):
                ours.publish()
            assert_same(trainer.weights, before)
            target[3] = kept
        if rng.random() < 0.5:  # often several in a row
            flaky.after = rng.randrange(5)
            error = Outage("down") if rng.random() < 0.7 else KeyboardInterrupt()
            flaky.fault = Fault(before=error) if rng.random() < 0.5 else Fault(after=error)
        with suppress(PulseError, KeyboardInterrupt):
            kinds.append(ours.publish().kind)
        if rng.random() < 0.05:
            with suppress(PulseError, KeyboardInterrupt):
                ours.wait()
            flaky.fault = None
            ours = publisher()
        flaky.fault, kept_fault = None, flaky.fault
        if not asynchronous:
            follower.poll()
            if follower.digest is not None:
                assert_same(follower.params, truth[follower.digest])
        flaky.fault = kept_fault
        assert_same({n: trainer.weights[n] for n in gated}, {n: expected[n] for n in gated})
        if k % 13 == 12:
            flaky.fault = None
            with suppress(PulseError, KeyboardInterrupt):
                ours.wait()
            for _ in range(2):  # the first may only say that an earlier version came through
                with suppress(PulseError):
                    ours.publish()
                    ours.wait()
            follower.poll()
            assert follower.version == ours.version
            assert_same(follower.params, trainer.rounded())
    assert kinds.count("patch") > 5


def test_several_failed_commits_go_as_one_patch() -> None:
    trainer, flaky = Mixed({"a.weight", "c.weight"}, 3), Flaky()
    publisher = Publisher(flaky.store(), trainer.weights, masters=trainer.masters)
    publisher.publish()
    create, follower = publisher.store.create, Subscriber(flaky.store(), blank(), verify="full")
    follower.poll()

    def refused(key: str, data: bytes) -> None:
        raise StoreError("down")

    publisher.store.create = refused  # type: ignore[method-assign]
    for _ in range(3):
        trainer.step()
        with pytest.raises(StoreError, match="down"):
            publisher.publish()
    publisher.store.create = create  # type: ignore[method-assign]
    trainer.step()
    report = publisher.publish()
    assert (report.kind, report.folded, report.note) == ("patch", 4, "")
    for _ in range(3):  # and what is kept of both kinds goes on from there
        follower.poll()
        assert_same(follower.params, trainer.rounded())
        trainer.step()
        report = publisher.publish()
        assert (report.kind, report.folded, report.note) == ("patch", 1, "")


@pytest.mark.parametrize("sent", [False, True], ids=["first", "patch"])
@pytest.mark.parametrize("name", ["a.weight", "norm.weight"], ids=["gated", "compared"])
def test_a_refusal_leaves_both_kinds_as_they_were(name: str, sent: bool) -> None:
    trainer, store = Mixed({"a.weight", "b.weight"}, 5), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    if sent:
        publisher.publish()
    trainer.step()
    target = trainer.masters.get(name, trainer.weights[name]).view(-1)
    kept = target[7].clone()
    target[7] = float("inf")
    before = copied(trainer.weights)
    with pytest.raises(NonFiniteError, match=rf"'{name}' is inf at flat position 7"):
        publisher.publish()
    assert_same(trainer.weights, before)
    target[7] = kept
    report = publisher.publish()
    assert (report.kind, report.folded) == ("patch" if sent else "anchor", 1)
    follower = Subscriber(store, blank())
    follower.poll()
    assert_same(follower.params, trainer.rounded())


def test_gated_weights_have_no_copy() -> None:
    trainer = Mixed({"a.weight", "b.weight"}, 5)
    source = Source(trainer.weights, trainer.masters)
    source.commit(source.change())
    assert source._snapshot is not None
    assert source._snapshot.keys() == KINDS.keys() - {"a.weight", "b.weight"}
    everything = Source({name: trainer.weights[name] for name in trainer.masters}, trainer.masters)
    everything.commit(everything.change())
    assert everything._snapshot == {}


class Tied(nn.Module):
    """A head tied to the embedding, a buffer, and an FP32 parameter; masters from named_parameters() lack three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 32, dtype=torch.bfloat16)
        self.head = nn.Linear(32, 300, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_a_weight_tied_to_a_gated_one_is_compared_after_the_cast() -> None:
    model, store = Tied(), MemoryStore()
    masters = {name: p.detach().float() for name, p in model.named_parameters() if p.dtype is torch.bfloat16}
    assert list(masters) == ["embed.weight"]
    publisher = Publisher(store, model, masters=masters)
    follower = Subscriber(store, {name: tensor.detach() + 1 for name, tensor in Tied().state_dict().items()})
    for _ in range(4):
        kind = publisher.publish().kind
        follower.poll()
        assert_same(follower.params, {name: tensor.detach() for name, tensor in model.state_dict().items()})
        masters["embed.weight"].view(-1)[::97] += 1
        with torch.no_grad():
            model.scale[1] += 1
            model.steps += 1  # type: ignore[operator]
    assert kind == "patch"


def test_a_gated_weight_that_others_wrote_is_told_from_a_compared_one() -> None:
    trainer, store = Mixed({"a.weight"}, 6), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    trainer.weights["c.weight"][5] += 1
    assert publisher.publish().kind == "patch"
    trainer.weights["a.weight"][5, 5] += 1
    report = publisher.publish()
    assert (report.kind, report.note) == ("anchor", "the weights were changed by others than the publisher")
    trainer.weights["c.weight"][5] += 1
    assert publisher.publish().kind == "patch"
    follower = Subscriber(store, blank(), verify="full")
    follower.poll()
    assert_same(follower.params, trainer.rounded())


def test_masters_and_weights_that_do_not_fit() -> None:
    trainer = Mixed({"a.weight"}, 6)
    with pytest.raises(ValueError, match="'x' has a master and no weight; masters go by"):
        Source(trainer.weights, {**trainer.masters, "x": torch.ones(3)})
    source = Source(trainer.weights, trainer.masters)
    trainer.masters["c.weight"] = trainer.weights["c.weight"].float()
    with pytest.raises(ValueError, match=r"'c\.weight' is new since publishing began"):
        source.change()
    del trainer.masters["c.weight"], trainer.masters["a.weight"]
    with pytest.raises(ValueError, match=r"'a\.weight' is gone since publishing began"):
        source.change()


def test_masters_of_none_is_no_masters() -> None:
    trainer, store = Mixed(set(), 6), MemoryStore()
    publisher = Publisher(store, trainer.weights, masters={})
    publisher.publish()
    trainer.step()
    assert publisher.publish().kind == "patch"
    follower = Subscriber(store, blank())
    follower.poll()
    assert_same(follower.params, trainer.weights)
