"""What reports of syncs have in common: seconds by phase, and a form for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar


class Report:
    """A frozen dataclass with ``seconds`` by phase. All sizes in bytes, all times in seconds of wall clock."""

    report: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able data; "report" says which kind it is."""
        return {"report": self.report, **asdict(self)}  # type: ignore[call-overload]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())  # type: ignore[attr-defined,no-any-return]


class Phases:
    """Wall-clock seconds by phase, in the order in which phases first ended; whatever is in no phase is the next's."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._last = clock()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """What has passed since the phase before it ended was ``phase``."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
