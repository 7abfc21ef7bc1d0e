"""Bytes over torch.distributed, without pickle: what a peer sends is bytes, and no more of them than allowed.

Every function here is a collective: all ranks of the group must call it, in the same order. Where ranks are refused
each other's sizes, all of them raise. What the back end itself raises (a peer died, its time-out passed) goes through:
the group is then out of step and has to be made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pulse_kernels.errors import GroupError

# A torch.distributed.ProcessGroup, or None for all ranks; that class is absent in builds of torch without it.
Group: TypeAlias = Any

GATHER_LIMIT = 64 << 20  # bytes a rank may send to ``gather_bytes``


def group_device(group: Group) -> torch.device:
    """Where the group's tensors must live: the host where its back end takes host tensors, else this rank's GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_rows(row: bytes, group: Group) -> list[bytes]:
    """The ``row`` of every rank, by rank; all must be equally long. One collective."""
    device = group_device(group)
    rows = torch.empty((dist.get_world_size(group), len(row)), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows.unbind()), to_tensor(row).to(device), group=group)
    return [bytes(each) for each in rows.cpu().numpy()]


def gather_bytes(data: bytes, group: Group, *, limit: int = GATHER_LIMIT) -> list[bytes]:
    """The ``data`` of every rank, by rank; any lengths. Two collectives: sizes, then bytes, padded to the longest.

    Raises GroupError on every rank where one of them has more than ``limit`` bytes.
    """
    sizes = gather_integers(len(data), group)
    for rank, size in enumerate(sizes):
        if not 0 <= size <= limit:
            raise GroupError(
                f"rank {rank} wants to send {size} bytes to all, expected 0 to {limit}", {rank: f"{size} bytes"}
            )
    longest = max(sizes)
    rows = gather_rows(data + bytes(longest - len(data)), group)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def gather_integers(number: int, group: Group) -> list[int]:
    """The ``number`` (64 bits) of every rank, by rank."""
    return [
        int.from_bytes(row, "little", signed=True)
        for row in gather_rows(number.to_bytes(8, "little", signed=True), group)
    ]


def broadcast_bytes(data: bytes | None, src: int, group: Group, limit: int) -> memoryview:
    """``data`` of the rank ``src`` (its rank in the group) on every rank; None there says that it has failed.

    One exchange of sizes, in which the receivers state their ``limit``, and one broadcast. Raises GroupError on every
    rank, before anything is allocated, where the sender failed or its bytes are over anybody's limit.
    """
    mine = limit
    if dist.get_rank(group) == src:
        mine = -1 if data is None else len(data)
    sizes = gather_integers(mine, group)
    check_size(sizes, src)
    return broadcast_payload(data, sizes[src], src, group)


def check_size(sizes: Sequence[int], src: int) -> None:
    """GroupError unless what ``src`` wants to send, ``sizes[src]``, is within the limits that the others stated."""
    size = sizes[src]
    if size < 0:
        raise GroupError(f"rank {src} could not make what it was to send", {src: "failed"})
    for rank, limit in enumerate(sizes):
        if rank != src and size > limit:
            raise GroupError(
                f"rank {src} wants to send {size} bytes, rank {rank} takes up to {limit}; nothing was sent",
                {rank: f"{size} bytes are over its limit of {limit}"},
            )


def broadcast_payload(data: bytes | None, size: int, src: int, group: Group) -> memoryview:
    """The ``size`` bytes of ``data`` of the rank ``src`` on every rank, all of which know the size. One collective."""
    if dist.get_rank(group) == src:
        assert data is not None
        assert len(data) == size
        broadcast_tensor(to_tensor(data), src, group)
        return memoryview(data)
    received = torch.empty(size, dtype=torch.uint8, device="cpu")
    broadcast_tensor(received, src, group)
    return _view(received)


def broadcast_tensor(flat: Tensor, src: int, group: Group) -> None:
    """Fill ``flat`` (uint8 [n], on any device) with that of the rank ``src``. One collective."""
    at_hand = flat.to(group_device(group))
    dist.broadcast(at_hand, group=group, group_src=src)
    if at_hand is not flat and dist.get_rank(group) != src:
        flat.copy_(at_hand)


def to_tensor(data: bytes) -> Tensor:
    """A copy of ``data``: uint8 [n] in host memory."""
    tensor = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    _view(tensor)[:] = data
    return tensor


def _view(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
