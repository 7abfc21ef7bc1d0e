"""What belongs to a model beside its weights (config, tokenizer, ...): it travels with anchors, so that they load.

    anchors/00000120/config.json, ...          the files, under their own names, where loaders look for them
    anchors/00000120/pulse-aux-<16 hex>.json   their listing: names, sizes, BLAKE3; its own BLAKE3 is the manifest's
                                               fact "aux", which a signature covers

Manifests name neither as parts: a follower that lacks them still has the weights.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pulse_kernels.checkpoint.folder import auxiliary_files, is_auxiliary
from pulse_kernels.checkpoint.validate import parse_json
from pulse_kernels.errors import ChainError, CheckpointError
from pulse_kernels.sync.manifest import Manifest, anchor_folder
from pulse_kernels.sync.store import AlreadyExists, Store

AUX_FACT = "aux"
MAX_AUX_FILES = 256
MAX_AUX_BYTES = 64 << 20  # of one file; what is larger stays behind

_MAX_LISTING_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")
_MAX_NAME_CHARS = 256
_LISTING = "pulse-aux-"
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class AuxFiles:
    """Files sent with an anchor. late: what another attempt's files were in the way of, to be put once it is ours."""

    blake3: str
    late: tuple[tuple[str, bytes], ...]


def send_aux(store: Store, folder: str | os.PathLike[str], version: int) -> AuxFiles | None:
    """Send the files of ``folder`` that belong to a model and whose names a store takes; None where there are none."""
    from blake3 import blake3

    rows: list[dict[str, Any]] = []
    late: list[tuple[str, bytes]] = []
    for name in auxiliary_files(Path(folder)):
        if not _fits(name) or len(rows) == MAX_AUX_FILES:
            continue
        try:
            if os.path.getsize(Path(folder, name)) > MAX_AUX_BYTES:
                continue
            data = Path(folder, name).read_bytes()
        except OSError:  # taken away meanwhile
            continue
        key = f"{anchor_folder(version)}/{name}"
        try:
            store.create(key, data)
        except AlreadyExists:  # left by an attempt that failed, or another publisher's: the commit decides whose it is
            late.append((key, data))
        rows.append({"blake3": blake3(data).hexdigest(), "bytes": len(data), "name": name})
    if not rows:
        return None
    listing = json.dumps({"files": rows, "format": 1}, sort_keys=True, separators=(",", ":")).encode()
    digest = blake3(listing).hexdigest()
    with suppress(AlreadyExists):
        store.create(_listing_key(version, digest), listing)
    return AuxFiles(digest, tuple(late))


def fetch_aux(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """The files sent with an anchor, by their relative names; {} where none were. ChainError where one is not what the
    manifest's listing says, StoreError."""
    from blake3 import blake3

    digest = manifest.facts.get(AUX_FACT)
    if not manifest.anchor or not isinstance(digest, str) or not _HEX64.match(digest):
        return {}
    key = _listing_key(manifest.version, digest)
    listing = store.read(key, _MAX_LISTING_BYTES)
    if (found := blake3(listing).hexdigest()) != digest:
        raise ChainError(f"{key}: its BLAKE3 is {found}, the manifest says {digest}; it was damaged or replaced")
    files: dict[str, bytes] = {}
    for name, nbytes, expected in _rows(listing, key):
        data = bytes(store.get(f"{anchor_folder(manifest.version)}/{name}", nbytes))
        if (found := blake3(data).hexdigest()) != expected:
            raise ChainError(
                f"{anchor_folder(manifest.version)}/{name}: its BLAKE3 is {found}, the listing says {expected}; it was "
                "damaged or replaced"
            )
        files[name] = data
    return files


def _listing_key(version: int, digest: str) -> str:
    return f"{anchor_folder(version)}/{_LISTING}{digest[:16]}.json"


def _fits(name: str) -> bool:
    plain = len(name) <= _MAX_NAME_CHARS and ".." not in name and _NAME.match(name) is not None
    return plain and is_auxiliary(name) and not name.startswith(_LISTING)


def _rows(listing: bytes, key: str) -> list[tuple[str, int, str]]:
    try:
        content = parse_json(listing, key)
    except CheckpointError as error:
        raise ChainError(str(error)) from error
    rows = content.get("files") if isinstance(content, dict) and content.get("format") == 1 else None
    if not isinstance(rows, list) or len(rows) > MAX_AUX_FILES:
        raise ChainError(f"{key}: not a listing of up to {MAX_AUX_FILES} files")
    found = []
    for row in rows:
        if not isinstance(row, dict) or set(row) != {"blake3", "bytes", "name"}:
            raise ChainError(f"{key}: the row {row!r:.120}, expected blake3, bytes and name")
        name, nbytes, digest = row["name"], row["bytes"], row["blake3"]
        if not (isinstance(name, str) and _fits(name)):
            raise ChainError(f"{key}: the name {name!r:.120} is refused")
        if not (type(nbytes) is int and 0 <= nbytes <= MAX_AUX_BYTES):
            raise ChainError(f"{key}: {name} has {nbytes!r:.40} bytes, expected up to {MAX_AUX_BYTES}")
        if not (isinstance(digest, str) and _HEX64.match(digest)):
            raise ChainError(f"{key}: the BLAKE3 of {name} is {digest!r:.80}, expected 64 hexadecimal digits")
        found.append((name, nbytes, digest))
    return found
