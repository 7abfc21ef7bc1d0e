"""The task: two-digit addition, scored by exact answer.

A prompt is always six characters, ``34+57=``; the answer is the sum in decimal digits closed by an end mark.
Every problem belongs to one of two fixed sets: the held-out problems measure pass@1 and are never trained on, neither
by the warm start nor by the RL run.
"""

from __future__ import annotations

import random

import torch

ALPHABET = "0123456789+=."
END = ALPHABET.index(".")
PROMPT_LENGTH = 6
ANSWER_LENGTH = 4  # up to three digits and the end mark
HELD_OUT = 1024
SPLIT_SEED = 20260203

Problem = tuple[int, int]


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """All 8,100 problems as (training, held-out), the same split for every run and every seed."""
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


def prompt_tokens(problems: list[Problem]) -> torch.Tensor:
    """int64 [len(problems), PROMPT_LENGTH]."""
    return torch.tensor([encode(f"{a}+{b}=") for a, b in problems], dtype=torch.int64)


def number_tokens(numbers: list[int]) -> torch.Tensor:
    """Numbers as completions, int64 [len(numbers), ANSWER_LENGTH], filled up with end marks."""
    return torch.tensor([encode(str(number).ljust(ANSWER_LENGTH, ".")) for number in numbers], dtype=torch.int64)


def reward(problem: Problem, completion: list[int]) -> float:
    """1.0 if the completion is the exact sum and ends there, else 0.0. Tokens after the first end mark do not count."""
    if END not in completion:
        return 0.0
    answer = decode(completion[: completion.index(END)])
    return 1.0 if answer == str(problem[0] + problem[1]) else 0.0


def completion_mask(completions: torch.Tensor) -> torch.Tensor:
    """True for each token up to and including the first end mark: the tokens the policy really chose."""
    ended = (completions == END).cumsum(dim=-1)
    return (ended - (completions == END).to(ended.dtype)) == 0
