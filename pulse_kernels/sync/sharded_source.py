"""``Source`` for one rank of many: what changed in its boxes, in the positions of the whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from pulse_kernels import codec
from pulse_kernels.dtypes import DTYPES, dtype_name
from pulse_kernels.patch import Patch, TensorPatch
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, StateDigest, tensor_key, unsigned
from pulse_kernels.sync.sharding import Box, Local, Shard, boxes_of, owners
from pulse_kernels.sync.source import Change, Source

Lanes = tuple[int, int]


@dataclass
class Offer:
    """A rank's part of a version. lanes: what its boxes add to each tensor's digest. data: its patch, None without one.

    local_digest: of this rank's tensors by themselves, which the next change must begin at.
    """

    change: Change
    lanes: dict[str, Lanes]
    local_digest: str
    data: bytes | None
    num_changed: int

    def to_json(self) -> dict[str, Any]:
        """What the other ranks need to know."""
        return {
            "lanes": self.lanes,
            "bytes": -1 if self.data is None else len(self.data),
            "num_changed": self.num_changed,
            "folded": self.change.folded,
            "note": self.change.note,
        }


class ShardedSource:
    """This rank's tensors and their boxes. ``meet`` must tell it those of all ranks before anything else is asked.

    params, masters, shards, on_nonfinite: see ``ShardedPublisher``.
    """

    def __init__(
        self,
        params: Params,
        masters: Params | None,
        shards: Mapping[str, Shard] | None,
        profile: str,
        on_nonfinite: str,
    ) -> None:
        self._boxes = boxes_of(params, shards)
        # What the gate would send ahead to the host has other positions than the part.
        self._source = Source(
            Local(params),
            None if masters is None else Local(masters, "masters"),
            profile=None,
            on_nonfinite=on_nonfinite,
        )
        self._profile = profile
        self._lanes: dict[str, Lanes] = {}  # of the version committed last
        self._local_digest = ""
        self.owners: dict[str, dict[int, Box]] = {}
        self._own: dict[str, Box] = {}

    def to_json(self) -> dict[str, Any]:
        """The boxes, for ``meet``."""
        return {name: [dtype_name(box.dtype), box.shape, box.offset, box.local] for name, box in self._boxes.items()}

    def meet(self, rows: list[dict[str, Any]], rank: int) -> None:
        """Take note of all ranks' boxes, as ``to_json`` of each has them. ValueError where they do not make tensors."""
        boxes = [
            {name: Box(DTYPES[dtype], *map(tuple, places)) for name, (dtype, *places) in row.items()} for row in rows
        ]
        self.owners = owners(boxes)
        self._own = {name: found[rank] for name, found in self.owners.items() if rank in found}
        kinds = [next(iter(found.values())) for found in self.owners.values()]
        self.numel = sum(prod(box.shape) for box in kinds)
        self.dense_bytes = sum(prod(box.shape) * box.dtype.itemsize for box in kinds)

    def weights(self) -> dict[str, Tensor]:
        """This rank's tensors."""
        return self._source.weights()

    def measure(self) -> dict[str, Lanes]:
        """What this rank's own boxes add to each tensor's digest, by a pass over them."""
        named = self._source.weights()
        return {name: box.lanes(name, named[name]) for name, box in self._own.items()}

    def digests(self, lanes: list[Mapping[str, Lanes]]) -> dict[str, StateDigest]:
        """Each tensor's digest, from what the boxes of each rank add to it."""
        digests = {}
        for name, found in self.owners.items():
            digests[name] = StateDigest()
            digests[name].add_presence(name, next(iter(found.values())))
            for rank in found:
                digests[name].add_lanes(lanes[rank][name])
        return digests

    def resume(self, lanes: dict[str, Lanes]) -> None:
        """The weights, measured as ``lanes``, are those that followers have."""
        self._source.commit(Change(None, 0))
        self._lanes, self._local_digest = lanes, StateDigest.of(self._source.weights()).hexdigest()

    def distrust(self, why: str) -> None:
        """The next version is sent as the whole state."""
        self._source.distrust(why)

    def offer(self, base_version: int | None, version: int, sweep: bool, phases: Phases) -> Offer:
        """What this rank has for ``version``. sweep: see that the weights are what they should be. See ``change``."""
        change = self._source.change(version)
        if change.patch is not None and change.patch.base_digest != self._local_digest:
            self._source.distrust("the publisher was interrupted while it recorded what was sent")
            change = self._source.change(version)
        phases.end("gate")
        if change.patch is not None:
            part, lanes = self._part(change.patch, base_version, version)
            phases.end("gate")
            if not sweep or self.measure() == lanes:
                phases.end("digest")
                data = codec.encode(part, self._profile, None, with_values_digest=True)
                phases.end("encode")
                return Offer(change, lanes, change.patch.digest, data, part.num_changed)
            self._source.distrust("the weights were changed by others than the publisher")
            change = self._source.change(version)
        local = StateDigest.of(self._source.weights()).hexdigest()
        offer = Offer(change, self.measure(), local, None, 0)
        phases.end("digest")
        return offer

    def commit(self, offer: Offer) -> None:
        """Followers can have ``offer`` now."""
        self._source.commit(offer.change)
        self._lanes, self._local_digest = offer.lanes, offer.local_digest

    def _part(self, patch: Patch, base_version: int | None, version: int) -> tuple[Patch, dict[str, Lanes]]:
        """What ``patch`` changes in this rank's own boxes, and what these add to digests after it."""
        tensors = {}
        for name, item in patch.tensors.items():
            if name in self._own:
                box = self._own[name]
                where = box.positions(item.indices)
                tensors[name] = TensorPatch(name, box.shape, box.dtype, where, item.values, item.old_values)
        rows = []
        for name, item in tensors.items():
            assert item.old_values is not None
            rows.append((tensor_key(name, item.dtype, item.shape), item.indices, item.old_values, item.values))
        lanes = dict(self._lanes)
        for name, moved in zip(tensors, StateDigest().add_changes(rows), strict=True):
            lanes[name] = unsigned(before + by for before, by in zip(lanes[name], moved, strict=True))
        # No rank knows the digests of the whole state: the manifest has them.
        return Patch(base_version, version, tensors), lanes
