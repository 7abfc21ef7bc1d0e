"""Every kind of damage, planted in a sound chain, is found where it is and called what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from obstore.store import MemoryStore
from safetensors.torch import save
from sync_models import Trainer, assert_same_bits

from pulse_kernels import Patch, StateDigest
from pulse_kernels.sync import Publisher, Store, open_store
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.fsck import KINDS, fsck
from pulse_kernels.sync.manifest import Manifest, Part, anchor_folder, manifest_key
from pulse_kernels.sync.replay import fold, state_at
from pulse_kernels.sync.signing import generate_key, trusted_keys

INDEX = f"{anchor_folder(3)}/model.safetensors.index.json"


@pytest.fixture
def store() -> Store:
    """Versions 0 to 6; 0, 3 and 6 have anchors, those of 3 and 6 beside patches."""
    opened = open_store(MemoryStore())
    trainer = Trainer(masters=True, seed=2)
    with Publisher(opened, trainer.weights, masters=trainer.masters, anchor_every=3) as publisher:
        for _ in range(7):
            publisher.publish()
            trainer.step()
    return opened


def manifest_of(store: Store, version: int) -> Manifest:
    return Manifest.from_bytes(store.read(manifest_key(version), 1 << 24))


def rewrite(store: Store, version: int, **changes: object) -> None:
    """A manifest as an attacker without a key, or a bug, would leave it: sound in itself."""
    changed = replace(manifest_of(store, version), **changes)  # type: ignore[arg-type]
    store.put(manifest_key(changed.version if "key" in changes else version), changed.to_bytes())


def put_part(store: Store, version: int, data: bytes, kind: str = "patch") -> str:
    """Other bytes as a part, with the manifest changed so that size and hash fit."""
    from blake3 import blake3

    key = getattr(manifest_of(store, version), kind)[0].key
    store.put(key, data)
    rewrite(store, version, **{kind: (Part(key, len(data), blake3(data).hexdigest()),)})
    return key


def part_key(store: Store, version: int, kind: str = "patch") -> str:
    return str(getattr(manifest_of(store, version), kind)[0].key)


def flip(store: Store, key: str, at: int) -> None:
    data = bytearray(store.read(key, 1 << 24))
    data[at] ^= 4
    store.put(key, bytes(data))


def cut(store: Store, key: str) -> str:
    store.put(key, store.read(key, 1 << 24)[:-3])
    return key


def lying_patch(store: Store) -> str:
    """A patch of version 4 to 5 with one value changed; its header says what the manifest says."""
    state = state_at(Chain(store), 4)
    key = part_key(store, 5)
    patch = Patch.from_bytes(store.read(key, 1 << 24), state, current_digest=manifest_of(store, 4).digest)
    name = max(patch.tensors, key=lambda name: patch.tensors[name].num_changed)
    item = patch.tensors[name]
    values = item.values.clone()
    values[0] = values[0] * 2 + 1
    patch.tensors[name] = replace(item, values=values)
    return put_part(store, 5, patch.to_bytes("fast"))


def swapped_digests(store: Store) -> str:
    """Two tensors of version 5 with each other's digest: the sum is as it was."""
    digests = dict(manifest_of(store, 5).tensor_digests)
    first, second = "embed.weight", "layer.0.weight"
    digests[first], digests[second] = digests[second], digests[first]
    rewrite(store, 5, tensor_digests=digests)
    return manifest_key(5)


def other_anchor(store: Store) -> str:
    state = {name: tensor.clone() for name, tensor in state_at(Chain(store), 3).items()}
    state["layer.0.bias"][7] += 1
    put_part(store, 3, save(state), "anchor")
    return manifest_key(3)


def drop(store: Store, key: str) -> str:
    store.delete([key])
    return key


def put(store: Store, key: str, data: bytes) -> str:
    store.put(key, data)
    return key


def other_version(store: Store) -> str:
    store.put(manifest_key(5), store.read(manifest_key(4), 1 << 24))
    return manifest_key(5)


def changed(store: Store, version: int, **changes: object) -> str:
    rewrite(store, version, **changes)
    return manifest_key(version)


def other_tensors(store: Store) -> str:
    digests = dict(manifest_of(store, 5).tensor_digests)
    extra = StateDigest.fromhex("00" * 16)
    digests["added.weight"] = extra.hexdigest()
    rewrite(store, 5, tensor_digests=digests)
    return manifest_key(5)


def wrong_index(store: Store) -> str:
    document = json.loads(store.read(INDEX, 1 << 24))
    document["weight_map"]["scale"] = "model-00000000-00001-of-00001.safetensors"
    store.put(INDEX, json.dumps(document).encode())
    return INDEX


def flipped(store: Store, version: int, kind: str, at: int) -> str:
    key = part_key(store, version, kind)
    flip(store, key, at)
    return key


DAMAGE: dict[str, tuple[str, int | None, Callable[[Store], str]]] = {
    "manifest cut": ("manifest-unreadable", 5, lambda store: cut(store, manifest_key(5))),
    "manifest with a flipped bit": (
        "manifest-unreadable", 4, lambda store: flip(store, manifest_key(4), 1) or manifest_key(4)),
    "manifest of another version": ("manifest-version", 5, other_version),
    "manifest of another chain": ("foreign-chain", 2, lambda store: changed(store, 2, chain="0" * 32)),
    "base gone": ("broken-link", 2, lambda store: drop(store, manifest_key(1)) and manifest_key(2)),
    "another base digest": ("base-digest", 4, lambda store: changed(store, 4, base_digest="1" * 32)),
    "other tensors": ("tensor-set", 5, other_tensors),
    "patch gone": ("part-missing", 4, lambda store: drop(store, part_key(store, 4))),
    "anchor file gone": ("part-missing", 3, lambda store: drop(store, part_key(store, 3, "anchor"))),
    "patch cut": ("part-size", 4, lambda store: cut(store, part_key(store, 4))),
    "patch flipped": ("part-hash", 1, lambda store: flipped(store, 1, "patch", -1)),
    "anchor flipped": ("part-hash", 3, lambda store: flipped(store, 3, "anchor", -1)),
    "no patch at all": ("part-undecodable", 2, lambda store: put_part(store, 2, b"not a patch")),
    "patch of another version": (
        "part-undecodable", 2, lambda store: put_part(store, 2, store.read(part_key(store, 1), 1 << 24))),
    "anchor that is none": ("part-undecodable", 3, lambda store: put_part(store, 3, b"{}", "anchor")),
    "anchor of other weights": ("anchor-digest", 3, other_anchor),
    "patch that leads elsewhere": ("state-digest", 5, lambda store: lying_patch(store)),
    "digests exchanged": ("tensor-digest", 5, swapped_digests),
    "index gone": ("index-missing", 3, lambda store: drop(store, INDEX)),
    "index of other files": ("index-wrong", 3, wrong_index),
    "index that is none": ("index-wrong", 3, lambda store: put(store, INDEX, b"[]")),
    "part nobody names": ("orphan", 5, lambda store: put(store, "patches/00000005/00000-deadbeef.safetensors", b"x")),
    "object of nobody": ("stray", None, lambda store: put(store, "notes.txt", b"x")),
}  # fmt: skip


def test_a_sound_chain_has_no_problems(store: Store) -> None:
    report = fsck(store)
    assert report.problems == []
    assert (report.versions, report.anchors, report.patches, report.unverified) == (7, 3, 6, [])
    assert not report.damaged
    assert report.bytes_read > 3 * manifest_of(store, 0).anchor[0].bytes


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(store: Store, what: str) -> None:
    kind, version, plant = DAMAGE[what]
    key = plant(store)
    report = fsck(store)
    found = [(problem.kind, problem.version, problem.key) for problem in report.problems]
    assert (kind, version, key) in found, report.problems
    assert report.damaged == (kind not in ("orphan", "stray"))
    # What else is told follows from it: nothing of versions that come before.
    damaged = [other for other_kind, other, _ in found if other_kind not in ("orphan", "stray")]
    assert all(other is None or version is None or other >= version for other in damaged)
    assert report.versions == (6 if what == "base gone" else 7)


def test_damage_does_not_hide_damage(store: Store) -> None:
    cut(store, part_key(store, 1))
    flip(store, part_key(store, 5), -1)
    drop(store, INDEX)
    kinds = {(problem.kind, problem.version) for problem in fsck(store).problems}
    assert {("part-size", 1), ("part-hash", 5), ("index-missing", 3)} <= kinds


def test_all_kinds_are_planted_here() -> None:
    planted = {kind for kind, _, _ in DAMAGE.values()}
    assert planted | {"signature", "leftover"} == set(KINDS)  # leftovers: test_sync_leftovers.py
    assert len(KINDS) >= 12


def test_signatures_are_checked_where_keys_are_given() -> None:
    private, public = generate_key()
    _, other = generate_key()
    opened = open_store(MemoryStore())
    trainer = Trainer(masters=True)
    publisher = Publisher(opened, trainer.weights, masters=trainer.masters, signer=private)
    publisher.publish()
    assert fsck(opened, trust=trusted_keys([public])).problems == []
    found = fsck(opened, trust=trusted_keys([other])).problems
    assert [(problem.kind, problem.version) for problem in found if problem.kind != "orphan"] == [("signature", 0)]


def test_shallow_reads_no_part(store: Store) -> None:
    flip(store, part_key(store, 4), -1)
    cut(store, part_key(store, 5))
    report = fsck(store, deep=False)
    assert [(problem.kind, problem.version) for problem in report.problems] == [("part-size", 5)]


def test_repair_writes_the_index_and_nothing_else(store: Store) -> None:
    before = store.read(INDEX, 1 << 24)
    drop(store, INDEX)
    cut(store, part_key(store, 5))
    listed = store.list()
    report = fsck(store, repair=True)
    assert report.repaired == [INDEX]
    assert [entry for entry in store.list() if entry.key != INDEX] == listed
    assert json.loads(store.read(INDEX, 1 << 24)) == json.loads(before)
    assert [problem.kind for problem in fsck(store).problems] == ["part-size"]


def test_repair_replaces_no_index_and_writes_none_for_damaged_anchors(store: Store) -> None:
    wrong_index(store)
    other = f"{anchor_folder(6)}/model.safetensors.index.json"
    drop(store, other)
    put_part(store, 6, save({"scale": torch.zeros(3)}), "anchor")
    before = store.read(INDEX, 1 << 24)
    report = fsck(store, repair=True)
    assert {"index-wrong", "index-missing", "anchor-digest"} <= {problem.kind for problem in report.problems}
    assert report.repaired == []
    assert store.read(INDEX, 1 << 24) == before
    assert not store.exists(other)


def test_a_foreign_newest_manifest_does_not_hide_the_chain(store: Store) -> None:
    changed(store, 6, chain="0" * 32)
    report = fsck(store)
    damaged = [(problem.kind, problem.version) for problem in report.problems if problem.kind != "orphan"]
    assert damaged[0] == ("foreign-chain", 6)
    assert all(version == 6 for _, version in damaged)
    assert (report.anchors, report.patches) == (2, 5)


def test_a_tensor_in_two_files_of_an_anchor_is_found(store: Store) -> None:
    from blake3 import blake3

    part = manifest_of(store, 3).anchor[0]
    data = store.read(part.key, 1 << 24)
    again = f"{anchor_folder(3)}/model-again.safetensors"
    store.put(again, data)
    rewrite(store, 3, anchor=(part, Part(again, len(data), blake3(data).hexdigest())))
    assert ("part-undecodable", 3, again) in [(p.kind, p.version, p.key) for p in fsck(store).problems]


def test_versions_behind_a_damaged_one_are_not_rebuilt_again_and_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(store, part_key(store, 1), -1)
    read: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda key, size: read.append(key) or get(key, size))
    report = fsck(store)
    assert len(read) == len(set(read))
    assert report.unverified == [1, 2]
    assert [(problem.kind, problem.version) for problem in report.problems] == [("part-hash", 1)]
    assert (report.anchors, report.patches) == (3, 3)  # 3 has its anchor; 4, 5 and 6 follow from it


# ---- rebuilding ------------------------------------------------------------------------------------------------------


def test_any_version_can_be_rebuilt(store: Store) -> None:
    chain = Chain(store)
    for version in range(7):
        state = state_at(chain, version)
        assert StateDigest.of(state).hexdigest() == manifest_of(store, version).digest


def test_a_version_is_rebuilt_from_an_earlier_anchor_where_the_nearest_is_damaged(store: Store) -> None:
    flip(store, part_key(store, 3, "anchor"), -1)
    assert StateDigest.of(state_at(Chain(store), 4)).hexdigest() == manifest_of(store, 4).digest


@pytest.mark.parametrize(("base", "version"), [(0, 1), (0, 6), (2, 5), (4, 6)])
@pytest.mark.parametrize("profile", ["fast", "balanced"])
def test_patches_fold_into_a_file_that_applies(store: Store, base: int, version: int, profile: str) -> None:
    chain = Chain(store)
    folded = fold(chain, base, version)
    assert (folded.base_version, folded.version) == (base, version)
    state = state_at(chain, base)
    Patch.from_bytes(folded.to_bytes(profile), state).apply_(state)
    assert_same_bits(state, state_at(chain, version))


def test_folds_that_are_none(store: Store) -> None:
    chain = Chain(store)
    with pytest.raises(ValueError, match="expected more than"):
        fold(chain, 3, 3)
    rewrite(store, 3, base_version=None, base_digest=None, patch=())
    with pytest.raises(Exception, match="has an anchor alone"):
        fold(chain, 2, 4)
