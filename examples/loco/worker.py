"""A worker: draws its own rollouts with its own policy, steps its own masters, and meets the others in PulseLoCo."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pulse_kernels as pk
from examples.loco.settings import Order, RankAccount, RoundAccount, Settings
from pulse_kernels.demo import task
from pulse_kernels.demo.grpo import Rollouts, grpo_loss, sample, score
from pulse_kernels.demo.model import load_policy, num_parameters, weights_of
from pulse_kernels.demo.processes import child
from pulse_kernels.demo.rollout import weights_hash
from pulse_kernels.demo.trainer import BETAS
from pulse_kernels.loco import PulseLoCo


class Worker:
    """One run of one method, as one rank."""

    def __init__(self, settings: Settings, order: Order) -> None:
        self.settings, self.order = settings, order
        self.rank = dist.get_rank()
        self.policy = load_policy()
        self.weights = weights_of(self.policy)
        self.masters = {name: weight.float() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.Adam(self.masters.values(), lr=order.learning_rate, betas=BETAS)
        self.loco = PulseLoCo(
            self.weights,
            masters=self.masters,
            sync_every=order.method.sync_every(settings.window),
            outer_optimizer=order.method.outer_optimizer,
            gate=order.method.gate,
            threads=1,
        )
        self.training, held_out = task.split_problems()
        share = [settings.held_out * k // settings.workers for k in (self.rank, self.rank + 1)]
        self.held_out = held_out[slice(*share)]
        # Of seed and rank alone: all methods begin with the same prompts and draws, no two ranks with the same.
        self.generator = torch.Generator().manual_seed(1000 * order.seed + self.rank)
        self.prompt_tokens = self.drawn_tokens = 0

    def run(self) -> RankAccount:
        right_before = self.right()
        rewards, changed, rounds = [], [], []
        for step in range(1, self.settings.steps + 1):
            rollouts = self.rollouts(step)
            rewards.append(float(rollouts.rewards.mean()))
            changed.append(self.step(rollouts))
            due = self.order.method.gate is not None and step % self.loco.sync_every == 0
            account = self.gate_account() if due else {}
            report = self.loco.step()
            if report is not None:
                sizes = (report.num_fired, report.payload_bytes, report.sent_bytes, report.dense_bytes)
                rounds.append(RoundAccount(step, *sizes, report.digest, **account))
        return RankAccount(
            rank=self.rank,
            parameters=num_parameters(self.policy),
            prompt_tokens=self.prompt_tokens,
            drawn_tokens=self.drawn_tokens,
            rewards=rewards,
            changed=changed,
            rounds=rounds,
            held_out=len(self.held_out),
            right_before=right_before,
            right_after=self.right(),
            weights_hash=weights_hash(self.weights),
        )

    def rollouts(self, step: int) -> Rollouts:
        chosen = torch.randperm(len(self.training), generator=self.generator)[: self.settings.prompts]
        problems = [self.training[k] for k in chosen.tolist()]
        prompts = task.prompt_tokens(problems)
        completions, logprobs = sample(self.policy, prompts, self.settings.samples, self.generator)
        self.prompt_tokens += prompts.numel()
        self.drawn_tokens += completions.numel()
        return Rollouts(step, prompts, completions, logprobs, score(problems, completions))

    def step(self, rollouts: Rollouts) -> int:
        """One inner step, and the cast; how many BF16 weights it changed."""
        self.policy.zero_grad()
        grpo_loss(self.policy, rollouts).backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.policy.named_parameters():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        indices, _ = pk.gate_compact_many(list(self.masters.values()), list(self.weights.values()), update=True)
        return sum(index.numel() for index in indices)

    def gate_account(self) -> dict[str, Any]:
        """RoundAccount's last fields, of the round that is due."""
        parts = (self.loco.theta, self.masters, self.loco.residual)
        return gate_figures(*(torch.cat([named[name].reshape(-1) for name in self.masters]) for named in parts))

    def right(self) -> int:
        """Right answers to this rank's held-out problems, greedily, with the policy as it is."""
        with torch.no_grad():
            return int(score(self.held_out, sample(self.policy, task.prompt_tokens(self.held_out), 1, None)[0]).sum())


def gate_figures(theta: Tensor, local: Tensor, residual: Tensor) -> dict[str, float]:
    """RoundAccount's last fields, in plain PyTorch."""
    s = residual + (theta - local)
    silent = (theta - s).bfloat16() == theta.bfloat16()
    s = s.abs()
    spacing = bf16_spacing(theta)
    return {
        "visible_without_residual": float((theta.bfloat16() != local.bfloat16()).float().mean()),
        "expected_density": float((s / spacing).clamp_max(1).mean()),
        "held_back": float(s[silent].double().sum() / s.double().sum()),
        "median_s": float(s.median()),
        "median_spacing": float(spacing.median()),
    }


def bf16_spacing(x: Tensor) -> Tensor:
    """From the BF16 number below |x| to the next: 8 significant bits. Of zero, that of the smallest normal numbers."""
    exponent = torch.frexp(x).exponent.clamp_min(-125)
    return torch.ldexp(torch.ones_like(x), torch.where(x == 0, -125, exponent) - 8)


def serve(orders: Connection, rank: int, settings: Settings, meeting: Path) -> None:
    """One process group for all runs; ends with None."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=settings.workers)
    try:
        while (order := orders.recv()) is not None:
            orders.send(Worker(settings, order).run())
    finally:
        dist.destroy_process_group()


def worker_process(orders: Connection, rank: int, settings: Settings, meeting: Path) -> None:
    child(f"worker {rank}", None, orders, lambda: serve(orders, rank, settings, meeting))
