"""What each step of a sync tells about itself. All sizes in bytes, all times in seconds of wall clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pulse_kernels.report import Report


@dataclass(frozen=True, repr=False)
class PublishReport(Report):
    """A version sent. seconds: by phase: check (does anybody else publish), gate (find the changes), digest (of whole
    states, with anchors), pack (code indices and values), encode (container), anchor (read, hash, send the
    whole state), upload (of the patch, with its BLAKE3), commit (the manifest), prune (retention).

    kind: "anchor" or "patch". payload_bytes: what a follower fetches, the patch or else the anchor. ratio:
    dense_bytes / payload_bytes. Both are None while the upload still runs, as nobody knows yet. folded: changes of how
    many calls are in it. committed: False where the upload still runs; ``wait()`` returns the report of what came of
    it, which ``on_report`` gets as well. note: why an anchor was sent, where it was not just its turn.
    """

    report: ClassVar[str] = "publish"

    version: int
    kind: str
    base_version: int | None
    digest: str
    num_changed: int
    numel: int
    density: float
    payload_bytes: int | None
    anchor_bytes: int
    dense_bytes: int
    ratio: float | None
    folded: int
    committed: bool
    note: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class StageReport(Report):
    """A version made ready. seconds: by phase: route (manifests), fetch, decode. from_anchor: whether it is reached
    from an anchor. patches: how many were folded."""

    report: ClassVar[str] = "stage"

    version: int
    from_version: int | None
    from_anchor: bool
    patches: int
    fetched_bytes: int
    num_changed: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ApplyReport(Report):
    """A version in place. seconds: by phase: apply (the pause; with verify="full" the sweep is in "verify"), and,
    where ``poll`` made it, those of the stage before it."""

    report: ClassVar[str] = "apply"

    version: int | None
    from_version: int | None
    digest: str
    num_changed: int
    seconds: dict[str, float] = field(default_factory=dict)
