"""The heart of the fault suite over the S3 protocol: bits, lost answers, conflicts, damage in the bucket, retention."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from faults import Fault, FaultyBackend, Outage, at
from s3_server import BUCKET
from sync_models import assert_same_bits, blank
from test_sync_faults import NO_RETRY, World, script

from pulse_kernels import ChainError, ConflictError, StoreError
from pulse_kernels.sync import Publisher, Store, Subscriber, open_store
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.replay import state_at
from pulse_kernels.sync.retention import prune

STEPS = 6
FEWER = 5  # with one version after the second anchor
FAULTS: dict[str, Callable[[], Fault]] = {
    "outage": lambda: Fault(before=Outage("down")),
    "lost answer": lambda: Fault(after=Outage("reset")),
}


@dataclass
class S3World(World):
    """A trainer and a prefix of the bucket."""

    url: str = ""
    options: Any = None

    def plain(self) -> Store:
        return open_store(self.url, **self.options)

    def store(self, plan: Callable[[int, str, str], Fault | None] | None = None) -> tuple[Store, FaultyBackend]:
        backend = FaultyBackend(self.plain().backend, plan or (lambda number, name, key: None))
        return Store(backend, self.url, retries=NO_RETRY), backend

    def published(self) -> Publisher:
        """The publisher of ``STEPS`` versions with anchors at 0 and 3; each is followed, bit for bit."""
        publisher = self.publisher(self.plain())
        weights = blank(self.trainer.weights)
        subscriber = Subscriber(self.plain(), weights)
        for version, _ in enumerate(script(self, publisher, STEPS)):
            applied = subscriber.poll()
            assert applied is not None
            assert applied.version == version
            assert_same_bits(weights, self.truth[version])
        return publisher


Worlds = Callable[[bool], S3World]


@pytest.fixture
def worlds(s3_url: tuple[str, dict[str, Any]]) -> Worlds:
    """Makes worlds, each with a prefix of its own."""
    url, options = s3_url
    made = 0

    def make(masters: bool) -> S3World:
        nonlocal made
        made += 1
        return S3World(masters, url=f"{url}/{made}", options=options)

    return make


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "snapshot"])
def test_a_chain_bit_for_bit(masters: bool, worlds: Worlds) -> None:
    world = worlds(masters)
    publisher = world.published()
    chain = Chain(world.plain())
    assert chain.versions() == list(range(STEPS))
    assert [bool(chain.manifest(version).anchor) for version in range(STEPS)] == [True, False, False] * 2
    assert [bool(chain.manifest(version).patch) for version in range(STEPS)] == [False] + [True] * 5
    for version in range(STEPS):
        assert_same_bits(state_at(chain, version), world.truth[version])
    late = Subscriber(world.plain(), blank(world.trainer.weights), verify="full")
    staged = late.stage()
    assert staged is not None
    assert (staged.from_anchor, staged.patches) == (True, 2)
    late.apply()
    assert_same_bits(late.params, world.truth[5])  # type: ignore[arg-type]
    assert publisher.version == 5


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_the_publisher(fault: str, worlds: Worlds) -> None:
    """Every second call in turn; the fault kinds begin at different ones, so that each call fails in one way."""
    world = worlds(True)
    store, backend = world.store()
    for _ in script(world, world.publisher(store), FEWER):
        pass
    total = len(backend.calls)
    assert total > 15
    failed = 0
    tried = range(list(FAULTS).index(fault), total, 2)
    for number in tried:
        world = worlds(True)
        store, _ = world.store(at(number, FAULTS[fault]()))
        try:
            publisher = world.publisher(store)
        except StoreError:
            failed += 1
            publisher = world.publisher(store)
        done = 0
        while done < FEWER:
            try:
                for _ in script(world, publisher, FEWER - done):
                    done += 1
            except StoreError:
                failed += 1
                world.trainer.step()  # training goes on
        assert world.check_store() == publisher.version
        assert publisher.version >= FEWER - 1
    assert failed >= len(tried) - 6  # an anchor's index may fail and nobody minds


@pytest.mark.parametrize("kind", ["anchor", "patch"])
def test_of_two_publishers_one_wins_each_version(kind: str, worlds: Worlds) -> None:
    world, other = worlds(True), worlds(True)
    other.url = world.url
    if kind == "patch":
        next(script(world, world.publisher(world.plain()), 1))
        other.trainer.step()
    second: Publisher | None = None

    def overtake() -> None:
        nonlocal second
        if second is None:
            second = other.publisher(other.plain())
            assert second.publish().kind == kind

    store, backend = world.store(lambda number, name, key: Fault(run=overtake) if name == "create" else None)
    first = world.publisher(store)
    with pytest.raises(ConflictError, match="another publisher"):
        first.publish()
    assert second is not None
    won = other.trainer.rounded()
    assert_same_bits(Subscriber(world.plain()).params, won)
    with pytest.raises(ConflictError):
        first.publish()
    assert not fsck(world.plain()).problems  # the loser's parts are gone
    third = world.publisher(world.plain())  # goes on with the loser's weights
    world.trainer.step()
    assert third.publish().version == second.version + 1  # type: ignore[operator]
    with pytest.raises(ConflictError):
        second.publish()
    assert_same_bits(Subscriber(world.plain()).params, world.trainer.weights)
    assert [name for name, _ in backend.calls].count("create") == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone"])
def test_a_damaged_part_in_the_bucket(damage: str, worlds: Worlds) -> None:
    world = worlds(True)
    publisher = world.published()
    store = world.plain()
    part = Chain(store).manifest(5).patch[0]
    data = bytes(store.get(part.key, part.bytes))
    if damage == "gone":
        store.delete([part.key])
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        store.put(part.key, {"flipped": flipped, "cut": data[:-1], "longer": data + b"x"}[damage])
    weights = {name: tensor.clone() for name, tensor in world.truth[4].items()}
    subscriber = Subscriber(world.plain(), weights)
    subscriber.stage(4)
    with pytest.raises((ChainError, StoreError), match=part.key):
        subscriber.poll()
    assert_same_bits(weights, world.truth[4])
    report = fsck(store)
    kinds = {"flipped": "part-hash", "cut": "part-size", "longer": "part-size", "gone": "part-missing"}
    assert [(each.kind, each.version, each.key) for each in report.problems] == [(kinds[damage], 5, part.key)]
    world.trainer.step()
    assert publisher.publish().kind == "anchor"  # version 6 mends the chain
    subscriber.poll()
    assert subscriber.version == 6
    assert_same_bits(weights, world.trainer.weights)


def test_prune_and_fsck(worlds: Worlds) -> None:
    world = worlds(True)
    world.published()
    store = world.plain()
    store.put("patches/00000002/00000-0badc0de.safetensors", b"left by somebody")
    assert [(each.kind, each.version) for each in fsck(store).problems] == [("orphan", 2)]
    meant = prune(Chain(store), keep_anchors=1, dry_run=True)
    assert (meant.kept, meant.removed) == ((3, 4, 5), (0, 1, 2))
    before = {entry.key for entry in store.list()}
    done = prune(Chain(store), keep_anchors=1)
    left = {entry.key for entry in store.list()}
    assert (done.kept, done.removed, done.objects, done.nbytes) == (
        meant.kept,
        meant.removed,
        meant.objects,
        meant.nbytes,
    )
    assert len(before) - len(left) == done.objects
    report = fsck(store)
    assert (report.versions, report.anchors, report.patches, report.problems) == (3, 1, 2, [])
    for version in (3, 4, 5):
        assert_same_bits(state_at(Chain(store), version), world.truth[version])
    with pytest.raises(ChainError, match="no way to version 2"):
        Chain(store).routes(2)


class _Killed(Exception):
    pass


def test_an_interrupted_upload_shows_in_no_listing(s3_url: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url
    store = open_store(url, **options)
    key = "anchors/00000000/model.safetensors"

    def chunks() -> Iterator[bytes]:
        yield bytes(20 << 20)
        raise _Killed

    with pytest.raises(_Killed):
        store.put_stream(key, chunks)
    assert store.list() == []
    assert not store.exists(key)
    bucket, prefix = f"{options['config']['endpoint']}/{BUCKET}", url.rpartition("/")[2]
    assert f"{prefix}/{key}" not in request("GET", f"{bucket}?uploads")  # given up: nothing is left of it
    # Of an uploader that was killed something stays, for a life-cycle rule to remove; no listing shows it.
    request("POST", f"{bucket}/{prefix}/{key}?uploads")
    assert f"{prefix}/{key}" in request("GET", f"{bucket}?uploads")
    assert store.list() == []
    store.put_stream(key, lambda: [b"whole"])
    assert bytes(store.get(key, 5)) == b"whole"


def request(method: str, address: str) -> str:
    asked = urllib.request.Request(address, method=method)
    asked.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(answer.read().decode())
