"""Which tensors take part, and how they are cut into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pulse_kernels import checks
from pulse_kernels.errors import PulseError
from pulse_kernels.state import Params, named_tensors


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, which are [at, at + stop - start) of the bucket."""

    name: str
    start: int
    stop: int
    at: int

    def of(self, named: Mapping[str, Tensor]) -> Tensor:
        """This piece of a tensor, flat; writing to it writes to the tensor."""
        return named[self.name].view(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Bucket:
    """What is gated and exchanged at once: pieces side by side."""

    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        last = self.pieces[-1]
        return last.at + last.stop - last.start

    def of(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        return [piece.of(named) for piece in self.pieces]


def cut(numels: Mapping[str, int], bucket_numel: int) -> list[Bucket]:
    """Buckets of up to ``bucket_numel`` elements that hold all tensors, in order; a large tensor is in several."""
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for name, numel in numels.items():
        start = 0
        while start < numel:
            stop = min(numel, start + bucket_numel - used)
            pieces.append(Piece(name, start, stop, used))
            used += stop - start
            start = stop
            if used == bucket_numel:
                buckets.append(Bucket(tuple(pieces)))
                pieces, used = [], 0
    if pieces:
        buckets.append(Bucket(tuple(pieces)))
    return buckets


def fragments(numels: Mapping[str, int], count: int) -> list[list[str]]:
    """The names in ``count`` groups of neighbours, as even in elements as whole tensors allow; none is empty."""
    names = list(numels)
    if count > len(names):
        raise ValueError(f"fragments is {count}, but there are only {len(names)} tensors; ask for fewer fragments")
    total = sum(numels.values())
    groups: list[list[str]] = [[]]
    seen = 0
    for k, name in enumerate(names):
        full = groups[-1] and seen * count >= total * len(groups)
        needed = len(names) - k == count - len(groups)  # one tensor for each group to come
        if len(groups) < count and groups[-1] and (full or needed):
            groups.append([])
        groups[-1].append(name)
        seen += numels[name]
    return groups


@dataclass(frozen=True)
class Trained:
    """local: the FP32 weights that the inner optimizer steps, each memory once. owners: the tensors of which these are
    views. casts: low-precision weights by the name of their master. tied: names that are another name's tensor."""

    local: dict[str, Tensor]
    owners: dict[str, Tensor]
    casts: dict[str, Tensor]
    tied: dict[str, str]


def trained(params: Params, masters: Params | None) -> Trained:
    """The tensors to train. Raises ValueError, TypeError for what cannot be."""
    named = _trainable(params)
    casts: dict[str, Tensor] = {}
    if masters is not None:
        given = named_tensors(masters, "masters")
        if lone := given.keys() - named.keys():
            raise ValueError(f"masters: {min(lone)!r:.200} is no trainable parameter; pass masters of params alone")
        for name, master in given.items():
            weight = named[name]
            if tuple(master.shape) != tuple(weight.shape):
                raise ValueError(f"masters: {name!r:.200} is {list(master.shape)}, its weight {list(weight.shape)}")
            if weight is not master:
                casts[name] = weight
            named[name] = master
    for name, tensor in named.items():
        if tensor.dtype != torch.float32:
            raise TypeError(
                f"{name!r:.200} is {checks.short(tensor.dtype)}, expected float32: hand over the FP32 weights that the "
                "optimizer steps with masters="
            )
        if tensor.is_inference() or (name in casts and casts[name].is_inference()):
            raise ValueError(
                f"{name!r:.200} was made in torch.inference_mode, outside which it cannot be written to; .clone() it"
            )
        if tensor.is_meta:
            raise ValueError(f"{name!r:.200} is on the meta device, it has no weights; make them before")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{name!r:.200} is a {type(tensor).__name__}, expected a plain tensor or Parameter; of a sharded one "
                "pass this rank's part, as DTensor.to_local() gives it"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r:.200} is not contiguous; make it so before training with .contiguous()")
    local, tied = _once(named)
    if len(devices := {tensor.device for tensor in local.values()}) > 1:
        raise ValueError(f"params are on {', '.join(sorted(map(str, devices)))}, expected one device a rank")
    return Trained({name: tensor.detach() for name, tensor in local.items()}, local, casts, tied)


def check_same_memory(name: str, owner: Tensor, view: Tensor) -> None:
    """PulseError where a parameter has other memory than it had: ``view`` would be weights that nobody trains."""
    last = owner.storage_offset() + owner.numel()
    if (owner.data_ptr(), owner.shape, owner.dtype, owner.stride()) != (
        view.data_ptr(), view.shape, view.dtype, view.stride()
    ) or owner.untyped_storage().nbytes() < 4 * last:  # fmt: skip
        raise PulseError(
            f"{name!r:.200} has other memory, shape or dtype than when the PulseLoCo was made, as after .data = ..., "
            ".to() or resize_(). Write to parameters in place, or make a new PulseLoCo on all ranks after a change"
        )


def _trainable(params: Params) -> dict[str, Tensor]:
    if isinstance(params, nn.Module):
        named: dict[str, Tensor] = dict(params.named_parameters(remove_duplicate=False))
    else:
        named = named_tensors(params)
    named = {
        name: tensor for name, tensor in named.items() if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }
    if not named:
        raise ValueError("params has no trainable parameters; there is nothing to synchronise")
    return named


def _once(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied parameters under their first name alone, and which names are another's."""
    first: dict[tuple[object, ...], str] = {}
    local: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named.items():
        place = (tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else (name,)
        if place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            local[name] = tensor
    if checks.share_memory(list(local.values())):
        raise ValueError(
            "params: tensors share part of their memory; pass each memory once, whole, as the optimizer steps it"
        )
    return local, tied


def by_pieces(bucket: Bucket, indices: Tensor, values: Tensor) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Entries of a bucket, sorted, by piece: (piece, indices in the piece, values)."""
    ends = indices.new_tensor([piece.at + piece.stop - piece.start - 1 for piece in bucket.pieces])
    bounds: Sequence[int] = [0, *torch.searchsorted(indices, ends, right=True).tolist()]
    for piece, first, last in zip(bucket.pieces, bounds[:-1], bounds[1:], strict=True):
        yield piece, indices[first:last] - piece.at, values[first:last]


def joined(bucket: Bucket, indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Entries of each piece as entries of the bucket."""
    places = [index + piece.at for piece, index in zip(bucket.pieces, indices, strict=True)]
    return torch.cat(places).to(torch.int32), torch.cat(list(values))
