"""What goes wrong once a version is committed cannot undo it, and nobody continues a signed chain without a key."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from faults import Fault, FaultyBackend
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import StoreError, TrustError
from pulse_kernels.sync import Publisher, PublishReport, Store, Subscriber, open_store
from pulse_kernels.sync import publisher as publisher_module
from pulse_kernels.sync.backend import ObstoreBackend

KEY = Ed25519PrivateKey.generate()


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "MemoryError"), (OSError(errno.EIO, "bad disk"), "bad disk"), (RuntimeError("odd"), "odd")],
    ids=lambda value: type(value).__name__,
)
def test_a_prune_that_fails_is_a_note(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **options: Any) -> None:
        raise error

    trainer = Trainer(masters=True)
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=1, keep_anchors=1)
    monkeypatch.setattr(publisher_module, "prune", failing)
    report = publisher.publish()
    assert (report.version, report.committed) == (0, True)
    assert report.note.startswith("nothing was sent before; old versions were not removed (")
    assert told in report.note
    trainer.step()
    monkeypatch.undo()
    report = publisher.publish()
    assert (report.version, report.base_version) == (1, 0)
    assert "not removed" not in report.note
    assert publisher.chain.versions() == [1]
    assert_same_bits(Subscriber(store).params, trainer.weights)


def test_an_index_that_fails_is_a_note_and_written_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(masters=False)
    store = open_store(MemoryStore())
    publisher = Publisher(store, trainer.weights)

    def failing(key: str, data: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(store, "put", failing)
    report = publisher.publish()
    assert (report.committed, report.note.endswith("waits for the next call (MemoryError)")) == (True, True)
    assert not store.exists("anchors/00000000/model.safetensors.index.json")
    monkeypatch.undo()
    publisher.publish()
    assert store.exists("anchors/00000000/model.safetensors.index.json")


def published(publisher: Publisher) -> PublishReport:
    """The report of one version, once it is committed."""
    report = publisher.publish()
    return publisher.wait() or report


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("anchor_every", [1, 30], ids=["anchor", "patch"])
def test_a_commit_that_a_full_disk_refuses_leaves_nothing(anchor_every: int) -> None:
    trainer, memory = Trainer(masters=True), MemoryStore()
    backend = FaultyBackend(ObstoreBackend(memory))
    publisher = Publisher(
        Store(backend, "memory://"), trainer.weights, masters=trainer.masters, anchor_every=anchor_every
    )
    publisher.publish()
    before = open_store(memory).list()
    for _ in range(3):
        trainer.step()
        backend.plan = lambda number, name, key: Fault(before=full()) if name == "create" else None
        with pytest.raises(StoreError, match="free some space"):
            publisher.publish()
        assert open_store(memory).list() == before
    backend.plan = lambda number, name, key: None
    report = publisher.publish()
    assert (report.version, report.folded) == (1, 4)
    assert_same_bits(Subscriber(memory).params, trainer.weights)


def test_a_commit_that_took_effect_on_a_full_disk_counts() -> None:
    trainer, memory = Trainer(masters=True), MemoryStore()
    backend = FaultyBackend(ObstoreBackend(memory))
    publisher = Publisher(Store(backend, "memory://"), trainer.weights, masters=trainer.masters)
    publisher.publish()
    trainer.step()
    backend.plan = lambda number, name, key: Fault(after=full()) if name == "create" else None
    with pytest.raises(StoreError, match="free some space"):
        publisher.publish()
    backend.plan = lambda number, name, key: None
    assert_same_bits(Subscriber(memory).params, trainer.weights)  # its parts are there
    trainer.step()
    report = publisher.publish()
    assert (report.version, report.base_version, report.folded) == (2, 1, 1)
    assert_same_bits(Subscriber(memory).params, trainer.weights)


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "snapshot"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
def test_what_on_report_raises_comes_out_of_a_committed_publish(masters: bool, asynchronous: bool) -> None:
    seen: list[int] = []

    def on_report(report: PublishReport) -> None:
        seen.append(report.version)
        if report.version in (0, 1):
            raise ZeroDivisionError(f"of version {report.version}")

    trainer = Trainer(masters=masters)
    store = MemoryStore()
    publisher = Publisher(
        store, trainer.weights, masters=trainer.masters, on_report=on_report, asynchronous=asynchronous
    )
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    for version in (0, 1):
        with pytest.raises(ZeroDivisionError, match=f"of version {version}"):
            published(publisher)
        assert publisher.version == version
        subscriber.poll()
        assert_same_bits(weights, trainer.weights)
        trainer.step()
    report = published(publisher)
    assert (report.version, report.kind, report.base_version, report.folded) == (2, "patch", 1, 1)
    subscriber.poll()
    assert_same_bits(weights, trainer.weights)
    assert seen == [0, 1, 2]


def test_a_signed_chain_is_not_continued_without_a_signer() -> None:
    trainer = Trainer(masters=True)
    store = MemoryStore()
    Publisher(store, trainer.weights, masters=trainer.masters, signer=KEY).publish()
    before = open_store(store).list()
    with pytest.raises(TrustError, match=r"version 0 in .* is signed, .*Pass signer=\.\.\."):
        Publisher(store, trainer.weights, masters=trainer.masters)
    assert open_store(store).list() == before
    trainer.step()
    assert Publisher(store, trainer.weights, masters=trainer.masters, signer=KEY).publish().version == 1
    Subscriber(store, blank(trainer.weights), trust=[KEY.public_key()]).poll()


def test_an_unsigned_chain_goes_on_without_one() -> None:
    trainer = Trainer(masters=True)
    store = MemoryStore()
    Publisher(store, trainer.weights, masters=trainer.masters).publish()
    trainer.step()
    assert Publisher(store, trainer.weights, masters=trainer.masters).publish().kind == "patch"
