"""What is compared, and under which conditions; what a rank is told, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pulse_kernels.demo.task import HELD_OUT
from pulse_kernels.demo.trainer import LEARNING_RATE


@dataclass(frozen=True)
class Method:
    """Arguments of PulseLoCo. window: rounds are due every ``window`` steps; 1 where not."""

    name: str
    gate: str | None
    every_step: bool
    outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None

    def sync_every(self, window: int) -> int:
        return 1 if self.every_step else window


# SGD at rate 1 of theta - mean(local): theta becomes the mean of the local weights.
DDP = Method("DDP", None, True, partial(torch.optim.SGD, lr=1.0))
DILOCO = Method("DiLoCo", None, False)
PULSELOCO = Method("PULSELoCo", "bf16", False)
# The same with less outer momentum: the outer step then gains 1.4 times the mean in all, not 7 times.
SOFT = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
DILOCO_SOFT = Method("DiLoCo, momentum 0.5", None, False, SOFT)
PULSELOCO_SOFT = Method("PULSELoCo, momentum 0.5", "bf16", False, SOFT)
METHODS = (DDP, DILOCO, PULSELOCO, DILOCO_SOFT, PULSELOCO_SOFT)


@dataclass(frozen=True)
class Settings:
    """The same for all methods. window: inner steps a round (H). prompts, samples: of a worker, a step. other_rates:
    PULSELoCo also runs at these learning rates, with the first seed."""

    steps: int = 120
    window: int = 8
    workers: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)
    prompts: int = 8
    samples: int = 8
    held_out: int = HELD_OUT
    learning_rate: float = LEARNING_RATE
    other_rates: tuple[float, ...] = (3e-7, 1e-6)

    def __post_init__(self) -> None:
        if self.window < 1 or self.steps < self.window or self.steps % self.window:
            raise ValueError(f"steps is {self.steps}, expected a multiple of window ({self.window})")
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}, expected at least 2")
        if self.samples < 2:
            raise ValueError(f"samples is {self.samples}; a group needs at least 2 to compare")
        if not self.workers <= self.held_out <= HELD_OUT:
            raise ValueError(f"held_out is {self.held_out}, expected {self.workers} to {HELD_OUT}")
        if not self.seeds or self.prompts < 1:
            raise ValueError(f"seeds is {self.seeds} and prompts {self.prompts}, expected at least one of each")


@dataclass(frozen=True)
class Order:
    """One run: from the warm start to the last round."""

    method: Method
    seed: int
    learning_rate: float


@dataclass(frozen=True)
class RoundAccount:
    """A round as one rank has it. The fields after ``digest`` only with the gate on; they are of s = residual +
    (theta - local) and of theta as they were before the round.

    visible_without_residual: share of weights that would have fired for theta - local alone. expected_density: mean of
    min(1, |s| / spacing), spacing being that of BF16 numbers at theta: the density, were theta anywhere between two
    BF16 numbers with equal probability. held_back: what did not fire, as share of the sum of |s|. median_s,
    median_spacing: over all weights.
    """

    step: int
    num_fired: int
    payload_bytes: int
    sent_bytes: int
    dense_bytes: int
    digest: str
    visible_without_residual: float | None = None
    expected_density: float | None = None
    held_back: float | None = None
    median_s: float | None = None
    median_spacing: float | None = None


@dataclass(frozen=True)
class RankAccount:
    """A run as one rank has it. rewards: mean of each step's completions. changed: BF16 weights that each inner step
    changed, before any exchange. right_before, right_after: of this rank's ``held_out`` problems, answered greedily."""

    rank: int
    parameters: int
    prompt_tokens: int
    drawn_tokens: int
    rewards: list[float]
    changed: list[int]
    rounds: list[RoundAccount]
    held_out: int
    right_before: int
    right_after: int
    weights_hash: str


@dataclass(frozen=True)
class RunResult:
    """A run, over its workers. tokens: of a worker, prompts and completions. Lists have an item a step, those of
    ``rounds`` an item a round; bytes are of a worker, on average. digest, weights_hash: the global weights in FP32 and
    as BF16 policy, the same on all workers."""

    method: str
    seed: int
    learning_rate: float
    workers: int
    parameters: int
    tokens: int
    reward: list[float]
    step_density: list[float]
    rounds: dict[str, list[Any]]
    held_out_before: float
    held_out_after: float
    digest: str
    weights_hash: str
    seconds: float


@dataclass(frozen=True)
class Results:
    settings: Settings
    environment: dict[str, str]
    runs: list[RunResult]
    seconds: float
    rates: list[RunResult] = field(default_factory=list)  # of ``other_rates``

    def to_dict(self) -> dict[str, Any]:
        return {"report": "loco-experiment", **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Results:
        settings = dict(data["settings"])
        settings |= {name: tuple(settings[name]) for name in ("seeds", "other_rates")}
        runs, rates = ([RunResult(**run) for run in data[name]] for name in ("runs", "rates"))
        return cls(Settings(**settings), data["environment"], runs, data["seconds"], rates)

    def of(self, method: Method) -> list[RunResult]:
        return [run for run in self.runs if run.method == method.name]
