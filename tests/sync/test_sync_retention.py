"""What is pruned is gone as a whole; what stays can be rebuilt, whatever was asked and wherever it was interrupted."""

from __future__ import annotations

import pytest
from faults import Fault, FaultyBackend, Outage, at
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank
from torch import Tensor

from pulse_kernels import ChainError, StoreError
from pulse_kernels.sync import Publisher, Store, Subscriber, open_store
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.manifest import manifest_key
from pulse_kernels.sync.replay import state_at
from pulse_kernels.sync.retention import prune
from pulse_kernels.sync.retries import Retries

States = dict[int, dict[str, Tensor]]


def published(memory: MemoryStore, versions: int = 11) -> States:
    """Anchors at 0, 3, 6, 9 beside patches."""
    trainer = Trainer(masters=True, seed=5)
    states = {}
    with Publisher(memory, trainer.weights, masters=trainer.masters, anchor_every=3) as publisher:
        for version in range(versions):
            publisher.publish()
            states[version] = trainer.saved_weights()
            trainer.step()
    return states


def check(memory: MemoryStore, states: States, expected: list[int]) -> None:
    store = open_store(memory)
    chain = Chain(store)
    assert chain.versions() == expected
    report = fsck(store)
    assert not report.damaged, report.problems
    for version in expected:
        assert_same_bits(state_at(chain, version), states[version])


@pytest.mark.parametrize(
    ("keep_anchors", "keep_patches", "expected"),
    [
        (None, None, list(range(11))),
        (1, None, [9, 10]),
        (2, None, [6, 7, 8, 9, 10]),
        (9, None, list(range(11))),
        (None, 1, [9, 10]),
        (None, 3, [6, 7, 8, 9, 10]),  # 8 is rebuilt from 6
        (None, 99, list(range(11))),
        (1, 1, [9, 10]),
        (3, 1, [3, 6, 9, 10]),
        (1, 5, [6, 7, 8, 9, 10]),
    ],
)
def test_what_stays(keep_anchors: int | None, keep_patches: int | None, expected: list[int]) -> None:
    memory = MemoryStore()
    states = published(memory)
    chain = Chain(open_store(memory))
    tried = prune(chain, keep_anchors=keep_anchors, keep_patches=keep_patches, dry_run=True)
    check(memory, states, list(range(11)))
    report = prune(chain, keep_anchors=keep_anchors, keep_patches=keep_patches)
    assert list(report.kept) == expected
    assert (tried.kept, tried.removed, tried.objects, tried.nbytes) == (
        report.kept, report.removed, report.objects, report.nbytes)  # fmt: skip
    check(memory, states, expected)
    assert fsck(open_store(memory)).problems == []
    again = prune(chain, keep_anchors=keep_anchors, keep_patches=keep_patches)
    assert (again.objects, again.removed) == (0, ())


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_counts_that_are_none(value: object) -> None:
    memory = MemoryStore()
    with pytest.raises(ValueError, match="keep_anchors"):
        prune(Chain(open_store(memory)), keep_anchors=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_patches"):
        Publisher(memory, Trainer(masters=False).weights, keep_patches=value)  # type: ignore[arg-type]


def test_an_interruption_at_any_call_leaves_what_stays_whole() -> None:
    number = 0
    while True:
        memory = MemoryStore()
        states = published(memory)
        backend = FaultyBackend(ObstoreBackend(memory), at(number, Fault(before=Outage("down"))))
        store = Store(backend, "memory://", retries=Retries(attempts=1))
        try:
            prune(Chain(store), keep_anchors=1)
        except StoreError:
            subscriber = Subscriber(memory)
            assert_same_bits(subscriber.params, states[10])  # type: ignore[arg-type]
        prune(Chain(open_store(memory)), keep_anchors=1)
        check(memory, states, [9, 10])
        assert fsck(open_store(memory)).problems == []
        if number >= len(backend.calls):
            break
        number += 1
    assert number > 10


def test_parts_of_interrupted_publishers_go_and_of_running_ones_stay() -> None:
    memory = MemoryStore()
    states = published(memory)
    store = open_store(memory)
    store.put("patches/00000010/00000-deadbeef.safetensors", b"lost the race")
    store.put("anchors/00000004/model-deadbeef-00001-of-00001.safetensors", b"never committed")
    store.put("patches/00000011/00000-deadbeef.safetensors", b"on its way")
    report = prune(Chain(store))
    assert report.objects == 2
    assert report.removed == ()
    assert store.exists("patches/00000011/00000-deadbeef.safetensors")
    check(memory, states, list(range(11)))


def test_nothing_goes_where_what_is_needed_is_not_known() -> None:
    memory = MemoryStore()
    published(memory)
    store = open_store(memory)
    store.put(manifest_key(10), b"{}")
    before = store.list()
    with pytest.raises(ChainError, match="nothing was removed"):
        prune(Chain(store), keep_anchors=1)
    assert store.list() == before


def test_a_publisher_prunes_after_its_anchors() -> None:
    memory = MemoryStore()
    trainer = Trainer(masters=True)
    weights = blank(trainer.weights)
    subscriber = Subscriber(memory, weights)
    with Publisher(memory, trainer.weights, masters=trainer.masters, anchor_every=2, keep_anchors=2) as publisher:
        for version in range(9):
            report = publisher.publish()
            assert ("prune" in report.seconds) == (version % 2 == 0)
            assert subscriber.poll() is not None
            assert_same_bits(weights, trainer.weights)
            trainer.step()
    assert Chain(open_store(memory)).versions() == [6, 7, 8]


def test_a_subscriber_whose_patches_went_takes_the_anchor() -> None:
    memory = MemoryStore()
    states = published(memory, 5)
    weights = {name: tensor.clone() for name, tensor in states[1].items()}
    subscriber = Subscriber(memory, weights)
    assert subscriber.stage(1) is None
    assert subscriber.version == 1
    prune(Chain(open_store(memory)), keep_anchors=1)
    staged = subscriber.stage()
    assert staged is not None
    assert staged.from_anchor
    assert subscriber.apply().version == 4
    assert_same_bits(weights, states[4])


def test_a_prune_between_manifest_and_part_is_survived() -> None:
    """Parts that go while a subscriber is on its way to them: another route, or a clear error and old bits."""
    memory = MemoryStore()
    states = published(memory, 5)
    gone = False

    def plan(number: int, name: str, key: str) -> Fault | None:
        nonlocal gone
        if name == "get" and key.startswith("patches/") and not gone:
            gone = True
            prune(Chain(open_store(memory)), keep_anchors=1)
        return None

    weights = {name: tensor.clone() for name, tensor in states[1].items()}
    subscriber = Subscriber(Store(FaultyBackend(ObstoreBackend(memory), plan), "memory://"), weights)
    subscriber.poll()
    assert subscriber.version == 4
    assert_same_bits(weights, states[4])
