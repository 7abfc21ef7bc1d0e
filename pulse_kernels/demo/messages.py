"""What crosses process borders: orders and answers between trainer and rollout processes, events to whoever watches.

Weights are not among it: they travel through the store only. Rollouts are plain lists of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pulse_kernels.demo.task import Problem
from pulse_kernels.errors import (
    BaseMismatchError,
    ChainError,
    PatchFormatError,
    PulseError,
    StoreError,
    VerificationError,
)


class DemoError(PulseError):
    """The run cannot go on: a process died or failed."""


@dataclass(frozen=True)
class Settings:
    """What a run is, the same in every process."""

    steps: int
    seed: int
    workers: int
    prompts_per_step: int
    samples_per_prompt: int
    held_out: int
    store: str  # folder or URL, which every process opens for itself
    temporary: Path | None  # the folder to remove when the run ends, by whoever ends last
    final_weights: Path | None  # where the trainer leaves the last version
    damage_version: int | None  # each part of this version gets one bit flipped in the store


# ---- trainer -> rollout process, each answered by one message --------------------------------------------------------


@dataclass(frozen=True)
class Sync:
    """Bring the weights to `version` from the store. Answered by Synced."""

    version: int


@dataclass(frozen=True)
class Sample:
    """Draw a group of completions for each problem. Answered by Sampled."""

    problems: list[Problem]
    samples: int
    seed: int


@dataclass(frozen=True)
class Evaluate:
    """Answer each problem greedily, and `draws` times at temperature 1. Answered by Evaluated."""

    problems: list[Problem]
    draws: int
    seed: int


@dataclass(frozen=True)
class Finish:
    """Send a hash over all weight bytes and end. Answered by Finished."""


# ---- rollout process -> trainer --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Synced:
    """`digest` is the receiver's own, after the patch."""

    version: int
    digest: str
    fetch_seconds: float
    apply_seconds: float


@dataclass(frozen=True)
class Sampled:
    """Groups of completions and what the trainer must know about the policy that drew them."""

    version: int
    completions: list[list[list[int]]]
    logprobs: list[list[list[float]]]
    rewards: list[list[float]]
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """Right answers: greedy ones out of len(problems), drawn ones out of len(problems) * draws."""

    greedy_right: int
    drawn_right: int


@dataclass(frozen=True)
class Finished:
    version: int
    digest: str
    weights_hash: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The last message of a process that could not go on."""

    error: str  # the exception's class name
    message: str

    def exception(self) -> PulseError:
        kinds: tuple[type[PulseError], ...] = (
            BaseMismatchError,
            ChainError,
            PatchFormatError,
            StoreError,
            VerificationError,
        )
        by_name = {kind.__name__: kind for kind in kinds}
        return by_name.get(self.error, DemoError)(self.message)

    @classmethod
    def of(cls, where: str, error: BaseException) -> Failed:
        kind = type(error).__name__
        return cls(kind, f"{where}: {error}" if isinstance(error, PulseError) else f"{where}: {kind}: {error}")


# ---- trainer -> whoever watches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """pass@1 on the held-out problems, as the rollout processes measured it with the weights they hold."""

    version: int
    greedy: float
    sampled: float


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step and the patch that carried it. Times in seconds; of several receivers the slowest counts."""

    step: int
    reward: float
    num_changed: int
    density: float
    payload_bytes: int
    dense_bytes: int
    rollout_seconds: float
    train_seconds: float
    gate_seconds: float
    encode_seconds: float
    fetch_seconds: float
    apply_seconds: float
    digest: str
    digest_ok: bool

    @property
    def ratio_to_dense(self) -> float:
        return self.dense_bytes / self.payload_bytes


@dataclass(frozen=True)
class Summary:
    """The end of a run in which every check held."""

    parameters: int
    digest: str
    weights_hash: str
    seconds: dict[str, float] = field(default_factory=dict)
