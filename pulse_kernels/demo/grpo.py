"""GRPO: group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1), outcome rewards.

For each prompt the old policy draws a group of G completions with rewards r_1..r_G. Every token of completion i gets
the advantage

    A_i = (r_i - mean(r)) / std(r)

and the loss is

    -1/G sum_i 1/|o_i| sum_t min(ratio_it * A_i, clip(ratio_it, 1 - eps, 1 + eps) * A_i)

with ratio_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t). pi_old is what the rollout process reported when it drew
the token. The paper's KL term against a reference model is left out (its beta is 0 here): the reward is exact, so
there is no reward model to drift away from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pulse_kernels.demo.model import Policy
from pulse_kernels.demo.task import ANSWER_LENGTH, END, Problem, completion_mask, prompt_tokens, reward

CLIP = 0.2


@dataclass
class Rollouts:
    """Groups of completions: everything the trainer needs to know about what a policy version did."""

    version: int
    prompts: Tensor  # int64 [groups, PROMPT_LENGTH]
    completions: Tensor  # int64 [groups, samples, ANSWER_LENGTH], end marks after the first end mark
    logprobs: Tensor  # float32, as completions: log pi_old of each token
    rewards: Tensor  # float32 [groups, samples]


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw `samples` completions a prompt at temperature 1, or the greedy one if `generator` is None.

    Returns tokens and their log-probabilities, both [prompts, samples, ANSWER_LENGTH]. The prompts run through the
    model once; their keys and values are then shared by the group and grow by one position a token.
    """
    logits, cache = policy(prompts)
    cache = [(k.repeat_interleave(samples, 0), v.repeat_interleave(samples, 0)) for k, v in cache]
    logits = logits[:, -1].repeat_interleave(samples, 0)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for position in range(ANSWER_LENGTH):
        if position:
            logits, cache = policy(tokens[-1][:, None], cache)
            logits = logits[:, -1]
        scores = logits
        if generator is not None:  # Gumbel-max: the arg-max of logits plus Gumbel noise is a draw from softmax
            noise = torch.empty_like(logits).exponential_(generator=generator)
            scores = logits - noise.log()
        ended = tokens[-1] == END if tokens else torch.zeros(len(logits), dtype=torch.bool)
        tokens.append(scores.argmax(-1).masked_fill(ended, END))
        logprobs.append(logits.log_softmax(-1).gather(1, tokens[-1][:, None])[:, 0])
    shape = (len(prompts), samples, ANSWER_LENGTH)
    return torch.stack(tokens, 1).view(shape), torch.stack(logprobs, 1).view(shape)


def score(problems: list[Problem], completions: Tensor) -> Tensor:
    """Rewards, float32 [problems, samples], of completions [problems, samples, ANSWER_LENGTH]."""
    rows = zip(problems, completions.tolist(), strict=True)
    return torch.tensor([[reward(problem, row) for row in group] for problem, group in rows])


def pass_at_1(policy: Policy, problems: list[Problem], draws: int = 4, seed: int = 0) -> tuple[float, float]:
    """Share of problems solved by one completion: the greedy one, and on average over `draws` at temperature 1."""
    prompts = prompt_tokens(problems)
    greedy = score(problems, sample(policy, prompts, 1, None)[0])
    drawn = score(problems, sample(policy, prompts, draws, torch.Generator().manual_seed(seed))[0])
    return float(greedy.mean()), float(drawn.mean())


def token_logprobs(policy: Policy, prompts: Tensor, owner: Tensor, completions: Tensor) -> Tensor:
    """log pi of each completion token, [n, ANSWER_LENGTH]; completion i answers prompts[owner[i]].

    As in `sample`, a prompt runs through the model once and its completions share the keys and values.
    """
    logits, cache = policy(prompts)
    first = logits[owner, -1:]
    rest, _ = policy(completions[:, :-1], [(k[owner], v[owner]) for k, v in cache])
    logits = torch.cat((first, rest), dim=1)
    return logits.log_softmax(-1).gather(2, completions[..., None])[..., 0]


def group_advantages(rewards: Tensor) -> Tensor:
    """[groups, samples] -> the same: rewards standardised inside each group, 0 where all rewards of a group agree."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=0)
    return torch.where(std > 0, centred / std.clamp_min(1e-6), torch.zeros_like(centred))


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float = CLIP
) -> Tensor:
    """Per-completion losses [n] from per-token log-probabilities [n, A] and one advantage a completion [n]."""
    ratio = (logprobs - old_logprobs).exp()
    advantage = advantages[:, None]
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(objective * mask).sum(1) / mask.sum(1)


def grpo_loss(policy: Policy, rollouts: Rollouts) -> Tensor:
    """The mean loss over all completions of all groups.

    Two savings leave the loss as it is: groups whose rewards all agree have no advantage and are skipped, and equal
    completions of one group run through the model once, weighted by their number.
    """
    advantages = group_advantages(rollouts.rewards)
    groups, samples = advantages.shape
    live = (advantages != 0).any(dim=1)
    if not live.any():
        return torch.stack([parameter.float().sum() for parameter in policy.parameters()]).sum() * 0.0
    group = torch.arange(int(live.sum())).repeat_interleave(samples)
    rows = torch.cat((group[:, None], rollouts.completions[live].flatten(0, 1)), dim=1)
    rows, inverse, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    # Any one of the equal completions stands for all of them.
    chosen = torch.empty(len(rows), dtype=torch.int64).scatter_(0, inverse, torch.arange(len(inverse)))
    completions = rows[:, 1:]
    losses = clipped_loss(
        token_logprobs(policy, rollouts.prompts[live], rows[:, 0], completions),
        rollouts.logprobs[live].flatten(0, 1)[chosen],
        advantages[live].flatten()[chosen],
        completion_mask(completions),
    )
    return (losses * counts).sum() / (groups * samples)
