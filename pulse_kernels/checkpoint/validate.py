"""What is refused in a layout, an index or a header, and why.

File names, shapes and metadata come from folders and patches that anyone may have made; what passes here can be
written to disk, cannot leave its folder, and can be read back by the safetensors library.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pulse_kernels.dtypes import DTYPES
from pulse_kernels.errors import CheckpointError

from .layout import (
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    SUB_BYTE_DTYPES,
    FileLayout,
    Layout,
    TensorSpec,
    encode_header,
    without_marker,
)

# A write that has not reached its end names this file, which never exists, in the index: no loader gets past it.
UNFINISHED_FILE = "pulse-unfinished.safetensors"

MAX_FILES = 10_000
MAX_TENSORS = 1_000_000
MAX_DIMS = 64
MAX_NAME_BYTES = 4096
MAX_BYTES = 2**63 - 1
MAX_JSON_DEPTH = 16
MAX_JSON_VALUES = 100_000
MAX_JSON_TEXT = 1 << 24  # characters of all strings in the index's metadata together

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHARD_NUMBER = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors", re.DOTALL)


def check_file_name(name: object, where: str) -> str:
    """`name` if it is a plain `*.safetensors` file name that cannot leave its folder, else CheckpointError."""
    if not isinstance(name, str):
        raise CheckpointError(f"{where}: the file name is {show(name)}, not a string")
    problem = None
    if any(c in name for c in "/\\") or name.startswith("."):
        problem = "it must be a plain, visible name in the checkpoint's own folder"
    elif _CONTROL.search(name):
        problem = "it contains control characters"
    elif not name.endswith(".safetensors") or name == ".safetensors":
        problem = "it must end in .safetensors"
    elif not _utf8_fits(name, 255):
        problem = "it must be valid text of at most 255 bytes"
    if problem:
        raise CheckpointError(f"{where}: file name {show(name)} refused: {problem}")
    return name


def check_spec(name: object, dtype_name: object, shape: object, where: str) -> TensorSpec:
    """A TensorSpec if the three make a tensor this package can hold, else CheckpointError."""
    if not isinstance(name, str) or name == "__metadata__" or not _utf8_fits(name, MAX_NAME_BYTES):
        raise CheckpointError(
            f"{where}: tensor name {show(name)} refused: expected text of at most {MAX_NAME_BYTES} bytes"
        )
    where = f"{where}: tensor {show(name)}"
    if isinstance(dtype_name, str) and dtype_name in SUB_BYTE_DTYPES:
        raise CheckpointError(
            f"{where} has the sub-byte dtype {dtype_name}, whose elements have no byte of their own; "
            "store it packed, as U8"
        )
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{where} has the unknown dtype {show(dtype_name)}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: shape {show(shape)} is not a list of at most {MAX_DIMS} sizes")
    reach = DTYPES[dtype_name].itemsize  # what the strides multiply up to, empty dimensions or not
    for size in shape:
        if type(size) is not int or size < 0:
            raise CheckpointError(f"{where}: shape {show(shape)} holds {show(size)}, which is no size")
        reach *= max(size, 1)
        if reach > MAX_BYTES:
            raise CheckpointError(f"{where}: shape {show(shape)} needs more than 2^63 - 1 bytes")
    return TensorSpec(name, dtype_name, tuple(shape))


def check_file_set(names: list[str], *, has_index: bool, where: str) -> None:
    """Raise CheckpointError where the names of a folder's weight files contradict each other."""
    folded: dict[str, str] = {}
    for name in names:
        if name.casefold() in folded:
            other = folded[name.casefold()]
            raise CheckpointError(
                f"{where}: {show(other)} and {show(name)} name the same file, at least where case is ignored"
            )
        folded[name.casefold()] = name
    if SINGLE_FILE in folded and (has_index or len(names) > 1):
        raise CheckpointError(
            f"{where}: {SINGLE_FILE} stands for a whole checkpoint, so it cannot be one file of several or of an index"
        )
    if not has_index:
        _check_shard_numbers(names, where)


def validate_layout(layout: object) -> Layout:
    """Check a layout that may come from anyone and return it in typed form.

    Args:
        layout: the JSON form (see the top of this file), or a `Layout`, which is checked again.

    A recorded digest or version in its metadata belongs to another write and is dropped.

    Raises:
        CheckpointError: a file name that is not a plain `*.safetensors` name, files or tensors listed twice, a
            shape or dtype that is none, metadata that is not text, anything too large, or a layout of no known form.
    """
    if isinstance(layout, Layout):
        layout = layout.to_json()
    top = _fields(layout, ("format", "folder", "files", "index"), "layout")
    if top["format"] != 1 or type(top["format"]) is not int:
        raise CheckpointError(f"layout: format {show(top['format'])}, expected 1; a newer version may read it")
    if not isinstance(top["folder"], bool):
        raise CheckpointError(f"layout: 'folder' is {show(top['folder'])}, expected true or false")
    if not isinstance(top["files"], list) or not 1 <= len(top["files"]) <= MAX_FILES:
        raise CheckpointError(f"layout: 'files' must be a list of 1 to {MAX_FILES} files")

    files: list[FileLayout] = []
    owner: dict[str, str] = {}
    for entry in top["files"]:
        file = _validate_file(entry)
        for spec in file.tensors:
            if spec.name in owner:
                raise CheckpointError(
                    f"layout: tensor {show(spec.name)} is listed twice, in {owner[spec.name]} and {file.name}"
                )
            owner[spec.name] = file.name
        files.append(file)
        if len(owner) > MAX_TENSORS:
            raise CheckpointError(f"layout: more than {MAX_TENSORS} tensors")

    index_metadata = None
    if top["index"] is not None:
        index_metadata = _fields(top["index"], ("metadata",), "layout: index")["metadata"]
        if not isinstance(index_metadata, dict):
            raise CheckpointError(f"layout: the index's metadata is {show(index_metadata)}, not an object")
        check_json(index_metadata, "layout: the index's metadata")
        index_metadata = without_marker(index_metadata) or {}
    has_index = index_metadata is not None
    if top["folder"]:
        check_file_set([file.name for file in files], has_index=has_index, where="layout")
    elif has_index or len(files) > 1:
        raise CheckpointError("layout: a lone file ('folder' is false) can have neither an index nor a second file")
    empty = [file.name for file in files if not file.tensors]
    if has_index and empty:
        raise CheckpointError(f"layout: {empty[0]} holds no tensor, so an index cannot name it")
    result = Layout(tuple(files), index_metadata, top["folder"])
    if result.nbytes > MAX_BYTES:
        raise CheckpointError(f"layout: the tensors need {result.nbytes} bytes, more than any file system holds")
    for file in files:
        encode_header(file)
    return result


def _validate_file(entry: object) -> FileLayout:
    fields = _fields(entry, ("name", "metadata", "tensors"), "layout: file")
    name = check_file_name(fields["name"], "layout")
    if name == UNFINISHED_FILE:
        raise CheckpointError(f"layout: file name {name} is reserved for unfinished writes")
    metadata = fields["metadata"]
    if metadata is not None:
        if not isinstance(metadata, dict):
            raise CheckpointError(f"layout: {name}: metadata is {show(metadata)}, not an object")
        for key, value in metadata.items():
            if not all(isinstance(text, str) and _utf8_fits(text, MAX_HEADER_BYTES) for text in (key, value)):
                raise CheckpointError(f"layout: {name}: metadata {show(key)} is {show(value)}; both must be text")
    if not isinstance(fields["tensors"], list) or len(fields["tensors"]) > MAX_TENSORS:
        raise CheckpointError(f"layout: {name}: 'tensors' must be a list of at most {MAX_TENSORS}")
    specs: dict[str, TensorSpec] = {}
    for item in fields["tensors"]:
        if not isinstance(item, list | tuple) or len(item) != 3:
            raise CheckpointError(f"layout: {name}: {show(item)} is not [name, dtype, shape]")
        tensor, dtype_name, shape = item
        spec = check_spec(tensor, dtype_name, shape, f"layout: {name}")
        if spec.name in specs:
            raise CheckpointError(f"layout: {name}: tensor {show(spec.name)} is listed twice")
        specs[spec.name] = spec
    return FileLayout(name, without_marker(metadata), tuple(specs.values()))


def check_json(value: object, where: str) -> None:
    """Raise CheckpointError unless `value` is JSON of bounded depth and size."""
    budget = MAX_JSON_VALUES
    text_left = MAX_JSON_TEXT
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        budget -= 1
        children: list[object] = []
        if isinstance(item, str):
            text_left -= len(item)
            if not _utf8_fits(item, MAX_JSON_TEXT):
                raise CheckpointError(f"{where}: {show(item)} is not valid text")
        elif isinstance(item, dict):
            children = [*item.keys(), *item.values()]
            if not all(isinstance(key, str) for key in item):
                raise CheckpointError(f"{where}: a key is not text")
        elif isinstance(item, list):
            children = item
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise CheckpointError(f"{where}: {item} has no JSON form")
        elif isinstance(item, int):
            if abs(item) >= 2**64:
                raise CheckpointError(f"{where}: a number of {item.bit_length()} bits, expected at most 64")
        elif item is not None:
            raise CheckpointError(f"{where}: {show(item)} has no JSON form")
        if depth > MAX_JSON_DEPTH or budget < len(stack) + len(children) or text_left < 0:
            raise CheckpointError(f"{where}: too deep or too large")
        stack.extend((child, depth + 1) for child in children)


def parse_json(data: bytes, where: str) -> Any:
    """JSON in which no object names a key twice; anything else is a CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{where}: {show(key)} appears twice in one object")
            result[key] = value
        return result

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON ({error or 'nested too deeply'}); restore the file") from error


def _check_shard_numbers(names: list[str], where: str) -> None:
    """Files numbered `...-00002-of-00005` without an index: all five must be there."""
    groups: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _SHARD_NUMBER.fullmatch(name):
            key = match["stem"], int(match["total"])
            groups.setdefault(key, set()).add(int(match["number"]))
    for (stem, total), numbers in groups.items():
        if len(numbers) != total or min(numbers) != 1 or max(numbers) != total:
            raise CheckpointError(
                f"{where}: {len(numbers)} of the {total} files {show(stem)}-....safetensors are there and no index "
                "lists them; copy the missing ones"
            )


def _fields(value: object, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(keys):
        raise CheckpointError(f"{where}: expected an object with {', '.join(keys)}; found {show(value)}")
    return value


def _utf8_fits(text: str, limit: int) -> bool:
    try:
        return len(text) <= limit and len(text.encode()) <= limit
    except UnicodeEncodeError:
        return False


def show(value: object) -> str:
    """`value` for a message: quoted, escaped, short. Never walks a large or deep structure."""
    if isinstance(value, str):
        return ascii(value[:80]) + ("..." if len(value) > 80 else "")
    if isinstance(value, list | tuple):
        flat = all(isinstance(item, int | float) and abs(item) < 2**70 for item in value[:8])
        return f"{list(value[:8])}{'...' if len(value) > 8 else ''}" if flat else f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object with " + (", ".join(show(key) for key in list(value)[:6]) or "nothing")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**70:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:80]
