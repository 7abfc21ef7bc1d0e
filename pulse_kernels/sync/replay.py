"""States and patches rebuilt from a chain, apart from anybody's weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from torch import Tensor

from pulse_kernels.errors import BaseMismatchError, ChainError, PatchFormatError, VerificationError
from pulse_kernels.patch import Patch
from pulse_kernels.report import Phases
from pulse_kernels.state import StateDigest
from pulse_kernels.sync.anchor import fetch_anchor
from pulse_kernels.sync.chain import Chain, Route, first_sound
from pulse_kernels.sync.manifest import Manifest
from pulse_kernels.sync.merge import merge_parts


def state_at(chain: Chain, version: int) -> dict[str, Tensor]:
    """The weights of a version, rebuilt in host memory and checked against its digest.

    Raises ChainError where it cannot be rebuilt as it was.
    """

    def rebuilt(route: Route) -> dict[str, Tensor]:
        chain.require(route.manifests)
        return state_along(chain, route, Phases(time.perf_counter))

    return first_sound(chain.routes(version), rebuilt)


def fold(chain: Chain, base_version: int, version: int) -> Patch:
    """The patches from one version to a later one as one, with old values known, so that every profile can code it.

    Memory: the base's state and the patches. Raises ChainError where patches do not lead from the one to the other.
    """
    if not base_version < version:
        raise ValueError(f"version is {version}, expected more than the base's, {base_version}")
    manifests: list[Manifest] = []
    at: int | None = version
    while at is not None and at != base_version:
        manifests.append(chain.manifest(at))
        at = manifests[-1].base_version
    if at is None:
        raise ChainError(
            f"no patches lead from version {base_version} to {version}: version {manifests[-1].version} has an anchor "
            "alone; begin there, or diff the two"
        )
    manifests.reverse()
    chain.require(manifests)
    state, digest = state_at(chain, base_version), chain.manifest(base_version).digest
    patches = []
    with closing(chain.fetch_ahead(manifests)) as fetched:
        for manifest, parts in fetched:
            patch = decoded(manifest, parts, state, digest, None)
            undo = patch.exchange_(state, current_digest=digest)
            digest = manifest.digest
            patch.tensors = {  # the decoder does not say what was there before
                name: replace(patch.tensors[name], old_values=item.values) for name, item in undo.tensors.items()
            }
            patches.append(patch)
    return Patch.fold(patches)


def state_along(chain: Chain, route: Route, phases: Phases) -> dict[str, Tensor]:
    """The whole state at the end of ``route``, which begins with an anchor."""
    assert route.anchor is not None
    state = fetch_anchor(chain, route.anchor)
    phases.end("fetch")
    found = StateDigest.of(state).hexdigest()
    if found != route.anchor.digest:
        raise ChainError(
            f"the anchor of version {route.anchor.version} has digest {found}, its manifest says "
            f"{route.anchor.digest}; it was made or changed by something else: run `pulse-kernels fsck`"
        )
    phases.end("decode")
    with closing(chain.fetch_ahead(route.patches)) as fetched:
        for manifest, parts in fetched:
            phases.end("fetch")
            found = advance(state, found, manifest, parts)
            phases.end("decode")
    return state


def advance(state: dict[str, Tensor], digest: str, manifest: Manifest, parts: Sequence[memoryview]) -> str:
    """Bring ``state``, which has ``digest``, to the version of ``manifest`` in place; returns the new digest."""
    try:
        return decoded(manifest, parts, state, digest, None).apply_(state, current_digest=digest)
    except (VerificationError, BaseMismatchError, IndexError) as error:
        raise ChainError(f"version {manifest.version}: {error}") from error


def decoded(
    manifest: Manifest, parts: Sequence[memoryview], base: Mapping[str, Tensor], digest: str, pending: Patch | None
) -> Patch:
    """The patch of one version; ChainError where its parts are no patch of it."""
    where = f"version {manifest.version}"
    patches = []
    for part, data in zip(manifest.patch, parts, strict=True):
        try:
            header = Patch.peek(data)
            said = header.base_digest, header.digest
            if not ((manifest.base_digest, manifest.digest) == said or said == ("", "")):
                raise ChainError(
                    f"{where}: {part.key} leads from digest {said[0]} to {said[1]}, the manifest says from "
                    f"{manifest.base_digest} to {manifest.digest}; run `pulse-kernels fsck`"
                )
            if header.added or header.removed:
                raise ChainError(
                    f"{where}: {part.key} adds, replaces or removes tensors, but a chain keeps its own; run "
                    "`pulse-kernels fsck`"
                )
            patches.append(Patch.from_bytes(data, base, current_digest=digest, pending=pending))
        except (PatchFormatError, BaseMismatchError) as error:  # the base is the manifest's, so it is the part
            raise ChainError(f"{where}: {part.key}: {error}; run `pulse-kernels fsck`") from error
    patch = merge_parts(patches, where)
    patch.base_version, patch.version = manifest.base_version, manifest.version
    patch.base_digest, patch.digest = manifest.base_digest or "", manifest.digest
    return patch
