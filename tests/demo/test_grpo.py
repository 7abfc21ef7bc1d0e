"""GRPO by hand: advantages, the clipped loss, and that its short cuts change nothing."""

from __future__ import annotations

import math

import pytest
import torch

from pulse_kernels.demo import grpo, task
from pulse_kernels.demo.model import Policy, load_policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy()


@pytest.fixture
def problems() -> list[task.Problem]:
    return task.split_problems()[0][:6]


def test_advantages_are_standardised_inside_a_group() -> None:
    advantages = grpo.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]))
    # mean 1/4, std sqrt(3)/4: (3/4) / (sqrt(3)/4) = sqrt(3), (-1/4) / (sqrt(3)/4) = -1/sqrt(3)
    root = math.sqrt(3)
    torch.testing.assert_close(advantages[0], torch.tensor([root, -1 / root, -1 / root, -1 / root]))
    torch.testing.assert_close(advantages[1], torch.tensor([1.0, 1.0, -1.0, -1.0]))


def test_a_group_that_agrees_has_no_advantage() -> None:
    assert grpo.group_advantages(torch.tensor([[1.0] * 3, [0.0] * 3])).tolist() == [[0.0] * 3] * 2


def test_the_ratio_is_clipped_where_it_would_help() -> None:
    old = torch.zeros(4, 1)
    new = torch.tensor([[1.5], [0.5], [1.5], [0.5]]).log()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0])
    losses = grpo.clipped_loss(new, old, advantages, torch.ones(4, 1), clip=0.2)
    # min(1.5*2, 1.2*2), min(0.5*2, 0.8*2), min(1.5*-2, 1.2*-2), min(0.5*-2, 0.8*-2), each negated
    torch.testing.assert_close(losses, torch.tensor([-2.4, -1.0, 3.0, 1.6]))


def test_a_completion_counts_its_own_tokens_only() -> None:
    new = torch.tensor([[1.1, 1.0, 9.0]]).log()
    losses = grpo.clipped_loss(new, torch.zeros(1, 3), torch.tensor([1.0]), torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(losses, torch.tensor([-(1.1 + 1.0) / 2]))


def test_sampling_follows_its_seed(policy: Policy, problems: list[task.Problem]) -> None:
    prompts = task.prompt_tokens(problems)

    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return grpo.sample(policy, prompts, 8, torch.Generator().manual_seed(seed))

    (tokens, logprobs), (again, same), (other, _) = draw(1), draw(1), draw(2)
    assert torch.equal(tokens, again)
    assert torch.equal(logprobs, same)
    assert not torch.equal(tokens, other)


def test_after_the_end_mark_come_end_marks(policy: Policy, problems: list[task.Problem]) -> None:
    tokens, _ = grpo.sample(policy, task.prompt_tokens(problems), 16, torch.Generator().manual_seed(0))
    assert (tokens[~task.completion_mask(tokens)] == task.END).all()


def test_sampled_tokens_follow_the_policy(policy: Policy) -> None:
    prompts = task.prompt_tokens([(34, 57)])
    tokens, _ = grpo.sample(policy, prompts, 1024, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy(prompts)[0][0, -1].softmax(-1)
    observed = tokens[0, :, 0].bincount(minlength=len(expected)) / 1024
    torch.testing.assert_close(observed, expected, atol=0.06, rtol=0)


def test_cached_and_whole_passes_agree(policy: Policy, problems: list[task.Problem]) -> None:
    prompts = task.prompt_tokens(problems)
    tokens, drawn = grpo.sample(policy, prompts, 4, torch.Generator().manual_seed(0))
    mask = task.completion_mask(tokens)
    with torch.no_grad():
        shared = grpo.token_logprobs(policy, prompts, torch.arange(6).repeat_interleave(4), tokens.flatten(0, 1))
        whole = torch.cat((prompts.repeat_interleave(4, 0), tokens.flatten(0, 1)[:, :-1]), dim=1)
        logits, _ = policy(whole)
        plain = logits[:, task.PROMPT_LENGTH - 1 :].log_softmax(-1).gather(2, tokens.flatten(0, 1)[..., None])[..., 0]
    torch.testing.assert_close(shared, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drawn[mask], plain.view_as(drawn)[mask], atol=1e-4, rtol=1e-4)


def rollouts(policy: Policy, problems: list[task.Problem]) -> grpo.Rollouts:
    prompts = task.prompt_tokens(problems)
    completions, logprobs = grpo.sample(policy, prompts, 8, torch.Generator().manual_seed(3))
    return grpo.Rollouts(0, prompts, completions, logprobs, grpo.score(problems, completions))


def test_skipping_and_sharing_leave_loss_and_gradient_alone(policy: Policy, problems: list[task.Problem]) -> None:
    batch = rollouts(policy, problems)
    batch.rewards[0] = 1.0  # a group without a signal
    policy.zero_grad()
    loss = grpo.grpo_loss(policy, batch)
    loss.backward()
    gradients = [parameter.grad.float().clone() for parameter in policy.parameters()]

    policy.zero_grad()
    completions = batch.completions.flatten(0, 1)
    logprobs = grpo.token_logprobs(policy, batch.prompts, torch.arange(6).repeat_interleave(8), completions)
    advantages = grpo.group_advantages(batch.rewards).flatten()
    mask = task.completion_mask(completions)
    plain = grpo.clipped_loss(logprobs, batch.logprobs.flatten(0, 1), advantages, mask).mean()
    plain.backward()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-4)
    for gradient, parameter in zip(gradients, policy.parameters(), strict=True):
        error = (gradient - parameter.grad.float()).norm() / parameter.grad.float().norm()
        assert error < 0.02  # gradients are BF16
    policy.zero_grad()


def test_no_signal_gives_zero_gradients(policy: Policy, problems: list[task.Problem]) -> None:
    batch = rollouts(policy, problems)
    batch.rewards[:] = 0.0
    policy.zero_grad()
    loss = grpo.grpo_loss(policy, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all((parameter.grad == 0).all() for parameter in policy.parameters())
    policy.zero_grad()


def test_the_forward_pass_reads_the_bf16_weights(policy: Policy) -> None:
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert policy.cos.dtype == torch.float32
