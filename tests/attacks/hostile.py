"""A chain that was really published, and what somebody who may write to the store, without the key, makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import obstore
import pytest
from blake3 import blake3
from manifest_samples import KEY, OTHER, PUBLIC, encode, sign
from obstore.store import LocalStore, MemoryStore
from sync_models import Trainer, assert_same_bits, blank
from torch import Tensor

from pulse_kernels.sync import Publisher, Subscriber
from pulse_kernels.sync.manifest import manifest_key, patch_folder

State = dict[str, Tensor]


class Run:
    """A trainer, its chain in a store, and the weights of every version. key: None publishes unsigned."""

    def __init__(self, *, key: Any = KEY, anchor_every: int = 100, folder: Path | None = None) -> None:
        self.store: Any = MemoryStore() if folder is None else LocalStore(str(folder))
        self.key = key
        self.trainer = Trainer(masters=True, seed=7)
        self.states: list[State] = []
        self.anchor_every = anchor_every
        self.publisher = self.new_publisher()

    def new_publisher(self, key: Any = None) -> Publisher:
        key = key or self.key
        trainer = self.trainer
        return Publisher(
            self.store, trainer.weights, masters=trainer.masters, signer=key, anchor_every=self.anchor_every
        )

    def publish(self, versions: int = 1) -> None:
        for _ in range(versions):
            self.trainer.step()
            self.publisher.publish()
            self.states.append(copied(self.trainer.weights))

    def subscriber(self, **options: Any) -> Subscriber:
        options.setdefault("trust", None if self.key is None else [PUBLIC])
        return Subscriber(self.store, blank(self.trainer.weights), **options)

    # ---- the attacker's hands -------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def write(self, key: str, data: bytes) -> None:
        obstore.put(self.store, key, data)

    def everything(self) -> dict[str, bytes]:
        return {item["path"]: self.read(item["path"]) for page in obstore.list(self.store) for item in page}

    def restore(self, objects: dict[str, bytes]) -> None:
        for key in self.everything().keys() - objects.keys():
            obstore.delete(self.store, key)
        for key, data in objects.items():
            self.write(key, data)

    def manifest(self, version: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.read(manifest_key(version)))
        content.pop("signature", None)
        return content

    def plant(self, version: int, content: dict[str, Any], *, key: Any = None, at: int | None = None) -> None:
        """A manifest of this content, signed where a key is given."""
        data = encode(content) if key is None else sign(content, key)
        self.write(manifest_key(version if at is None else at), data)

    def plant_part(self, version: int, data: bytes, kind: str = "patch", **changes: Any) -> None:
        """The only part of a version exchanged, its manifest made to fit, as whoever may write unsigned ones does."""
        content = self.manifest(version)
        folder = patch_folder(version) if kind == "patch" else f"anchors/{version:08d}"
        key = f"{folder}/hostile.safetensors"
        self.write(key, data)
        content[kind] = [{"blake3": blake3(data).hexdigest(), "bytes": len(data), "key": key}]
        self.plant(version, {**content, **changes})

    def part(self, version: int, kind: str = "patch") -> str:
        key: str = self.manifest(version)[kind][0]["key"]
        return key


def attacked(*, signed: bool = False) -> tuple[Run, Subscriber, dict[str, bytes]]:
    """A chain of three versions, by default unsigned, a subscriber at the second, and the store as it should be."""
    run = Run() if signed else Run(key=None)
    run.publish(2)
    subscriber = run.subscriber()
    subscriber.poll()
    run.publish()
    return run, subscriber, run.everything()


UNPICKLED: list[int] = []


def unpickled() -> None:
    UNPICKLED.append(1)


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, ()


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def refuses(subscriber: Subscriber, error: type[Exception], match: str) -> None:
    """A poll raises just this, naming what was found; bits and version are as they were."""
    weights = subscriber.params
    assert isinstance(weights, dict)
    before, version, digest = copied(weights), subscriber.version, subscriber.digest
    with pytest.raises(error, match=match) as caught:
        subscriber.poll()
    assert type(caught.value) is error
    assert len(str(caught.value)) < 2000
    assert_same_bits(weights, before)
    assert subscriber.version == version
    if version is not None:
        assert subscriber.digest == digest


def goes_on(subscriber: Subscriber, run: Run) -> None:
    """The next poll leads to the newest version of the run."""
    subscriber.poll()
    assert subscriber.version == len(run.states) - 1
    assert_same_bits(subscriber.params, run.states[-1])  # type: ignore[arg-type]


__all__ = ["KEY", "OTHER", "PUBLIC", "UNPICKLED", "Exploit", "Run", "attacked", "copied", "goes_on", "refuses"]
