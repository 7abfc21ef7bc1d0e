"""Stores: what they keep, refuse, try again and never show."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultyBackend, Outage, at, from_on
from obstore.store import LocalStore, MemoryStore, S3Store

from pulse_kernels import ChainError, StoreError
from pulse_kernels.sync.backend import PART_BYTES, ObstoreBackend
from pulse_kernels.sync.retries import Retries
from pulse_kernels.sync.store import AlreadyExists, Entry, NotFound, Store, open_store

Waits = list[float]


@pytest.fixture(params=["memory", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "s3":
        url, options = request.getfixturevalue("s3_url")
        opened = open_store(url, **options)
    else:
        opened = open_store(MemoryStore() if request.param == "memory" else tmp_path / "store")
    with opened:
        yield opened


def faulty(plan: Any, waits: Waits | None = None, **options: Any) -> tuple[Store, FaultyBackend]:
    backend = FaultyBackend(ObstoreBackend(MemoryStore()), plan)
    sleep = (lambda seconds: None) if waits is None else waits.append
    return Store(backend, "memory://", retries=Retries(sleep=sleep, **options)), backend


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_objects_come_back(store: Store) -> None:
    store.put("a/b", b"one")
    store.put("a/b", memoryview(b"two!"))
    assert bytes(store.get("a/b", 4)) == b"two!"
    assert store.read("a/b", 4) == b"two!"
    assert store.size("a/b") == 4
    store.put("a/empty", b"")
    assert bytes(store.get("a/empty", 0)) == b""
    assert store.exists("a/b")
    assert not store.exists("a/c")
    assert store.list("a") == [Entry("a/b", 4), Entry("a/empty", 0)]
    assert store.list("b") == []
    assert store.list("a", after="a/b") == [Entry("a/empty", 0)]
    assert store.list("a", after="a/a") == [Entry("a/b", 4), Entry("a/empty", 0)]
    assert store.list("a", after="a/empty") == []
    store.delete(["a/b", "a/never", "a/empty"])
    assert store.list() == []


def test_what_is_read_can_be_written(store: Store) -> None:
    store.put("k", b"abc")
    view = store.get("k", 3)
    view[0] = ord("x")
    assert bytes(view) == b"xbc"
    assert bytes(store.get("k", 3)) == b"abc"


@pytest.mark.parametrize("extra", [-1, 0, 1, 7])
def test_large_objects_go_in_parts(store: Store, extra: int) -> None:
    data = bytes(range(251)) * ((2 * PART_BYTES + extra) // 251 + 1)
    data = data[: 2 * PART_BYTES + extra]
    store.put_stream("big", lambda: (data[k : k + (5 << 20)] for k in range(0, len(data), 5 << 20)))
    assert bytes(store.get("big", len(data))) == data
    assert store.read("big", len(data)) == data
    with pytest.raises(ChainError, match="more than"):
        store.read("big", len(data) - 1)


def test_create_never_replaces(store: Store) -> None:
    store.create("m/1.json", b"first")
    with pytest.raises(AlreadyExists):
        store.create("m/1.json", b"second")
    with pytest.raises(AlreadyExists):
        store.create("m/1.json", b"firs")
    with pytest.raises(AlreadyExists):
        store.create("m/1.json", b"first, and more")
    assert store.read("m/1.json", 99) == b"first"
    store.create("m/1.json", b"first")  # ours, as after a lost answer


def test_of_many_that_create_one_wins(store: Store) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def create(k: int) -> None:
        barrier.wait()
        try:
            store.create("m/2.json", f"writer {k}".encode())
            won.append(k)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=create, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("m/2.json", 99) == f"writer {won[0]}".encode()


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4, 6, 1 << 20, PART_BYTES, 3 * PART_BYTES])
def test_another_size_is_refused(store: Store, size: int) -> None:
    store.put("k", b"12345")
    with pytest.raises(ChainError, match=f"expected {size}"):
        store.get("k", size)


def test_no_memory_is_taken_for_a_size_that_is_not_there() -> None:
    store, _ = faulty(at(-1, Fault()))
    store.put("k", b"12345")
    with pytest.raises((ChainError, StoreError)):
        store.get("k", 1 << 60)


def test_missing_objects(store: Store) -> None:
    for call in (store.size, lambda key: store.read(key, 9), lambda key: store.get(key, 9)):
        with pytest.raises(NotFound, match="no/such"):
            call("no/such")


def test_reads_are_bounded_in_parallel() -> None:
    running, most = 0, 0
    lock = threading.Lock()
    release = threading.Event()

    def enter() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if most >= 3:
            release.set()
        release.wait(5)
        with lock:
            running -= 1

    backend = FaultyBackend(
        ObstoreBackend(MemoryStore()), lambda number, name, key: Fault(run=enter) if name == "get" else None
    )
    store = Store(backend, "memory://", parallel=3)
    data = b"x" * (9 * PART_BYTES)
    store.put("big", data)
    assert bytes(store.get("big", len(data))) == data
    assert most == 3


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", "..", "a/../b", "../a", ".hidden", "a/.b", "a\\b", "a b", "a%2e", "ä", "a\n", "a\0",
     "-a", "a/-b", "C:/a", "a?b", "a#1", "x" * 513],
)  # fmt: skip
def test_keys_that_are_refused(tmp_path: Path, key: str) -> None:
    store = open_store(tmp_path / "inner")
    for call in (
        lambda: store.put(key, b""),
        lambda: store.create(key, b""),
        lambda: store.put_stream(key, lambda: [b""]),
        lambda: store.get(key, 1),
        lambda: store.read(key, 1),
        lambda: store.size(key),
        lambda: store.delete([key]),
    ):
        with pytest.raises(StoreError, match="refused"):
            call()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inner"]


def test_a_url_with_a_prefix_keeps_to_it(s3_url: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url
    outer, inner = open_store(url, **options), open_store(f"{url}/inner", **options)
    inner.put("k", b"1")
    outer.put("k", b"22")
    assert inner.list() == [Entry("k", 1)]
    assert outer.list() == [Entry("inner/k", 1), Entry("k", 2)]


# ---- trying again ----------------------------------------------------------------------------------------------------


def test_what_passes_is_tried_again() -> None:
    waits: Waits = []
    store, backend = faulty(lambda number, name, key: Fault(before=Outage("down")) if number < 3 else None, waits)
    store.put("k", b"v")
    assert len(backend.calls) == 4
    assert len(waits) == 3
    assert all(0 <= wait <= 0.2 * 2**k for k, wait in enumerate(waits))


def test_what_does_not_pass_ends_in_one_clear_error() -> None:
    waits: Waits = []
    store, backend = faulty(from_on(0, lambda: Outage("connection refused")), waits)
    with pytest.raises(StoreError, match=r"cannot write k after 5 attempts .*connection refused") as caught:
        store.put("k", b"v")
    assert len(backend.calls) == 5
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_tried_again(number: int) -> None:
    store, backend = faulty(from_on(0, lambda: OSError(number, "No space left on device")))
    with pytest.raises(StoreError, match="free some space"):
        store.put("k", b"v")
    assert len(backend.calls) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(error: type[BaseException]) -> None:
    store, backend = faulty(at(0, Fault(before=error())))
    with pytest.raises(error):
        store.put("k", b"v")
    assert len(backend.calls) == 1


def test_the_deadline_ends_it_before_the_attempts_do() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 40.0

    backend = FaultyBackend(ObstoreBackend(MemoryStore()), from_on(0, lambda: Outage("down")))
    retries = Retries(attempts=100, deadline_s=100, sleep=sleep, clock=lambda: now[0])
    with pytest.raises(StoreError, match="after 4 attempts in 120"):
        Store(backend, "memory://", retries=retries).put("k", b"v")


def test_a_commit_whose_answer_was_lost_counts() -> None:
    store, backend = faulty(at(0, Fault(after=Outage("connection reset"))))
    store.create("k", b"ours")
    assert store.read("k", 9) == b"ours"
    assert backend.calls[:3] == [("create", "k"), ("create", "k"), ("get", "k")]


def test_a_commit_that_lost_while_it_was_tried_again_is_refused() -> None:
    inner = ObstoreBackend(MemoryStore())

    def plan(number: int, name: str, key: str) -> Fault | None:
        if number > 0:
            return None
        return Fault(before=Outage("down"), run=lambda: inner.put("k", b"theirs", create=True))

    store = Store(FaultyBackend(inner, plan), "memory://", retries=Retries(sleep=lambda seconds: None))
    with pytest.raises(AlreadyExists):
        store.create("k", b"ours")


def test_streams_begin_anew_and_their_own_errors_come_out() -> None:
    store, _ = faulty(at(0, Fault(after=Outage("reset"))))
    begun: list[int] = []

    def chunks() -> Iterator[bytes]:
        begun.append(1)
        yield b"abc"
        yield b"def"

    store.put_stream("k", chunks)
    assert len(begun) == 2
    assert store.read("k", 9) == b"abcdef"

    for error in (ZeroDivisionError("mine"), KeyboardInterrupt(), StoreError("mine")):
        begun.clear()

        def broken(error: BaseException = error) -> Iterator[bytes]:
            begun.append(1)
            yield b"abc"
            raise error

        with pytest.raises(type(error)) as caught:
            store.put_stream("broken", broken)
        assert caught.value is error
        assert len(begun) == 1
    assert not store.exists("broken")


def test_a_failed_stream_leaves_nothing(store: Store, tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * (PART_BYTES + 5)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put_stream("p/k", chunks)
    assert store.list() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_ways_to_name_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "a b"
    open_store(place).put("k", b"1")
    for name in (str(place), place, place.as_uri(), LocalStore(str(place)), open_store(place)):
        assert open_store(name).read("k", 9) == b"1"
    with pytest.raises(StoreError, match="no such folder"):
        open_store(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="is a file"):
        open_store(tmp_path / "file")


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", object()])
def test_what_is_no_store(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a URL"):
        open_store(wrong)


def test_an_unknown_address_is_refused() -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store("gopher://somewhere/x")


def test_memory_is_new_each_time() -> None:
    first, second = open_store("memory://"), open_store("memory://")
    first.put("k", b"1")
    assert second.list() == []


# ---- secrets ---------------------------------------------------------------------------------------------------------


def test_no_credentials_are_ever_shown(s3: tuple[str, dict[str, Any]]) -> None:
    _, options = s3
    config = {**options["config"], "secret_access_key": "hunter2-hunter2", "session_token": "token-of-mine"}
    quick = Retries(attempts=1)
    refused = open_store("s3://no-such-bucket/x", config=config, retries=quick)
    unreachable = open_store(
        "s3://bucket/x",
        config={**config, "endpoint": "http://user:hunter2-hunter2@127.0.0.1:9/"},
        retries=quick,
        retry_config={"max_retries": 0},
    )
    shown = [repr(refused), refused.describe(), repr(refused.backend)]
    for store in (refused, unreachable):
        for name, arguments in (("put", ("k", b"1")), ("list", ()), ("read", ("k", 3))):
            with pytest.raises(StoreError) as caught:
                getattr(store, name)(*arguments)
            error: BaseException | None = caught.value
            while error is not None:
                shown.append(f"{error!r} {error}")
                error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for text in shown:
        for secret in ("hunter2", "token-of-mine", "AKIAFALSE", "Debug source"):
            assert secret not in text
    with pytest.raises(StoreError) as caught:
        open_store("https+x://me:hunter2-hunter2@host/p?token=hunter2-hunter2")
    assert "hunter2" not in str(caught.value)


def test_an_s3_store_of_ones_own(s3: tuple[str, dict[str, Any]]) -> None:
    _, options = s3
    mine = S3Store("pulse-tests", prefix="own", client_options={"allow_http": True}, **options)
    store = open_store(mine)
    store.put("k", b"1")
    assert store.list() == [Entry("k", 1)]
    assert "AKIA" not in store.describe()
