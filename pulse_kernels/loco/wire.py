"""Entries of a range of positions as bytes: packed positions and the four byte planes of their FP32 values.

A payload is [pack_indices blob][plane 0]..[plane 3], plane k holding byte k (little-endian) of every value. Where the
payload is compressed, a plane may be a zstd frame, or left out where it is zero all over: its size tells. All positions
having a value, there is no blob. Sizes, count and a digest travel ahead of it, in a Label.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from pulse_kernels import ops
from pulse_kernels.backends import for_device
from pulse_kernels.codec.streams import load_part, store_parts
from pulse_kernels.errors import PatchFormatError

_LABEL = struct.Struct("<q5q2q")
LABEL_BYTES = _LABEL.size
_DIGEST_KEY = 0x10C0


@dataclass(frozen=True)
class Entries:
    """FP32 values [n] at sorted int32 positions [n] of a range; indices None: at every position."""

    indices: Tensor | None
    values: Tensor

    @property
    def count(self) -> int:
        return self.values.numel()


def nothing(device: torch.device) -> Entries:
    """No entries. FP32 is asked for by name here as everywhere: the user's default dtype may be another."""
    return Entries(torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.float32, device=device))


@dataclass(frozen=True)
class Label:
    """What a rank tells of a payload before it sends it: entries, bytes of its five parts, its digest."""

    count: int
    sizes: tuple[int, ...]
    digest: tuple[int, int]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def to_bytes(self) -> bytes:
        return _LABEL.pack(self.count, *self.sizes, *self.digest)

    @classmethod
    def from_bytes(cls, row: bytes, numel: int, what: str) -> Label:
        """PatchFormatError where no payload for ``numel`` positions can have this label."""
        count, *rest = _LABEL.unpack(row)
        sizes, digest = tuple(rest[:5]), (rest[5], rest[6])
        if not 0 <= count <= numel or min(sizes) < 0 or max(sizes[1:]) > count or (sizes[0] and count == numel):
            raise PatchFormatError(f"{what}: {count} entries in parts of {sizes} bytes for {numel} positions")
        if sizes[0] > 8 * count + 1024:  # no blob is as large
            raise PatchFormatError(f"{what}: {sizes[0]} bytes of positions for {count} entries")
        return cls(count, sizes, digest)


NOTHING = Label(0, (0, 0, 0, 0, 0), (0, 0))


def encode(entries: Entries, numel: int, compress: bool, device: torch.device, threads: int) -> tuple[Label, Tensor]:
    """The payload (uint8 [bytes] on ``device``) of entries below ``numel``, and its label."""
    if entries.count == 0:
        return NOTHING, torch.empty(0, dtype=torch.uint8, device=device)
    dense = entries.indices is None or entries.count == numel
    parts = [torch.empty(0, dtype=torch.uint8, device=device)]
    if not dense:
        assert entries.indices is not None
        parts = [ops.pack_indices(entries.indices, numel).to(device)]
    planes = _planes(entries.values)
    if compress:
        stored = store_parts([plane.cpu() for plane in planes], threads)
        parts += [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) if part else parts[0][:0]
                  for part in stored]  # fmt: skip
    else:
        parts += [plane.to(device) for plane in planes]
    payload = torch.cat(parts)
    return Label(entries.count, tuple(part.numel() for part in parts), _digest(payload)), payload


def decode(label: Label, payload: Tensor, numel: int, device: torch.device, what: str) -> Entries:
    """The entries, on ``device``; PatchFormatError for a payload that is not what its label says."""
    if label.count == 0:
        return nothing(device)
    if payload.numel() != label.total or _digest(payload) != label.digest:
        raise PatchFormatError(f"{what}: the bytes that came are not those that were sent")
    blob, *planes = payload.split(list(label.sizes))
    loaded = [plane if plane.numel() == label.count else _load(plane, label.count, what) for plane in planes]
    values = _values([plane.to(device) for plane in loaded])
    if label.count == numel:
        return Entries(None, values)
    indices = ops.unpack_indices(blob.to(device), index_dtype=torch.int32)
    if indices.numel() != label.count or int(indices[-1]) >= numel:
        raise PatchFormatError(f"{what}: {indices.numel()} positions below {numel}, {label.count} were announced")
    return Entries(indices, values)


def _load(plane: Tensor, count: int, what: str) -> Tensor:
    return load_part(memoryview(bytes(plane.cpu().numpy())), count, what)


def _planes(values: Tensor) -> list[Tensor]:
    if values.device.type == "cpu":
        return list(for_device("cpu").encode_values_many([values], None)[0].split(values.numel()))
    return list(values.contiguous().view(torch.uint8).view(-1, 4).t().contiguous().unbind())


def _values(planes: list[Tensor]) -> Tensor:
    if planes[0].device.type == "cpu":
        decoded: Tensor = for_device("cpu").decode_values(torch.cat(planes), None, torch.float32)
        return decoded
    return torch.stack(planes, dim=1).view(torch.float32).view(-1)


def _digest(payload: Tensor) -> tuple[int, int]:
    first, second = ops.digest(payload, _DIGEST_KEY).tolist()
    return first, second
