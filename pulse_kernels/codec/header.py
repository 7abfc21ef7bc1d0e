"""The patch header: what a patch says of itself before any stream is decoded (docs/format.md, "Header")."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from pulse_kernels.codec.segment import ALL, DELTA, PROFILES, SegmentHeader, segment_from_json
from pulse_kernels.dtypes import DTYPES
from pulse_kernels.errors import PatchFormatError

FORMAT_VERSION = 1
MAX_NAME_BYTES = 4096
MAX_NUMEL = 1 << 62
MAX_NUMBER_CHARS = 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIGEST = re.compile(r"(?:[0-9a-f]{32})?\Z")


@dataclass
class TensorHeader:
    """One tensor of a patch: name, safetensors dtype name, shape, and its coded segments in order."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    segments: list[SegmentHeader] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_changed(self) -> int:
        return sum(segment.count for segment in self.segments)

    @property
    def payload_bytes(self) -> int:
        return sum(segment.index_bytes + segment.value_bytes for segment in self.segments)

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype_name, list(self.shape), [segment.to_json() for segment in self.segments]]


@dataclass
class PatchHeader:
    """Versions, digests, profile and the list of tensors; sizes in bytes are of the coded streams."""

    profile: str
    base_version: int | None
    version: int | None
    base_digest: str
    digest: str
    tensors: list[TensorHeader]
    added: list[TensorHeader]
    removed: tuple[str, ...]
    layout: dict[str, Any] | None = None
    values_digest: str = ""

    @property
    def num_changed(self) -> int:
        """Changed elements, without added tensors."""
        return sum(tensor.num_changed for tensor in self.tensors)

    @property
    def numel(self) -> int:
        """Elements of the tensors that changed."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def density(self) -> float:
        return self.num_changed / self.numel if self.numel else 0.0

    @property
    def index_bytes(self) -> int:
        return sum(segment.index_bytes for tensor in self.tensors for segment in tensor.segments)

    @property
    def value_bytes(self) -> int:
        return sum(segment.value_bytes for tensor in self.tensors for segment in tensor.segments)

    @property
    def added_bytes(self) -> int:
        return sum(tensor.payload_bytes for tensor in self.added)

    @property
    def needs_base(self) -> bool:
        """Whether values are coded against the base."""
        return any(segment.value_code == DELTA for tensor in self.tensors for segment in tensor.segments)

    @property
    def decoded_bytes(self) -> int:
        """An upper bound of the memory that decoding takes: positions, values and the planes they come from."""
        total = 0
        for tensor in (*self.tensors, *self.added):
            for segment in tensor.segments:
                total += segment.count * (8 + 4 * tensor.dtype.itemsize) + segment.escape_bytes
        return total

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "profile": self.profile,
            "base_version": self.base_version,
            "version": self.version,
            "base_digest": self.base_digest,
            "digest": self.digest,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "added": [tensor.to_json() for tensor in self.added],
            "removed": list(self.removed),
        }
        if self.layout is not None:
            content["layout"] = self.layout
        if self.values_digest:
            content["values_digest"] = self.values_digest
        try:
            return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the patch header does not go into JSON: {error}; is layout plain data?") from None

    @classmethod
    def from_json(cls, text: str) -> PatchHeader:
        """Out of untrusted text; PatchFormatError where anything is missing, unknown or inconsistent."""
        try:
            return cls._from_content(parse_json(text, "patch header"))
        except RecursionError:
            raise PatchFormatError("patch header: nested too deep; the file is damaged") from None

    @classmethod
    def _from_content(cls, content: Any) -> PatchHeader:
        found = content.get("format") if isinstance(content, dict) else content
        if not isinstance(content, dict) or type(found) is not int or found != FORMAT_VERSION:
            raise PatchFormatError(
                f"patch header: format {found!r:.60}, expected {FORMAT_VERSION}; a newer pulse_kernels may read it"
            )
        needed = {
            "format",
            "profile",
            "base_version",
            "version",
            "base_digest",
            "digest",
            "tensors",
            "added",
            "removed",
        }
        if set(content) - {"layout", "values_digest"} != needed:
            raise PatchFormatError(f"patch header: fields {sorted(set(content) ^ needed)!r:.200} missing or unknown")
        if content["profile"] not in PROFILES:
            raise PatchFormatError(f"patch header: profile {content['profile']!r:.60}, expected one of {PROFILES}")
        for name in ("base_version", "version"):
            value = content[name]
            if value is not None and (type(value) is not int or not 0 <= value < 1 << 63):
                raise PatchFormatError(f"patch header: {name} is {value!r:.60}, expected an integer >= 0 or null")
        for name in ("base_digest", "digest"):
            if not isinstance(content[name], str) or not _DIGEST.match(content[name]):
                raise PatchFormatError(f"patch header: {name} is {content[name]!r:.60}, expected 32 hexadecimal digits")
        values_digest = content.get("values_digest", "")
        if "values_digest" in content and (
            not isinstance(values_digest, str) or not values_digest or not _DIGEST.match(values_digest)
        ):
            raise PatchFormatError(
                f"patch header: values_digest is {values_digest!r:.60}, expected 32 hexadecimal digits"
            )
        for name in ("tensors", "added", "removed"):
            if not isinstance(content[name], list):
                raise PatchFormatError(f"patch header: {name} is {content[name]!r:.60}, expected a list")
        layout = content.get("layout")
        if layout is not None and not isinstance(layout, dict):
            raise PatchFormatError(f"patch header: layout is {layout!r:.60}, expected an object")
        try:
            json.dumps(layout, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PatchFormatError("patch header: layout is not Unicode text") from None
        tensors = [_tensor_from_json(item, whole=False) for item in content["tensors"]]
        added = [_tensor_from_json(item, whole=True) for item in content["added"]]
        removed = [_checked_name(name) for name in content["removed"]]
        seen: set[str] = set()
        for name in (*(tensor.name for tensor in (*tensors, *added)), *removed):
            if name in seen:
                raise PatchFormatError(f"patch header: tensor {name!r} is listed twice")
            seen.add(name)
        versions = content["base_version"], content["version"]
        digests = content["base_digest"], content["digest"]
        return cls(content["profile"], *versions, *digests, tensors, added, tuple(removed), layout, values_digest)


def name_problem(name: str) -> str | None:
    """Why ``name`` is not taken as a tensor's name: nothing that could pass for a path out of a folder."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "not Unicode text"
    if not 0 < size <= MAX_NAME_BYTES:
        return f"{size} bytes, expected 1 to {MAX_NAME_BYTES}"
    if name == "__metadata__":
        return "reserved by the safetensors format"
    if _CONTROL.search(name):
        return "control characters"
    if "\\" in name or name.startswith("/") or ".." in name.split("/") or re.match(r"[A-Za-z]:", name):
        return "looks like a path"
    return None


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise PatchFormatError(f"patch header: tensor name {name!r:.60}, expected text")
    if problem := name_problem(name):
        raise PatchFormatError(f"patch header: tensor name {name!r:.80} is refused: {problem}")
    return name


def _tensor_from_json(item: Any, *, whole: bool) -> TensorHeader:
    if not isinstance(item, list) or len(item) != 4:
        raise PatchFormatError(f"patch header: tensor {item!r:.80}, expected [name, dtype, shape, segments]")
    name, dtype_name, shape, segments = item
    name = _checked_name(name)
    what = f"tensor {name!r:.200}"
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise PatchFormatError(f"{what}: dtype {dtype_name!r:.60}, expected one of {', '.join(DTYPES)}")
    sizes_fit = isinstance(shape, list) and all(type(size) is int and 0 <= size <= MAX_NUMEL for size in shape)
    # Zeros count as ones here: strides multiply the other sizes whether there are elements or not.
    if not sizes_fit or len(shape) > 64 or math.prod(max(size, 1) for size in shape) > MAX_NUMEL:
        raise PatchFormatError(
            f"{what}: shape {shape!r:.80}, expected up to 64 sizes with a product (without zeros) up to 2^62"
        )
    if not isinstance(segments, list):
        raise PatchFormatError(f"{what}: segments are {segments!r:.60}, expected a list")
    header = TensorHeader(name, dtype_name, tuple(shape))
    end = 0
    for part in segments:
        segment = segment_from_json(part, header.dtype, what)
        if segment.start < end or (whole and segment.start != end) or segment.start + segment.numel > header.numel:
            raise PatchFormatError(
                f"{what}: a segment [{segment.start}, {segment.start + segment.numel}) after {end} of {header.numel}"
            )
        if (segment.index_code == ALL) != whole:
            raise PatchFormatError(f"{what}: index code {segment.index_code!r} does not fit its list")
        end = segment.start + segment.numel
        header.segments.append(segment)
    if whole and end != header.numel:
        raise PatchFormatError(f"{what}: segments end at {end} of {header.numel} elements")
    return header


def parse_json(text: str | bytes, what: str) -> Any:
    """Strict JSON, in UTF-8 where it comes as bytes: no duplicate keys, no numbers that are infinite or endless."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise PatchFormatError(f"{what}: a key occurs twice")
        return result

    def refuse(token: str) -> Any:
        raise PatchFormatError(f"{what}: the number {token!r:.40}")

    def integer(token: str) -> int:
        return int(token) if len(token) <= MAX_NUMBER_CHARS else refuse(token)

    def real(token: str) -> float:
        value = float(token) if len(token) <= MAX_NUMBER_CHARS else math.inf
        return value if math.isfinite(value) else refuse(token)

    try:
        # As text: out of bytes, json.loads would take UTF-16 and UTF-32 as well.
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_int=integer, parse_float=real)
    except (ValueError, RecursionError) as error:
        if isinstance(error, PatchFormatError):
            raise
        raise PatchFormatError(f"{what}: no valid JSON ({error!s:.120})") from None
