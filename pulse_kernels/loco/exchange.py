"""Entries of every rank, summed over the ranks, bucket by bucket: the collectives of a round.

All ranks take the same collectives in the same order, whatever fails: a rank that failed says so in its next header,
and then all raise. While the bytes of a bucket travel, the next bucket is gated.

Sums are taken in the order of ranks, each element's as ((0 + v_0) + v_1) + ..., so that every rank has the same bits,
whichever way the bytes went:

* "gather": all ranks get all entries, and add them up.
* "reduce": rank r gets everybody's entries of the r-th part of the positions, adds them up, and all get the sums.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pulse_kernels import checks, ops
from pulse_kernels.backends import for_device
from pulse_kernels.errors import GroupError, NonFiniteError, PatchFormatError
from pulse_kernels.loco.wire import LABEL_BYTES, Entries, Label, decode, encode, nothing
from pulse_kernels.ranks.collectives import Group, gather_rows, group_device
from pulse_kernels.report import Phases

_HEAD = struct.Struct("<8sq8sqB7x")
_MAGIC = b"PULSELC1"
_TEXT_BYTES = 480
FIRST, SUMS, AGREE, VOTE, VERIFY = range(5)
_STEPS = ("entries", "sums", "agreement", "vote", "comparison of digests", "none", "none", "none")
_CHANGED_NOTHING = "no rank changed anything, and nothing is lost: synchronise again"


@dataclass
class Traffic:
    """payload: bytes of this rank's coded entries. sent: bytes this rank sent to others, padding included."""

    payload: int = 0
    sent: int = 0
    count: int = 0


@dataclass
class _Flight:
    """A bucket whose bytes are on their way."""

    bucket: int
    numel: int
    labels: list[list[Label]]  # [rank][part]
    received: list[Tensor]  # by rank
    work: Any

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def reduce_is_smaller(world: int, density: float, *, dense: bool) -> bool:
    """Whether "reduce" takes fewer bytes than "gather", where every rank fires that share of positions, independently.

    Received by a rank, in entries: gather (K - 1) d; reduce (K - 1)/K d, and (K - 1)/K of the union of all ranks'
    positions, 1 - (1 - d)^K. Entries of the union take fewer bits for their positions, which is not counted.
    """
    if world <= 2:
        return False
    if dense:
        return True
    gather = (world - 1) * density
    return (world - 1) / world * (density + 1 - (1 - density) ** world) < gather


class Exchange:
    """One round's collectives. ``group`` None: all ranks. tag: the round, and 8 bytes for what is synchronised.

    failure: what has failed on this rank; the next header tells the others, and raises it here.
    """

    def __init__(
        self, group: Group, device: torch.device, tag: tuple[int, bytes], *, reduce: bool, compress: bool, threads: int
    ) -> None:
        self.group = group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.wire_device = group_device(group)
        self.device = device
        self.tag = tag
        self.parts = self.world if reduce else 1
        self.compress, self.threads = compress, threads
        self.traffic = Traffic()
        self.counts = 0  # entries of all ranks
        self.failure: BaseException | None = None
        self._seen = hashlib.blake2b(digest_size=16)

    @property
    def identity(self) -> str:
        """A hash of the labels of all ranks: this round's and, whatever its number, no other's."""
        return self._seen.hexdigest()

    # ---- the round ------------------------------------------------------------------------------------------------

    def run(self, numels: Sequence[int], make: Callable[[int], Entries], phases: Phases) -> list[Entries]:
        """Of every bucket the sums over the ranks; ``make(k)`` gives this rank's entries of bucket k.

        Raises what failed here, GroupError where it failed on another rank; whatever the back end raises goes through.
        """
        sums: list[Entries] = []
        flight: _Flight | None = None
        try:
            for bucket, numel in enumerate(numels):
                parts: list[tuple[Label, Tensor]] = []
                if self.failure is None:
                    try:
                        entries = make(bucket)
                        phases.end("gate")
                        parts = self._encoded(entries, numel)
                        phases.end("pack")
                    except Exception as error:
                        self.failure = error
                labels = self._labels(FIRST, bucket, [label for label, _ in parts], self._bounds(numel))
                coming = self._send(bucket, numel, labels, [payload for _, payload in parts])
                phases.end("exchange")
                landing, flight = flight, coming
                if landing is not None:
                    sums.append(self._land(landing, phases))
            if flight is not None:
                sums.append(self._land(flight, phases))
                flight = None
        finally:
            if flight is not None:  # its buffers must live until the back end is through with them
                with contextlib.suppress(Exception):
                    flight.wait()
        return sums

    def means(self, sums: Sequence[Entries]) -> list[Entries]:
        """The sums over the number of ranks; what fails is told at the next header."""
        try:
            return [Entries(each.indices, each.values / self.world) for each in sums]
        except Exception as error:
            self.failure = self.failure or error
            return []

    def agree(self) -> None:
        """Returns on all ranks, once all have all; else raises on all."""
        self._header(AGREE, 0, b"")

    def vote(self, ballot: bool | Exception) -> list[bool]:
        """What every rank says, by rank; an exception of one is raised by all."""
        if isinstance(ballot, Exception):
            self.failure = ballot
        return [row == b"\1" for row in self._header(VOTE, 0, bytes([ballot is True]))]

    def digests(self, digest: bytes) -> list[bytes]:
        """Every rank's, by rank, once the round is committed; raises on all where a rank failed to commit it."""
        return self._header(
            VERIFY,
            0,
            digest,
            "all had agreed to commit it, and the others have: call regroup() on all ranks, with the same group or "
            "another, which gives the state of the others to those that failed",
        )

    # ---- headers --------------------------------------------------------------------------------------------------

    def _header(self, step: int, bucket: int, body: bytes, then: str = _CHANGED_NOTHING) -> list[bytes]:
        """The ``body`` of every rank; all are equally long. Raises on every rank where one has failed."""
        failure = self.failure
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        told = text.encode("utf-8", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        head = _HEAD.pack(_MAGIC, *self.tag, bucket << 3 | step, failure is not None)
        rows = gather_rows(head + told + body, self.group)
        if failure is not None:
            raise failure
        self._check(rows, step, bucket)
        failures = {
            rank: row[_HEAD.size : _HEAD.size + _TEXT_BYTES].rstrip(b"\0").decode("utf-8", "replace")
            for rank, row in enumerate(rows)
            if row[_HEAD.size - 8]
        }
        if failures:
            told_of = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
            raise GroupError(
                f"{len(failures)} of {len(rows)} ranks failed in round {self.tag[0]}; {then}. {told_of}",
                failures,
            )
        return [row[_HEAD.size + _TEXT_BYTES :] for row in rows]

    def _check(self, rows: Sequence[bytes], step: int, bucket: int) -> None:
        for rank, row in enumerate(rows):
            magic, number, what, place, failed = _HEAD.unpack_from(row)
            if magic != _MAGIC:
                raise GroupError(
                    f"rank {rank} sent {magic!r} where {_MAGIC!r} was expected: it uses the group for something else. "
                    "Give PulseLoCo a process group of its own",
                    {rank: "no header"},
                )
            if failed:  # why tells more than where; one that is broken does not know its round
                continue
            if (number, what, place) != (*self.tag, bucket << 3 | step):
                other = "" if what == self.tag[1] else " of other fragments or of another PulseLoCo"
                raise GroupError(
                    f"rank {rank} is at the {_STEPS[place & 7]} of bucket {place >> 3} of round {number}{other}, this "
                    f"one at the {_STEPS[step]} of bucket {bucket} of round {self.tag[0]}: the ranks are out of step. "
                    "Make a new process group and call regroup() on all ranks",
                    {rank: f"is at round {number}"},
                )

    def _labels(self, step: int, bucket: int, labels: list[Label], bounds: Sequence[int]) -> list[list[Label]]:
        """Everybody's labels, [rank][part]; ``bounds``: where the parts of the bucket begin and end."""
        n = len(bounds) - 1
        body = b"".join(label.to_bytes() for label in labels) if labels else bytes(n * LABEL_BYTES)
        rows = self._header(step, bucket, body)
        self._seen.update(b"".join(rows))
        return [
            [_label(row[LABEL_BYTES * k : LABEL_BYTES * (k + 1)], bounds[k + 1] - bounds[k], rank) for k in range(n)]
            for rank, row in enumerate(rows)
        ]

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def _bounds(self, numel: int) -> list[int]:
        return [numel * part // self.parts for part in range(self.parts + 1)]

    def _encoded(self, entries: Entries, numel: int) -> list[tuple[Label, Tensor]]:
        bounds = self._bounds(numel)
        self.traffic.count += entries.count
        parts = [self._encode(part, bounds[k + 1] - bounds[k]) for k, part in enumerate(_split(entries, bounds))]
        self.traffic.payload += sum(label.total for label, _ in parts)
        return parts

    def _encode(self, entries: Entries, numel: int) -> tuple[Label, Tensor]:
        return encode(entries, numel, self.compress, self.wire_device, self.threads)

    def _send(self, bucket: int, numel: int, labels: list[list[Label]], payloads: list[Tensor]) -> _Flight:
        self.counts += sum(label.count for row in labels for label in row)
        if self.parts == 1:
            received, work = self._gather(payloads[0], [row[0].total for row in labels])
            return _Flight(bucket, numel, labels, received, work)
        incoming = [row[self.rank].total for row in labels]
        outgoing = [payload.numel() for payload in payloads]
        whole = torch.empty(sum(incoming), dtype=torch.uint8, device=self.wire_device)
        work = dist.all_to_all_single(
            whole, torch.cat(payloads), incoming, outgoing, group=self.group, async_op=True
        )  # fmt: skip
        self.traffic.sent += sum(outgoing) - outgoing[self.rank]
        return _Flight(bucket, numel, labels, list(whole.split(incoming)), work)

    def _gather(self, payload: Tensor, totals: list[int]) -> tuple[list[Tensor], Any]:
        """Everybody's payload, padded to the longest."""
        longest = max(totals)
        if longest == 0:
            return [payload] * len(totals), None
        padded = torch.empty(longest, dtype=torch.uint8, device=self.wire_device)
        padded[: payload.numel()] = payload
        padded[payload.numel() :] = 0
        rows = list(torch.empty((self.world, longest), dtype=torch.uint8, device=self.wire_device).unbind())
        work = dist.all_gather(rows, padded, group=self.group, async_op=True)
        self.traffic.sent += longest * (self.world - 1)
        return [row[:total] for row, total in zip(rows, totals, strict=True)], work

    # ---- sums -----------------------------------------------------------------------------------------------------

    def _land(self, flight: _Flight, phases: Phases) -> Entries:
        """The sums of a bucket. What fails here alone is kept for the next header; the entries are then empty."""
        flight.wait()
        phases.end("exchange")
        bounds = self._bounds(flight.numel)
        part = self.rank if self.parts > 1 else 0
        numel = bounds[part + 1] - bounds[part]
        sums = nothing(self.device)
        try:
            if self.failure is None:
                sums = self._add(flight, [row[part] for row in flight.labels], numel)
        except Exception as error:
            self.failure = error
        phases.end("reduce")
        if self.parts == 1:
            return sums
        label, payload = None, torch.empty(0, dtype=torch.uint8, device=self.wire_device)
        try:
            if self.failure is None:
                label, payload = self._encode(sums, numel)
        except Exception as error:
            self.failure = error
        rows = self._sum_labels(flight.bucket, label, bounds)
        phases.end("pack")
        received, work = self._gather(payload, [each.total for each in rows])
        if work is not None:
            work.wait()
        phases.end("exchange")
        try:
            parts = [
                decode(each, data, bounds[k + 1] - bounds[k], self.device, f"the sums of rank {k}")
                for k, (each, data) in enumerate(zip(rows, received, strict=True))
            ]
            sums = _join(parts, bounds)
        except Exception as error:
            self.failure = error
        phases.end("reduce")
        return sums

    def _sum_labels(self, bucket: int, label: Label | None, bounds: Sequence[int]) -> list[Label]:
        body = bytes(LABEL_BYTES) if label is None else label.to_bytes()
        return [
            _label(row, bounds[rank + 1] - bounds[rank], rank)
            for rank, row in enumerate(self._header(SUMS, bucket, body))
        ]

    def _add(self, flight: _Flight, labels: Sequence[Label], numel: int) -> Entries:
        entries = [
            decode(label, payload, numel, self.device, f"rank {rank}")
            for rank, (label, payload) in enumerate(zip(labels, flight.received, strict=True))
        ]
        total = add(entries, numel)
        check_finite(total.values, "the sum over all ranks")
        return total


def add(entries: Sequence[Entries], numel: int) -> Entries:
    """The sum of all, in their order; without its zeros, unless one of them has all positions."""
    device = entries[0].values.device
    sparse = [(each.indices, each.values) for each in entries if each.indices is not None]
    if len(sparse) == len(entries):
        return Entries(*for_device(device.type).sum_entries(*map(list, zip(*sparse, strict=True)), numel))
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    for each in entries:
        if each.indices is None:
            total += each.values
        else:
            here = for_device(device.type).gather(total, each.indices)
            ops.apply_patch_(total, each.indices, here.add_(each.values), check=False)
    return Entries(None, total)


def _label(row: bytes, numel: int, rank: int) -> Label:
    try:
        return Label.from_bytes(row, numel, f"rank {rank}")
    except PatchFormatError as error:  # all ranks see it, and all raise
        raise GroupError(f"{error}; nothing was changed", {rank: str(error)}) from None


def check_finite(values: Tensor, what: str) -> None:
    """NonFiniteError unless all values are finite."""
    if not checks.all_finite(values):
        number = int((~torch.isfinite(values)).sum())
        raise NonFiniteError(
            f"{number} of {values.numel()} values of {what} are infinite or NaN; no rank changed anything. Mend the "
            "training step (a lower learning rate, gradient clipping), or restore a checkpoint"
        )


def _split(entries: Entries, bounds: Sequence[int]) -> list[Entries]:
    """The entries of each part, counted from the part's beginning."""
    if len(bounds) == 2:
        return [entries]
    if entries.indices is None:
        return [Entries(None, entries.values[start:stop]) for start, stop in itertools.pairwise(bounds)]
    inner = entries.indices.new_tensor([bound - 1 for bound in bounds[1:-1]])
    cuts = [0, *torch.searchsorted(entries.indices, inner, right=True).tolist(), entries.count]
    return [
        Entries(entries.indices[first:last] - start, entries.values[first:last])
        for start, first, last in zip(bounds[:-1], cuts[:-1], cuts[1:], strict=True)
    ]


def _join(parts: Sequence[Entries], bounds: Sequence[int]) -> Entries:
    values = torch.cat([part.values for part in parts])
    if values.numel() == bounds[-1]:
        return Entries(None, values)
    indices = []
    for part, start, stop in zip(parts, bounds[:-1], bounds[1:], strict=True):
        own = part.indices
        if own is None:
            own = torch.arange(stop - start, dtype=torch.int32, device=part.values.device)
        indices.append(own + start)
    return Entries(torch.cat(indices), values)


__all__ = ["Exchange", "Traffic", "add", "check_finite", "reduce_is_smaller"]
