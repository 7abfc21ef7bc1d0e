"""What the ranks of a group tell each other around a version: one record each before it is sent, and one after.

All ranks see the same records, so that all come to the same agreement, or raise the same error.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pulse_kernels.dtypes import dtype_name
from pulse_kernels.errors import GroupError
from pulse_kernels.ranks.collectives import check_size

MAGIC = b"PULSEGR1"
RECORD_BYTES = 512
_HEAD = struct.Struct("<8sBBBBqq16s16s16s")
_TEXT_BYTES = RECORD_BYTES - _HEAD.size

RECEIVER, TRAINER = 0, 1
NOTHING, PATCH, WHOLE = 0, 1, 2
_NAMES = {RECEIVER: "receive()", TRAINER: "publish()"}


@dataclass(frozen=True)
class Record:
    """One rank's part of an exchange.

    role: RECEIVER or TRAINER. error: why it failed, "" where it did not. size: bytes of the trainer's patch, -1 without
    one; of a receiver the most it takes. version: the receiver's, -1 where unknown; the one the trainer proposes, or
    insists on (``fixed``). base: digest that the trainer's patch is for. digest: of the state that the trainer has, or
    of the receiver's weights. layout: ``layout_of`` the tensors.
    """

    role: int
    size: int = -1
    version: int = -1
    base: str = ""
    digest: str = ""
    layout: str = ""
    error: str = ""
    fixed: bool = False

    def to_bytes(self) -> bytes:
        """RECORD_BYTES bytes; a longer ``error`` is cut."""
        text = self.error.encode("utf-8", "replace")[:_TEXT_BYTES]
        digests = (bytes.fromhex(each) for each in (self.base, self.digest, self.layout))
        head = _HEAD.pack(
            MAGIC, self.role, bool(self.error), self.fixed, bool(self.base), self.size, self.version, *digests
        )
        return head + text.ljust(_TEXT_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, row: bytes, rank: int) -> Record:
        """GroupError where ``row``, sent by ``rank``, is no record."""
        magic, role, failed, fixed, based, size, version, *digests = _HEAD.unpack_from(row)
        if magic != MAGIC or role not in _NAMES:
            raise GroupError(
                f"rank {rank} sent {row[:8]!r} where {MAGIC!r} was expected: it runs another version of pulse_kernels, "
                "or something else over this group. Give the sync a process group of its own",
                {rank: "no record"},
            )
        base, digest, layout = (each.hex() for each in digests)
        error = row[_HEAD.size :].rstrip(b"\0").decode("utf-8", "replace") or "failed" if failed else ""
        return cls(role, size, version, base if based else "", digest, layout, error, bool(fixed))


@dataclass(frozen=True)
class Agreement:
    """What is sent: NOTHING (all have the state), the PATCH or the WHOLE state; as which version."""

    mode: int
    version: int


def layout_of(named: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes and shapes, as 32 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(named):
        tensor = named[name]
        hasher.update(f"{name}\0{dtype_name(tensor.dtype)}\0{','.join(map(str, tensor.shape))}\0\0".encode())
    return hasher.hexdigest()


def agree(records: Sequence[Record], src: int) -> Agreement:
    """What to send, from the records before it. GroupError where a rank failed or does not fit the others."""
    trainer = records[src]
    receivers = {rank: record for rank, record in enumerate(records) if rank != src}
    _check_roles(records, src)
    check_failures(records, "before anything was sent")
    for rank, record in receivers.items():
        if record.layout != trainer.layout:
            raise GroupError(
                f"rank {rank} has tensors of other names, dtypes or shapes than the trainer (rank {src}); give the "
                "weights of the same model",
                {rank: "other tensors"},
            )
    lacking = [record for record in receivers.values() if record.digest != trainer.digest]
    mode = NOTHING
    if lacking:
        mode = PATCH if trainer.size >= 0 and all(record.digest == trainer.base for record in lacking) else WHOLE
    if mode == PATCH:
        check_size([record.size for record in records], src)
    least = max((record.version + (record.digest != trainer.digest) for record in receivers.values()), default=-1)
    if trainer.fixed and least > trainer.version:
        rank = next(rank for rank, record in receivers.items() if record.version >= trainer.version)
        raise GroupError(
            f"version {trainer.version} is not above version {records[rank].version}, which rank {rank} has; leave "
            "version out to count on",
            {rank: f"is at version {records[rank].version}"},
        )
    return Agreement(mode, max(trainer.version, least))


def confirm(records: Sequence[Record], src: int, digest: str, version: int) -> None:
    """GroupError unless every rank has ``digest`` now."""
    _check_roles(records, src)
    check_failures(records, f"with version {version}; all ranks went back to the version before")
    for rank, record in enumerate(records):
        if record.digest != digest:
            raise GroupError(
                f"rank {rank} has digest {record.digest} where version {version} has {digest}; all ranks went back to "
                "the version before",
                {rank: f"digest {record.digest}"},
            )


def check_failures(records: Sequence[Record], when: str) -> None:
    """GroupError that names each rank with an error, and the error."""
    failures = {rank: record.error for rank, record in enumerate(records) if record.error}
    if failures:
        told = "; ".join(f"rank {rank}: {error}" for rank, error in failures.items())
        raise GroupError(f"{len(failures)} of {len(records)} ranks failed {when}. {told}", failures)


def _check_roles(records: Sequence[Record], src: int) -> None:
    for rank, record in enumerate(records):
        expected = TRAINER if rank == src else RECEIVER
        if record.role != expected:
            raise GroupError(
                f"rank {rank} called {_NAMES[record.role]}, expected {_NAMES[expected]}: the trainer is rank {src} of "
                "the group. Pass the same src everywhere",
                {rank: f"called {_NAMES[record.role]}"},
            )
