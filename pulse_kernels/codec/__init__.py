"""Patch <-> bytes. Profiles: "fast" (bit-packed gaps, raw values) and "balanced" (default: gap bytes, values as
differences to the base, zstd level 1). The bytes are specified in docs/format.md.

parallel.py   work spread over threads
streams.py    parts of a stream: zstd, raw or zero
segment.py    one segment of a tensor: indices and values
sending.py    a patch's tensors on their way from a device to the host
header.py     the patch header and what is refused in one
overlay.py    a base with a patch imagined on top
container.py  the safetensors file around both
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pulse_kernels import patch as _patch
from pulse_kernels.backends import for_device
from pulse_kernels.checks import INT32_NUMEL
from pulse_kernels.codec.container import PatchBuilder, PatchReader
from pulse_kernels.codec.header import PatchHeader, TensorHeader, name_problem
from pulse_kernels.codec.overlay import check_base_digest, imagine, imagined_changes, imagined_tensors
from pulse_kernels.codec.parallel import parallel_map
from pulse_kernels.codec.segment import (
    ALL,
    DELTA,
    PROFILES,
    SEGMENT_NUMEL,
    Changes,
    Segment,
    decode_indices,
    decode_values,
    encode_segments,
)
from pulse_kernels.codec.sending import SentChanges, SentTensor, base_tensor, batches, send_changes, send_tensors
from pulse_kernels.dtypes import dtype_name
from pulse_kernels.errors import PatchFormatError, PulseError, VerificationError
from pulse_kernels.patch import Patch, TensorPatch

# Where no base bounds a patch's decoded size: a ratio no real patch comes near, above a size nobody minds.
_MAX_EXPANSION = 256
_FREE_BYTES = 1 << 28


def _threads(profile: str) -> int:
    # `fast` has nothing but operators that are themselves parallel.
    return 1 if profile == "fast" else torch.get_num_threads()


def check_profile(profile: str) -> None:
    """ValueError unless there is such a profile."""
    if profile not in PROFILES:
        raise ValueError(f"profile is {profile!r}, expected one of {', '.join(PROFILES)}")


def tensor_header(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorHeader:
    """The header of a tensor without segments; ValueError for a name that no reader would take."""
    if problem := name_problem(name):
        raise ValueError(f"tensor name {name!r:.80} cannot go into a patch: {problem}; rename the tensor")
    return TensorHeader(name, dtype_name(dtype), tuple(shape))


def build(
    patch: Patch, profile: str, base: Mapping[str, Tensor] | None, *, with_values_digest: bool = False
) -> PatchBuilder:
    """The coded segments of a patch, of which ``chunks`` makes the file. See ``Patch.to_bytes``. with_values_digest:
    the patch gets its ``values_digest`` first."""
    check_profile(profile)
    if with_values_digest:
        patch.values_digest = patch.digest_of_values()
    header = PatchHeader(
        *(profile, patch.base_version, patch.version, patch.base_digest, patch.digest),
        [tensor_header(item.name, item.dtype, item.shape) for item in patch.tensors.values()],
        [tensor_header(name, tensor.dtype, tensor.shape) for name, tensor in patch.added.items()],
        patch.removed,
        patch.layout,
        patch.values_digest,
    )
    builder = PatchBuilder(header)
    sent: list[SentChanges | SentTensor] = [*_send(patch, profile, base), *send_tensors(list(patch.added.values()))]
    tensors = [*header.tensors, *header.added]
    for batch in batches(sent):
        coded = [(tensors[k], changes) for k in batch for changes in sent[k].changes()]
        segments = encode_segments([changes for _, changes in coded], profile, torch.get_num_threads())
        for (target, _), segment in zip(coded, segments, strict=True):
            builder.add(target, segment)
    return builder


def _send(patch: Patch, profile: str, base: Mapping[str, Tensor] | None) -> list[SentChanges]:
    """The patch's changes on their way to the host, those that ``Patch.gate`` sent and the others from now on."""
    sent: dict[str, SentChanges] = {
        name: patch.sent[name]
        for name, item in patch.tensors.items()
        if name in patch.sent and patch.sent[name].stand_for(item, profile)
    }
    others = [name for name in patch.tensors if name not in sent]
    sent.update(zip(others, send_changes([patch.tensors[name] for name in others], profile, base), strict=True))
    return [sent[name] for name in patch.tensors]


def send(items: Sequence[TensorPatch], profile: str) -> list[SentChanges]:
    """Begin to bring to the host what ``profile`` codes of changes that know their old values and are in order."""
    check_profile(profile)
    return send_changes(items, profile, check=False)


def encode(patch: Patch, profile: str, base: Mapping[str, Tensor] | None, *, with_values_digest: bool = False) -> bytes:
    """See ``Patch.to_bytes`` and ``build``."""
    return b"".join(build(patch, profile, base, with_values_digest=with_values_digest).chunks())


def save_builder(builder: PatchBuilder, path: str | os.PathLike[str]) -> int:
    """Write a patch file under a temporary name, sync, rename; returns its bytes."""
    target = Path(path)
    temporary = target.parent / f".pulse-{secrets.token_hex(8)}.tmp"
    ours = False
    try:
        with open(temporary, "xb") as file:
            ours = True
            size = sum(file.write(chunk) for chunk in builder.chunks())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        ours = False
        return size
    except OSError as error:
        raise PulseError(
            f"{target}: cannot write the patch: {error.strerror or error}; nothing was left behind. Check the folder, "
            "its permissions and its free space"
        ) from error
    finally:
        if ours:
            temporary.unlink(missing_ok=True)


def save(patch: Patch, path: str | os.PathLike[str], profile: str, base: Mapping[str, Tensor] | None) -> int:
    """See ``Patch.save``."""
    return save_builder(build(patch, profile, base), path)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a patch file; PulseError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PulseError(f"{path}: cannot read the patch: {error.strerror or error}; check the path") from error


def peek(buffer: Any) -> PatchHeader:
    """See ``Patch.peek``."""
    return PatchReader(buffer).header


def _check_size(header: PatchHeader, file_bytes: int, based: bool, limit: int | None) -> None:
    """Bound what decoding may allocate before it allocates anything."""
    if limit is None and not based:
        limit = max(_FREE_BYTES, _MAX_EXPANSION * file_bytes)
    if limit is None:
        added = sum(tensor.nbytes for tensor in header.added)
        # Changed tensors are as large as the base's, which exist; added ones have only the file to show for them.
        if added > max(_FREE_BYTES, _MAX_EXPANSION * file_bytes):
            raise PatchFormatError(
                f"added tensors: {added} bytes out of a file of {file_bytes}; if that is right, pass max_decoded_bytes"
            )
        return
    if header.decoded_bytes > limit:
        raise PatchFormatError(
            f"the patch would take {header.decoded_bytes} bytes of memory, the limit is {limit} for a file of "
            f"{file_bytes}; if that is right, pass max_decoded_bytes"
        )


def decode(
    buffer: Any,
    base: Mapping[str, Tensor] | None,
    current_digest: str | None,
    max_decoded_bytes: int | None,
    pending: Patch | None = None,
) -> Patch:
    """See ``Patch.from_bytes``."""
    reader = PatchReader(buffer)
    header = reader.header
    if base is None and header.needs_base:
        raise ValueError(
            f"this patch codes values against its base (digest {header.base_digest}); pass base=<the old tensors>"
        )
    tensors_before: Mapping[str, Tensor] = {}
    if base is not None:
        tensors_before = imagined_tensors(base, pending)
        for item in header.tensors:
            base_tensor(tensors_before, item.name, item.dtype, item.shape)
    _check_size(header, memoryview(buffer).nbytes, base is not None, max_decoded_bytes)
    if base is not None and header.needs_base:
        check_base_digest(header, base, current_digest, pending)
    flat = {item.name: tensors_before[item.name].detach().reshape(-1) for item in header.tensors if base is not None}
    changes = imagined_changes(tensors_before, pending, header)

    def work(job: tuple[TensorHeader, int, memoryview, memoryview]) -> tuple[Tensor | None, Tensor]:
        tensor, s, index_stream, value_stream = job
        segment = tensor.segments[s]
        before = flat[tensor.name][segment.start : segment.start + segment.numel] if tensor.name in flat else None
        local, values = decode_segment(tensor, s, index_stream, value_stream, before, changes.get(tensor.name))
        if local is None:
            return None, values
        return (local.long() if tensor.numel > INT32_NUMEL else local) + segment.start, values

    jobs = list(reader.streams())
    parts: dict[int, list[tuple[Tensor | None, Tensor]]] = {}
    results = parallel_map(work, jobs, _threads(header.profile))
    for job, result in zip(jobs, results, strict=True):
        parts.setdefault(id(job[0]), []).append(result)
    tensors = {item.name: _join_changes(item, parts.get(id(item), [])) for item in header.tensors}
    added = {item.name: _join_whole(item, parts.get(id(item), [])) for item in header.added}
    patch = Patch(
        *(header.base_version, header.version, tensors, added, header.removed),
        *(header.base_digest, header.digest, header.layout),
    )
    if header.values_digest and (found := patch.digest_of_values()) != header.values_digest:
        raise VerificationError(
            f"decoded, the patch's values have digest {found}, expected {header.values_digest}: the base's values at "
            "those positions are not what its digest stands for. Something else wrote them; begin from a whole state"
        )
    return patch


def decode_segment(
    tensor: TensorHeader,
    s: int,
    index_stream: memoryview,
    value_stream: memoryview,
    base: Tensor | None,
    pending: TensorPatch | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(positions inside the segment, absolute values) of one segment; positions are None for a whole (added) one.

    base: the segment's elements of the base tensor, flat, or None where values are not coded against it. pending:
    changes of the whole tensor, on the host, that count as made to it.
    """
    segment = tensor.segments[s]
    what = f"tensor {tensor.name!r:.200}, segment {s}, "
    if segment.index_code == ALL:
        return None, decode_values(segment, value_stream, tensor.dtype, None, what + "values")
    local = decode_indices(segment, index_stream, what + "indices")
    before = None
    if segment.value_code == DELTA:
        assert base is not None
        before = for_device(base.device.type).gather(base, local.to(base.device)).cpu()
        if pending is not None:
            imagine(before, local, segment.start, segment.numel, pending)
    return local, decode_values(segment, value_stream, tensor.dtype, before, what + "values")


def _join_changes(item: TensorHeader, parts: list[tuple[Tensor | None, Tensor]]) -> TensorPatch:
    index_dtype = torch.int64 if item.numel > INT32_NUMEL else torch.int32
    indices = [part[0] for part in parts if part[0] is not None]
    joined = _cat(indices, index_dtype), _cat([part[1] for part in parts], item.dtype)
    return TensorPatch(item.name, item.shape, item.dtype, *joined)


def _join_whole(item: TensorHeader, parts: list[tuple[Tensor | None, Tensor]]) -> Tensor:
    return _cat([part[1] for part in parts], item.dtype).view(item.shape)


def _cat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.empty(0, dtype=dtype, device="cpu")
    # Joined as bytes: not every dtype has a cat of its own.
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)


class _Codec:
    send = staticmethod(send)
    encode = staticmethod(encode)
    decode = staticmethod(decode)
    peek = staticmethod(peek)
    save = staticmethod(save)
    read_file = staticmethod(read_file)


_patch.install_codec(_Codec())

__all__ = [
    "PROFILES",
    "SEGMENT_NUMEL",
    "Changes",
    "PatchBuilder",
    "PatchHeader",
    "PatchReader",
    "Segment",
    "TensorHeader",
    "build",
    "check_profile",
    "decode",
    "decode_segment",
    "encode",
    "encode_segments",
    "parallel_map",
    "peek",
    "read_file",
    "save_builder",
    "tensor_header",
]
