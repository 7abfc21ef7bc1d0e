"""Manifests: their exact bytes and signature, the keys of versions, and being the one that was meant."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifest_samples import (
    ANCHOR,
    CHAIN,
    FIELDS,
    KEY,
    ONLY_ANCHOR,
    OTHER,
    PATCH,
    PLAIN_BYTES,
    PUBLIC,
    SIGNATURE,
    SIGNED_BYTES,
    content_of,
    sign,
)

from pulse_kernels.errors import ChainError
from pulse_kernels.state import StateDigest
from pulse_kernels.sync import manifest as module
from pulse_kernels.sync.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_PARTS,
    Manifest,
    Part,
    anchor_folder,
    manifest_key,
    patch_folder,
    version_of,
)

# -- exact bytes


def test_exact_bytes() -> None:
    assert PATCH.to_bytes() == PLAIN_BYTES
    assert Manifest.from_bytes(PLAIN_BYTES) == PATCH
    assert len(PLAIN_BYTES) == 571
    assert hashlib.sha256(PLAIN_BYTES).hexdigest() == "3b677d2e3f71518599f1c3ada7e8833443c4021a1a3395bca7e8585ff2c00b48"


def test_exact_signature() -> None:
    assert PATCH.to_bytes(KEY) == SIGNED_BYTES == sign(content_of())
    KEY.public_key().verify(
        bytes.fromhex(content_of(SIGNED_BYTES)["signature"]["value"]), b"pulse-kernels manifest v1\n" + PLAIN_BYTES
    )


def test_the_specification_has_these_bytes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sync-format.md").read_text(encoding="utf-8")
    for piece in (PLAIN_BYTES.decode(), SIGNATURE, hashlib.sha256(PLAIN_BYTES).hexdigest()):
        assert f"\n{piece}\n" in text or f"`{piece}`" in text
    for name in [*FIELDS, "format", "signature", *content_of()["patch"][0]]:
        assert f"\n| `{name}` |" in text
    assert f"{MAX_MANIFEST_BYTES:,}" in text
    assert f"{MAX_PARTS:,} parts" in text


@pytest.mark.parametrize("manifest", [PATCH, ANCHOR, ONLY_ANCHOR], ids=["patch", "anchor and patch", "anchor"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_round_trip(manifest: Manifest, kind: Any) -> None:
    assert Manifest.from_bytes(kind(manifest.to_bytes()), version=121, chain=CHAIN) == manifest
    signed = kind(manifest.to_bytes(KEY))
    assert Manifest.from_bytes(signed, version=121, chain=CHAIN, trust=[OTHER.public_key(), PUBLIC]) == manifest
    assert Manifest.from_bytes(signed, version=121, chain=CHAIN) == manifest


digests = st.binary(min_size=16, max_size=16).map(bytes.hex)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
names = st.text(min_size=1, max_size=20).filter(lambda name: module.name_problem(name) is None)
shown = st.text(max_size=30).filter(lambda text: not module._UNSHOWN.search(text))
file_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,5}(/[A-Za-z0-9][A-Za-z0-9_-]{0,5})?\.st", fullmatch=True)
identifiers = st.from_regex(r"[a-z][a-z0-9_-]{0,63}", fullmatch=True)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    version = draw(st.integers(0, 2**53 - 1) | st.integers(0, 3))
    patched = version > 0 and draw(st.booleans())

    def parts(folder: str) -> tuple[Part, ...]:
        files = draw(st.lists(file_names, min_size=1, max_size=3, unique=True))
        return tuple(Part(f"{folder}/{name}", draw(st.integers(1, 2**53 - 1)), draw(hashes)) for name in files)

    patch = parts(patch_folder(version)) if patched else ()
    anchor = parts(anchor_folder(version)) if not patched or draw(st.booleans()) else ()
    tensors = draw(st.dictionaries(names, digests, max_size=4))
    total = StateDigest()
    for digest in tensors.values():
        total.merge(StateDigest.fromhex(digest))
    return Manifest(
        chain=draw(digests),
        version=version,
        kind="anchor" if anchor else "patch",
        base_version=draw(st.integers(0, version - 1)) if patched else None,
        base_digest=draw(digests) if patched else None,
        digest=total.hexdigest(),
        tensor_digests=tensors,
        anchor=anchor,
        patch=patch,
        profile=draw(identifiers),
        time=draw(st.integers(0, 2**53 - 1)),
        facts=draw(st.dictionaries(identifiers, shown | st.integers(1 - 2**53, 2**53 - 1), max_size=4)),
    )


@given(manifests(), st.booleans())
def test_round_trip_of_any(manifest: Manifest, signed: bool) -> None:
    data = manifest.to_bytes(KEY if signed else None)
    read = Manifest.from_bytes(data, version=manifest.version, chain=manifest.chain, trust=[PUBLIC] if signed else None)
    assert read == manifest
    assert read.to_bytes(KEY if signed else None) == data


# -- keys


def test_keys() -> None:
    assert manifest_key(121) == "manifests/00000121.json"
    assert anchor_folder(120) == "anchors/00000120"
    assert patch_folder(0) == "patches/00000000"
    assert manifest_key(10**8 - 1) == "manifests/99999999.json"
    assert manifest_key(10**8) == "manifests/100000000.json"
    assert manifest_key(2**53 - 1) == "manifests/9007199254740991.json"


@given(st.integers(0, 2**53 - 1))
def test_version_of_keys(version: int) -> None:
    assert version_of(manifest_key(version)) == version


@pytest.mark.parametrize(
    "key",
    [
        "manifests/121.json",
        "manifests/000000121.json",
        "manifests/0000000000000121.json",
        "manifests/9007199254740992.json",
        "manifests/99999999999999999.json",
        "manifests/00000121.json\n",
        "manifests/00000121.json/",
        "manifests/00000121.JSON",
        "manifests/0000012a.json",
        "manifests/+0000121.json",
        "manifests/0000_121.json",
        "manifests/0000012\u0661.json",
        "run/manifests/00000121.json",
        "00000121.json",
        "patches/00000121.json",
        "manifests/00000121.json.tmp",
        "",
    ],
)
def test_keys_that_are_no_manifest(key: str) -> None:
    assert version_of(key) is None


@pytest.mark.parametrize("version", [-1, 2**53, True, 1.0, "1", None])
@pytest.mark.parametrize("function", [manifest_key, anchor_folder, patch_folder])
def test_versions_without_key(version: Any, function: Any) -> None:
    with pytest.raises(ValueError, match=r"expected an integer from 0 to 2\^53 - 1"):
        function(version)


# -- the one that was meant


@pytest.mark.parametrize("data", [PLAIN_BYTES, SIGNED_BYTES])
def test_replays_under_another_name_are_refused(data: bytes) -> None:
    trust = [PUBLIC] if data == SIGNED_BYTES else None
    with pytest.raises(ChainError, match=r"manifests/00000122\.json is that of version 121.*after 122") as caught:
        Manifest.from_bytes(data, version=122, chain=CHAIN, trust=trust)
    assert type(caught.value) is ChainError


@pytest.mark.parametrize("data", [PLAIN_BYTES, SIGNED_BYTES])
def test_other_chains_are_refused(data: bytes) -> None:
    trust = [PUBLIC] if data == SIGNED_BYTES else None
    with pytest.raises(ChainError, match=f"belongs to chain {CHAIN}, expected '{'f' * 32}'.*a prefix of its own"):
        Manifest.from_bytes(data, version=121, chain="f" * 32, trust=trust)
