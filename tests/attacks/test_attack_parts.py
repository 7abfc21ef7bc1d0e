"""S5 to S7 of docs/security.md: parts are their manifest's; names and sizes are checked before anything is fetched."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import FaultyBackend
from hostile import UNPICKLED, Exploit, Run, attacked, goes_on, refuses
from manifest_samples import encode

from pulse_kernels import ChainError, StoreError
from pulse_kernels.sync import Chain, Store, Subscriber
from pulse_kernels.sync.backend import ObstoreBackend
from pulse_kernels.sync.manifest import MAX_MANIFEST_BYTES, manifest_key
from pulse_kernels.sync.retention import prune

# ---- S5: parts are the manifest's, to the byte -----------------------------------------------------------------------


def test_the_exploit_works() -> None:
    pickle.loads(pickle.dumps(Exploit()))
    assert UNPICKLED.pop() == 1


EXCHANGED: dict[str, tuple[Callable[[Run, bytes], bytes], str]] = {
    "another version's part": (lambda run, data: run.read(run.part(1)), "bytes in the store|BLAKE3"),
    "a forgery of equal size": (lambda run, data: data[:-1] + bytes([data[-1] ^ 1]), "its BLAKE3 is .*, the manifest"),
    "zeros": (lambda run, data: bytes(len(data)), "its BLAKE3 is .*, the manifest"),
    "a cut one": (lambda run, data: data[:-1], "bytes in the store, expected"),
    "a longer one": (lambda run, data: data + b"x", "bytes in the store, expected"),
    "a pickle": (lambda run, data: pickle.dumps(Exploit()).ljust(len(data), b"."), "its BLAKE3 is .*, the manifest"),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_attack_part_exchanged(name: str) -> None:
    run, subscriber, honest = attacked(signed=True)
    make, match = EXCHANGED[name]
    run.write(run.part(2), make(run, run.read(run.part(2))))
    refuses(subscriber, ChainError, match)
    assert not UNPICKLED
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_pickles_with_the_right_hash_are_not_run() -> None:
    run, subscriber, honest = attacked()
    run.plant_part(2, pickle.dumps(Exploit()))
    refuses(subscriber, ChainError, "hostile.safetensors: ")
    assert not UNPICKLED
    run.restore(honest)
    goes_on(subscriber, run)


# ---- S6: names stay in the prefix ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "patches/00000002/../../../../etc/passwd",
        "../patches/00000002/x",
        "/etc/passwd",
        "patches/00000002/%2e%2e/%2e%2e/x",
        "patches/00000002/..%2fx",
        "patches\\00000002\\x",
        "patches/00000002/..\\..\\x",
        "patches/00000001/x",
        "anchors/00000000/x",
        "manifests/00000001.json",
        "patches/00000002/.hidden",
        "patches/00000002//x",
        "patches/00000002/x\0",
        "patches/00000002/x\n",
        "file:///etc/passwd",
        "patches/00000002/" + "x" * 512,
        "",
    ],
)
def test_attack_part_key(key: str) -> None:
    run, subscriber, honest = attacked()
    content = run.manifest(2)
    content["patch"][0]["key"] = key
    run.plant(2, content)
    refuses(subscriber, ChainError, "patch: the part key .* is (refused|not in patches/00000002/)")
    run.restore(honest)
    goes_on(subscriber, run)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_attack_links_out_of_a_local_folder(tmp_path: Path) -> None:
    """They are neither read, listed, written through nor deleted behind."""
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "store"
    folder.mkdir()
    run = Run(folder=folder)
    run.publish(2)
    subscriber = run.subscriber()
    subscriber.poll()
    run.publish()
    part = folder / run.part(2)
    (outside / "secret").write_bytes(part.read_bytes())  # of the right bytes even
    part.unlink()
    part.symlink_to(outside / "secret")
    refuses(subscriber, StoreError, "leads out of .* by a symbolic link, which is not followed")
    part.unlink()
    part.write_bytes((outside / "secret").read_bytes())
    goes_on(subscriber, run)

    (folder / "patches" / "00000003").symlink_to(outside)
    run.trainer.step()
    with pytest.raises(StoreError, match="leads out of"):
        run.publisher.publish()
    assert os.listdir(outside) == ["secret"]
    (folder / "anchors" / "evil").symlink_to(outside)
    store = Store(ObstoreBackend(run.store), str(folder))
    assert not [entry.key for entry in store.list() if "evil" in entry.key]
    with pytest.raises(StoreError, match="leads out of"):
        store.delete(["anchors/evil/secret"])
    assert (outside / "secret").exists()
    prune(Chain(store), keep_anchors=1)
    assert os.listdir(outside) == ["secret"]
    (folder / "patches" / "00000003").unlink()
    run.publish()
    goes_on(subscriber, run)


# ---- S7: sizes are bounded before memory is taken --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 60, (1 << 53) - 1, 1 << 40, 100 << 20])
@pytest.mark.parametrize("kind", ["patch", "anchor"])
def test_attack_part_of_a_size_that_no_such_weights_have(size: int, kind: str) -> None:
    run = Run(key=None, anchor_every=1)
    run.publish()
    backend = FaultyBackend(ObstoreBackend(run.store))
    weights = {name: tensor.clone() for name, tensor in run.states[0].items()}
    subscriber = Subscriber(Store(backend, "memory://"), weights)
    assert subscriber.poll() is None
    run.publish()
    honest = run.everything()
    content = run.manifest(1)
    content[kind][0]["bytes"] = size
    if kind == "anchor":
        content |= {"patch": [], "base_version": None, "base_digest": None}
    run.plant(1, content)
    match = "expected an integer from 1 to 2" if size == 1 << 60 else "nothing of it was fetched"
    refuses(subscriber, ChainError, match)
    assert not [key for name, key in backend.calls if name in ("get", "size") and not key.startswith("manifests/")]
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_size_of_an_object_that_is_smaller_takes_no_memory() -> None:
    run, _, _ = attacked()
    store = Store(ObstoreBackend(run.store), "memory://")
    tracemalloc.start()
    try:
        for size in (1 << 60, 1 << 31):
            with pytest.raises(ChainError, match=f"expected {size}"):
                store.get(run.part(2), size)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


BIG: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "64 MiB and a byte": (lambda content: b" " * (MAX_MANIFEST_BYTES + 1), "more than 67108864 bytes"),
    "a million brackets": (lambda content: b"[" * 1_000_000, "no valid JSON"),
    "a million nested objects": (lambda content: b'{"a":' * 1_000_000, "no valid JSON"),
    "a number of a million digits": (lambda content: b'{"version":' + b"9" * 1_000_000 + b"}", "the number"),
}


@pytest.mark.parametrize("name", BIG)
def test_attack_gigantic_manifest(name: str) -> None:
    run, subscriber, honest = attacked()
    make, match = BIG[name]
    run.write(manifest_key(2), make(run.manifest(2)))
    refuses(subscriber, ChainError, match)
    run.restore(honest)
    goes_on(subscriber, run)


@pytest.mark.parametrize("count", [100_001, 1_000_000])
def test_attack_manifest_of_very_many_parts(count: int) -> None:
    run, subscriber, honest = attacked()
    content = run.manifest(2)
    part = content["patch"][0]
    if count == 1_000_000:  # over the size that is read
        one = encode(part)
        run.write(manifest_key(2), b'{"anchor":[' + b",".join([one] * count)[: MAX_MANIFEST_BYTES + 9])
    else:
        content["patch"] = [{**part, "key": f"patches/00000002/{k}"} for k in range(count)]
        run.plant(2, content)
    refuses(subscriber, ChainError, "over 100000 parts|more than 67108864 bytes")
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_very_long_chain_is_not_walked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from pulse_kernels.sync import chain

    monkeypatch.setattr(chain, "_LONGEST", 300)
    run, subscriber, honest = attacked()
    content = run.manifest(2)
    for version in range(10_000, 10_400):
        patch = [{**content["patch"][0], "key": f"patches/{version:08d}/x"}]
        run.plant(version, {**content, "version": version, "base_version": version - 1, "patch": patch})
    refuses(subscriber, ChainError, "there are 300 patches in a row after version 10099")
    run.restore(honest)
    goes_on(subscriber, run)


@pytest.mark.parametrize("base", [2, 3, 1 << 53, -1])
def test_attack_version_based_on_itself_or_a_newer_one(base: int) -> None:
    run, subscriber, honest = attacked()
    run.plant(2, {**run.manifest(2), "base_version": base})
    refuses(subscriber, ChainError, f"base_version is {base}, expected an integer from 0 on and below version 2")
    run.restore(honest)
    goes_on(subscriber, run)
