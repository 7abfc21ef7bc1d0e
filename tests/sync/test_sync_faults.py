"""Every store call of a script fails once, in every way: nothing is lost, nothing is mixed, all goes on after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from faults import Fault, FaultyBackend, Outage, at
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, bits, blank
from torch import Tensor

from pulse_kernels import ChainError, PulseError, StoreError
from pulse_kernels.sync import Publisher, Store, Subscriber
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.retries import Retries

State = dict[str, Tensor]
NO_RETRY = Retries(attempts=1)

FAULTS: dict[str, Callable[[], Fault]] = {
    "outage": lambda: Fault(before=Outage("down")),
    "lost answer": lambda: Fault(after=Outage("reset")),
    "interrupt before": lambda: Fault(before=KeyboardInterrupt()),
    "interrupt after": lambda: Fault(after=KeyboardInterrupt()),
}
READ_FAULTS: dict[str, Callable[[], Fault]] = {
    "cut": lambda: Fault(change=lambda data: data[:-1]),
    "empty": lambda: Fault(change=lambda data: b""),
    "first bit": lambda: Fault(change=lambda data: bytes([data[0] ^ 1]) + data[1:] if data else data),
    "last bit": lambda: Fault(change=lambda data: data[:-1] + bytes([data[-1] ^ 128]) if data else data),
    "longer": lambda: Fault(change=lambda data: data + b"x"),
}


@dataclass
class World:
    """A trainer and a store; what every committed version was."""

    masters: bool
    trainer: Trainer = field(init=False)
    memory: MemoryStore = field(default_factory=MemoryStore)
    truth: dict[int, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trainer = Trainer(masters=self.masters, seed=3)

    def store(self, plan: Callable[[int, str, str], Fault | None] | None = None) -> tuple[Store, FaultyBackend]:
        backend = FaultyBackend(ObstoreBackend(self.memory), plan or (lambda number, name, key: None))
        return Store(backend, "memory://", retries=NO_RETRY), backend

    def publisher(self, store: Store) -> Publisher:
        return Publisher(store, self.trainer.weights, masters=self.trainer.masters, anchor_every=3)

    def check_store(self) -> int:
        """Every version that exists rebuilds to what the trainer had; the newest one."""
        subscriber = Subscriber(self.store()[0])
        versions = subscriber.chain.versions()
        for version in versions:
            assert version in self.truth, version
        newest = versions[-1]
        assert_same_bits(subscriber.params, self.truth[newest])
        return newest


def script(world: World, publisher: Publisher, steps: int) -> Iterator[None]:
    """Publish again and again; ``truth`` learns of a version before it is tried: the trainer knows its own weights."""
    for _ in range(steps):
        expected = world.trainer.rounded()
        number = 0 if publisher.version is None else publisher.version + 1
        # What the publisher tried before may turn out to exist: then this becomes the version after it.
        world.truth.setdefault(number, expected)
        report = publisher.publish()
        world.truth[report.version] = expected
        assert_same_bits(world.trainer.weights, expected)
        world.trainer.step()
        yield


def calls_of(world: World) -> int:
    store, backend = world.store()
    publisher = world.publisher(store)
    for _ in script(world, publisher, 6):
        pass
    return len(backend.calls)


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "snapshot"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_the_publisher(fault: str, masters: bool) -> None:
    total = calls_of(World(masters))
    assert total > 20
    failed = 0
    for number in range(total):
        world = World(masters)
        store, _ = world.store(at(number, FAULTS[fault]()))
        try:
            publisher = world.publisher(store)
        except (StoreError, KeyboardInterrupt):
            failed += 1
            publisher = world.publisher(store)
        done = 0
        while done < 6:
            try:
                for _ in script(world, publisher, 6 - done):
                    done += 1
            except (StoreError, KeyboardInterrupt):
                failed += 1
                world.trainer.step()  # training goes on
        world.check_store()
        assert publisher.version is not None
        assert publisher.version >= 5
    assert failed >= total - 12  # some calls may fail and nobody minds: tidying up


@pytest.mark.parametrize("fault", READ_FAULTS)
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_lost_commit_that_is_read_back_damaged(fault: str, attempts: int) -> None:
    """It is no other publisher's. attempts: whether the same call learns that it is there already, or the next one."""
    world = World(masters=True)
    faults = {"create": Fault(after=Outage("reset")), "get": READ_FAULTS[fault]()}

    def plan(number: int, name: str, key: str) -> Fault | None:
        due = key == "manifests/00000001.json" and (name == "create" or "create" not in faults)
        return faults.pop(name, None) if due else None

    backend = FaultyBackend(ObstoreBackend(world.memory), plan)
    store = Store(backend, "memory://", retries=Retries(attempts=attempts, first_wait_s=0.0))
    publisher = world.publisher(store)
    publisher.publish()
    world.trainer.step()
    if attempts == 1:
        with pytest.raises(StoreError, match="reset"):
            publisher.publish()
        world.trainer.step()
    assert publisher.publish().version == {1: 2, 2: 1}[attempts]
    assert not faults
    newest = Subscriber(world.memory, blank(world.trainer.weights))
    newest.poll()
    assert newest.version == publisher.version
    assert_same_bits(newest.params, world.trainer.weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [*FAULTS, *READ_FAULTS])
@pytest.mark.parametrize("start", ["blank", "version 1", "version 4"])
def test_every_call_of_a_subscriber(fault: str, start: str) -> None:
    world = World(masters=True)
    publisher = world.publisher(world.store()[0])
    states: dict[int, State] = {}
    for version, _ in enumerate(script(world, publisher, 6)):
        states[version] = world.truth[version]
    number = 0
    while True:
        store, backend = world.store(at(number, (FAULTS | READ_FAULTS)[fault]()))
        weights = blank(world.trainer.weights) if start == "blank" else copied(states[int(start[-1])])
        before = copied(weights)
        subscriber = Subscriber(store, weights)
        try:
            subscriber.poll()
        except (StoreError, ChainError, KeyboardInterrupt):
            assert_same_bits(weights, before)
            subscriber.poll()
        assert subscriber.version == 5
        assert_same_bits(weights, states[5])
        if number >= len(backend.calls):
            break
        number += 1
    assert number > 4


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_an_outage_of_many_steps_is_one_patch_afterwards() -> None:
    world = World(masters=True)
    down = False
    store, _ = world.store(lambda number, name, key: Fault(before=Outage("down")) if down else None)
    publisher = world.publisher(store)
    publisher.publish()
    weights = blank(world.trainer.weights)
    subscriber = Subscriber(world.store()[0], weights)
    subscriber.poll()
    for _ in range(5):
        world.trainer.step()
        down = True
        expected = world.trainer.rounded()
        with pytest.raises(StoreError):
            publisher.publish()
        assert_same_bits(world.trainer.weights, expected)  # training goes on with them
    down = False
    report = publisher.publish()
    assert (report.version, report.kind, report.folded) == (1, "patch", 6)
    subscriber.poll()
    assert_same_bits(weights, world.trainer.weights)


def test_an_outage_at_the_upload_keeps_and_folds_what_was_gated() -> None:
    world = World(masters=True)
    down = False
    store, _ = world.store(lambda number, name, key: Fault(before=Outage("down")) if down and name == "put" else None)
    publisher = world.publisher(store)
    publisher.publish()
    for _ in range(3):
        world.trainer.step()
        down = True
        with pytest.raises(StoreError, match="nothing was lost"):
            publisher.publish()
        assert publisher.version == 0
    down = False
    world.trainer.step()
    report = publisher.publish()
    assert (report.version, report.kind, report.folded) == (1, "patch", 4)
    weights = blank(world.trainer.weights)
    Subscriber(world.store()[0], weights).poll()
    assert_same_bits(weights, world.trainer.weights)


def test_a_commit_with_a_lost_answer_is_not_published_twice() -> None:
    world = World(masters=True)
    lost = Fault(after=Outage("reset"))
    store, _ = world.store(lambda number, name, key: lost if name == "create" and key.endswith("1.json") else None)
    publisher = world.publisher(store)
    publisher.publish()
    world.trainer.step()
    with pytest.raises(StoreError):
        publisher.publish()
    at_one = world.trainer.rounded()
    world.trainer.step()
    report = publisher.publish()
    assert (report.version, report.base_version, report.folded) == (2, 1, 1)
    subscriber = Subscriber(world.store()[0], copied(at_one))
    subscriber.stage()
    assert subscriber.version == 1
    subscriber.apply()
    assert_same_bits(subscriber.params, world.trainer.weights)  # type: ignore[arg-type]


# ---- operators that fail inside a step -------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def test_every_operator_call_of_an_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call into a back end fails, before or after its effect: old bits, old version; the next poll works."""
    from pulse_kernels import backends

    world = World(masters=True)
    publisher = world.publisher(world.store()[0])
    states: dict[int, State] = {}
    for version, _ in enumerate(script(world, publisher, 6)):
        states[version] = world.truth[version]
    backend = backends.for_device("cpu")
    for after in (False, True):
        for error in (Broken, KeyboardInterrupt):
            for start in (2, 4):
                number = 0
                while True:
                    weights = copied(states[start])
                    subscriber = Subscriber(world.store()[0], weights, verify="full")
                    subscriber.stage()
                    assert subscriber.version == start
                    with monkeypatch.context() as patched:
                        calls = failing(patched, backend, number, error, after=after)
                        try:
                            subscriber.apply()
                            failed = False
                        except (Broken, KeyboardInterrupt):
                            failed = True
                    if failed:
                        same_as_old = all((bits(weights[k]) == bits(states[start][k])).all() for k in weights)
                        same_as_new = all((bits(weights[k]) == bits(states[5][k])).all() for k in weights)
                        assert same_as_old or (same_as_new and error is KeyboardInterrupt)
                    subscriber.poll()
                    assert subscriber.version == 5
                    assert_same_bits(weights, states[5])
                    if calls[0] <= number:
                        break
                    number += 1
                assert number >= 3


def failing(
    patched: pytest.MonkeyPatch, backend: object, number: int, error: type[BaseException], *, after: bool
) -> list[int]:
    """Make the ``number``-th call into ``backend`` fail; the count of calls so far, in a list."""
    calls = [0]

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            mine = calls[0]
            calls[0] += 1
            if mine == number and not after:
                raise error("planned")
            result = real(*arguments, **options)
            if mine == number:
                raise error("planned")
            return result

        return wrapped

    for name in dir(backend):
        if not name.startswith("_") and callable(getattr(backend, name)) and name not in ("names",):
            patched.setattr(backend, name, wrap(getattr(backend, name)), raising=False)
    return calls


def test_nothing_is_staged_by_a_failed_stage() -> None:
    world = World(masters=True)
    publisher = world.publisher(world.store()[0])
    for _ in script(world, publisher, 2):
        pass
    subscriber = Subscriber(world.store(at(3, Fault(before=Outage("down"))))[0], blank(world.trainer.weights))
    with pytest.raises(StoreError):
        subscriber.stage()
    with pytest.raises(PulseError, match="nothing is staged"):
        subscriber.apply()
