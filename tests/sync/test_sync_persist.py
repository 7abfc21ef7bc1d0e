"""A subscriber's state on disk: resumed, whole after kill -9, ignored where damaged, refused where it is another's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore
from safetensors.torch import load_file, save_file
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import BaseMismatchError, ChainError, PulseError, StateDigest, VerificationError
from pulse_kernels.checkpoint import checkpoint_state
from pulse_kernels.sync import Publisher, Subscriber, persist
from pulse_kernels.sync.persist import StateFolder

CHAIN = "0123456789abcdef" * 2


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(masters=True, seed=3)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def publisher_of(store: MemoryStore, trainer: Trainer) -> Publisher:
    return Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=100)


def test_a_restart_fetches_only_what_is_missing(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    publisher = publisher_of(store, trainer)
    publisher.publish()
    first = Subscriber(store, blank(trainer.weights), state_dir=tmp_path / "state")
    first.poll()
    assert first.save() == 0
    state = checkpoint_state(tmp_path / "state")
    assert (state.version, state.digest) == (0, publisher.chain.manifest(0).digest)
    assert_same_bits(load_file(tmp_path / "state" / "model.safetensors"), trainer.weights)
    trainer.step()
    patch_bytes = publisher.publish().payload_bytes

    weights = blank(trainer.weights)
    again = Subscriber(store, weights, state_dir=tmp_path / "state")
    assert (again.version, again.chain.id) == (0, publisher.chain.id)
    staged = again.stage()
    assert staged is not None
    assert (staged.from_version, staged.from_anchor, staged.fetched_bytes) == (0, False, patch_bytes)
    again.apply()
    assert_same_bits(weights, trainer.weights)


def test_tensors_come_from_the_folder(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    publisher_of(store, trainer).publish()
    Subscriber(store, None, state_dir=tmp_path).poll()
    assert not StateFolder(tmp_path).occupied()
    with Subscriber(store, None, state_dir=tmp_path) as first:
        first.poll()
        first.save()
    empty = MemoryStore()
    again = Subscriber(empty, None, state_dir=tmp_path)
    assert again.version == 0
    assert isinstance(again.params, dict)
    assert_same_bits(again.params, trainer.weights)
    with pytest.raises(ChainError, match="version 0 was seen"):
        again.poll()


def test_an_older_chain_and_another_chain_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    store, other = MemoryStore(), MemoryStore()
    publisher = publisher_of(store, trainer)
    publisher.publish()
    Publisher(other, trainer.weights).publish(7)
    for _ in range(2):
        trainer.step()
        publisher.publish()
    subscriber = Subscriber(store, blank(trainer.weights), state_dir=tmp_path)
    subscriber.poll()
    assert subscriber.save() == 2
    store.delete("manifests/00000002.json")
    with pytest.raises(ChainError, match="version 2 was seen"):
        Subscriber(store, blank(trainer.weights), state_dir=tmp_path).poll()
    with pytest.raises(ChainError, match="belongs to chain"):
        Subscriber(other, blank(trainer.weights), state_dir=tmp_path).poll()
    untouched = blank(trainer.weights)
    with pytest.raises(ChainError, match="expected " + CHAIN):
        Subscriber(store, untouched, state_dir=tmp_path, chain=CHAIN)
    assert_same_bits(untouched, blank(trainer.weights))


def test_save_every_writes_between_applies(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    publisher = publisher_of(store, trainer)
    subscriber = Subscriber(store, blank(trainer.weights), state_dir=tmp_path, save_every=2)
    saved = []
    for _ in range(6):
        publisher.publish()
        subscriber.stage()
        saved.append(checkpoint_state(tmp_path).version if (tmp_path / "model.safetensors").exists() else None)
        subscriber.apply()
        trainer.step()
    assert saved == [None, None, 1, 1, 3, 3]
    subscriber.close()
    assert checkpoint_state(tmp_path).version == 5


def test_a_save_that_fails_is_a_warning_to_who_serves(
    trainer: Trainer, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_of(store, trainer)
    publisher.publish()
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights, state_dir=tmp_path, save_every=1)
    subscriber.poll()
    trainer.step()
    publisher.publish()
    with monkeypatch.context() as patched:
        patched.setattr("pulse_kernels.checkpoint.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.warns(RuntimeWarning, match="was not saved"):
            assert subscriber.poll() is not None
        with pytest.raises(PulseError, match="full"):
            subscriber.save()
    assert_same_bits(weights, trainer.weights)
    assert subscriber.save() == 1


def test_weights_that_others_wrote_are_not_saved(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    publisher_of(store, trainer).publish()
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights, state_dir=tmp_path)
    subscriber.poll()
    subscriber.save()
    before = (tmp_path / "model.safetensors").read_bytes()
    weights["scale"].fill_(7)
    with pytest.raises(VerificationError, match="were not saved"):
        subscriber.save()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert subscriber.version is None


@pytest.mark.parametrize("shard_bytes", [4 << 30, 4_000])
def test_a_damaged_folder_is_ignored_and_replaced(
    trainer: Trainer, store: MemoryStore, tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist, "_SHARD_BYTES", shard_bytes)
    publisher_of(store, trainer).publish()

    def subscriber() -> Subscriber:
        return Subscriber(store, blank(trainer.weights), state_dir=tmp_path)

    first = subscriber()
    first.poll()
    first.save()
    largest = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (shard_bytes == 4_000)
    damages = {
        "a flipped bit": lambda: largest.write_bytes(largest.read_bytes()[:-1] + bytes([largest.read_bytes()[-1] ^ 1])),
        "a cut file": lambda: largest.write_bytes(largest.read_bytes()[:-9]),
        "an empty file": lambda: largest.write_bytes(b""),
    }
    if index.exists():
        damages |= {"a lost shard": largest.unlink, "no index to read": lambda: index.write_text("{")}
    for damage in damages.values():
        damage()
        with pytest.warns(RuntimeWarning, match="the saved state is not used"):
            again = subscriber()
        assert again.version is None
        again.poll()
        assert again.save() == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed = subscriber()
        assert resumed.version == 0
        assert_same_bits(resumed.params, trainer.weights)  # type: ignore[arg-type]


def test_another_models_folder_is_refused(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    publisher_of(store, trainer).publish()
    save_file({"other": torch.ones(3)}, tmp_path / "model.safetensors")
    weights = blank(trainer.weights)
    with pytest.raises(BaseMismatchError, match="a folder of its own"):
        Subscriber(store, weights, state_dir=tmp_path)
    assert_same_bits(weights, blank(trainer.weights))
    wrong_kind = {name: tensor.float() for name, tensor in trainer.weights.items()}
    save_file(wrong_kind, tmp_path / "model.safetensors")
    with pytest.raises(BaseMismatchError, match="float32"):
        Subscriber(store, weights, state_dir=tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        Subscriber(store, weights, state_dir=tmp_path / "model.safetensors")


def test_a_base_model_without_a_version_saves_the_first_fetch(
    trainer: Trainer, store: MemoryStore, tmp_path: Path
) -> None:
    publisher = publisher_of(store, trainer)
    publisher.publish()
    save_file(trainer.weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    trainer.step()
    patch_bytes = publisher.publish().payload_bytes
    subscriber = Subscriber(store, None, state_dir=tmp_path)
    assert subscriber.version is None
    staged = subscriber.stage()  # found to be version 0, by its digest
    assert staged is not None
    assert (staged.from_version, staged.fetched_bytes) == (0, patch_bytes)
    subscriber.apply()
    subscriber.save()
    assert_same_bits(load_file(tmp_path / "model.safetensors"), trainer.weights)


def test_weights_of_any_layout(tmp_path: Path) -> None:
    dense = {
        "a": torch.randn(7, 5, dtype=torch.bfloat16),
        "b": torch.arange(6.0),
        "c": torch.tensor(3),
        "d": torch.empty(0, 4),
    }
    strided = {
        "a": torch.empty(5, 7, dtype=torch.bfloat16).T,
        "b": torch.zeros(12)[::2],
        "c": torch.tensor(0),
        "d": torch.empty(0, 4),
    }
    digest = StateDigest.of(dense).hexdigest()
    StateFolder(tmp_path).save(dense, 4, digest, CHAIN)
    saved = StateFolder(tmp_path).load(strided)
    assert saved is not None
    assert (saved.version, saved.digest, saved.chain) == (4, digest, CHAIN)
    assert_same_bits(strided, dense)
    StateFolder(tmp_path).save(strided, 5, digest, CHAIN)
    assert_same_bits(load_file(tmp_path / "model.safetensors"), dense)


SAVER = """
import os, sys, torch
from pulse_kernels import StateDigest
from pulse_kernels.sync import persist
folder, persist._SHARD_BYTES = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
for line in sys.stdin:  # each line: one process that saves until it is killed
    pid = os.fork()
    if not pid:
        version = int(line)
        state = persist.StateFolder(folder)
        state.load()
        while True:
            tensors = {name: torch.full((400_000,), float(version)) for name in "abcd"}
            state.save(tensors, version, StateDigest.of(tensors).hexdigest(), "c" * 32)
            version += 1
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


@pytest.mark.parametrize("shard_bytes", [4 << 30, 2_000_000], ids=["one file", "shards"])
def test_old_or_new_is_whole_after_kill_9(tmp_path: Path, shard_bytes: int) -> None:
    delays = random.Random(shard_bytes)
    folder = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(folder), str(shard_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        version = 0
        for _ in range(10):
            print(version + 1, file=saver.stdin, flush=True)
            pid = int(saver.stdout.readline())
            while not version and not StateFolder(folder).occupied():
                time.sleep(0.01)
            time.sleep(delays.uniform(0.05, 0.25))
            os.kill(pid, signal.SIGKILL)
            assert saver.stdout.readline() == "dead\n"
            with warnings.catch_warnings():
                if version:  # the very first save may be cut off before its end
                    warnings.simplefilter("error")
                else:
                    warnings.simplefilter("ignore")
                saved = StateFolder(folder).load()
            if saved is None:
                assert not version
                continue
            assert saved.version is not None
            assert saved.version >= version
            version = saved.version
            assert all(bool((tensor == version).all()) for tensor in saved.tensors.values())
            assert sorted(saved.tensors) == list("abcd")
        assert version > 0
        saver.stdin.close()
