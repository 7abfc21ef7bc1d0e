"""The rollout process: holds BF16 weights, brings them up to date from the store, and draws completions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from pulse_kernels.demo.grpo import sample, score
from pulse_kernels.demo.messages import Evaluate, Evaluated, Finish, Finished, Sample, Sampled, Settings, Sync, Synced
from pulse_kernels.demo.model import Policy, load_policy, weights_of
from pulse_kernels.demo.processes import child
from pulse_kernels.demo.task import prompt_tokens
from pulse_kernels.errors import PulseError
from pulse_kernels.sync import Subscriber


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """BLAKE2b over every byte of every weight, by name."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Receiver:
    """Weights at some version, and how they get to the next one: only through the store."""

    def __init__(self, weights: dict[str, Tensor], settings: Settings) -> None:
        self.weights = weights
        self.subscriber = Subscriber(settings.store, weights)

    @property
    def version(self) -> int:
        version = self.subscriber.version
        if version is None:
            raise PulseError("the receiver's weights are at no known version; sync first")
        return version

    def sync(self, version: int) -> Synced:
        """Go to `version`: fetched, checked and decoded beside the weights, then applied in one short step."""
        start = time.perf_counter()
        staged = self.subscriber.stage(version)
        fetched = time.perf_counter()
        if staged is not None:
            self.subscriber.apply()
        return Synced(self.version, self.digest, fetched - start, time.perf_counter() - fetched)

    @property
    def digest(self) -> str:
        return self.subscriber.digest or ""


def draw(policy: Policy, order: Sample, version: int) -> Sampled:
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(order.seed)
    completions, logprobs = sample(policy, prompt_tokens(order.problems), order.samples, generator)
    rewards = score(order.problems, completions)
    seconds = time.perf_counter() - start
    return Sampled(version, completions.tolist(), logprobs.tolist(), rewards.tolist(), seconds)


def evaluate(policy: Policy, order: Evaluate) -> Evaluated:
    prompts = prompt_tokens(order.problems)
    greedy, _ = sample(policy, prompts, 1, None)
    drawn, _ = sample(policy, prompts, order.draws, torch.Generator().manual_seed(order.seed))
    return Evaluated(int(score(order.problems, greedy).sum()), int(score(order.problems, drawn).sum()))


def serve(trainer: Connection, settings: Settings) -> None:
    """Obey the trainer until it says Finish."""
    policy = load_policy()
    receiver = Receiver(weights_of(policy), settings)
    with receiver.subscriber:
        obey(trainer, policy, receiver)


def obey(trainer: Connection, policy: Policy, receiver: Receiver) -> None:
    while True:
        order = trainer.recv()
        if isinstance(order, Sync):
            trainer.send(receiver.sync(order.version))
        elif isinstance(order, Sample):
            trainer.send(draw(policy, order, receiver.version))
        elif isinstance(order, Evaluate):
            trainer.send(evaluate(policy, order))
        elif isinstance(order, Finish):
            start = time.perf_counter()
            final = weights_hash(receiver.weights)
            trainer.send(Finished(receiver.version, receiver.digest, final, time.perf_counter() - start))
            return


def rollout_process(worker: int, trainer: Connection, settings: Settings) -> None:
    where = f"rollout process {worker}"
    child(where, settings.temporary, trainer, lambda: serve(trainer, settings))
