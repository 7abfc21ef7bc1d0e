"""A manifest has one spelling: other spellings of the same JSON, and what is no manifest, are refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifest_samples import KEY, PATCH, PLAIN_BYTES, PUBLIC, content_of, encode, spelled

from pulse_kernels.errors import ChainError
from pulse_kernels.sync import manifest as module
from pulse_kernels.sync.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
)

# -- one spelling alone


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
