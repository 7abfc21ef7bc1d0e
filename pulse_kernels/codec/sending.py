"""What encoding needs of a patch, on its way to the host: all copies begin before the first is waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pulse_kernels import checks
from pulse_kernels.backends import for_device
from pulse_kernels.checks import INT32_NUMEL
from pulse_kernels.codec import segment
from pulse_kernels.codec.segment import Changes, bounds
from pulse_kernels.errors import BaseMismatchError
from pulse_kernels.patch import TensorPatch
from pulse_kernels.transfer import HostCopy, is_away, to_host

_BATCH = 32 << 20  # bytes coded at once: enough for all threads, while the next ones travel


@dataclass(frozen=True)
class _Cut:
    """A segment as the device finds it: first element, elements, and which of the tensor's changes are in it."""

    start: int
    numel: int
    first: int
    last: int


@dataclass(frozen=True)
class SentChanges:
    """The changes of a tensor, sent for a profile: positions, or each segment's packed on the device."""

    item: TensorPatch
    profile: str
    indices: HostCopy | None
    packed: Sequence[tuple[_Cut, HostCopy]]
    values: HostCopy
    old_values: HostCopy | None
    versions: tuple[int, ...]

    @property
    def travelling(self) -> int:
        """Bytes that had to come from a device."""
        copies = [self.indices, self.values, self.old_values, *(blob for _, blob in self.packed)]
        return sum(copy.travelling for copy in copies if copy is not None)

    def stand_for(self, item: TensorPatch, profile: str) -> bool:
        """Whether these are what ``item`` holds now, for this profile."""
        return self.item is item and self.profile == profile and self.versions == _versions(item)

    def changes(self) -> Iterator[Changes]:
        """What to code of each segment, as soon as it is there."""
        values = self.values.get()
        for cut, blob in self.packed:
            yield Changes(cut.start, cut.numel, None, values[cut.first : cut.last], packed=blob.get())
        if self.indices is None:
            return
        indices, old = self.indices.get().contiguous(), None if self.old_values is None else self.old_values.get()
        for start, numel, first, last in bounds(indices, self.item.numel):
            part = slice(first, last)
            yield Changes(start, numel, indices[part], values[part], None if old is None else old[part])


@dataclass(frozen=True)
class SentTensor:
    """A whole tensor on its way."""

    values: HostCopy

    @property
    def travelling(self) -> int:
        return self.values.travelling

    def changes(self) -> Iterator[Changes]:
        flat = self.values.get().resolve_conj().resolve_neg().reshape(-1)
        for start in range(0, flat.numel(), segment.SEGMENT_NUMEL):
            values = flat[start : start + segment.SEGMENT_NUMEL]
            yield Changes(start, values.numel(), None, values)


Sent: TypeAlias = "SentChanges | SentTensor"


def _versions(item: TensorPatch) -> tuple[int, ...]:
    """Counts of in-place writes to the tensors of ``item``; inference tensors keep none."""
    tensors = [item.indices, item.values, *([] if item.old_values is None else [item.old_values])]
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def base_tensor(base: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The base's tensor of that name; BaseMismatchError unless it is there and of that kind."""
    if name not in base:
        raise BaseMismatchError(f"the base lacks {name!r}, which the patch changes; pass the patch's own base")
    tensor = base[name]
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise BaseMismatchError(
            f"{name!r} is {tensor.dtype} {list(tensor.shape)} in the base, the patch was made for {dtype} {list(shape)}"
        )
    return tensor


def _old_values(item: TensorPatch, base: Mapping[str, Tensor] | None, profile: str) -> Tensor | None:
    if profile == "fast":
        return None
    if item.old_values is not None:
        return item.old_values
    if base is None:
        raise ValueError(
            f"profile {profile!r} codes the values of {item.name!r} against the base, and the patch does not know the "
            "old values; pass base=<the old tensors>, or use profile='fast'"
        )
    tensor = base_tensor(base, item.name, item.dtype, item.shape)
    return for_device(tensor.device.type).gather(tensor, item.indices.to(tensor.device))


def _wide_enough(item: TensorPatch) -> Tensor:
    """The indices in a dtype that holds every position of the tensor."""
    return item.indices.long() if item.numel > INT32_NUMEL else item.indices


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Which of ``tensors`` are on each device that they have to be sent from."""
    return {device: rows for device, rows in checks.rows_by_device(tensors).items() if is_away(tensors[rows[0]])}


def _first_bad(items: Sequence[TensorPatch], indices: Sequence[Tensor]) -> dict[int, int]:
    """``first_bad_index`` of those on a device, looked for there: one call each device, and only numbers come back."""
    bad: dict[int, int] = {}
    for device, rows in _by_device(indices).items():
        arguments = [indices[k] for k in rows], [items[k].numel for k in rows]
        bad.update(zip(rows, for_device(device.type).first_bad_index_many(*arguments), strict=True))
    return bad


def packs_on(device: torch.device) -> bool:
    """Whether indices are packed on the device; in plain PyTorch it would take longer than to send them."""
    return "cuda" in for_device(device.type).names


def _pack(items: Sequence[TensorPatch], indices: Sequence[Tensor], rows: list[int]) -> list[list[tuple[_Cut, Tensor]]]:
    """Each row's segments with their positions packed, on the one device that all are on."""
    cuts = [_cuts(items[k].numel, ends) for k, ends in zip(rows, _segment_ends(items, indices, rows), strict=True)]
    local = [
        (indices[k][cut.first : cut.last] - cut.start).to(torch.int32)
        for k, own in zip(rows, cuts, strict=True)
        for cut in own
    ]
    device_type = indices[rows[0]].device.type
    blobs = iter(for_device(device_type).pack_indices_many(local, [cut.numel for own in cuts for cut in own]))
    return [[(cut, next(blobs)) for cut in own] for own in cuts]


def _segment_ends(items: Sequence[TensorPatch], indices: Sequence[Tensor], rows: list[int]) -> list[list[int]]:
    """How many changes of each row lie before the end of each of its segments; one synchronisation for all."""
    found = []
    for k in rows:
        if items[k].numel > segment.SEGMENT_NUMEL:
            index, size = indices[k].contiguous(), segment.SEGMENT_NUMEL
            starts = torch.arange(size, items[k].numel, size, dtype=index.dtype, device=index.device)
            found.append(torch.searchsorted(index, starts))
    numbers = iter(torch.cat(found).tolist() if found else [])
    segments = [-(-items[k].numel // segment.SEGMENT_NUMEL) for k in rows]
    return [[next(numbers) for _ in range(n - 1)] + [indices[k].numel()] for k, n in zip(rows, segments, strict=True)]


def _cuts(numel: int, ends: list[int]) -> list[_Cut]:
    """The segments that have changes."""
    size = segment.SEGMENT_NUMEL
    cuts = [
        _Cut(k * size, min(size, numel - k * size), first, last)
        for k, (first, last) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return [cut for cut in cuts if cut.first < cut.last]


def send_changes(
    items: Sequence[TensorPatch], profile: str, base: Mapping[str, Tensor] | None = None, *, check: bool = True
) -> list[SentChanges]:
    """Begin to bring to the host what ``profile`` codes of ``items``.

    IndexError unless positions are sorted, unique and in range; ``check=False`` skips that, for patches this package
    made itself. ValueError or BaseMismatchError where values are needed that ``base`` should have and has not.
    """
    indices = [_wide_enough(item) for item in items]
    bad = _first_bad(items, indices) if check else dict.fromkeys(range(len(items)), -1)
    old_values: list[Tensor | None] = []
    for k, (item, index) in enumerate(zip(items, indices, strict=True)):
        if k not in bad:
            indices[k] = index = index.cpu().contiguous()
            bad[k] = for_device("cpu").first_bad_index(index, item.numel)
        checks.index_order(f"patch of {item.name!r:.200}", index, item.numel, bad[k])
        old_values.append(_old_values(item, base, profile))
    packed: dict[int, list[tuple[_Cut, Tensor]]] = {}
    if profile == "fast":
        for device, rows in _by_device(indices).items():
            if packs_on(device):
                packed.update(zip(rows, _pack(items, indices, rows), strict=True))
    # In the order in which they will be wanted, so that the first tensors are there first.
    tensors: list[Tensor] = []
    for k, (item, old) in enumerate(zip(items, old_values, strict=True)):
        positions = [blob for _, blob in packed[k]] if k in packed else [indices[k]]
        tensors += [*positions, item.values, *([] if old is None else [old])]
    copies = iter(to_host(tensors))
    sent = []
    for k, (item, old) in enumerate(zip(items, old_values, strict=True)):
        blobs = [(cut, next(copies)) for cut, _ in packed.get(k, [])]
        positions_sent = None if k in packed else next(copies)
        values, before = next(copies), None if old is None else next(copies)
        sent.append(SentChanges(item, profile, positions_sent, blobs, values, before, _versions(item)))
    return sent


def send_tensors(tensors: Sequence[Tensor]) -> list[SentTensor]:
    """Begin to bring whole tensors to the host."""
    return [SentTensor(copy) for copy in to_host([tensor.detach() for tensor in tensors])]


def batches(sent: Sequence[Sent]) -> Iterator[list[int]]:
    """Positions in ``sent`` to code together: all, where nothing travels; else as much as is worth waiting for."""
    batch: list[int] = []
    size = 0
    for k, item in enumerate(sent):
        batch.append(k)
        size += item.travelling
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


__all__ = ["SentChanges", "SentTensor", "base_tensor", "batches", "packs_on", "send_changes", "send_tensors"]
