"""What a round tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pulse_kernels.report import Report


@dataclass(frozen=True, repr=False)
class SyncReport(Report):
    """A round. seconds: by phase: gate (find what fires), pack (code it), exchange (wait for bytes of others), reduce
    (decode and add up), agree (all have everything; the commit hook), commit (residual and outer step), verify
    (digest).

    round: its number, from 1 on. fragments: which were synchronised. committed: False where the commit hook said no;
    nothing was changed then. world: ranks that took part. num_fired: this rank's entries of ``numel``; density: their
    share; mean_density: the same over all ranks. payload_bytes: this rank's coded entries. sent_bytes: what it sent to
    others for them, with padding and all copies. dense_bytes: FP32 of all entries, what DiLoCo codes. ratio:
    dense_bytes / payload_bytes. mode: "gather", "reduce" or "alone". digest: of the global weights of those fragments
    after the round, "" where it was not asked for.
    """

    report: ClassVar[str] = "loco"

    round: int
    fragments: tuple[int, ...]
    committed: bool
    world: int
    num_fired: int
    numel: int
    density: float
    mean_density: float
    payload_bytes: int
    sent_bytes: int
    dense_bytes: int
    ratio: float
    mode: str
    digest: str
    seconds: dict[str, float] = field(default_factory=dict)
