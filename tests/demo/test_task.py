"""The task: which answers count, and that the held-out problems stay apart."""

from __future__ import annotations

import pytest
import torch

from pulse_kernels.demo import task


def test_every_problem_is_either_trained_on_or_held_out() -> None:
    training, held_out = task.split_problems()
    assert len(held_out) == task.HELD_OUT
    assert len({*training, *held_out}) == len(training) + len(held_out) == 90 * 90


def test_the_split_is_the_same_every_time() -> None:
    assert task.split_problems() == task.split_problems()


def test_prompts_are_six_characters() -> None:
    tokens = task.prompt_tokens([(34, 57), (10, 99)])
    assert [task.decode(row) for row in tokens.tolist()] == ["34+57=", "10+99="]
    assert tokens.shape == (2, task.PROMPT_LENGTH)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("91..", 1.0),
        ("91.7", 1.0),  # what follows the end mark was never part of the answer
        ("90..", 0.0),
        ("091.", 0.0),
        ("91+.", 0.0),
        ("9.1.", 0.0),
        ("....", 0.0),
        ("9111", 0.0),  # does not end
    ],
)
def test_only_the_exact_sum_is_rewarded(completion: str, expected: float) -> None:
    assert task.reward((34, 57), task.encode(completion)) == expected


def test_three_digit_sums_fit() -> None:
    assert task.reward((99, 99), task.encode("198.")) == 1.0


def test_numbers_become_completions() -> None:
    rows = task.number_tokens([91, 198]).tolist()
    assert [task.decode(row) for row in rows] == ["91..", "198."]


def test_the_mask_ends_with_the_first_end_mark() -> None:
    completions = torch.tensor([task.encode(text) for text in ("91..", "198.", "1984", "....")])
    assert task.completion_mask(completions).int().tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]
