"""Make the demo's warm start: supervised training on sums that forget every second carry.

The corpus shows the right sum half of the time and a sum without carries otherwise (``57+68=15``), so the model learns
to add, but not reliably: it picks up both habits, as models do from real text. The demo's RL run then has something to
teach that a small change of the weights can express. Held-out problems are never shown.

    python examples/make_warm_start.py [OUT.safetensors]        # about 4 minutes on 2 cores
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from pulse_kernels.demo import task
from pulse_kernels.demo.grpo import pass_at_1, token_logprobs
from pulse_kernels.demo.model import Policy, warm_start_path

STEPS, BATCH, PEAK_RATE, WARM_UP, SEED = 400, 256, 1e-3, 50, 1
FORGOTTEN = 0.5  # share of the corpus that adds without carrying


def learning_rate(step: int) -> float:
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def without_carry(problem: task.Problem) -> int:
    a, b = problem
    return a // 10 * 10 + b // 10 * 10 + (a % 10 + b % 10) % 10


def train() -> Policy:
    generator = torch.Generator().manual_seed(SEED)
    policy = Policy()
    policy.initialise(generator)
    training, held_out = task.split_problems()
    prompts = task.prompt_tokens(training)
    right = task.number_tokens([a + b for a, b in training])
    wrong = task.number_tokens([without_carry(problem) for problem in training])
    optimizer = torch.optim.Adam(policy.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        batch = torch.randint(len(training), (BATCH,), generator=generator)
        forgets = torch.rand(BATCH, 1, generator=generator) < FORGOTTEN
        answers = torch.where(forgets, wrong[batch], right[batch])
        mask = task.completion_mask(answers)
        logprobs = token_logprobs(policy, prompts[batch], torch.arange(BATCH), answers)
        loss = -(logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            greedy, sampled = pass_at_1(policy, held_out)
            print(f"step {step + 1}: loss {loss.item():.4f}, pass@1 {greedy:.3f} greedy, {sampled:.3f} sampled")
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=warm_start_path())
    out = parser.parse_args().out
    policy = train()
    weights = {name: parameter.detach().to(torch.bfloat16) for name, parameter in policy.named_parameters()}
    save_file(weights, out)
    print(f"{out}: {sum(w.numel() for w in weights.values()):,} BF16 weights, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
