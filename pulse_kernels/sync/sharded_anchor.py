"""Anchors of a state that lies on many ranks: whole tensors from where they are, boxes put together a few at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pulse_kernels.checkpoint.layout import DIGEST_KEY, INDEX_FILE, VERSION_KEY, index_bytes
from pulse_kernels.ranks.collectives import Group, group_device
from pulse_kernels.sync.anchor import AnchorFiles, send_anchor, shards
from pulse_kernels.sync.manifest import anchor_folder
from pulse_kernels.sync.sharding import Box
from pulse_kernels.sync.store import Store

_TOGETHER = 256 << 20  # bytes of boxed tensors that one rank puts together at once, a larger tensor alone
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def send_sharded_anchor(
    store: Store,
    group: Group,
    weights: Mapping[str, Tensor],
    owners: Mapping[str, Mapping[int, Box]],
    version: int,
    digest: str,
    *,
    token: str,
    shard_bytes: int,
    sent: list[AnchorFiles],
    failure: Exception | None = None,
) -> None:
    """Upload this rank's share of the anchor's files, and add them to ``sent``; all ranks must call it.

    weights: this rank's tensors. owners: see ``sharding.owners``. Where ``failure``, or one here, makes the anchor
    void, the rank still gives the others its boxes, and raises at the end. Memory: _TOGETHER, or the
    largest boxed tensor.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def upload(named: Mapping[str, Tensor]) -> None:
        nonlocal failure
        if failure is not None or not named:
            return
        name = f"{rank:05d}-{token}-{len(sent)}"
        try:
            sent.append(send_anchor(store, named, version, digest, token=name, shard_bytes=shard_bytes))
        except Exception as error:
            failure = error

    complete = {name for name, found in owners.items() if len(found) == 1 and next(iter(found.values())).whole}
    upload({name: weights[name] for name in owners if name in complete and rank in owners[name]})
    boxed = {name: next(iter(found.values())) for name, found in owners.items() if name not in complete}
    kinds = {name: torch.empty(box.shape, dtype=box.dtype, device="meta") for name, box in boxed.items()}
    files = [file for file in shards(kinds, min(shard_bytes, _TOGETHER)) if file]
    for first in range(0, len(files), world):  # each rank puts one file together, then all upload at once
        mine: dict[str, Tensor] = {}
        for target, file in enumerate(files[first : first + world]):
            for spec in file:
                try:
                    if rank == target and failure is None:
                        mine[spec.name] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                except Exception as error:
                    failure = error
                _assemble(mine.get(spec.name), owners[spec.name], weights.get(spec.name), target, group)
        upload(mine)
    if failure is not None:
        raise failure


def _assemble(whole: Tensor | None, found: Mapping[int, Box], local: Tensor | None, target: int, group: Group) -> None:
    """Bring the boxes of a tensor to the rank ``target``, into ``whole`` unless that is None. As integers: copies of
    bools change their bits."""
    rank, device = dist.get_rank(group), group_device(group)
    for owner, box in found.items():
        if not box.numel or rank not in (owner, target):
            continue
        bits = _BITS[box.dtype.itemsize]
        if rank == owner:
            assert local is not None
            part = local.detach().contiguous().view(bits)
            if owner != target:
                dist.send(part.to(device).reshape(-1).view(torch.uint8), group=group, group_dst=target)
        else:
            raw = torch.empty(box.numel * box.dtype.itemsize, dtype=torch.uint8, device=device)
            dist.recv(raw, group=group, group_src=owner)
            part = raw.view(bits).reshape(box.local)
        if rank == target and whole is not None:
            whole.view(bits)[box.slices].copy_(part)


def anchor_to_json(sent: Sequence[AnchorFiles]) -> dict[str, Any]:
    """What rank 0 must know of a rank's files: parts, and the file of each tensor."""
    indices = [json.loads(data) for files in sent for key, data in files.late if key.endswith(INDEX_FILE)]
    return {
        "parts": [[part.key, part.bytes, part.blake3] for files in sent for part in files.parts],
        "weight_map": {name: file for index in indices for name, file in index["weight_map"].items()},
        "total_size": sum(index["metadata"]["total_size"] for index in indices),
    }


def index_of(rows: Sequence[Mapping[str, Any]], version: int, digest: str) -> tuple[str, bytes]:
    """Key and bytes of the index that makes all ranks' files, as ``anchor_to_json`` has them, one checkpoint."""
    metadata = {
        "total_size": sum(row["total_size"] for row in rows),
        DIGEST_KEY: digest,
        VERSION_KEY: str(version),
    }
    weight_map = {name: file for row in rows for name, file in row["weight_map"].items()}
    return f"{anchor_folder(version)}/{INDEX_FILE}", index_bytes({"metadata": metadata, "weight_map": weight_map})
