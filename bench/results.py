"""The saved JSON of a benchmark run, as the report and the floors read it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """One comparison. seconds: ours, median. peers: name -> median. num_bytes: what GB/s counts, 0 for nothing.

    other_processes: CPU seconds that others took meanwhile, and CPU seconds there were.
    """

    name: str
    section: str
    title: str
    ours: str
    seconds: float
    peers: dict[str, float]
    num_bytes: int
    other_processes: tuple[float, float] | None
    facts: dict[str, Any]

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> Result:
        info = item["extra_info"]
        return cls(
            name=item["name"],
            section=info["section"],
            title=info["title"],
            ours=info["ours"],
            seconds=statistics.median(item["stats"]["data"]) / info["calls"],
            peers={name: statistics.median(seconds) for name, seconds in info["peers"].items() if seconds},
            num_bytes=info["num_bytes"],
            other_processes=info["other_processes"],
            facts=info["facts"],
        )


@dataclass(frozen=True)
class Results:
    """A run: the machine, the date, the comparisons in the order they ran."""

    machine: dict[str, Any]
    date: str
    comparisons: list[Result]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Results:
        """Of several files, runs of parts of the suite on one machine, the last to hold a comparison counts."""
        runs = [json.loads(path.read_text()) for path in paths]
        items = {item["fullname"]: item for run in runs for item in run["benchmarks"]}
        comparisons = [Result.from_json(item) for item in items.values() if "section" in item["extra_info"]]
        return cls(runs[-1]["machine_info"]["pulse_kernels"], runs[-1]["datetime"][:10], comparisons)

    @property
    def by_name(self) -> dict[str, Result]:
        return {result.name: result for result in self.comparisons}

    def section(self, name: str) -> list[Result]:
        return [result for result in self.comparisons if result.section == name]
