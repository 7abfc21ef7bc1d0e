"""The check's report: as JSON, as Markdown, and as the short table that is printed last."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.device import goals
from bench.device.cases import COMPILED, CUB, EAGER
from bench.device.steps import FAILED, NOT_RUN, Step

DRY_RUN = "DRY RUN on the CPU, through Triton's interpreter, at small sizes: its times mean nothing"
_PEERS = (EAGER, COMPILED, CUB)
_NOT_OURS = (EAGER, COMPILED, "eager, tensor by tensor")
_HEAD = ("", "ms", "GB/s", "of copy", *_PEERS, "result")


def status(row: dict[str, Any]) -> str:
    """ok; WRONG where a result was; FAILED where one of ours raised; NOT RUN where time was over; else why the row has
    no figure of ours."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    if "not_run" in row:
        return f"{NOT_RUN}: {row['not_run']}"
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    contenders = row["contenders"]
    if any(found["correct"] is False for found in contenders.values()):
        return "WRONG"
    broken = [name for name, found in contenders.items() if found.get("failed") and name not in _NOT_OURS]
    if broken:
        return f"FAILED: {', '.join(broken)}"
    ours = contenders[row["ours"]]
    return "ok" if ours["correct"] else f"skipped: {ours.get('reason', '')}"


@dataclass
class Report:
    """rows: by their keys, in the order of the plan; those with ``skipped``, ``not_run`` or ``failed`` have no
    contenders."""

    device: str
    date: str
    dry_run: bool
    minutes: float
    environment: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        wrong = any(status(row).startswith(("WRONG", "FAILED")) for row in self.rows.values())
        return wrong or any(step.outcome == FAILED for step in self.steps)

    @property
    def not_run(self) -> list[str]:
        """Steps and rows that were wanted and not run."""
        steps = [step.name for step in self.steps if step.outcome == NOT_RUN]
        return steps + [key for key, row in self.rows.items() if status(row).startswith(NOT_RUN)]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "date": self.date,
            "dry_run": self.dry_run,
            "note": DRY_RUN if self.dry_run else "",
            "minutes": self.minutes,
            "environment": self.environment,
            "steps": [step.to_json() for step in self.steps],
            "copy_bytes_per_second": goals.copy_rate(self.rows),
            "goals": self.goals(),
            "rows": [
                {"key": key, **row, "status": status(row), "correct": status(row) == "ok"}
                for key, row in self.rows.items()
            ],
            "failed": self.failed,
            "not_run": self.not_run,
        }

    def goals(self) -> list[dict[str, Any]]:
        """Without a verdict in a dry run."""
        judged = [goal.judged(self.rows) for goal in goals.GOALS]
        return [goal | {"met": None} for goal in judged] if self.dry_run else judged

    # ---- lines of the tables ----

    def _lines(self) -> list[tuple[str, tuple[str, ...]]]:
        """(section, cells) of each row, sections together."""
        sections = dict.fromkeys(row["section"] for row in self.rows.values())
        return [
            (section, self._cells(key, row))
            for section in sections
            for key, row in sorted(self.rows.items(), key=lambda item: _order(item[0]))
            if row["section"] == section
        ]

    def _cells(self, key: str, row: dict[str, Any]) -> tuple[str, ...]:
        seconds, share = goals.seconds(self.rows, key), goals.share_of_copy(self.rows, key)
        if seconds is None:
            return (key, *("-",) * 6, status(row))
        ratios = [_peer(row["contenders"].get(name), seconds) for name in _PEERS]
        rate = row["num_bytes"] / seconds / 1e9
        return (key, f"{1e3 * seconds:.3g}", f"{rate:.0f}", _percent(share), *ratios, status(row))

    def _others(self, row: dict[str, Any]) -> str:
        """Contenders without a column, and why others are absent."""
        parts = []
        for name, found in row.get("contenders", {}).items():
            if "seconds" in found and name not in (*_PEERS, row["ours"]):
                parts.append(f"{name} {1e3 * found['seconds']:.3g} ms")
            elif found["correct"] is False:
                parts.append(f"{name}: WRONG")
            elif "reason" in found:
                parts.append(f"{name}: {found['reason']}")
        return "; ".join(parts + row.get("notes", []))

    def _verdicts(self) -> list[tuple[str, str, str, str]]:
        verdict = {True: "met", False: "missed", None: "not judged" if self.dry_run else "not measured"}
        lines = []
        for goal in self.goals():
            value = "-" if goal["value"] is None else f"{goal['value']:.3g}{goal['unit']}"
            lines.append((goal["what"], goal["bound"], value, verdict[goal["met"]]))
        return lines

    # ---- forms ----

    def table(self) -> str:
        """What is printed last."""
        lines = [DRY_RUN, ""] if self.dry_run else []
        lines += [f"{self.device}, {self.date}", ""]
        lines += _aligned([(step.name, step.outcome, step.detail) for step in self.steps])
        if self.rows:
            lines += ["", *_aligned([_HEAD, *(cells for _, cells in self._lines())])]
            lines += ["", *_aligned([("goal on an H200", "bound", "here", ""), *self._verdicts()])]
        if self.not_run:
            lines += ["", self._what_did_not_run()]
        return "\n".join(lines)

    def _what_did_not_run(self) -> str:
        return f"NOT EVERYTHING RAN in {self.minutes:g} minutes: {', '.join(self.not_run)}"

    def markdown(self) -> str:
        lines = [f"# Device check: {self.device}", "", f"{self.date}, `python bench/device_check.py`.", ""]
        lines += [f"**{DRY_RUN}.**", ""] if self.dry_run else []
        lines += [f"**{self._what_did_not_run()}.**", ""] if self.not_run else []
        packages = self.environment.get("packages", {})
        lines += [", ".join(f"{name} {version}" for name, version in packages.items() if version) + ".", ""]
        facts = {name: self.environment.get(name) for name in ("python", "driver", "cuda_of_torch", "nvcc", "commit")}
        lines += [", ".join(f"{name}: {value}" for name, value in facts.items() if value) + ".", ""]
        lines += _grid([("step", "outcome", ""), *((s.name, s.outcome, s.detail) for s in self.steps)])
        if self.rows:
            lines += [
                "",
                "Medians; every result was compared with the eager one before it was timed. GB/s count the bytes that "
                "any form has to move, so shares of copy bandwidth understate what moved. A peer's column is its time "
                "over ours.",
            ]
        for section in dict.fromkeys(section for section, _ in self._lines()):
            lines += ["", f"## {section}", ""]
            lines += _grid([("row", *_HEAD[1:]), *(cells for name, cells in self._lines() if name == section)])
            lines.append("")
            for key, row in self.rows.items():
                if row["section"] == section and (others := self._others(row)):
                    lines.append(f"* {row.get('title', key)}: {others}")
        if self.rows:
            lines += ["", "## Goals", ""]
            lines += _grid([("goal on an H200", "bound", "here", ""), *self._verdicts()])
        for step in self.steps:
            if step.output:
                lines += ["", f"## Output of {step.name}", "", "```", step.output.replace("```", "'''"), "```"]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """JSON and Markdown, named after the device."""
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        paths = [folder / f"{name}.json", folder / f"{name}.md"]
        paths[0].write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        paths[1].write_text(self.markdown(), encoding="utf-8")
        return paths


def _order(key: str) -> list[tuple[float, str]]:
    """Sizes and densities in keys by their numbers."""
    parts = []
    for part in key.split("/"):
        try:
            parts.append((float(part.rstrip("%")), ""))
        except ValueError:
            parts.append((0.0, part))
    return parts


def _peer(found: dict[str, Any] | None, seconds: float) -> str:
    if found is None:
        return ""
    if "seconds" in found:
        return f"{found['seconds'] / seconds:.2f}x"
    return "WRONG" if found["correct"] is False else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]]
