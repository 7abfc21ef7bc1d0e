"""Walk and verify a whole chain: every manifest, every part, every version rebuilt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from blake3 import blake3
from torch import Tensor

from pulse_kernels.checkpoint.in_memory import tensors_in
from pulse_kernels.checkpoint.layout import (
    DIGEST_KEY,
    INDEX_FILE,
    VERSION_KEY,
    FileLayout,
    Layout,
    TensorSpec,
    encode_index,
)
from pulse_kernels.checkpoint.validate import parse_json
from pulse_kernels.dtypes import dtype_name
from pulse_kernels.errors import BaseMismatchError, ChainError, CheckpointError, PatchFormatError, TrustError
from pulse_kernels.patch import Patch
from pulse_kernels.state import StateDigest
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.leftovers import dead_uploads
from pulse_kernels.sync.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    anchor_folder,
    manifest_key,
    version_in,
    version_of,
)
from pulse_kernels.sync.replay import advance, state_at
from pulse_kernels.sync.retention import orphans
from pulse_kernels.sync.store import NotFound, Store

State = dict[str, Tensor]

KINDS = {
    "manifest-unreadable": "a manifest that is no manifest: cut, changed, or written by something else",
    "manifest-version": "a manifest under another version's name",
    "foreign-chain": "a manifest of another chain",
    "signature": "a manifest without a signature of a trusted key",
    "broken-link": "the version that a patch begins at is gone, and there is no anchor",
    "base-digest": "a patch that begins at another state than the version before it has",
    "tensor-set": "a version with other tensors than the one before it",
    "part-missing": "a part that the manifest names and the store lacks",
    "part-size": "a part that is shorter or longer than the manifest says",
    "part-hash": "a part whose BLAKE3 is not the manifest's",
    "part-undecodable": "a part that is no patch or no safetensors file, or a patch of other versions",
    "anchor-digest": "an anchor whose tensors do not have the manifest's digests",
    "state-digest": "a patch that does not lead to the manifest's digest",
    "tensor-digest": "a version whose tensors do not have the digests the manifest says, though the sum is right",
    "index-missing": "an anchor without its index, so that no loader finds it",
    "index-wrong": "an anchor's index that names other files or tensors",
    "orphan": "an object that no manifest names: harmless, prune removes it",
    "stray": "an object that belongs to no chain: harmless",
    "leftover": "a temporary file of an upload that was killed, in a local folder: harmless, prune removes it",
}
HARMLESS = frozenset({"orphan", "stray", "leftover"})


@dataclass(frozen=True)
class Problem:
    """kind: one of KINDS. version, key: where; None and "" where it has none."""

    kind: str
    version: int | None
    key: str
    message: str


@dataclass
class FsckReport:
    """versions: manifests found. anchors, patches: verified as a whole. unverified: versions that could not be rebuilt,
    for the damage of others. repaired: keys written."""

    versions: int = 0
    anchors: int = 0
    patches: int = 0
    bytes_read: int = 0
    unverified: list[int] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether there is any problem that is not harmless."""
        return any(problem.kind not in HARMLESS for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "damaged": self.damaged}


def fsck(store: Store, *, trust: frozenset[bytes] | None = None, deep: bool = True, repair: bool = False) -> FsckReport:
    """Read everything in ``store`` and report what is wrong with it; one damaged version does not hide the next.

    trust: raw public keys that must have signed. deep=False reads manifests and looks up the sizes of parts only.
    repair: write the indexes of sound anchors that lack theirs, which needs deep; nothing else is ever written, and
    nothing is replaced. Memory: two states, and the parts of one version. Raises StoreError where the store cannot be
    read.
    """
    return _Walk(store, trust, deep, repair).run()


class _Walk:
    def __init__(self, store: Store, trust: frozenset[bytes] | None, deep: bool, repair: bool) -> None:
        self.store, self.trust, self.deep, self.repair = store, trust, deep, repair
        self.chain = Chain(store)
        self.report = FsckReport()
        self.sizes = {entry.key: entry.size for entry in store.list()}

    def run(self) -> FsckReport:
        manifests = self._manifests()
        state: State | None = None
        at: int | None = None
        for version in sorted(manifests):
            manifest = manifests[version]
            sound = self._check_links(manifest, manifests)
            parts = self._fetch_all(manifest)
            anchor = self._anchor(manifest, parts)
            self._check_index(manifest, parts, sound=anchor is not None)
            if not self.deep:
                continue
            base = state if at is not None and at == manifest.base_version else None
            if base is None and manifest.patch and sound:
                base = self._rebuilt(manifest.base_version)
            followed = self._follow(manifest, parts, base) if manifest.patch and sound else None
            state = followed if followed is not None else anchor
            at = version if state is not None else None
            if state is None:
                self.report.unverified.append(version)
        self._check_objects(manifests)
        return self.report

    def _add(self, kind: str, version: int | None, key: str, message: object) -> None:
        assert kind in KINDS
        self.report.problems.append(Problem(kind, version, key, str(message)))

    # ---- manifests ------------------------------------------------------------------------------------------------

    def _manifests(self) -> dict[int, Manifest]:
        """All that can be read, whatever else is wrong with them, by the version in their key."""
        found: dict[int, Manifest] = {}
        versions = sorted(version for key in self.sizes if (version := version_of(key)) is not None)
        for version in versions:
            key = manifest_key(version)
            self.report.versions += 1
            try:
                data = self.store.read(key, MAX_MANIFEST_BYTES)
                self.report.bytes_read += len(data)
                manifest = Manifest.from_bytes(data)
            except (ChainError, NotFound) as error:
                self._add("manifest-unreadable", version, key, error)
                continue
            if manifest.version != version:
                self._add("manifest-version", version, key, f"it is the manifest of version {manifest.version}")
                continue
            if self.trust is not None:
                try:
                    Manifest.from_bytes(data, trust=self.trust)
                except TrustError as error:
                    self._add("signature", version, key, error)
                    continue
            found[version] = manifest
        # Of several chains the one that most versions belong to: one foreign manifest does not hide the others.
        counts = Counter(found[version].chain for version in sorted(found))
        self.chain.id = max(counts, key=counts.__getitem__, default=None)
        for version in sorted(found):
            if found[version].chain != self.chain.id:
                message = f"chain {found[version].chain}, most versions are of {self.chain.id}"
                self._add("foreign-chain", version, manifest_key(version), message)
                del found[version]
        return found

    def _check_links(self, manifest: Manifest, manifests: Mapping[int, Manifest]) -> bool:
        """Whether the version its patch begins at is there and the one it means."""
        key, base = manifest_key(manifest.version), manifest.base_version
        if base is None:
            return True
        if base not in manifests:
            if not manifest.anchor:
                self._add("broken-link", manifest.version, key, f"version {base}, which it begins at, is not there")
            return False
        sound = True
        if manifests[base].digest != manifest.base_digest:
            message = f"begins at digest {manifest.base_digest}, version {base} has {manifests[base].digest}"
            self._add("base-digest", manifest.version, key, message)
            sound = False
        if odd := manifests[base].tensor_digests.keys() ^ manifest.tensor_digests.keys():
            message = f"{len(odd)} tensors are not in both, {min(odd)!r:.200} among them"
            self._add("tensor-set", manifest.version, key, message)
            sound = False
        return sound

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _fetch_all(self, manifest: Manifest) -> dict[str, memoryview]:
        """The parts that are as the manifest says, by key; none are read where the walk is not deep."""
        found = {}
        for part in (*manifest.anchor, *manifest.patch):
            data = self._fetch(manifest.version, part)
            if data is not None:
                found[part.key] = data
        return found

    def _fetch(self, version: int, part: Part) -> memoryview | None:
        size = self.sizes.get(part.key)
        if size is None:
            self._add("part-missing", version, part.key, "it is not in the store")
            return None
        if size != part.bytes:
            self._add("part-size", version, part.key, f"{size} bytes, the manifest says {part.bytes}")
            return None
        if not self.deep:
            return None
        try:
            data = self.store.get(part.key, part.bytes)
        except (NotFound, ChainError) as error:
            self._add("part-missing", version, part.key, error)
            return None
        self.report.bytes_read += part.bytes
        digest = blake3(data, max_threads=blake3.AUTO).hexdigest()
        if digest != part.blake3:
            self._add("part-hash", version, part.key, f"BLAKE3 {digest}, the manifest says {part.blake3}")
            return None
        return data

    def _anchor(self, manifest: Manifest, parts: Mapping[str, memoryview]) -> State | None:
        """The state an anchor holds, where all of it is as it should be."""
        if not manifest.anchor or any(part.key not in parts for part in manifest.anchor):
            return None
        state: State = {}
        for part in manifest.anchor:
            try:
                tensors = tensors_in(parts[part.key], part.key)
                if both := state.keys() & tensors.keys():
                    raise CheckpointError(f"{part.key}: {min(both)!r:.200} is in another file of the anchor, too")
            except CheckpointError as error:
                self._add("part-undecodable", manifest.version, part.key, error)
                return None
            state.update(tensors)
        if not self._has_digests(manifest, state, "anchor-digest", "anchor-digest"):
            return None
        self.report.anchors += 1
        return state

    def _follow(self, manifest: Manifest, parts: Mapping[str, memoryview], base: State | None) -> State | None:
        """``base`` brought to the version by its patch, in place; None where that is not what it should be."""
        if any(part.key not in parts for part in manifest.patch):
            return None
        data = [parts[part.key] for part in manifest.patch]
        if base is None:
            for part, bytes_ in zip(manifest.patch, data, strict=True):
                with suppress(ValueError):
                    try:
                        Patch.peek(bytes_)
                    except PatchFormatError as error:
                        self._add("part-undecodable", manifest.version, part.key, error)
            return None
        assert manifest.base_digest is not None
        try:
            advance(base, manifest.base_digest, manifest, data)
        except (ChainError, BaseMismatchError) as error:
            lies = isinstance(error.__cause__, Exception) and type(error.__cause__).__name__ == "VerificationError"
            kind = "state-digest" if lies else "part-undecodable"
            self._add(kind, manifest.version, manifest.patch[0].key, error)
            return None
        if not self._has_digests(manifest, base, "state-digest", "tensor-digest"):
            return None
        self.report.patches += 1
        return base

    def _has_digests(self, manifest: Manifest, state: State, total_kind: str, tensor_kind: str) -> bool:
        each = {name: digest.hexdigest() for name, digest in StateDigest.of_each(state).items()}
        if each == dict(manifest.tensor_digests):
            return True
        total = StateDigest.of(state).hexdigest()
        kind = tensor_kind if total == manifest.digest else total_kind
        names = each.keys() | manifest.tensor_digests.keys()
        odd = sorted(name for name in names if each.get(name) != manifest.tensor_digests.get(name))
        key = manifest_key(manifest.version)
        self._add(kind, manifest.version, key, f"{len(odd)} tensors differ, {odd[0]!r:.200} among them")
        return False

    def _rebuilt(self, version: int | None) -> State | None:
        """The state of a version that is not the one just walked; None where it cannot be had."""
        if version is None or version in self.report.unverified:
            return None
        try:
            return state_at(self.chain, version)
        except (ChainError, NotFound):
            return None  # told where it is damaged

    # ---- what is around them --------------------------------------------------------------------------------------

    def _check_index(self, manifest: Manifest, parts: Mapping[str, memoryview], *, sound: bool) -> None:
        """sound: whether the anchor was found to hold what it should, without which no index is written for it."""
        if not manifest.anchor:
            return
        key = f"{anchor_folder(manifest.version)}/{INDEX_FILE}"
        expected: dict[str, str] | None = None
        with suppress(CheckpointError, KeyError):  # of parts that are not there, or no safetensors files
            expected = {
                name: part.key.rpartition("/")[2]
                for part in manifest.anchor
                for name in tensors_in(parts[part.key], part.key)
            }
        if key not in self.sizes:
            self._add("index-missing", manifest.version, key, "the anchor has no index")
            if self.repair and sound:
                self._write_index(manifest, parts, key)
            return
        try:
            document = parse_json(self.store.read(key, MAX_MANIFEST_BYTES), key)
            found: dict[str, str] = document["weight_map"]
            files = set(found.values())
        except (ChainError, CheckpointError, NotFound, KeyError, AttributeError, TypeError) as error:
            self._add("index-wrong", manifest.version, key, f"it cannot be read: {error}")
            return
        named = {part.key.rpartition("/")[2] for part in manifest.anchor}
        if found != expected and not (expected is None and files <= named):
            self._add("index-wrong", manifest.version, key, "it names other files or tensors than the anchor has")

    def _write_index(self, manifest: Manifest, parts: Mapping[str, memoryview], key: str) -> None:
        files = tuple(
            FileLayout(
                part.key.rpartition("/")[2],
                None,
                tuple(
                    TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
                    for name, tensor in tensors_in(parts[part.key], part.key).items()
                ),
            )
            for part in manifest.anchor
        )
        marker = {DIGEST_KEY: manifest.digest, VERSION_KEY: str(manifest.version)}
        self.store.put(key, encode_index(Layout(files, {}, folder=True), [file.name for file in files], marker))
        self.report.repaired.append(key)

    def _check_objects(self, manifests: Mapping[int, Manifest]) -> None:
        newest = max((version for key in self.sizes if (version := version_of(key)) is not None), default=-1)
        # A manifest that cannot be read may name what lies in its folders.
        unread = {v for key in self.sizes if (v := version_of(key)) is not None} - manifests.keys()
        for entry in orphans(self.chain, dict(manifests), newest):
            if version_in(entry.key) not in unread:
                self._add("orphan", version_in(entry.key), entry.key, f"{entry.size} bytes that no manifest names")
        for key in self._strays(self.sizes):
            self._add("stray", None, key, "the key is none of a chain")
        for entry in dead_uploads(self.store):
            message = f"{entry.size} bytes of an upload that was killed; `pulse-kernels prune` removes them"
            self._add("leftover", version_in(entry.key), entry.key, message)

    @staticmethod
    def _strays(keys: Iterable[str]) -> list[str]:
        return [key for key in keys if version_of(key) is None and version_in(key) is None]
