"""Manifests: their exact bytes and signature, one spelling alone, and an example of everything that is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tracemalloc
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_kernels.errors import ChainError, TrustError
from pulse_kernels.state import StateDigest
from pulse_kernels.sync import manifest as module
from pulse_kernels.sync.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    anchor_folder,
    manifest_key,
    patch_folder,
    version_of,
)

CHAIN = "0123456789abcdef" * 2
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8")
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
FIELDS: dict[str, Any] = {
    "chain": CHAIN,
    "version": 121,
    "kind": "patch",
    "base_version": 120,
    "base_digest": "00112233445566778899aabbccddeeff",
    # Each half is a sum of its own, modulo 2^64.
    "digest": "00000000000000030000000000000001",
    "tensor_digests": {
        "model.norm.weight": "0000000000000001ffffffffffffffff",
        "lm_head.weight": "00000000000000020000000000000002",
    },
    "anchor": (),
    "patch": (Part("patches/00000121/00000.safetensors", 4711, "ab" * 32),),
    "profile": "balanced",
    "time": 1764685517,
    "facts": {"num_changed": 12, "note": 'a "grün" run\\'},
}
PATCH = Manifest(**FIELDS)
ANCHOR_FIELDS = {
    **FIELDS,
    "kind": "anchor",
    "anchor": tuple(Part(f"anchors/00000121/model-{k}.safetensors", 10**9 + k, "cd" * 32) for k in (1, 2)),
}
ANCHOR = Manifest(**ANCHOR_FIELDS)
ONLY_ANCHOR = Manifest(**{**ANCHOR_FIELDS, "patch": (), "base_version": None, "base_digest": None})

FRONT = (
    '{"anchor":[],"base_digest":"00112233445566778899aabbccddeeff","base_version":120,"chain":"0123456789abcdef01234567'
    '89abcdef","digest":"00000000000000030000000000000001","facts":{"note":"a \\"grün\\" run\\\\","num_changed":12},'
    '"format":1,"kind":"patch","patch":[{"blake3":"abababababababababababababababababababababababababababababababab","bytes'
    '":4711,"key":"patches/00000121/00000.safetensors"}],"profile":"balanced",'
)
SIGNATURE = (
    '"signature":{"key":"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8","value":"0ef79bf3b3a2063243b'
    'c3589324a98f40d4ce2010e6cd3d8606be27092d34f7ef21847bc5c08f9127f7e361eba14289273f69a4ad655d7b7834d6ee08b197709"},'
)
BACK = (
    '"tensor_digests":{"lm_head.weight":"00000000000000020000000000000002","model.norm.weight":"0000000000000001fffffff'
    'fffffffff"},"time":1764685517,"version":121}'
)
PLAIN_BYTES = (FRONT + BACK).encode()
SIGNED_BYTES = (FRONT + SIGNATURE + BACK).encode()


def content_of(data: bytes = PLAIN_BYTES) -> dict[str, Any]:
    return json.loads(data)


def encode(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def sign(content: dict[str, Any], key: Any = KEY) -> bytes:
    """Signed bytes of any object, written from docs/sync-format.md and not with the package."""
    value = key.sign(b"pulse-kernels manifest v1\n" + encode(content)).hex()
    public = key.public_key().public_bytes_raw().hex()
    return encode({**content, "signature": {"key": public, "value": value}})


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
printable = st.text(max_size=30).filter(str.isprintable)
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
        facts=draw(st.dictionaries(identifiers, printable | st.integers(1 - 2**53, 2**53 - 1), max_size=4)),
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


# -- what every field must be. As JSON values; (field, value, message)

PART = {"blake3": "ab" * 32, "bytes": 4711, "key": "patches/00000121/00000.safetensors"}
FOREIGN_ZERO = "0" * 31 + "\u0660"


def part(**changes: Any) -> list[dict[str, Any]]:
    return [{**PART, **changes}]


def keyed(key: Any) -> list[dict[str, Any]]:
    return part(key=key)


BAD_VALUES = [
    *(("chain", value, "chain is .*expected 32 lower-case") for value in (None, 1, "", "0" * 31, "0" * 33, "A" * 32)),
    ("chain", FOREIGN_ZERO, "chain is"),
    ("chain", "0" * 32 + "\n", "chain is"),
    *(
        ("digest", value, "digest is .*expected 32")
        for value in (None, 0, "00000000000000030000000000000001 ", "F" * 32)
    ),
    *(("base_digest", value, "base_digest is .*expected 32") for value in (0, "", "0" * 64, FOREIGN_ZERO)),
    *(("version", value, "version is") for value in (None, True, 121.0, "121", -1, 2**53)),
    *(("base_version", value, "base_version is .*below version 121") for value in (121, 122, -1, True, 120.0, "120")),
    *(
        ("kind", value, "kind is .*expected 'anchor' or 'patch'")
        for value in (None, 1, "", "delta", ["patch"], "Patch")
    ),
    *(("time", value, "time is .*expected whole seconds") for value in (None, -1, 1.5, True, "0", 2**53)),
    *(("profile", value, "profile is") for value in (None, 1, "", "a b", "x" * 65, "../x", "Balanced", "x\n")),
    *(("anchor", value, "anchor is .*expected a list") for value in (None, {}, "anchors", 1)),
    *(("patch", [value], "expected an object with blake3, bytes and key") for value in (None, 1, "x", [], {}, [PART])),
    ("patch", part(size=1), "expected an object with blake3, bytes and key"),
    *(("patch", part(bytes=value), "bytes of .*from 1 to 2") for value in (0, -1, True, 1.0, "1", None, 2**53)),
    *(("patch", part(blake3=value), "blake3 of .*expected 64") for value in (None, 1, "", "ab" * 16, "AB" * 32)),
    ("patch", part(blake3="ab" * 32 + "\n"), "blake3 of"),
    *(("patch", keyed(value), "part key .* is refused") for value in (None, 1, [], "", "/patches/00000121/x")),
    *(
        ("patch", keyed(f"patches/00000121/{name}"), "part key .* is refused")
        for name in ("", "../00000120/x", ".x", "./x")
    ),
    *(
        ("patch", keyed(f"patches/00000121/{name}"), "is refused")
        for name in ("a..b", "a//b", "a\\b", "a b", "ä", "x\n")
    ),
    ("patch", keyed("patches/00000121/" + "x" * 496), "up to 512"),
    *(
        ("patch", keyed(f"{folder}x"), "is not in patches/00000121/")
        for folder in ("patches/00000120/", "patches/121/")
    ),
    *(("patch", keyed(f"{folder}x"), "is not in patches/0") for folder in ("anchors/00000121/", "patches/000001210/")),
    ("patch", keyed("x/patches/00000121/x"), "is not in patches/00000121/"),
    ("patch", keyed("patches/00000121"), "is not in patches/00000121/"),
    ("patch", [PART, PART], "occurs twice"),
    ("patch", [*keyed("patches/00000121/a"), *keyed("patches/00000121/a/b/c")], "is also a folder of"),
    ("anchor", [PART], "anchor: the part key .* is not in anchors/00000121/"),
    ("anchor", keyed("anchors/00000121/x"), "kind is 'patch', but there are 1 anchor parts"),
    ("patch", [], "kind is 'patch', but there are no patch parts"),
    ("kind", "anchor", "kind is 'anchor', but there are 0 anchor parts"),
    ("base_version", None, "base_version is None, but there are 1 patch parts"),
    ("base_digest", None, "base_digest is None, but there are 1 patch parts"),
    *(("tensor_digests", value, "tensor_digests is") for value in (None, [], "x")),
    *(("tensor_digests", {"w": value}, "the digest of tensor 'w'") for value in (None, 1, "", "A" * 32, "0" * 33)),
    ("tensor_digests", {}, "digest is 00000000000000030000000000000001, but tensor_digests add up to 0{32}"),
    ("tensor_digests", {"w": "00000000000000030000000000000002"}, "add up to 00000000000000030000000000000002"),
    # A carry out of the second half does not go into the first.
    ("digest", "00000000000000040000000000000001", "add up to 00000000000000030000000000000001"),
    ("tensor_digests", {"": "0" * 32}, "0 bytes, expected 1 to 4096"),
    ("tensor_digests", {"x" * 4097: "0" * 32}, "4097 bytes"),
    *(
        ("tensor_digests", {name: "0" * 32}, "tensor name .* is refused")
        for name in ("../x", "/x", "C:x", "a\\b", "a\n")
    ),
    ("tensor_digests", {"__metadata__": "0" * 32}, "reserved"),
    *(("facts", value, "facts is") for value in (None, [], {f"f{k}": k for k in range(65)})),
    *(("facts", {name: 1}, "expected a short identifier") for name in ("", "A", "a b", "x" * 65, "ä", "1", "a\n")),
    *(("facts", {"a": value}, "facts: a is") for value in (None, True, 1.5, [], {}, 2**53, -(2**53), "x" * 257)),
    *(("facts", {"a": value}, "facts: a is") for value in ("\n", "\x1b[2J", "\u202e", "\u2028", "\x7f")),
]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_bad_values_are_refused_on_reading(name: str, value: Any, message: str, signed: bool) -> None:
    content = {**content_of(), name: value}
    data = sign(content) if signed else encode(content)
    with pytest.raises(ChainError, match=rf"(?s)^the manifest manifests/00000121\.json: .*{message}") as caught:
        Manifest.from_bytes(data, version=121, trust=[PUBLIC] if signed else None)
    assert type(caught.value) is ChainError
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_bad_values_are_refused_on_making(name: str, value: Any, message: str) -> None:
    if name in ("anchor", "patch"):
        if not isinstance(value, list) or not all(isinstance(item, dict) and set(item) == set(PART) for item in value):
            message = "expected a tuple of Part"
        else:
            value = tuple(Part(item["key"], item["bytes"], item["blake3"]) for item in value)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Manifest(**{**FIELDS, name: value})


@pytest.mark.parametrize("name", ["base_version", "base_digest"])
def test_an_anchor_without_patch_has_no_base(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, but there are 0 patch parts: both or neither"):
        dataclasses.replace(ONLY_ANCHOR, **{name: FIELDS[name]})


def test_the_number_of_parts_is_bounded() -> None:
    def parts(folder: str, count: int) -> tuple[Part, ...]:
        return tuple(Part(f"{folder}/{k}", 1, "0" * 64) for k in range(count))

    full = dataclasses.replace(ANCHOR, anchor=parts(anchor_folder(121), 60_000), patch=parts(patch_folder(121), 40_000))
    assert Manifest.from_bytes(full.to_bytes()) == full
    with pytest.raises(ValueError, match="over 100000 parts"):
        dataclasses.replace(full, patch=parts(patch_folder(121), 40_001))


def test_fields_made_bad_later_are_not_written() -> None:
    manifest = dataclasses.replace(PATCH, tensor_digests=dict(PATCH.tensor_digests))
    manifest.tensor_digests["w"] = "0" * 31 + "1"
    with pytest.raises(ValueError, match="add up to"):
        manifest.to_bytes()


@pytest.mark.parametrize("name", [*FIELDS, "format"])
def test_missing_fields_are_refused(name: str) -> None:
    content = content_of()
    del content[name]
    with pytest.raises(ChainError, match="format None, expected 1" if name == "format" else f"'{name}'.* missing"):
        Manifest.from_bytes(encode(content))


@pytest.mark.parametrize("value", [0, 2, True, 1.0, "1", None])
def test_other_formats_are_refused(value: Any) -> None:
    data = sign({**content_of(), "format": value, "news": 1})
    with pytest.raises(ChainError, match=r"format .*, expected 1; a newer pulse_kernels may read it"):
        Manifest.from_bytes(data, trust=[PUBLIC])


def test_unknown_fields_are_refused() -> None:
    data = sign({**content_of(), "expires": 1})
    with pytest.raises(ChainError, match=r"unknown fields \['expires'\]; a newer pulse_kernels may read it"):
        Manifest.from_bytes(data, trust=[PUBLIC])


# -- one spelling alone


def spelled(old: str, new: str) -> bytes:
    text = PLAIN_BYTES.decode()
    assert text.count(old) == 1
    return text.replace(old, new).encode()


OTHER_SPELLINGS = {
    "newline at the end": PLAIN_BYTES + b"\n",
    "space in front": b" " + PLAIN_BYTES,
    "space after a colon": spelled('"format":1', '"format": 1'),
    "space after a comma": spelled(',"format"', ', "format"'),
    "escaped letter": spelled('"patch","patch"', '"p\\u0061tch","patch"'),
    "escaped key": spelled('"format"', '"\\u0066ormat"'),
    "escaped umlaut": spelled("grün", "gr\\u00fcn"),
    "escaped slash": spelled("patches/00000121/0", "patches\\/00000121/0"),
    "escape in upper case": spelled('a \\"gr', "a \\u0022gr"),
    "keys in another order": encode(dict(reversed(content_of().items()))).replace(
        b'"time":1764685517,"version":121', b'"version":121,"time":1764685517'
    ),
    "order of a part's keys": spelled('"bytes":4711,"key":"patches/00000121/00000.safetensors"', "")
    .replace(b'"blake3":"abab', b'"key":"patches/00000121/00000.safetensors","bytes":4711,"blake3":"abab')
    .replace(b'ab",}', b'ab"}'),
    "order of tensors": PATCH.to_bytes().replace(
        b'"lm_head.weight":"00000000000000020000000000000002","model.norm.weight":"0000000000000001ffffffffffffffff"',
        b'"model.norm.weight":"0000000000000001ffffffffffffffff","lm_head.weight":"00000000000000020000000000000002"',
    ),
    "exponent": spelled("4711", "4711e0"),
    "fraction": spelled("4711", "4711.0"),
    "minus zero": encode({**content_of(), "facts": {"a": 0}}).replace(b'"a":0', b'"a":-0'),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN_BYTES,
    "UTF-16": PLAIN_BYTES.decode().encode("utf-16"),
    "key twice": spelled('"format":1', '"format":1,"format":1'),
    "tensor twice": spelled('"lm_head', '"lm_head.weight":"00000000000000020000000000000002","lm_head'),
    "leading zero": spelled("4711", "04711"),
    "not UTF-8": PLAIN_BYTES.replace("ü".encode(), b"\xfc"),
    "overlong UTF-8": PLAIN_BYTES.replace(b"run", b"r\xc1\xb5n"),
    "two objects": PLAIN_BYTES * 2,
}


@pytest.mark.parametrize("name", OTHER_SPELLINGS)
def test_other_spellings_are_refused(name: str) -> None:
    assert OTHER_SPELLINGS[name] != PLAIN_BYTES
    with pytest.raises(ChainError, match="the manifest"):
        Manifest.from_bytes(OTHER_SPELLINGS[name])


@pytest.mark.parametrize(
    "name",
    ["space after a colon", "escaped umlaut", "keys in another order", "order of a part's keys", "order of tensors"],
)
def test_other_spellings_are_the_same_json_and_refused_for_their_form(name: str) -> None:
    assert content_of(OTHER_SPELLINGS[name]) == content_of()
    with pytest.raises(ChainError, match="not in canonical form"):
        Manifest.from_bytes(OTHER_SPELLINGS[name])


def test_other_spellings_are_refused_when_signed() -> None:
    """A key holder who writes another form is told so: a signature does not make it readable."""
    body = OTHER_SPELLINGS["space after a colon"]
    value = KEY.sign(b"pulse-kernels manifest v1\n" + body).hex()
    field = f'"signature":{{"key":"{PUBLIC.hex()}","value":"{value}"}},"tensor_digests"'
    with pytest.raises(ChainError, match="not in canonical form"):
        Manifest.from_bytes(body.replace(b'"tensor_digests"', field.encode()), trust=[PUBLIC])


NOT_MANIFESTS = {
    "nothing": b"",
    "half of one": PLAIN_BYTES[:300],
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "an empty object": b"{}",
    "zeros": bytes(571),
    "deep": b"[" * 100_000,
    "deep and closed": b'{"format":1,"facts":' + b"[" * 900 + b"]" * 900 + b"}",
    "NaN": spelled("4711", "NaN"),
    "infinity": spelled("4711", "1e999"),
    "an endless number": spelled("4711", "1" * 5000),
    "a lone surrogate": spelled("grün", "gr\\ud800n"),
    "a lone surrogate in a name": spelled("lm_head", "lm\\udc00head"),
    "a lone surrogate in UTF-8": PLAIN_BYTES.replace("ü".encode(), b"\xed\xa0\x80"),
}


@pytest.mark.parametrize("trust", [None, [PUBLIC]])
@pytest.mark.parametrize("name", NOT_MANIFESTS)
def test_what_is_no_manifest_is_refused(name: str, trust: Any) -> None:
    with pytest.raises(ChainError, match=r"the manifest manifests/00000121\.json") as caught:
        Manifest.from_bytes(NOT_MANIFESTS[name], version=121, trust=trust)
    assert len(str(caught.value)) < 700


def test_large_ones_are_refused_before_they_are_looked_at() -> None:
    buffer = memoryview(bytearray(MAX_MANIFEST_BYTES + 1))
    tracemalloc.start()
    try:
        with pytest.raises(ChainError, match="has 67108865 bytes, expected up to 67108864"):
            Manifest.from_bytes(buffer, trust=[PUBLIC])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_large_ones_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", len(PLAIN_BYTES))
    assert PATCH.to_bytes() == PLAIN_BYTES
    with pytest.raises(ValueError, match=r"version 121 takes 797 bytes for 2 tensors and 1 parts, expected up to 571"):
        PATCH.to_bytes(KEY)


# -- signatures


def test_any_altered_byte_is_refused() -> None:
    for position in range(len(SIGNED_BYTES)):
        for mask in (0x01, 0x20, 0x80):
            data = bytearray(SIGNED_BYTES)
            data[position] ^= mask
            with pytest.raises(TrustError):
                Manifest.from_bytes(data, trust=[PUBLIC])


def test_any_lost_or_added_byte_is_refused() -> None:
    for position in range(len(SIGNED_BYTES)):
        for data in (
            SIGNED_BYTES[:position],
            SIGNED_BYTES[:position] + SIGNED_BYTES[position + 1 :],
            SIGNED_BYTES[:position] + b" " + SIGNED_BYTES[position:],
        ):
            with pytest.raises(TrustError):
                Manifest.from_bytes(data, trust=[PUBLIC])


def test_unsigned_ones_are_refused_where_keys_are_trusted() -> None:
    with pytest.raises(TrustError, match=r"is not signed.*expected one of 03a107bf\.\.\.31b8.*trust=None"):
        Manifest.from_bytes(PLAIN_BYTES, trust=[PUBLIC])


def test_foreign_signers_are_refused() -> None:
    foreign = OTHER.public_key().public_bytes_raw().hex()
    with pytest.raises(TrustError, match=rf"signed by {foreign[:8]}\.\.\..*expected one of 03a107bf\.\.\.31b8"):
        Manifest.from_bytes(PATCH.to_bytes(OTHER), trust=[PUBLIC])


def test_a_trusted_name_on_a_foreign_signature_is_refused() -> None:
    foreign = OTHER.public_key().public_bytes_raw().hex().encode()
    with pytest.raises(TrustError, match=r"the signature by 03a107bf\.\.\.31b8 is wrong"):
        Manifest.from_bytes(PATCH.to_bytes(OTHER).replace(foreign, PUBLIC.hex().encode()), trust=[PUBLIC])


def test_a_signature_of_another_version_is_refused() -> None:
    signature = content_of(dataclasses.replace(PATCH, time=0).to_bytes(KEY))["signature"]
    with pytest.raises(TrustError, match="altered after it was signed"):
        Manifest.from_bytes(encode({**content_of(), "signature": signature}), trust=[PUBLIC])


def test_signed_text_of_other_kinds_is_no_manifest() -> None:
    """Without the prefix the same key's signatures under other things could be passed off as a manifest's."""
    value = {"key": PUBLIC.hex(), "value": KEY.sign(PLAIN_BYTES).hex()}
    with pytest.raises(TrustError, match="is wrong"):
        Manifest.from_bytes(encode({**content_of(), "signature": value}), trust=[PUBLIC])


def test_a_signature_elsewhere_is_none() -> None:
    """Verified before parsing, so it must not matter where in the bytes something like a signature turns up."""
    content = content_of()
    value = KEY.sign(b"pulse-kernels manifest v1\n" + encode({**content, "facts": {"z": 1}})).hex()
    hidden = encode({**content, "facts": {"signature": {"key": PUBLIC.hex(), "value": value}, "z": 1}})
    with pytest.raises(ChainError, match="the signature is not a field of its own"):
        Manifest.from_bytes(hidden, trust=[PUBLIC])
    twice = encode({**content, "facts": {"signature": {"key": PUBLIC.hex(), "value": value}, "z": 1}, "signature": 1})
    with pytest.raises(ChainError):
        Manifest.from_bytes(twice, trust=[PUBLIC])
    both = sign({**content, "facts": {"signature": {"key": PUBLIC.hex(), "value": value}, "z": 1}})
    with pytest.raises(TrustError, match="2 signatures found"):
        Manifest.from_bytes(both, trust=[PUBLIC])
    quoted = dataclasses.replace(PATCH, facts={"note": SIGNATURE[:256]})
    assert Manifest.from_bytes(quoted.to_bytes(KEY), trust=[PUBLIC]) == quoted


GOOD = {"key": "03" * 32, "value": "04" * 64}
BAD_SIGNATURES = [
    None,
    1,
    "03" * 32,
    [],
    {},
    {"key": GOOD["key"]},
    {**GOOD, "more": 1},
    {**GOOD, "key": None},
    {**GOOD, "key": "03" * 31},
    {**GOOD, "key": "0A" * 32},
    {**GOOD, "value": 1},
    {**GOOD, "value": "04" * 63},
    {**GOOD, "value": "0A" * 64},
]


@pytest.mark.parametrize("value", BAD_SIGNATURES)
def test_signatures_must_be_well_formed(value: Any) -> None:
    data = encode({**content_of(), "signature": value})
    with pytest.raises(ChainError, match="signature") as caught:
        Manifest.from_bytes(data)
    assert type(caught.value) is ChainError
    with pytest.raises(TrustError, match="is not signed, or damaged"):
        Manifest.from_bytes(data, trust=[PUBLIC])


def test_without_trust_signatures_are_not_verified() -> None:
    assert Manifest.from_bytes(encode({**content_of(), "signature": GOOD})) == PATCH


@pytest.mark.parametrize(("trust", "error"), [([], ValueError), (PUBLIC, TypeError), (["x"], OSError)])
def test_trust_itself_is_checked(trust: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Manifest.from_bytes(SIGNED_BYTES, trust=trust)


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


@settings(max_examples=200)
@given(st.data())
def test_garbage_gives_our_errors_alone(data: st.DataObject) -> None:
    """Whatever is put in the place of some bytes: a ChainError, or a manifest that says the very same bytes."""
    start = data.draw(st.integers(0, len(PLAIN_BYTES)))
    end = data.draw(st.integers(start, min(start + 40, len(PLAIN_BYTES))))
    pieces = st.binary(max_size=10) | st.sampled_from([b"", b"null", b"[]", b"{}", b'"', b"1", b'"x":1,', b"\\ud800"])
    mutated = PLAIN_BYTES[:start] + data.draw(pieces) + PLAIN_BYTES[end:]
    try:
        manifest = Manifest.from_bytes(mutated)
    except ChainError:
        return
    assert manifest.to_bytes() == mutated
