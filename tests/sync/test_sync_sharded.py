"""Trainers sharded over ranks: real processes, gloo on 127.0.0.1, a folder as store, followers in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_pool import Died, Ranks
from sync_models import assert_same_bits, blank
from torch import Tensor

from pulse_kernels import ConflictError, PulseError, StateDigest, StoreError
from pulse_kernels.checkpoint import Checkpoint
from pulse_kernels.sync import Publisher, Shard, ShardedPublisher, Subscriber
from pulse_kernels.sync.aux_files import fetch_aux
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.signing import generate_key
from pulse_kernels.sync.store import Store, open_store

ROWS, COLUMNS, BLOCKS, COPIES, STAGES = "rows.weight", "columns.weight", "blocks.weight", "norm.weight", "stage"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


class Model:
    """The whole model, stepped alike on every rank, and this rank's part of it.

    Rows are cut unevenly, so that of three ranks the last has none.
    """

    def __init__(self, rank: int, world: int, *, masters: bool | str) -> None:
        self.generator = torch.Generator().manual_seed(11)
        shapes = {ROWS: (5, 24), COLUMNS: (32, 12, 4), BLOCKS: (6, 4, 5), COPIES: (40,)}
        shapes |= {f"{STAGES}.{k}": (24 + k, 9) for k in range(world)}
        self.state = {name: torch.randn(shape, generator=self.generator) for name, shape in shapes.items()}
        self.places: dict[str, tuple[slice, ...]] = {}
        self.shards: dict[str, Shard] = {}
        step = 3
        first, last = min(5, step * rank), min(5, step * rank + step)
        self._place(ROWS, slice(first, last), slice(0, 24))
        wide = 12 // world
        self._place(COLUMNS, slice(0, 32), slice(wide * rank, wide * rank + wide), slice(0, 4))
        if world == 2:
            self._place(BLOCKS, slice(0, 6), slice(0, 4), slice((0, 2)[rank], (2, 5)[rank]))
        else:  # two blocks of the upper half, and the lower half
            self._place(
                BLOCKS, *((slice(0, 3), slice(2 * rank, 2 * rank + 2)) if rank < 2 else (slice(3, 6), slice(0, 4)))
            )
        self.places[COPIES] = (slice(None),)
        self.places[f"{STAGES}.{rank}"] = (slice(None),)
        self.local = {name: self.state[name][place].clone() for name, place in self.places.items()}
        self.weights = {name: tensor.bfloat16() for name, tensor in self.local.items()}
        some = {name: self.local[name] for name in self.local if name not in (COPIES, f"{STAGES}.1")}
        self.masters = (some if masters == "some" else self.local) if masters else None

    def _place(self, name: str, *place: slice) -> None:
        shape = tuple(self.state[name].shape)
        self.places[name] = place
        self.shards[name] = Shard(shape, (*(each.start for each in place), *(0,) * (len(shape) - len(place))))

    def step(self) -> None:
        for tensor in self.state.values():
            tensor.add_(torch.randn(tensor.shape, generator=self.generator) * tensor.abs() * 1e-4)
            tensor.view(-1)[int(torch.randint(9, (), generator=self.generator))].neg_()
        for name, place in self.places.items():
            self.local[name].copy_(self.state[name][place])
            if self.masters is None or name not in self.masters:
                self.weights[name].copy_(self.local[name])

    def publisher(self, store: Path | Store, **options: Any) -> ShardedPublisher:
        return ShardedPublisher(store, self.weights, masters=self.masters, shards=self.shards, **options)

    def whole(self) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.state.items()}


def told(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def train(rank: int, world: int, folder: Path, masters: bool | str) -> list[dict[str, Any]]:
    model = Model(rank, world, masters=masters)
    if rank == 0:
        (folder / "aux").mkdir()
        (folder / "aux" / "config.json").write_text("{}")
    publisher = model.publisher(folder / "store", anchor_every=6, aux_files=folder / "aux" if rank == 0 else None)
    reports = []
    for version in range(10):
        if version:
            model.step()
        report = publisher.publish()
        assert publisher.version == report.version == version
        # the whole state is in one digest, whoever measures it
        assert report.digest == StateDigest.of(model.whole()).hexdigest()
        reports.append(report.to_dict())
    return reports


@pytest.mark.parametrize(("world", "masters"), [(2, True), (3, False), (3, True), (2, "some")])
def test_followers_have_the_whole_models_bits(ranks: Ranks, tmp_path: Path, world: int, masters: bool | str) -> None:
    reports = ranks.run(train, world, tmp_path, masters, world=world)
    model = Model(0, world, masters=masters)
    weights = blank(model.whole())
    store = tmp_path / "store"
    subscriber = Subscriber(store, weights)
    for version in range(10):
        if version:
            model.step()
        staged = subscriber.stage(version)
        assert staged is not None
        assert staged.from_anchor == (version == 0)
        subscriber.apply()
        assert_same_bits(weights, model.whole())
        manifest = subscriber.chain.manifest(version)
        assert manifest.kind == ("anchor" if version in (0, 6) else "patch")
        assert len(manifest.patch) == (world if version else 0)
        told = [{key: value for key, value in each[version].items() if key != "seconds"} for each in reports]
        assert told == told[:1] * world  # all ranks are told the same
        assert told[0]["num_changed"] == (staged.num_changed if version else 0)
        assert told[0]["payload_bytes"] == staged.fetched_bytes
        subscriber.check()
    # anchors are checkpoints that anyone can load, and late joiners begin from one
    with Checkpoint.open(store / "anchors" / "00000006") as checkpoint:
        assert checkpoint.tensors.keys() == weights.keys()
        assert len({info.file for info in checkpoint.tensors.values()}) >= world
    assert_same_bits(Subscriber(store).params, weights)
    assert fetch_aux(subscriber.chain.store, subscriber.chain.manifest(6)) == {"config.json": b"{}"}


class Flaky:
    """A store whose next uploads fail, before anything is written or once it was."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(folder)
        self.fail = ""
        for name in ("put", "put_stream", "create"):
            setattr(self.store, name, self._guarded(name, getattr(self.store, name)))

    def _guarded(self, name: str, inner: Callable[..., None]) -> Callable[..., None]:
        def call(key: str, data: Any) -> None:
            if self.fail == name:
                raise StoreError(f"{name} of {key} failed")
            inner(key, data)
            if self.fail == f"answer of {name}":
                raise StoreError(f"the answer of {name} was lost")

        return call


def failing(rank: int, folder: Path, masters: bool) -> dict[str, Any]:
    model = Model(rank, 3, masters=masters)
    flaky = Flaky(folder)
    publisher = model.publisher(flaky.store, anchor_every=100)
    publisher.publish()
    seen: dict[str, Any] = {}
    # a rank cannot upload its part, then rank 0 cannot commit: nobody has the version
    for who, fail in ((1, "put"), (0, "create")):
        model.step()
        flaky.fail = fail if rank == who else ""
        seen[fail] = told(publisher.publish)
        assert publisher.version == 0
    flaky.fail = ""
    model.step()
    seen["folded"] = publisher.publish().to_dict()
    # the answer to the commit is lost: the next call finds it out and goes on from there
    model.step()
    flaky.fail = "answer of create" if rank == 0 else ""
    seen["lost"] = told(publisher.publish)
    flaky.fail = ""
    model.step()
    seen["after"] = publisher.publish().to_dict()
    # of two attempts at one number the second is in the store
    model.step()
    flaky.fail = "create" if rank == 0 else ""
    told(publisher.publish)
    model.step()
    flaky.fail = "answer of create" if rank == 0 else ""
    told(publisher.publish)
    flaky.fail = ""
    model.step()
    seen["second"] = publisher.publish().to_dict()
    # an anchor that one rank cannot write
    publisher._since_anchor = 99
    model.step()
    flaky.fail = "put_stream" if rank == 2 else ""
    seen["anchor"] = told(publisher.publish)
    flaky.fail = ""
    model.step()
    seen["anchored"] = publisher.publish().to_dict()
    return seen


@pytest.mark.parametrize("masters", [True, False])
def test_a_rank_that_fails_keeps_all_from_committing_and_nothing_is_lost(
    ranks: Ranks, tmp_path: Path, masters: bool
) -> None:
    seen = ranks.run(failing, tmp_path, masters)
    for what, who in (("put", 1), ("create", 0), ("anchor", 2)):
        for rank, each in enumerate(seen):
            assert each[what][0] == ("StoreError" if rank == who else "GroupError"), each[what]
            assert "failed" in each[what][1]
            assert rank == who or f"rank {who}" in each[what][1]
    folded = 3 if masters else 1  # without masters the snapshot holds what was not sent
    assert [seen[0][key]["version"] for key in ("folded", "after", "second", "anchored")] == [1, 3, 5, 6]
    assert [seen[0][key]["kind"] for key in ("folded", "after", "second", "anchored")] == [*["patch"] * 3, "anchor"]
    assert seen[0]["folded"]["folded"] == folded
    assert seen[0]["lost"][0] == "StoreError"
    chain = Chain(open_store(tmp_path))
    assert chain.versions() == [0, 1, 2, 3, 4, 5, 6]
    model = Model(0, 3, masters=masters)
    weights = blank(model.whole())
    subscriber = Subscriber(tmp_path, weights)
    for version, steps in ((0, 0), (1, 3), (2, 1), (3, 1), (4, 2), (5, 1), (6, 2)):
        for _ in range(steps):
            model.step()
        subscriber.stage(version)
        subscriber.apply()
        assert_same_bits(weights, model.whole())
    # what was given up was removed
    parts = {part.key for version in chain.versions() for part in chain.manifest(version).patch}
    left = {entry.key for entry in open_store(tmp_path).list("patches")} - parts
    assert all(key.startswith(("patches/00000001/", "patches/00000004/")) for key in left), left


def restarting(rank: int, folder: Path, masters: bool) -> list[tuple[str, int | None]]:
    model = Model(rank, 2, masters=masters)
    model.publisher(folder, anchor_every=100).publish()
    seen = []
    for _ in range(2):
        model.step()
        report = model.publisher(folder, anchor_every=100).publish()
        seen.append((report.kind, report.base_version))
    # one rank comes back with other weights
    again = Model(rank, 2, masters=masters) if rank else model
    report = again.publisher(folder, anchor_every=100).publish()
    assert report.note
    return [*seen, (report.kind, report.base_version)]


@pytest.mark.parametrize("masters", [True, False])
def test_a_restart_of_all_ranks_goes_on_with_patches(ranks: Ranks, tmp_path: Path, masters: bool) -> None:
    seen = ranks.run(restarting, tmp_path, masters, world=2)
    # with masters the restarted weights are those of the version, which the masters have left
    assert seen == [[("patch", 0), ("patch", 1), ("anchor", None)]] * 2 if masters else True
    if not masters:
        assert seen == [[("anchor", None)] * 3] * 2


def refused(rank: int, folder: Path) -> dict[str, tuple[str, str]]:
    seen = {}
    model = Model(rank, 2, masters=True)
    name = f"{STAGES}.{rank}"
    # construction: one rank's arguments are bad, or boxes do not fit each other
    seen["arguments"] = told(lambda: model.publisher(folder, profile="odd" if rank else "fast"))
    shards = {**model.shards, COLUMNS: Shard((32, 13, 4), model.shards[COLUMNS].offset)}
    seen["boxes"] = told(lambda: ShardedPublisher(folder, model.weights, shards=shards))
    publisher = model.publisher(folder)
    publisher.publish()
    # a value that is not finite on one rank
    model.step()
    before = {name: tensor.clone() for name, tensor in model.weights.items()}
    sound = model.local[name][0, 0].clone()
    if rank == 1:
        model.local[name][0, 0] = float("inf")
    seen["non-finite"] = told(publisher.publish)
    if rank == 1:
        assert_same_bits(model.weights, before)
    model.local[name][0, 0] = sound
    report = publisher.publish()
    assert (report.version, report.kind) == (1, "patch")
    seen["number"] = told(lambda: publisher.publish(1))
    # somebody wrote weights on one rank: the whole state is sent
    model.step()
    model.weights[COPIES][3] = 5.0
    report = publisher.publish()
    assert (report.version, report.kind) == (2, "anchor")
    assert "changed by others" in report.note
    # another publisher takes the chain over
    if rank == 0:
        whole = model.whole()
        Publisher(folder, whole).publish()
    dist.barrier()
    model.step()
    seen["fenced"] = told(publisher.publish)
    seen["fenced again"] = told(publisher.publish)
    return seen


def test_what_one_rank_refuses_all_refuse(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(refused, tmp_path, world=2)
    assert second["arguments"][0] == "ValueError"
    assert first["arguments"][0] == "GroupError"
    assert "rank 1: ValueError: profile is 'odd'" in first["arguments"][1]
    assert first["boxes"] == second["boxes"]
    assert "'columns.weight'" in first["boxes"][1]
    assert "is in 0 of the ranks' boxes" in first["boxes"][1]
    assert second["non-finite"][0] == "NonFiniteError"
    assert "rank 1: NonFiniteError" in first["non-finite"][1]
    assert first["number"][0] == "ValueError"
    assert second["number"][0] == "GroupError"
    for each in (first, second):
        for key in ("fenced", "fenced again"):
            assert each[key][0] == ConflictError.__name__


def passing_over(rank: int, folder: Path) -> list[str]:
    model = Model(rank, 2, masters=True)
    publisher = model.publisher(folder, anchor_every=100)
    kinds = [publisher.publish().kind]
    model.step()
    kinds.append(publisher.publish().kind)
    create = publisher.store.create

    def after_a_rival(key: str, data: bytes) -> None:
        rival = Publisher(folder, {name: tensor + 1 for name, tensor in model.whole().items()}, keep_anchors=1)
        assert rival.publish(2).kind == "anchor"
        create(key, data)

    model.step()
    publisher.store.create = after_a_rival  # type: ignore[method-assign]
    kinds.append(publisher.publish(3).kind)
    publisher.store.create = create  # type: ignore[method-assign]
    for _ in range(2):
        model.step()
        kinds.append(publisher.publish().kind)
    return kinds


def test_after_a_lower_number_of_a_rival_comes_an_anchor(ranks: Ranks, tmp_path: Path) -> None:
    """It may have removed what the patch of the higher one begins at."""
    kinds = ranks.run(passing_over, tmp_path, world=2)
    assert kinds == [["anchor", "patch", "patch", "anchor", "patch"]] * 2
    chain = Chain(open_store(tmp_path))
    assert chain.versions() == [2, 3, 4, 5]
    assert (chain.manifest(3).base_version, chain.manifest(4).base_version) == (1, 3)
    model = Model(0, 2, masters=True)
    for _ in range(4):
        model.step()
    weights = blank(model.whole())
    Subscriber(tmp_path, weights).poll()
    assert_same_bits(weights, model.whole())


def killed(rank: int, folder: Path) -> tuple[str, str]:
    model = Model(rank, 3, masters=True)
    publisher = model.publisher(folder, anchor_every=100)
    publisher.publish()
    model.step()
    if rank == 2:
        publisher.store.put = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[method-assign]
    return told(publisher.publish)


def continued(rank: int, folder: Path) -> tuple[str, int]:
    model = Model(rank, 3, masters=True)
    publisher = model.publisher(folder, anchor_every=100)
    model.step()
    report = publisher.publish()
    return report.kind, report.version


def test_a_killed_rank_keeps_all_from_committing_and_new_ranks_continue(ranks: Ranks, tmp_path: Path) -> None:
    pool = Ranks(3)
    try:
        first, second, dead = pool.run(killed, tmp_path, seconds=15)
    finally:
        pool.close()
    assert isinstance(dead, Died)
    for kind, _ in (first, second):
        assert kind
        assert kind != "AssertionError"
    assert Chain(open_store(tmp_path)).versions() == [0]
    assert ranks.run(continued, tmp_path) == [("patch", 1)] * 3
    model = Model(0, 3, masters=True)
    model.step()
    found = Subscriber(tmp_path).params
    assert isinstance(found, dict)
    assert_same_bits(found, model.whole())


def with_dtensors(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Cut

    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(2)
    full = {name: torch.randn(7, 6, generator=generator) for name in ("rows", "columns", "copies")}
    places = {"rows": [Cut(0)], "columns": [Cut(1)], "copies": [Replicate()]}
    masters = {name: distribute_tensor(full[name], mesh, place) for name, place in places.items()}
    weights = {name: distribute_tensor(full[name].bfloat16(), mesh, place) for name, place in places.items()}
    publisher = ShardedPublisher(folder, weights, masters=masters)
    publisher.publish()
    for name, master in masters.items():
        local = master.to_local()
        local.view(-1)[0 if name == "copies" else rank] = 3.5 + rank * (name != "copies")
    report = publisher.publish()
    assert (report.version, report.kind) == (1, "anchor" if report.note else "patch")
    expected = {name: master.full_tensor().bfloat16() for name, master in masters.items()}
    assert report.digest == StateDigest.of(expected).hexdigest()
    if rank == 0:
        found = Subscriber(folder).params
        assert isinstance(found, dict)
        assert_same_bits(found, expected)


def test_dtensors_know_their_boxes(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(with_dtensors, tmp_path, world=2)


def joining(rank: int, store: str) -> tuple[str, str]:
    model = Model(rank, 2, masters=True)
    try:
        ShardedPublisher(store, model.weights, masters=model.masters, shards=model.shards)
    except PulseError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_signed_chain_is_not_continued_without_a_signer(ranks: Ranks, tmp_path: Path) -> None:
    private, _ = generate_key()
    Publisher(tmp_path / "run", {"w": torch.ones(3)}, signer=private).publish()
    said = ranks.run(joining, str(tmp_path / "run"), world=2)
    assert [kind for kind, _ in said] == ["TrustError", "GroupError"]
    assert all("version 0" in words and "Pass signer=..." in words for _, words in said)
