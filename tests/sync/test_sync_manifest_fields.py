"""Every field of a manifest: an example of everything that is refused, on reading and on making."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from manifest_samples import ANCHOR, FIELDS, ONLY_ANCHOR, PATCH, PUBLIC, content_of, encode, sign

from pulse_kernels.errors import ChainError
from pulse_kernels.sync.manifest import (
    Manifest,
    Part,
    anchor_folder,
    patch_folder,
)

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
    *(
        ("facts", {"a": value}, "facts: a is")
        for value in ("\n", "\x1b[2J", "\u202e", "\u2028", "\x7f", "\x9b", "\ufeff")
    ),
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


def test_text_that_is_not_unicode_is_refused_on_making() -> None:
    for changes in ({"facts": {"a": "\ud800"}}, {"tensor_digests": {"\ud800": "0" * 32}}):
        with pytest.raises(ValueError, match=r"facts: a is|not Unicode"):
            Manifest(**{**FIELDS, **changes})


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
