"""The trainer process: FP32 masters, Adam, the gate in place of the cast, and one published version a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import pulse_kernels as pk
from pulse_kernels.demo import task
from pulse_kernels.demo.grpo import Rollouts, grpo_loss
from pulse_kernels.demo.messages import (
    Accuracy,
    DemoError,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Sample,
    Sampled,
    Settings,
    StepRecord,
    Summary,
    Sync,
    Synced,
)
from pulse_kernels.demo.model import load_policy, num_parameters, weights_of
from pulse_kernels.demo.processes import child, receive, send
from pulse_kernels.demo.rollout import weights_hash
from pulse_kernels.errors import VerificationError
from pulse_kernels.sync import Publisher

LEARNING_RATE = 3e-6  # what RL post-training runs at
BETAS = (0.9, 0.99)
EVALUATION_DRAWS = 2


class Clock:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


@dataclass
class Published:
    num_changed: int
    payload_bytes: int
    gate_seconds: float
    encode_seconds: float


class Trainer:
    """Policy, masters and optimizer; `weights` are the BF16 tensors that the policy's forward pass reads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.policy = load_policy()
        self.weights = weights_of(self.policy)
        self.masters = {name: weight.float().requires_grad_() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.Adam(self.masters.values(), lr=LEARNING_RATE, betas=BETAS)
        self.publisher = Publisher(settings.store, self.weights, masters=self.masters)
        self.version, self.digest = 0, self.publisher.publish(0).digest  # the anchor that receivers begin at
        self.problems, held_out = task.split_problems()
        self.held_out = held_out[: settings.held_out]
        self.generator = torch.Generator().manual_seed(settings.seed)

    def next_problems(self) -> list[task.Problem]:
        count = self.settings.prompts_per_step
        return [self.problems[k] for k in torch.randperm(len(self.problems), generator=self.generator)[:count].tolist()]

    def step(self, rollouts: Rollouts) -> None:
        """One optimizer step of the masters. The weights, and so the policy, stay as they are until `publish`."""
        if rollouts.version != self.version:
            raise DemoError(f"rollouts come from version {rollouts.version}, expected version {self.version}")
        loss = grpo_loss(self.policy, rollouts)
        self.policy.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.policy.named_parameters():
            self.masters[name].grad = parameter.grad.float() if parameter.grad is not None else None
        self.optimizer.step()

    def publish(self) -> Published:
        """Cast the masters into the weights, and send what changed as the next version."""
        report = self.publisher.publish()
        self.version, self.digest = report.version, report.digest
        if self.version == self.settings.damage_version:
            self.damage()
        assert report.payload_bytes is not None  # it is there when the call returns
        gate_seconds = report.seconds["gate"]
        encode_seconds = report.total_seconds - gate_seconds
        return Published(report.num_changed, report.payload_bytes, gate_seconds, encode_seconds)

    def damage(self) -> None:
        """Flip one bit in the last byte of each part of the version, which is inside a tensor or a coded stream."""
        manifest = self.publisher.chain.manifest(self.version)
        for part in (*manifest.patch, *manifest.anchor):
            data = bytearray(self.publisher.store.get(part.key, part.bytes))
            data[-1] ^= 1
            self.publisher.store.put(part.key, bytes(data))


class Crew:
    """The rollout processes as the trainer sees them: one order to all, one answer from each."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections

    def ask(self, orders: list[Any], kind: type[Any]) -> list[Any]:
        for worker, (connection, order) in enumerate(zip(self.connections, orders, strict=True)):
            send(connection, order, f"rollout process {worker}")
        return [
            receive(connection, kind, f"rollout process {worker}") for worker, connection in enumerate(self.connections)
        ]

    def shares(self, items: list[Any]) -> list[list[Any]]:
        """`items` in order, split among the processes as evenly as it goes."""
        count = len(self.connections)
        return [items[len(items) * k // count : len(items) * (k + 1) // count] for k in range(count)]

    def sync(self, trainer: Trainer) -> list[Synced]:
        """All receivers go to the trainer's version; their digests must be the trainer's own."""
        answers: list[Synced] = self.ask([Sync(trainer.version)] * len(self.connections), Synced)
        expected = trainer.digest
        for worker, answer in enumerate(answers):
            if (answer.version, answer.digest) != (trainer.version, expected):
                raise VerificationError(
                    f"rollout process {worker} is at version {answer.version} with digest {answer.digest}, expected "
                    f"version {trainer.version} with digest {expected}"
                )
        return answers

    def rollouts(self, trainer: Trainer, step: int) -> tuple[Rollouts, float]:
        """A batch drawn by all processes together, and the seconds that the slowest needed."""
        problems = trainer.next_problems()
        samples, seed = trainer.settings.samples_per_prompt, trainer.settings.seed
        orders = [
            Sample(share, samples, seed=(seed << 32) + step * len(self.connections) + worker)
            for worker, share in enumerate(self.shares(problems))
        ]
        answers: list[Sampled] = self.ask(orders, Sampled)
        if len(versions := {answer.version for answer in answers}) != 1:
            raise DemoError(f"rollouts come from versions {sorted(versions)}, expected one version")
        rollouts = Rollouts(
            versions.pop(),
            task.prompt_tokens(problems),
            torch.cat([torch.tensor(answer.completions) for answer in answers]),
            torch.cat([torch.tensor(answer.logprobs) for answer in answers]),
            torch.cat([torch.tensor(answer.rewards) for answer in answers]),
        )
        return rollouts, max(answer.seconds for answer in answers)

    def accuracy(self, trainer: Trainer) -> Accuracy:
        """pass@1 with the weights the receivers hold. The draws do not depend on the run's seed."""
        orders = [Evaluate(share, EVALUATION_DRAWS, k) for k, share in enumerate(self.shares(trainer.held_out))]
        answers: list[Evaluated] = self.ask(orders, Evaluated)
        count = len(trainer.held_out)
        greedy = sum(answer.greedy_right for answer in answers) / count
        sampled = sum(answer.drawn_right for answer in answers) / (count * EVALUATION_DRAWS)
        return Accuracy(trainer.version, greedy, sampled)

    def finish(self, trainer: Trainer) -> str:
        """Every receiver's weights must be the trainer's, byte for byte; the common hash."""
        expected = weights_hash(trainer.weights)
        answers: list[Finished] = self.ask([Finish()] * len(self.connections), Finished)
        for worker, answer in enumerate(answers):
            if answer.weights_hash != expected:
                raise VerificationError(
                    f"the weights of rollout process {worker} hash to {answer.weights_hash}, expected {expected}: they "
                    "are not bit-identical to the trainer's"
                )
        if pk.StateDigest.of(trainer.weights).hexdigest() != trainer.digest:
            raise VerificationError("the trainer's running digest is not the digest of its weights")
        return expected


def train(events: Connection, connections: list[Connection], settings: Settings) -> None:
    """The whole run, reported to `events`."""
    clock = Clock()
    with clock("start"):
        trainer, crew = Trainer(settings), Crew(connections)
        crew.sync(trainer)
    with clock("evaluate"):
        events.send(crew.accuracy(trainer))
    parameters = num_parameters(trainer.policy)
    for step in range(1, settings.steps + 1):
        with clock("rollout"):
            rollouts, rollout_seconds = crew.rollouts(trainer, step)
        with clock("train"):
            started = time.perf_counter()
            trainer.step(rollouts)
            train_seconds = time.perf_counter() - started
        published = trainer.publish()
        clock.seconds["gate"] += published.gate_seconds
        clock.seconds["encode"] += published.encode_seconds
        started = time.perf_counter()
        answers = crew.sync(trainer)
        fetch_seconds = max(answer.fetch_seconds for answer in answers)
        apply_seconds = max(answer.apply_seconds for answer in answers)
        clock.seconds["fetch+decode"] += fetch_seconds
        clock.seconds["apply"] += apply_seconds
        clock.seconds["sync wait"] += max(0.0, time.perf_counter() - started - fetch_seconds - apply_seconds)
        record = StepRecord(
            step=step,
            reward=float(rollouts.rewards.mean()),
            num_changed=published.num_changed,
            density=published.num_changed / parameters,
            payload_bytes=published.payload_bytes,
            dense_bytes=2 * parameters,
            rollout_seconds=rollout_seconds,
            train_seconds=train_seconds,
            gate_seconds=published.gate_seconds,
            encode_seconds=published.encode_seconds,
            fetch_seconds=fetch_seconds,
            apply_seconds=apply_seconds,
            digest=trainer.digest,
            digest_ok=True,  # `sync` raised otherwise
        )
        events.send(record)
    with clock("evaluate"):
        events.send(crew.accuracy(trainer))
    with clock("verify"):
        final_hash = crew.finish(trainer)
    if settings.final_weights is not None:
        from safetensors.torch import save_file

        save_file(trainer.weights, settings.final_weights)
    trainer.publisher.close()
    events.send(Summary(parameters, trainer.digest, final_hash, dict(clock.seconds)))


def trainer_process(events: Connection, connections: list[Connection], settings: Settings) -> None:
    child("trainer", settings.temporary, events, lambda: train(events, connections, settings))
