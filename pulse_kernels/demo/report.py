"""What a run did: the figures, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pulse_kernels.demo.messages import Accuracy, StepRecord, Summary


@dataclass
class DemoReport:
    """A finished run, in which every digest and the final hash agreed; a run where one did not raises instead.

    before, after: pass@1 on the held-out problems, greedy (what `improved` goes by) and sampled at temperature 1.
    seconds: wall clock by phase. chart, out_dir: where files were left, None where none were; `notes` says why.
    """

    seed: int
    workers: int
    held_out: int
    before: Accuracy
    after: Accuracy
    steps: list[StepRecord]
    summary_of_trainer: Summary
    seconds: dict[str, float]
    total_seconds: float
    chart: Path | None
    out_dir: Path | None
    notes: list[str]

    @property
    def improved(self) -> bool:
        return self.after.greedy > self.before.greedy

    @property
    def density(self) -> float:
        """Changed weights a step over all weights, mean over the steps."""
        return sum(step.density for step in self.steps) / len(self.steps)

    @property
    def payload_bytes(self) -> float:
        """Bytes of a patch, mean over the steps."""
        return sum(step.payload_bytes for step in self.steps) / len(self.steps)

    @property
    def dense_bytes(self) -> int:
        return self.steps[0].dense_bytes

    @property
    def ratio_to_dense(self) -> float:
        return self.dense_bytes / self.payload_bytes

    @property
    def bits_per_change(self) -> float:
        return 8 * sum(step.payload_bytes for step in self.steps) / max(1, sum(step.num_changed for step in self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return {
            "improved": self.improved,
            "pass_at_1": {
                "problems": self.held_out,
                "before": {"greedy": self.before.greedy, "sampled": self.before.sampled},
                "after": {"greedy": self.after.greedy, "sampled": self.after.sampled},
            },
            "parameters": self.summary_of_trainer.parameters,
            "density": self.density,
            "payload_bytes": self.payload_bytes,
            "dense_bytes": self.dense_bytes,
            "ratio_to_dense": self.ratio_to_dense,
            "bits_per_change": self.bits_per_change,
            "seconds": {**self.seconds, "total": self.total_seconds},
            "seed": self.seed,
            "workers": self.workers,
            "versions": len(self.steps),
            "digests_checked": len(self.steps) * self.workers,
            "final_digest": self.summary_of_trainer.digest,
            "final_weights_blake2b": self.summary_of_trainer.weights_hash,
            "bit_identical": True,
            "chart": None if self.chart is None else str(self.chart),
            "out_dir": None if self.out_dir is None else str(self.out_dir),
            "notes": self.notes,
            "steps": [asdict(step) | {"ratio_to_dense": step.ratio_to_dense} for step in self.steps],
        }

    def summary(self) -> str:
        """The run on one screen."""
        before, after = self.before, self.after
        densities = [100 * step.density for step in self.steps]
        shown = [(phase, seconds) for phase, seconds in self.seconds.items() if seconds >= 0.005]
        lines = [
            f"pass@1        {before.greedy:.3f} -> {after.greedy:.3f} greedy, {before.sampled:.3f} -> "
            f"{after.sampled:.3f} sampled at temperature 1 ({self.held_out} held-out problems)",
            f"density       {sum(densities) / len(densities):.2f}% of {self.summary_of_trainer.parameters:,} BF16 "
            f"weights change a step (from {min(densities):.2f}% to {max(densities):.2f}%)",
            f"payload       {self.payload_bytes / 1e3:.1f} KB a patch, {self.bits_per_change:.1f} bits per change",
            f"ratio         1/{self.ratio_to_dense:.0f} of the dense {self.dense_bytes / 1e3:,.0f} KB",
            f"bit-identical {len(self.steps)} patches x {self.workers} rollout processes, every digest equal; final "
            f"BLAKE2b {self.summary_of_trainer.weights_hash[:16]} in all {self.workers + 1} processes",
            f"seconds       {', '.join(f'{phase} {seconds:.2f}' for phase, seconds in shown)}; "
            f"total {self.total_seconds:.1f}",
        ]
        if self.chart is not None:
            lines.append(f"chart         {self.chart}")
        if self.out_dir is not None:
            lines.append(f"files         {self.out_dir}")
        lines += [f"note          {note}" for note in self.notes]
        if not self.improved:
            lines.append(f"NOT IMPROVED  pass@1 did not rise within {len(self.steps)} steps")
        return "\n".join(lines)
