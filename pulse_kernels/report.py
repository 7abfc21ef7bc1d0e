"""What reports of syncs have in common: seconds by phase, and a form for JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar


class Report:
    """A frozen dataclass with ``seconds`` by phase. All sizes in bytes, all times in seconds of wall clock."""

    report: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able data; "report" says which kind it is."""
        return {"report": self.report, **asdict(self)}  # type: ignore[call-overload]

    def __repr__(self) -> str:
        """One line: no phases, no notes that are empty, figures rounded; ``to_dict`` has all."""
        shown = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.name == "seconds":
                shown.append(f"total_seconds={self.total_seconds:.3g}")
            elif isinstance(value, float):
                shown.append(f"{each.name}={value:.4g}")
            elif each.name == "digest":
                shown.append(f"digest={value[:8]}...")
            elif value is not None and value != "":
                shown.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

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
