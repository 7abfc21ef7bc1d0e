"""Layouts come from anyone: what is accepted comes back unchanged, everything else is a CheckpointError."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from checkpoint_files import layout_of

from pulse_kernels.checkpoint import CheckpointWriter, validate_layout
from pulse_kernels.errors import CheckpointError

SHARDED = layout_of(
    ("model-00001-of-00002.safetensors", {"a": torch.zeros(2, 3), "b": torch.zeros(0)}),
    ("model-00002-of-00002.safetensors", {"c": torch.zeros((), dtype=torch.bfloat16)}),
    index={"total_size": 26, "note": ["x", None, 1.5, True, {"deep": -1}]},
    metadata={"format": "pt"},
)


def with_tensor(*tensor: Any) -> dict[str, Any]:
    layout = copy.deepcopy(SHARDED)
    layout["files"][0]["tensors"][0] = list(tensor)
    return layout


def with_name(name: object) -> dict[str, Any]:
    layout = copy.deepcopy(SHARDED)
    layout["files"][0]["name"] = name
    return layout


def test_accepted_layouts_come_back_unchanged() -> None:
    assert validate_layout(SHARDED).to_json() == SHARDED
    assert validate_layout(json.loads(json.dumps(SHARDED))).to_json() == SHARDED
    lone = layout_of(("x.safetensors", {"a": torch.zeros(1)}), folder=False)
    assert validate_layout(lone).to_json() == lone


def test_sizes() -> None:
    layout = validate_layout(SHARDED)
    first, empty = layout.files[0].tensors
    assert (first.numel, first.itemsize, first.nbytes, empty.nbytes) == (6, 4, 24, 0)
    assert layout.nbytes == 26


def test_a_recorded_state_is_not_part_of_a_layout() -> None:
    layout = copy.deepcopy(SHARDED)
    layout["index"]["metadata"] |= {"pulse_digest": "d", "pulse_version": 3}
    layout["files"][0]["metadata"] = {"pulse_digest": "d", "format": "pt"}
    layout["files"][1]["metadata"] = {"pulse_version": "3"}
    clean = validate_layout(layout).to_json()
    assert clean["index"] == SHARDED["index"]
    assert [file["metadata"] for file in clean["files"]] == [{"format": "pt"}, None]


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors", "/x.safetensors", "a/x.safetensors", "a\\x.safetensors", "..", ".x.safetensors",
        ".safetensors", "x\0.safetensors", "x\n.safetensors", "x.bin", "x.safetensors ", "x.SAFETENSORS", "",
        "x" * 244 + ".safetensors", "\N{GREEK SMALL LETTER PI}" * 122 + ".safetensors", "\ud800.safetensors",
        "model-00002-of-00002.safetensors", "MODEL-00002-of-00002.safetensors", "model.safetensors",
        "Model.safetensors", "pulse-unfinished.safetensors", None, 7, ["x.safetensors"],
    ],
)  # fmt: skip
def test_refused_file_names(name: object) -> None:
    with pytest.raises(CheckpointError):
        validate_layout(with_name(name))


@pytest.mark.parametrize("name", ["x" * 243 + ".safetensors", "weights é.safetensors", "a..b.safetensors"])
def test_accepted_file_names(name: str) -> None:
    assert validate_layout(with_name(name)).files[0].name == name


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("a", "F32", [-1]), "-1"),
        (("a", "F32", [2, 1.0]), "no size"),
        (("a", "F32", [True]), "no size"),
        (("a", "F32", ["2"]), "no size"),
        (("a", "F32", None), "shape"),
        (("a", "F32", [1] * 65), "64 sizes"),
        (("a", "F32", [2**61]), "2^63"),
        (("a", "F32", [2**40, 2**40]), "2^63"),
        (("a", "F32", [0, 2**63]), "2^63"),
        (("a", "U8", [10**5000]), "2^63"),
        (("a", "F33", [1]), "F33"),
        (("a", None, [1]), "unknown dtype"),
        (("a", ["F32"], [1]), "unknown dtype"),
        (("a", "F4", [2]), "sub-byte"),
        (("a", "F6_E2M3", [4]), "sub-byte"),
        (("__metadata__", "F32", [1]), "name"),
        (("x" * 5000, "F32", [1]), "name"),
        (("\udcff", "F32", [1]), "name"),
        ((1, "F32", [1]), "name"),
        (("b", "F32", [1]), "twice"),
        (("c", "F32", [1]), "twice"),
        (("a", "F32"), "[name, dtype, shape]"),
    ],
)
def test_refused_tensors(tensor: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        validate_layout(with_tensor(*tensor))


def test_the_sum_of_sizes_may_overflow_too() -> None:
    layout = layout_of(("x.safetensors", {}))
    layout["files"][0]["tensors"] = [[str(i), "U8", [2**62]] for i in range(2)]
    with pytest.raises(CheckpointError, match="more than any file system"):
        validate_layout(layout)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("format",), True),
        (("folder",), 1),
        (("folder",), False),  # a lone file with an index
        (("files",), []),
        (("files",), {}),
        (("files",), [{"name": "x.safetensors"}] * 20_000),
        (("files", 0), "x.safetensors"),
        (("files", 0, "extra"), 1),
        (("files", 0, "tensors"), {}),
        (("files", 0, "tensors"), []),  # no index can name such a file
        (("files", 0, "metadata"), []),
        (("files", 0, "metadata"), {"a": 1}),
        (("files", 0, "metadata"), {"a": {}}),
        (("files", 0, "metadata"), {1: "a"}),
        (("files", 0, "metadata"), {"a": "\ud800"}),
        (("index",), {}),
        (("index",), []),
        (("index", "metadata"), None),
        (("index", "metadata"), {"a": float("nan")}),
        (("index", "metadata"), {"a": 10**5000}),
        (("index", "metadata"), {"a": "\ud800"}),
        (("index", "metadata"), {"a": {2: 3}}),
        (("index", "metadata"), {"a": object()}),
        (("index", "metadata"), {"a": nested(20)}),
        (("index", "metadata"), {"a": nested(100_000)}),
        (("index", "metadata"), {"a": [0] * 200_000}),
        (("index", "metadata"), {"a": "x" * (1 << 25)}),
    ],
)
def test_refused_forms(path: tuple[Any, ...], value: object) -> None:
    layout = copy.deepcopy(SHARDED)
    place: Any = layout
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(CheckpointError) as caught:
        validate_layout(layout)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("layout", [None, [], "layout", {}, {"format": 1}])
def test_no_layout_at_all(layout: object) -> None:
    with pytest.raises(CheckpointError, match="expected an object"):
        validate_layout(layout)


def test_a_header_no_library_reads() -> None:
    layout = layout_of(("x.safetensors", {"a": torch.zeros(1)}), metadata={"a": "x" * 100_000_000})
    with pytest.raises(CheckpointError, match="header would take"):
        validate_layout(layout)


def test_loose_files_that_could_not_be_read_back() -> None:
    half = layout_of(
        ("model-00001-of-00003.safetensors", {"a": torch.zeros(1)}),
        ("model-00002-of-00003.safetensors", {"b": torch.zeros(1)}),
    )
    with pytest.raises(CheckpointError, match="2 of the 3 files"):
        validate_layout(half)


def test_the_writer_refuses_before_it_touches_anything(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError):
        CheckpointWriter(tmp_path / "out", with_name("../x.safetensors"))
    assert list(tmp_path.iterdir()) == []
