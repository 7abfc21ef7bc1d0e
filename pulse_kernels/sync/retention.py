"""What of a chain is kept: every version that is kept can be rebuilt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pulse_kernels.errors import ChainError
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.leftovers import dead_uploads, remove_empty_folders, remove_uploads
from pulse_kernels.sync.manifest import Manifest, manifest_key, version_in
from pulse_kernels.sync.store import Entry


@dataclass(frozen=True)
class PruneReport:
    """kept, removed: versions. objects, nbytes: what was removed, manifests, orphans and what dead uploads left
    included. dry_run: or would have been."""

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    objects: int
    nbytes: int
    dry_run: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_retention(keep_anchors: int | None, keep_patches: int | None) -> None:
    """ValueError unless both are counts of at least 1, or None."""
    for name, value in (("keep_anchors", keep_anchors), ("keep_patches", keep_patches)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}, expected an integer of at least 1, or None to keep all")


def prune(
    chain: Chain, *, keep_anchors: int | None = None, keep_patches: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Remove old versions, and what interrupted publishers left.

    keep_patches: the newest so many versions stay. keep_anchors: the newest so many anchors stay, and, without
    keep_patches, all versions after the oldest of them. With neither, all versions stay. Whatever those that stay are
    rebuilt from, stays. The newest version and all above it are not touched, nor is what a publisher uploads now.

    An interruption leaves objects that no manifest names; the next call removes them. In a local folder temporary files
    that nobody has written to for an hour, left by publishers that were killed, go as well, and so do empty folders of
    versions. Readers of a version that goes
    get a clear error or take another route. Raises ChainError, before anything is removed, where a manifest that says
    what is needed cannot be read.
    """
    check_retention(keep_anchors, keep_patches)
    versions = chain.versions()
    dead = dead_uploads(chain.store)
    if not versions:
        if not dry_run:
            remove_uploads(chain.store, dead)
        return PruneReport((), (), len(dead), sum(entry.size for entry in dead), dry_run)
    wanted = _wanted(chain, versions, keep_anchors, keep_patches)
    kept = _needed(chain, versions, wanted)
    removed = [version for version in versions if version not in kept]
    manifests = {entry.key: entry for entry in chain.store.list("manifests")}
    going = [manifests[key] for version in removed if (key := manifest_key(version)) in manifests]
    going += orphans(chain, kept, versions[-1])
    if not dry_run:
        # Versions end before their parts go, oldest first: nobody finds one without the other.
        for version in removed:
            chain.store.delete([manifest_key(version)])
            chain.forget(version)
        chain.store.delete([entry.key for entry in going if entry.key not in manifests])
        remove_uploads(chain.store, dead)
        remove_empty_folders(chain.store, versions[-1])
    going += dead
    nbytes = sum(entry.size for entry in going)
    return PruneReport(tuple(sorted(kept)), tuple(removed), len(going), nbytes, dry_run)


def _wanted(chain: Chain, versions: list[int], keep_anchors: int | None, keep_patches: int | None) -> set[int]:
    if keep_anchors is None and keep_patches is None:
        return set(versions)
    wanted = {versions[-1]}
    if keep_patches is not None:
        wanted.update(versions[-keep_patches:])
    if keep_anchors is not None:
        anchors: list[int] = []
        for version in reversed(versions):
            if len(anchors) == keep_anchors:
                break
            if _read(chain, version).anchor:
                anchors.append(version)
        wanted.update(anchors)
        if keep_patches is None:
            oldest = anchors[-1] if len(anchors) == keep_anchors else versions[0]
            wanted.update(version for version in versions if version >= oldest)
    return wanted


def _needed(chain: Chain, versions: list[int], wanted: set[int]) -> dict[int, Manifest]:
    """The manifests of ``wanted`` and of all they are rebuilt from."""
    there = set(versions)
    kept: dict[int, Manifest] = {}
    for version in sorted(wanted, reverse=True):
        at: int | None = version
        while at is not None and at not in kept and at in there:
            kept[at] = _read(chain, at)
            at = None if kept[at].anchor else kept[at].base_version
    return kept


def _read(chain: Chain, version: int) -> Manifest:
    try:
        return chain.manifest(version)
    except ChainError as error:
        raise ChainError(f"nothing was removed, since what version {version} needs is not known: {error}") from error


def orphans(chain: Chain, kept: dict[int, Manifest], newest: int) -> list[Entry]:
    """Objects of versions up to ``newest`` that no kept manifest names or implies."""
    named = {part.key for manifest in kept.values() for part in (*manifest.anchor, *manifest.patch)}
    found = []
    for folder in ("anchors", "patches"):
        for entry in chain.store.list(folder):
            version = version_in(entry.key)
            if version is None or version > newest or entry.key in named:
                continue
            if version in kept and kept[version].anchor and not _is_part(entry.key):
                continue  # the index of an anchor, and what else belongs to the model
            found.append(entry)
    return found


def _is_part(key: str) -> bool:
    return key.startswith("patches/") or key.endswith(".safetensors")
