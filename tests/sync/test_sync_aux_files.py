"""What travels beside the weights: config and tokenizer files go with anchors and are checked like them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from blake3 import blake3
from obstore.store import MemoryStore
from sync_models import Trainer

from pulse_kernels import ChainError
from pulse_kernels.sync import Publisher
from pulse_kernels.sync import aux_files as aux_module
from pulse_kernels.sync.aux_files import fetch_aux
from pulse_kernels.sync.store import open_store

FILES = {"config.json": b'{"model_type": "toy"}', "sub/chat.jinja": b"hi", "empty.txt": b""}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name, data in {**FILES, ".hidden": b"x", "old.safetensors": b"x", "rng.pth": b"x", "a b.txt": b"x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_they_go_with_anchors_alone(model: Path) -> None:
    trainer = Trainer(masters=True)
    store = open_store(MemoryStore())
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=2, aux_files=model)
    for _ in range(3):
        publisher.publish()
        trainer.step()
    manifests = [publisher.chain.manifest(version) for version in range(3)]
    assert [fetch_aux(store, manifest) for manifest in manifests] == [FILES, {}, FILES]
    keys = {entry.key for entry in store.list("anchors/00000002")}
    listing = f"anchors/00000002/pulse-aux-{str(manifests[2].facts['aux'])[:16]}.json"
    parts = {part.key for part in manifests[2].anchor}
    assert keys - parts == {
        listing,
        "anchors/00000002/model.safetensors.index.json",
        *(f"anchors/00000002/{name}" for name in FILES),
    }
    assert {row["name"] for row in json.loads(store.read(listing, 10_000))["files"]} == FILES.keys()


def test_what_an_attempt_left_there_is_replaced_by_who_commits(model: Path) -> None:
    trainer = Trainer(masters=True)
    store = open_store(MemoryStore())
    store.put("anchors/00000000/config.json", b"another attempt's")
    publisher = Publisher(store, trainer.weights, aux_files=model)
    publisher.publish()
    assert fetch_aux(store, publisher.chain.manifest(0)) == FILES


def test_damage_is_found(model: Path) -> None:
    trainer = Trainer(masters=True)
    store = open_store(MemoryStore())
    publisher = Publisher(store, trainer.weights, aux_files=model)
    publisher.publish()
    manifest = publisher.chain.manifest(0)
    store.put("anchors/00000000/config.json", FILES["config.json"].replace(b"toy", b"tok"))
    with pytest.raises(ChainError, match=r"config\.json: its BLAKE3"):
        fetch_aux(store, manifest)
    listing = f"anchors/00000000/pulse-aux-{str(manifest.facts['aux'])[:16]}.json"
    store.put(listing, store.read(listing, 10_000).replace(b"config", b"confit"))
    with pytest.raises(ChainError, match=r"pulse-aux.*its BLAKE3"):
        fetch_aux(store, manifest)


@pytest.mark.parametrize(
    "name",
    ["../up", "/etc/x", "a/../b", ".hidden", "model.safetensors", "sub/.git/config", "a\\b", "", "x" * 300, "a//b"],
)
def test_names_cannot_leave_the_folder_or_pass_for_weights(name: str) -> None:
    listing = json.dumps({"files": [{"blake3": blake3(b"").hexdigest(), "bytes": 0, "name": name}], "format": 1})
    with pytest.raises(ChainError, match="is refused"):
        aux_module._rows(listing.encode(), "listing")
