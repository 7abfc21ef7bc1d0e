"""Hostile files. Each says what it tries; all end in PatchFormatError, naming tensor and field where there is one.

Most attackers here know the format: whatever they change, sizes, offsets and CRC-32s are made to fit again (forge.py),
so that it is the check meant for the lie that must find it.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import forge
import pytest
import torch
import zstandard
from codec_helpers import PROFILES, assert_same_patch, bits, changed_bits, random_bits
from forge import Forgery, Part
from safetensors.torch import save

import pulse_kernels as pk
from pulse_kernels.backends import reference

BASE = {
    "layer.weight": random_bits("F32", (10, 10), 1),
    "packed": random_bits("BF16", (600,), 2),
    "sparse": random_bits("I16", (70_000,), 3),
}


def _honest() -> Forgery:
    """A patch that uses every code; two segments in one tensor, two blocks in another, escapes in the third."""

    def segment(name: str, start: int, numel: int, positions: list[int], index_code: str, value_code: str) -> Part:
        flat = BASE[name].reshape(-1)[torch.tensor(positions)]
        new = changed_bits(flat, 1.0, 5)
        dtype = {"layer.weight": "F32", "packed": "BF16", "sparse": "I16"}[name]
        return forge.segment(dtype, start, numel, positions, bits(new), index_code, value_code, bits(flat))

    layer = [
        segment("layer.weight", 0, 50, [3, 4, 20, 49], "gaps8", "delta"),
        segment("layer.weight", 50, 50, [50, 99], "gaps8", "delta"),
    ]
    packed = [segment("packed", 0, 600, sorted(random.Random(1).sample(range(600), 300)), "packed", "raw")]
    sparse = [segment("sparse", 0, 70_000, [100, 1000, 66_900, 69_999], "gaps16", "planes")]
    bias = [forge.segment("U8", 0, 5, list(range(5)), [1, 2, 3, 4, 5], "all", "raw")]
    forgery = Forgery(
        [
            ["layer.weight", "F32", [10, 10], layer],
            ["packed", "BF16", [600], packed],
            ["sparse", "I16", [70_000], sparse],
        ],
        [["new.bias", "U8", [5], bias]],
    )
    forgery.fields["removed"] = ["gone"]
    return forgery


HONEST = _honest()


def honest() -> Forgery:
    return HONEST.copy()


def refused(data: bytes, *words: str, base: dict[str, torch.Tensor] | None = BASE) -> None:
    with pytest.raises(pk.PatchFormatError) as caught:
        pk.Patch.from_bytes(data, base)
    assert type(caught.value) is pk.PatchFormatError
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_the_honest_file_is_read() -> None:
    patch = pk.Patch.from_bytes(honest().build(), BASE)
    assert patch.tensors["layer.weight"].indices.tolist() == [3, 4, 20, 49, 50, 99]
    assert patch.tensors["sparse"].indices.tolist() == [100, 1000, 66_900, 69_999]
    assert patch.added["new.bias"].tolist() == [1, 2, 3, 4, 5]
    assert patch.removed == ("gone",)
    assert forge.from_header(honest().header(), honest().data()) == honest().build()


# ---- files that are something else -----------------------------------------------------------------------------------


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pulse", "x" * 100)
    return file.getvalue()


class _Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0" * 7, id="shorter than a length"),
        pytest.param(b"\0" * 8, id="a header of no bytes"),
        pytest.param(b"\0" * 1000, id="zeros"),
        pytest.param(b"\xff" * 1000, id="a header of 2^64 - 1 bytes"),
        pytest.param(random.Random(1).randbytes(5000), id="random"),
        pytest.param(struct.pack("<Q", 100_000_001) + b"{}", id="a header over the limit"),
        pytest.param(save({"w": torch.ones(5)}), id="an ordinary safetensors file"),
        pytest.param(save({"w": torch.ones(5)}, {"format": "pt"}), id="one with metadata"),
        pytest.param(save({}, {"pulse": "{}"}), id="one with an empty patch header"),
        pytest.param(pickle.dumps(_Exploit()), id="a pickle"),
        pytest.param(_zip(), id="a zip archive"),
        pytest.param(json.dumps(HONEST.header()).encode(), id="the header alone"),
        pytest.param(zstandard.ZstdCompressor().compress(HONEST.build()), id="a compressed patch"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(100), id="a picture"),
        pytest.param(HONEST.build()[8:], id="a patch without its first 8 bytes"),
    ],
)
def test_other_files(data: bytes) -> None:
    refused(data)
    with pytest.raises(pk.PatchFormatError):
        pk.Patch.peek(data)


def test_an_ordinary_safetensors_file_is_told_apart() -> None:
    refused(save({"w": torch.ones(5)}), "safetensors file, but no patch", "pulse-kernels diff")


# ---- damage ----------------------------------------------------------------------------------------------------------


def small_patch(profile: str) -> tuple[dict[str, torch.Tensor], bytes]:
    """A file of about 1 KB with every kind of stream of its profile, zstd frames among them."""
    old = {"w": torch.arange(300.0).bfloat16(), "v": torch.arange(8, dtype=torch.int32)}
    new = {"w": old["w"].clone(), "v": old["v"].clone(), "b": torch.arange(3.0)}
    new["w"][::3] *= 2
    new["v"][5] = -1
    data = pk.Patch.diff(old, new, base_version=1, version=2).to_bytes(profile)
    assert len(data) < 1500
    return old, data


@pytest.mark.parametrize("profile", PROFILES)
def test_truncation_at_every_length(profile: str) -> None:
    old, data = small_patch(profile)
    for size in range(len(data)):
        refused(data[:size], base=old)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("profile", PROFILES)
def test_every_flipped_bit(profile: str) -> None:
    """No bit of a file is free: each flip is found, whatever it hits."""
    old, data = small_patch(profile)
    damaged = bytearray(data)
    for k in range(8 * len(data)):
        damaged[k // 8] ^= 1 << k % 8
        with pytest.raises(pk.PatchFormatError):
            pk.Patch.from_bytes(damaged, old)
        damaged[k // 8] ^= 1 << k % 8
    assert damaged == data


@pytest.mark.parametrize("profile", PROFILES)
def test_every_byte_removed_or_doubled(profile: str) -> None:
    old, data = small_patch(profile)
    for k in range(0, len(data), 3):
        refused(data[:k] + data[k + 1 :], base=old)
        refused(data[:k] + data[k : k + 1] + data[k:], base=old)


@pytest.mark.parametrize("extra", [b"\0", b" ", b"x" * 1000, HONEST.build()])
def test_trailing_bytes(extra: bytes) -> None:
    refused(honest().build() + extra, "trailing bytes")


# ---- the outer header ------------------------------------------------------------------------------------------------


def _set(*path: Any) -> Callable[[Any], None]:
    """An edit: the last of ``path`` becomes the value under the keys before it."""
    *keys, last, value = path

    def edit(item: Any) -> None:
        for key in keys:
            item = item[key]
        item[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        pytest.param(lambda outer: outer.pop("0.0.i"), "list of streams", id="a stream is missing"),
        pytest.param(
            _set("9.0.v", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "streams", id="one too many"
        ),
        pytest.param(_set("0.0.i", "dtype", "I8"), "streams", id="another dtype"),
        pytest.param(_set("0.0.i", "shape", [4.0]), "streams", id="a size as a float"),
        pytest.param(_set("0.0.i", "shape", ["4"]), "streams", id="a size as text"),
        pytest.param(_set("0.0.i", "shape", [2, 2]), "streams", id="a matrix of bytes"),
        pytest.param(_set("0.0.i", "data_offsets", [False, 4]), "streams", id="an offset of false"),
        pytest.param(_set("0.0.i", "data_offsets", [1, 5]), "streams", id="overlapping streams"),
        pytest.param(_set("0.0.i", "data_offsets", [-4, 0]), "streams", id="a negative offset"),
        pytest.param(_set("0.0.i", "data_offsets", [2**64, 2**64 + 4]), "streams", id="an offset past 64 bits"),
        pytest.param(_set("0.0.i", "extra", 1), "streams", id="an unknown field of a stream"),
        pytest.param(_set("0.0.i", None), "streams", id="a stream of null"),
        pytest.param(_set("__metadata__", "extra", "x"), "streams", id="more metadata"),
        pytest.param(_set("__metadata__", "format", "pt"), "streams", id="another format"),
        pytest.param(lambda outer: outer["__metadata__"].pop("format"), "streams", id="no format"),
        pytest.param(lambda outer: outer["__metadata__"].pop("pulse_crc32"), "CRC-32", id="no CRC"),
        pytest.param(_set("__metadata__", "pulse_crc32", "00000000"), "CRC-32", id="another CRC"),
        pytest.param(_set("__metadata__", "pulse_crc32", 5), "CRC-32", id="a CRC as a number"),
        pytest.param(_set("__metadata__", "pulse", None), "no patch", id="a patch header of null"),
        pytest.param(_set("__metadata__", "pulse", {}), "no patch", id="a patch header that is not text"),
        pytest.param(_set("__metadata__", "pulse", ""), "CRC-32", id="an empty patch header"),
        pytest.param(_set("__metadata__", []), "no patch", id="metadata as a list"),
        pytest.param(lambda outer: outer.pop("__metadata__"), "no patch", id="no metadata"),
    ],
)
def test_outer_header(edit: Callable[[Any], None], word: str) -> None:
    outer = honest().outer()
    edit(outer)
    refused(forge.file(outer, honest().data()), word)


def test_stream_names_with_leading_zeros() -> None:
    outer = honest().outer()
    outer["00.0.i"] = outer.pop("0.0.i")
    refused(forge.file(outer, honest().data()), "streams")


def test_streams_that_change_places() -> None:
    """Same sizes, same bytes, but each under the other's name, or the bytes alone exchanged."""
    forgery = Forgery([["w", "U8", [9], [forge.segment("U8", 0, 9, [1, 5], [7, 8], "gaps8", "planes")]]])
    outer = forgery.outer()
    outer["0.0.i"], outer["0.0.v"] = outer["0.0.v"], outer["0.0.i"]
    refused(forge.file(outer, forgery.data()), "streams")
    data = forgery.data()
    refused(forge.file(forgery.outer(), data[2:] + data[:2]), "tensor 'w', segment 0, ", "CRC-32", base=None)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"x"', "{}", "", "{", "{}{}", "\0"])
def test_outer_headers_that_are_no_object(text: str) -> None:
    refused(forge.file(text, b""))


def test_other_encodings() -> None:
    """json.loads would take them; safetensors and the format do not."""
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig"):
        refused(forge.file(json.dumps(honest().outer()), honest().data(), encoding=encoding))
    text = json.dumps(honest().outer(), ensure_ascii=False)
    refused(forge.file(" " + text, honest().data()), "not a safetensors file")
    refused(
        forge.file(text.replace("gone", "g\xf6ne"), honest().data(), encoding="latin-1"), "safetensors header", "utf-8"
    )


def test_duplicate_keys() -> None:
    """Two readers could each take another one of two values."""
    text = json.dumps(honest().outer())
    refused(forge.file(text.replace('"0.0.i":', '"0.0.v": {}, "0.0.i":', 1), honest().data()), "twice")
    inner = json.dumps(honest().header())
    refused(honest().build(inner.replace('"version":', '"version": 5, "version":', 1)), "patch header", "twice")


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("NaN", id="NaN"),
        pytest.param("Infinity", id="Infinity"),
        pytest.param("-Infinity", id="-Infinity"),
        pytest.param("1e999", id="infinite when read"),
        pytest.param("1" * 5000, id="an integer of 5000 digits"),
        pytest.param("1" * 1_000_000, id="an integer of a million digits"),
        pytest.param("1." + "1" * 1_000_000, id="a fraction of a million digits"),
        pytest.param("1e-" + "9" * 200, id="an exponent of 200 digits"),
        pytest.param("[" * 100_000, id="100,000 open brackets"),
        pytest.param("[" * 900 + "]" * 900, id="900 lists"),
        pytest.param("[" * 990 + "]" * 990, id="990 lists"),
        pytest.param("[" * 5000 + "]" * 5000, id="5000 lists"),
        pytest.param('{"a":' * 5000 + "1" + "}" * 5000, id="5000 objects"),
        pytest.param('"\\ud800"', id="half a character"),
        pytest.param("'x'", id="the wrong quotation marks"),
        pytest.param("01", id="a leading zero"),
        pytest.param("", id="nothing"),
        pytest.param('"\n"', id="a line break in text"),
    ],
)
def test_json(value: str) -> None:
    inner = json.dumps(honest().header() | {"version": "@"})
    refused(honest().build(inner.replace('"@"', value)), "patch header")
    # Inside the layout, which may hold any JSON, lists in lists as well.
    inner = json.dumps(honest().header() | {"layout": {"a": ["@"]}})
    data = honest().build(inner.replace('"@"', value))
    if value in ("", "[" * 900 + "]" * 900, "[" * 990 + "]" * 990):
        with suppress(pk.PatchFormatError):
            pk.Patch.from_bytes(data, BASE)
    else:
        refused(data, "patch header")
    outer = json.dumps(honest().outer() | {"0.0.i": "@"})
    refused(forge.file(outer.replace('"@"', value), honest().data()))


# ---- the patch header ------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1.0,
    1.5,
    2**63,
    2**64,
    10**30,
    "",
    "x",
    "1",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
]


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("field", "fine"),
    [
        ("format", [1]),
        ("profile", ["fast", "balanced"]),
        ("base_version", [None, 0, 1, 2]),
        ("version", [None, 0, 1, 2]),
        ("base_digest", [""]),
        ("digest", [""]),
        ("removed", [[]]),
        ("layout", [None, {}, {"a": 1}]),
    ],
)
def test_header_fields_of_every_wrong_kind(field: str, fine: list[Any]) -> None:
    values = [value for value in ODD if not any(same(value, other) for other in fine)]
    for value in [*values, "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n"]:
        forgery = honest()
        forgery.fields[field] = value
        refused(forgery.build(), "patch header", "format" if field == "format" else field if field != "removed" else "")


@pytest.mark.parametrize("text", ["1", "true", "[1]", '"1"', "null"])
def test_patch_headers_that_are_no_object(text: str) -> None:
    refused(honest().build(text), "format")


@pytest.mark.parametrize("field", ["tensors", "added"])
def test_lists_of_tensors_of_every_wrong_kind(field: str) -> None:
    for value in ODD:
        if value not in ([],):
            text = json.dumps(honest().header() | {field: value})
            refused(honest().build(text), "patch header")
    for value in ODD:
        text = json.dumps(honest().header() | {field: [value]})
        refused(honest().build(text), "patch header: tensor")


@pytest.mark.parametrize("field", ["format", "profile", "base_version", "version", "base_digest", "digest", "removed"])
def test_missing_header_fields(field: str) -> None:
    forgery = honest()
    del forgery.fields[field]
    refused(forgery.build(), "patch header", field)


def test_unknown_header_fields() -> None:
    forgery = honest()
    forgery.fields["comment"] = "x"
    refused(forgery.build(), "patch header", "'comment'")
    forgery = honest()
    forgery.fields["format"] = 2
    refused(forgery.build(), "format 2, expected 1", "newer")


BAD_NAMES = [
    pytest.param("../../etc/passwd", "path", id="up and away"),
    pytest.param("a/../b", "path", id="up in the middle"),
    pytest.param("a/..", "path", id="up at the end"),
    pytest.param("..", "path", id="up alone"),
    pytest.param("/abs", "path", id="absolute"),
    pytest.param("//host/share", "path", id="a share"),
    pytest.param("C:\\x", "path", id="a drive"),
    pytest.param("c:x", "path", id="a drive without a backslash"),
    pytest.param("a\\..\\b", "path", id="backslashes"),
    pytest.param("a\0b", "control", id="NUL"),
    pytest.param("a\nb", "control", id="a line break"),
    pytest.param("\x1b[2J", "control", id="a terminal's escape"),
    pytest.param("\x7f", "control", id="DEL"),
    pytest.param("__metadata__", "reserved", id="the reserved name"),
    pytest.param("", "0 bytes", id="no name"),
    pytest.param("x" * 4097, "4097 bytes", id="too long"),
    pytest.param("é" * 2049, "4098 bytes", id="too long in UTF-8"),
    pytest.param("\ud800", "not Unicode", id="half a character"),
]


@pytest.mark.parametrize(("name", "word"), BAD_NAMES)
@pytest.mark.parametrize("place", ["tensors", "added", "removed"])
def test_names(name: str, word: str, place: str) -> None:
    forgery = honest()
    if place == "removed":
        forgery.fields["removed"] = [name]
    else:
        getattr(forgery, place)[0][0] = name
    refused(forgery.build(), "patch header: tensor name", word)
    assert "\x1b" not in _message(forgery.build())


def _message(data: bytes) -> str:
    with pytest.raises(pk.PatchFormatError) as caught:
        pk.Patch.from_bytes(data)
    return str(caught.value)


def test_names_of_every_wrong_kind() -> None:
    for value in ODD:
        if isinstance(value, str) and value:
            continue
        for place in ("tensors", "added"):
            forgery = honest()
            getattr(forgery, place)[0][0] = value
            refused(forgery.build(), "patch header: tensor name")
        forgery = honest()
        forgery.fields["removed"] = [value]
        refused(forgery.build(), "patch header: tensor name")


def test_one_name_twice() -> None:
    """Changed and added, changed and removed, removed twice, changed twice."""
    for place, name in (("added", "layer.weight"), ("tensors", "new.bias"), ("tensors", "gone"), ("tensors", "sparse")):
        forgery = honest()
        getattr(forgery, place)[0][0] = name
        refused(forgery.build(), f"tensor {name!r} is listed twice")
    forgery = honest()
    forgery.fields["removed"] = ["gone", "gone"]
    refused(forgery.build(), "tensor 'gone' is listed twice")


@pytest.mark.parametrize("place", ["tensors", "added"])
def test_tensor_fields_of_every_wrong_kind(place: str) -> None:
    name = getattr(HONEST, place)[0][0]
    for value in [*ODD, "bf16", "float32", "BF17", "F4"]:
        forgery = honest()
        getattr(forgery, place)[0][1] = value
        refused(forgery.build(), f"tensor {name!r}: dtype")
    shapes = [[-1], [1.0], [True], ["1"], [None], [[1]], [2**62 + 1], [2**31, 2**31, 2], [1] * 65, [0, 2**62, 2**62]]
    for value in [*(odd for odd in ODD if not same(odd, []) and not same(odd, [1])), *shapes]:
        forgery = honest()
        getattr(forgery, place)[0][2] = value
        refused(forgery.build(), f"tensor {name!r}: shape")
    for value in ODD:
        if not same(value, []):
            header = honest().header()
            header[place][0][3] = value
            refused(honest().build(json.dumps(header)), f"tensor {name!r}: segment")
    for size in (0, 1, 2, 3, 5):
        header = honest().header()
        header[place][0] = (header[place][0] * 2)[:size]
        refused(honest().build(json.dumps(header)), "expected [name, dtype, shape, segments]")


# ---- segments --------------------------------------------------------------------------------------------------------

FIELDS = {
    0: "start",
    1: "numel",
    2: "count",
    3: "index code",
    4: "index parts",
    5: "escape bytes",
    6: "index CRC",
    7: "value code",
    8: "value parts",
    9: "value CRC",
}


@pytest.mark.parametrize("k", list(FIELDS), ids=FIELDS.get)
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_segment_fields_of_every_wrong_kind(which: int, k: int) -> None:
    """Every odd value in every field of every kind of segment; the outer header repeats the lie where it can."""
    where, at = ("tensors", which) if which < 3 else ("added", 0)
    name = getattr(HONEST, where)[at][0]
    right = honest().header()[where][at][3][0][k]
    # Value codes that take parts of the same sizes: another patch, but a sound one; the digest tells them apart.
    equivalent = {0: ["planes"], 1: [], 2: ["delta"], 3: ["planes"]}
    nested = [[], [0], [0, 0], [0, 0, 0], [1, 1, 1], [-1], [True], [1.0], ["1"], [2**62], [2**63], [[1]], [None]]
    for value in [*ODD, *nested, "packed", "gaps8", "gaps16", "all", "raw", "planes", "delta", "GAPS8", 2**31, 2**32]:
        if same(value, right) or (k == 7 and value in equivalent[which]):
            continue
        header = honest().header()
        header[where][at][3][0][k] = value
        try:
            data = forge.from_header(header, honest().data())
        except TypeError:
            data = honest().build(json.dumps(header))
        refused(data, f"tensor {name!r}" if not _sizes_differ(header) else "")


def _sizes_differ(header: Any) -> bool:
    """Whether the header needs another number of bytes than there are: found before any tensor is looked at."""
    try:
        total = sum(sum(item[4]) + sum(item[8]) for t in header["tensors"] + header["added"] for item in t[3])
    except TypeError:
        return False
    return total != len(HONEST.data())


@pytest.mark.parametrize("size", [0, 1, 9, 11])
def test_segments_of_another_length(size: int) -> None:
    header = honest().header()
    header["tensors"][0][3][0] = (header["tensors"][0][3][0] * 2)[:size]
    refused(honest().build(json.dumps(header)), "tensor 'layer.weight'")


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        pytest.param([(0, "start", 50)], ["a segment [50, 100) after 100"], id="two segments at one place"),
        pytest.param([(1, "start", 49)], ["a segment [49, 99) after 50"], id="overlapping"),
        pytest.param([(0, "start", 50), (1, "start", 0)], ["a segment [0, 50) after 100"], id="descending"),
        pytest.param([(1, "start", 51)], ["a segment [51, 101) after 50 of 100"], id="past the tensor"),
        pytest.param([(1, "start", 2**61)], ["of 100"], id="far past the tensor"),
        pytest.param([(1, "numel", 51)], ["a segment [50, 101) after 50 of 100"], id="larger than the tensor"),
        pytest.param([(1, "numel", 49)], ["segment 1, indices"], id="smaller than its positions"),
        pytest.param([(0, "count", 3)], ["segment 0, indices"], id="fewer than there are"),
        pytest.param([(0, "count", 5)], ["segment 0, indices"], id="more than there are"),
        pytest.param([(0, "count", 50)], ["segment 0, indices"], id="all, it says"),
        pytest.param([(0, "count", 51)], ["count and numel is (51, 50)"], id="more than elements"),
        pytest.param([(0, "count", 0)], ["count and numel is (0, 50)"], id="none"),
        pytest.param([(0, "escape_size", 1)], ["segment 0, indices"], id="an escape that nobody uses"),
        pytest.param([(0, "escape_size", 37)], ["escape bytes is 37"], id="more escapes than may be"),
        pytest.param([(0, "index_code", "gaps16")], ["segment 0, indices"], id="gaps8 as gaps16"),
        pytest.param([(0, "index_code", "all")], ["index parts"], id="a changed tensor as a whole one"),
        pytest.param([(0, "value_code", "raw")], ["value parts"], id="delta as raw"),
    ],
)
def test_lying_segments(edits: list[tuple[int, str, Any]], words: list[str]) -> None:
    forgery = honest()
    for s, field, value in edits:
        setattr(forgery.tensors[0][3][s], field, value)
    refused(forgery.build(), "tensor 'layer.weight'", *words)


def test_whole_tensors_must_be_whole() -> None:
    def added(parts: list[Part], *words: str) -> None:
        refused(Forgery([], [["b", "U8", [5], parts]]).build(), "tensor 'b'", *words)

    def part(start: int, numel: int) -> Part:
        return forge.segment("U8", start, numel, list(range(start, start + numel)), [1] * numel, "all", "raw")

    added([], "segments end at 0 of 5 elements")
    added([part(0, 4)], "segments end at 4 of 5")
    added([part(1, 4)], "a segment [1, 5) after 0")
    added([part(0, 2), part(3, 2)], "a segment [3, 5) after 2")
    added([part(0, 3), part(2, 3)], "a segment [2, 5) after 3")
    added([part(0, 6)], "a segment [0, 6) after 0 of 5")
    added([forge.segment("U8", 0, 5, [0, 2], [1, 1], "gaps8", "raw")], "index code 'gaps8'")
    added([forge.segment("U8", 0, 5, list(range(5)), [1] * 5, "all", "delta", [0] * 5)], "codes of a whole tensor")
    lying = part(0, 5)
    lying.count = 4
    added([lying], "codes of a whole tensor")
    refused(Forgery([["w", "U8", [5], [part(0, 5)]]]).build(), "tensor 'w'", "index code 'all'", base=None)


def test_a_patch_for_another_kind_of_tensor() -> None:
    """No damage: the patch is for another base."""
    for k, value in ((1, "I32"), (2, [100]), (2, [5, 20])):
        forgery = honest()
        forgery.tensors[0][k] = value
        with pytest.raises(pk.BaseMismatchError, match=r"layer\.weight"):
            pk.Patch.from_bytes(forgery.build(), BASE)


# ---- packed indices --------------------------------------------------------------------------------------------------

# The stream of "packed": 300 positions of 600 in two blocks. Header 32 bytes, bases 32 to 39, offsets 40 to 47, widths
# 48 and 49, padding 50 and 51, then the words.
BLOB = HONEST.tensors[1][3][0].index[0]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        pytest.param(0, b"pkix", id="magic"),
        pytest.param(4, b"\2", id="version"),
        pytest.param(5, b"\x08", id="base size"),
        pytest.param(6, b"\1", id="reserved byte"),
        pytest.param(8, struct.pack("<Q", 599), id="numel less"),
        pytest.param(8, struct.pack("<Q", 601), id="numel more"),
        pytest.param(8, struct.pack("<Q", 2**63), id="numel huge"),
        pytest.param(16, struct.pack("<Q", 299), id="count less"),
        pytest.param(16, struct.pack("<Q", 301), id="count more"),
        pytest.param(16, struct.pack("<Q", 2**64 - 1), id="count huge"),
        pytest.param(16, struct.pack("<Q", 0), id="count zero"),
        pytest.param(24, struct.pack("<Q", 0), id="no payload"),
        pytest.param(24, struct.pack("<Q", 2**64 - 52), id="a payload that wraps around"),
        pytest.param(32, struct.pack("<I", 600), id="a base past the end"),
        pytest.param(32, struct.pack("<I", 2**32 - 1), id="a base far past the end"),
        pytest.param(32, struct.pack("<I", 590), id="a block that leaves the tensor"),
        pytest.param(36, struct.pack("<I", 0), id="a block before the one before it"),
        pytest.param(36, struct.pack("<I", 400), id="a block inside the one before it"),
        pytest.param(40, struct.pack("<I", 1), id="the first offset"),
        pytest.param(44, struct.pack("<I", 0), id="blocks that share words"),
        pytest.param(44, struct.pack("<I", 2**32 - 1), id="an offset far outside"),
        pytest.param(48, b"\x00", id="a width of 0"),
        pytest.param(48, b"\x3f", id="a width of 63"),
        pytest.param(48, b"\x40", id="a width of 64"),
        pytest.param(48, b"\xff", id="a width of 255"),
        pytest.param(49, b"\x21", id="another width of the last block"),
        pytest.param(50, b"\1", id="padding"),
        pytest.param(52, bytes([BLOB[52] | 1]), id="a gap before the first entry"),
        pytest.param(52, b"\xff" * (len(BLOB) - 52), id="the largest gaps everywhere"),
        pytest.param(len(BLOB) - 1, bytes([BLOB[-1] | 0x80]), id="bits behind the last entry"),
    ],
)
def test_packed_indices(at: int, value: bytes) -> None:
    blob = BLOB[:at] + value + BLOB[at + len(value) :]
    assert len(blob) == len(BLOB)
    assert blob != BLOB
    forgery = honest()
    forgery.tensors[1][3][0].index = [blob]
    refused(forgery.build(), "tensor 'packed', segment 0, indices: ")


@pytest.mark.parametrize("size", [0, 1, 31, 32, 51, 52, len(BLOB) - 4, len(BLOB) - 1])
def test_truncated_packed_indices(size: int) -> None:
    forgery = honest()
    forgery.tensors[1][3][0].index = [BLOB[:size]]
    refused(forgery.build(), "tensor 'packed', segment 0, indices: ")


def test_extended_packed_indices() -> None:
    forgery = honest()
    forgery.tensors[1][3][0].index = [BLOB + bytes(4)]
    refused(forgery.build(), "tensor 'packed', segment 0, indices: ")


def test_packed_indices_that_are_compressed() -> None:
    forgery = honest()
    forgery.tensors[1][3][0].index = [forge.frame(BLOB)]
    refused(forgery.build(), "tensor 'packed', segment 0, indices: ")


def test_packed_indices_for_another_segment() -> None:
    """A blob that is right in itself, but of other sizes than the header's."""
    positions = reference.unpack_indices(torch.tensor(list(BLOB), dtype=torch.uint8), torch.int32).tolist()
    for blob in (forge.pack(positions, 601), forge.pack(positions[:-1], 600)):
        forgery = honest()
        forgery.tensors[1][3][0].index = [blob]
        refused(forgery.build(), "tensor 'packed', segment 0, indices: ", "the header says 300 below 600")


# ---- gaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "low", "escapes"),
    [
        pytest.param([255, 0], [], b"", id="an escape that is not there"),
        pytest.param([1, 0], [], b"\1", id="an escape that nobody uses"),
        pytest.param([255, 0], [], b"\1\1", id="one escape too many"),
        pytest.param([255, 0], [], b"\x80", id="an escape that does not end"),
        pytest.param([255, 0], [], b"\x80" * 9, id="nine bytes that do not end"),
        pytest.param([255, 0], [], b"\x80" * 9 + b"\1", id="ten bytes"),
        pytest.param([255, 0], [], b"\xff" * 8 + b"\x7f", id="a gap of 2^63 - 1"),
        pytest.param([255, 0], [], b"\xff\xff\x03", id="a gap past the end"),
        pytest.param([255, 255], [], forge.leb128(39_000) * 2, id="two gaps past the end"),
        pytest.param([255, 0], [], forge.leb128(40_000 - 255), id="just past the end"),
        pytest.param([156, 0], [64, 0], b"", id="just past the end in two planes"),
        pytest.param([255, 255], [255, 255], b"\x0a\x0a", id="past the end in two planes"),
        pytest.param([255, 0], [0, 0], b"\xff" * 8 + b"\x7f", id="a gap that leaves 64 bits when shifted"),
        pytest.param([255, 0], [0, 0], forge.leb128(2**56), id="a gap that wraps around when shifted"),
    ],
)
def test_gaps(top: list[int], low: list[int], escapes: bytes) -> None:
    """Two positions of 40,000."""
    index = [bytes(top), bytes(low), escapes]
    code = "gaps16" if low else "gaps8"
    part = Part(0, 40_000, 2, code, index, len(escapes), "raw", [b"xy"])
    refused(Forgery([["w", "U8", [40_000], [part]]]).build(), "tensor 'w', segment 0, indices: ", base=None)


def test_the_last_position_is_reached_and_not_passed() -> None:
    for code in ("gaps8", "gaps16", "packed"):
        part = forge.segment("U8", 0, 40_000, [5, 39_999], [1, 2], code, "raw")
        patch = pk.Patch.from_bytes(Forgery([["w", "U8", [40_000], [part]]]).build())
        assert patch.tensors["w"].indices.tolist() == [5, 39_999]
        part.numel = 39_999
        refused(Forgery([["w", "U8", [40_000], [part]]]).build(), "tensor 'w', segment 0, indices: ", base=None)


def test_a_low_plane_of_one_plane_gaps() -> None:
    part = Part(0, 40_000, 2, "gaps8", [b"\1\1", b"\1\1", b""], 0, "raw", [b"xy"])
    refused(Forgery([["w", "U8", [40_000], [part]]]).build(), "tensor 'w', segment 0, indices: ", base=None)


# ---- parts and zstd --------------------------------------------------------------------------------------------------

SKIPPABLE = struct.pack("<II", 0x184D2A50, 5) + b"hello"


def rle_frame(declared: int, actual: int, *, window_log: int | None = None) -> bytes:
    """A frame of one repeated byte that declares a size and gives another; with ``window_log`` also a window."""
    block = (1 | 1 << 1 | actual << 3).to_bytes(3, "little") + b"x"
    if window_log is None:
        return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", declared) + block
    return b"\x28\xb5\x2f\xfd\xc0" + bytes([(window_log - 10) << 3]) + struct.pack("<Q", declared) + block


def thousand(part: bytes, count: int = 1000) -> bytes:
    """A file whose value plane of ``count`` bytes is stored as ``part``; positions 0, 1, 2, ..."""
    whole = Part(0, count, count, "gaps8", [b"", b"", b""], 0, "planes", [part])
    return Forgery([["z", "U8", [count], [whole]]]).build()


PLAIN = bytes(range(10)) * 100


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(forge.frame(PLAIN), id="plain"),
        pytest.param(forge.frame(PLAIN, level=19), id="level 19"),
        pytest.param(forge.frame(PLAIN, write_checksum=True), id="with a checksum"),
        pytest.param(PLAIN, id="raw"),
    ],
)
def test_parts_that_are_read(part: bytes) -> None:
    assert bits(pk.Patch.from_bytes(thousand(part)).tensors["z"].values) == list(PLAIN)


def test_a_frame_of_its_own_making_is_read() -> None:
    assert bits(pk.Patch.from_bytes(thousand(rle_frame(1000, 1000))).tensors["z"].values) == [120] * 1000
    assert bits(pk.Patch.from_bytes(thousand(rle_frame(1000, 1000, window_log=27))).tensors["z"].values) == [120] * 1000


BAD_CHECKSUM = bytearray(forge.frame(PLAIN, write_checksum=True))
BAD_CHECKSUM[-1] ^= 1


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(PLAIN + b"x", id="longer than its size"),
        pytest.param(PLAIN[:-1], id="shorter and no frame"),
        pytest.param(b"x", id="one byte"),
        pytest.param(forge.frame(random.Random(1).randbytes(1000)), id="a frame longer than its content"),
        pytest.param(forge.frame(PLAIN)[:-1], id="a truncated frame"),
        pytest.param(forge.frame(PLAIN)[:5], id="a frame's header"),
        pytest.param(forge.frame(PLAIN[:-1]), id="a frame of fewer bytes"),
        pytest.param(forge.frame(PLAIN + b"x"), id="a frame of more bytes"),
        pytest.param(forge.frame(b""), id="an empty frame"),
        pytest.param(forge.frame(bytes(1 << 20)), id="a frame of a megabyte"),
        pytest.param(forge.frame(PLAIN, write_content_size=False), id="a frame that declares no size"),
        pytest.param(rle_frame(1000, 999), id="a frame shorter than it says"),
        pytest.param(rle_frame(1000, 1001), id="a frame longer than it says"),
        pytest.param(rle_frame(1000, 100_000), id="a frame much longer than it says"),
        pytest.param(rle_frame(2**62, 1000), id="a frame that declares 2^62 bytes"),
        pytest.param(rle_frame(2**64 - 1, 1000), id="a frame that declares 2^64 - 1 bytes"),
        pytest.param(rle_frame(1000, 1000, window_log=28), id="a window of 2^28"),
        pytest.param(rle_frame(1000, 1000, window_log=41), id="a window of 2^41"),
        pytest.param(forge.frame(PLAIN) + forge.frame(PLAIN), id="two frames"),
        pytest.param(forge.frame(PLAIN[:500]) + forge.frame(PLAIN[500:]), id="two halves"),
        pytest.param(forge.frame(PLAIN) + forge.frame(b""), id="a frame and an empty one"),
        pytest.param(forge.frame(PLAIN) + SKIPPABLE, id="a frame and a skippable one"),
        pytest.param(SKIPPABLE + forge.frame(PLAIN), id="a skippable frame first"),
        pytest.param(SKIPPABLE, id="a skippable frame alone"),
        pytest.param(forge.frame(PLAIN) + b"\x28", id="a frame and the beginning of another"),
        pytest.param(forge.frame(PLAIN) + b"\0", id="a frame and a byte"),
        pytest.param(bytes(BAD_CHECKSUM), id="a wrong checksum"),
        pytest.param(b"\x28\xb5\x2f\xfd\xe1\1" + rle_frame(1000, 1000)[5:], id="a dictionary"),
        pytest.param(b"\x1f\x8b\x08" + bytes(50), id="gzip"),
    ],
)
def test_parts(part: bytes) -> None:
    assert 0 < len(part) != 1000
    refused(thousand(part), "tensor 'z', segment 0, values", base=None)
    # The same as the tops of gaps.
    whole = Part(0, 300_000, 1000, "gaps8", [part, b"", b""], 0, "planes", [b""])
    refused(Forgery([["z", "U8", [300_000], [whole]]]).build(), "tensor 'z', segment 0, indices", base=None)


@pytest.mark.parametrize(
    "part", [b"", forge.frame(PLAIN), PLAIN[:-1], PLAIN + b"x"], ids=["none", "a frame", "-1", "+1"]
)
def test_raw_values_are_stored_as_they_are(part: bytes) -> None:
    """The code has its meaning: `raw` is neither left out nor compressed."""
    whole = Part(0, 1000, 1000, "gaps8", [b"", b"", b""], 0, "raw", [part])
    refused(Forgery([["z", "U8", [1000], [whole]]]).build(), "tensor 'z': value parts", base=None)


# ---- signs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signs", [b"\0\0", b"\0\0\0", b"\x28\xb5\x2f\xfd"], ids=["two bytes", "three", "a frame"])
def test_signs_of_another_size(signs: bytes) -> None:
    """One byte holds the signs of four changes."""
    forgery = honest()
    forgery.tensors[0][3][0].value[0] = signs
    refused(forgery.build(), "tensor 'layer.weight', segment 0, values")


def test_signs_behind_the_last_value_mean_nothing() -> None:
    forgery = honest()
    part = forgery.tensors[0][3][0]
    plain = pk.Patch.from_bytes(forgery.build(), BASE)
    part.value[0] = bytes([(part.value[0] or b"\0")[0] | 0xF0])
    assert_same_patch(pk.Patch.from_bytes(forgery.build(), BASE), plain)


# ---- codes of changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (b"\0\0", "part 1: 2 stored bytes for 1 decoded ones"),
        (b"\xff", "part 2"),  # four large magnitudes, and planes of another size
    ],
    ids=["two bytes", "more large ones"],
)
def test_codes_of_another_number(codes: bytes, words: str) -> None:
    """One byte holds the codes of four changes; those of 3 tell how long the planes are."""
    forgery = honest()
    forgery.tensors[0][3][0].value[1] = codes
    refused(forgery.build(), f"tensor 'layer.weight', segment 0, values: {words}")


def test_codes_behind_the_last_value() -> None:
    forgery = honest()
    part = forgery.tensors[0][3][1]  # two changes
    part.value[1] = bytes([(part.value[1] or b"\0")[0] | 0x10])
    refused(forgery.build(), "tensor 'layer.weight', segment 1, values: codes behind the last value")


# ---- memory ----------------------------------------------------------------------------------------------------------

BOMBS = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
import torch, forge
import pulse_kernels as pk
from test_codec_attacks import Part, Forgery, rle_frame, honest, BASE, HONEST

def changed(count, dtype="U64", size=8, index=(b"", b"", b""), value=None, escapes=0):
    part = Part(0, count, count, "gaps8", list(index), escapes, "planes", [b""] * size if value is None else value)
    return [["z", dtype, [count], [part]]]

def whole(count, pieces):
    parts = [Part(k * count, count, count, "all", [], 0, "planes", [b""] * 8) for k in range(pieces)]
    return [["z", "U64", [count * pieces], parts]]

most = 2**31 - 1
inner = json.dumps(HONEST.header() | {"layout": {"a": "@"}})
bombs = {
    "a changed tensor of zeros": Forgery(changed(most)).build(),
    "one with escapes": Forgery(changed(most, escapes=9 * most)).build(),
    "a frame that declares as much": Forgery(changed(most, "U8", 1, value=[rle_frame(most, 1000)])).build(),
    "a frame that declares 2^62": Forgery(changed(1000, "U8", 1, value=[rle_frame(2**62, 1000)])).build(),
    "a window of 2^41": Forgery(changed(1000, "U8", 1, value=[rle_frame(1000, 1000, window_log=41)])).build(),
    "an added tensor of zeros": Forgery([], whole(most, 1)).build(),
    "one of 2^41 bytes": Forgery([], whole(2**30, 256)).build(),
    "many small ones": Forgery([], [[str(k), *whole(2**22, 1)[0][1:]] for k in range(1000)]).build(),
    "5 million brackets": honest().build(inner.replace('"@"', "[" * 5_000_000)),
    "an integer of 5 million digits": honest().build(inner.replace('"@"', "1" * 5_000_000)),
}
packed = honest()
packed.tensors[1][3][0].numel = packed.tensors[1][3][0].count = most
packed.tensors[1][2] = [most]
bombs["packed indices that announce 2^31"] = packed.build()

largest = Forgery(changed(2**28 // (8 + 4 * 8) - 1)).build()
tiny = pk.Patch.from_bytes(Forgery(changed(10)).build())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for base in (None, BASE):
    for name, data in bombs.items():
        try:
            pk.Patch.from_bytes(data, base)
            sys.exit(f"{name} was read")
        except pk.PatchFormatError as error:
            pass
        except (ValueError, pk.BaseMismatchError) as error:
            if "base" not in str(error):
                raise
refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.set_num_threads(2)
patch = pk.Patch.from_bytes(largest)
assert patch.num_changed == 2**28 // 40 - 1 and not patch.tensors["z"].values.view(torch.int64).any()
print(before, refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_bombs_take_no_memory() -> None:
    """Files of a few hundred bytes that ask for gigabytes; measured in a process of its own."""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", BOMBS, here], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    before, refused_, largest = (int(number) for number in done.stdout.split())
    assert refused_ - before < 64 << 10  # KiB; the JSON bombs are files of 5 MB themselves
    assert largest - refused_ <= (1 << 28 >> 10) + (32 << 10)


def test_the_limit_is_the_caller_s_to_set() -> None:
    part = Part(0, 1 << 20, 1 << 20, "gaps8", [b"", b"", b""], 0, "planes", [b""] * 8)
    data = Forgery([["z", "U64", [1 << 20], [part]]]).build()
    needed = pk.Patch.peek(data).decoded_bytes
    assert needed >= (1 << 20) * 12
    assert pk.Patch.from_bytes(data, max_decoded_bytes=needed).num_changed == 1 << 20
    with pytest.raises(pk.PatchFormatError, match=f"would take {needed} bytes.*pass max_decoded_bytes"):
        pk.Patch.from_bytes(data, max_decoded_bytes=needed - 1)


# ---- random mutations ------------------------------------------------------------------------------------------------


def check_or_refuse(data: bytes) -> pk.Patch | None:
    """A patch whose every position and value is sound, or a refusal; nothing else."""
    try:
        patch = pk.Patch.from_bytes(data, BASE)
    except (pk.PatchFormatError, pk.BaseMismatchError):
        return None
    for name, item in patch.tensors.items():
        assert item.dtype == BASE[name].dtype
        assert item.shape == tuple(BASE[name].shape)
        assert reference.first_bad_index(item.indices, item.numel) == -1
        assert item.values.numel() == item.indices.numel()
    return patch


def test_random_bytes_changed() -> None:
    rng, good = random.Random(11), HONEST.build()
    expected = pk.Patch.from_bytes(good, BASE)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 20)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randint(1, 20))
                case _:
                    other = rng.randrange(len(data))
                    data[at : at + 8] = data[other : other + 8]
        patch = check_or_refuse(bytes(data))
        if patch is not None:  # white space, or nothing, was changed
            assert_same_patch(patch, expected)


def test_random_header_values_changed() -> None:
    """Any value of the header becomes any other, with CRCs and outer header to fit."""
    rng = random.Random(12)
    numbers = [0, 1, 2, 3, 4, 5, 49, 50, 51, 99, 100, 255, 256, 600, 2**24, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, -1]
    values = [*ODD, *numbers, "gaps8", "gaps16", "packed", "all", "raw", "planes", "delta", "F32", "U8", "BF16"]
    read = 0
    for _ in range(3000):
        header = honest().header()
        for _ in range(rng.randint(1, 3)):
            item: Any = header
            key: Any = rng.choice(["tensors", "tensors", "tensors", "added", "added", *header])
            while isinstance(item[key], (list, dict)) and item[key] and rng.random() < 0.9:
                item = item[key]
                key = rng.choice(list(item) if isinstance(item, dict) else range(len(item)))
            if isinstance(item[key], int) and rng.random() < 0.5:
                item[key] += rng.choice([-2, -1, 1, 2])
            else:
                item[key] = rng.choice(values)
        try:
            data = forge.from_header(header, HONEST.data())
        except (TypeError, IndexError, KeyError):
            data = honest().build(json.dumps(header))
        read += check_or_refuse(data) is not None
    assert read > 30  # versions, names of removed tensors and the like are free to change


def test_random_stream_bytes_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that lie under CRCs that fit; both back ends take and refuse the same ones."""
    rng, cases = random.Random(13), []
    for _ in range(300):
        forgery = honest()
        part = rng.choice([part for tensor in forgery.tensors for part in tensor[3]])
        side = rng.choice([part.index, part.index, part.value])
        k = rng.randrange(len(side))
        data = bytearray(side[k])
        for _ in range(rng.randint(1, 3)):
            if data and rng.random() < 0.8:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 2, 127, 128, 254, 255, rng.randrange(256)])
            elif data and rng.random() < 0.5:
                del data[rng.randrange(len(data))]
            else:
                data.insert(rng.randint(0, len(data)), rng.randrange(256))
        side[k] = bytes(data)
        cases.append(forgery.build())
    native = [check_or_refuse(data) for data in cases]
    for module in ("pulse_kernels.codec", "pulse_kernels.codec.segment"):
        monkeypatch.setattr(f"{module}.for_device", lambda _: reference)
    for data, patch in zip(cases, native, strict=True):
        other = check_or_refuse(data)
        assert (other is None) == (patch is None)
        if patch is not None and other is not None:
            assert_same_patch(other, patch)
    taken = sum(patch is not None for patch in native)
    assert 50 < taken < 250
