"""PULSELoCo on several ranks, against the plain implementation in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from loco_models import PlainLoCo, model, moved
from ranks_pool import Ranks

from pulse_kernels.loco import PulseLoCo

ROUNDS = 50


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def rounds_of(rank: int, options: dict[str, Any], rounds: int) -> list[Any]:
    local = model()
    loco = PulseLoCo(local, **options)
    digests, fired = [], []
    for k in range(rounds):
        moved(list(local.values()), seed=1000 * k + rank)
        report = loco.sync()
        digests.append(report.digest)
        fired.append(report.num_fired)
    numbers = {name: tensor.clone() for name, tensor in loco.theta.items()}
    return [digests, fired, numbers, {name: tensor.clone() for name, tensor in loco.residual.items()}, dict(local)]


def plain_rounds(world: int, rounds: int, **options: Any) -> tuple[PlainLoCo, list[list[int]]]:
    plain = PlainLoCo(list(model().values()), world, **options)
    fired = []
    for k in range(rounds):
        for rank, local in enumerate(plain.local):
            moved(local, seed=1000 * k + rank)
        fired.append(plain.round())
    return plain, fired


def check_same(answers: list[Any], plain: PlainLoCo, fired: list[list[int]]) -> None:
    for rank, (digests, counts, theta, residual, local) in enumerate(answers):
        assert digests == answers[0][0]
        assert len(set(digests)) == len(digests)
        assert counts == [row[rank] for row in fired]
        for k, name in enumerate(theta):
            assert torch.equal(theta[name].view(torch.int32), plain.theta[k].view(torch.int32)), name
            assert torch.equal(local[name], plain.theta[k]), name
            if residual:
                assert torch.equal(residual[name], plain.residual[rank][k]), name


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_equals_the_plain_implementation(ranks: Ranks, world: int, exchange: str) -> None:
    plain, fired = plain_rounds(world, ROUNDS)
    assert any(0 < count < 500 for row in fired for count in row)
    options = {"exchange": exchange, "bucket_numel": 100}
    check_same(ranks.run(rounds_of, options, ROUNDS, world=world), plain, fired)


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_without_a_gate_it_is_diloco(ranks: Ranks, exchange: str) -> None:
    plain, fired = plain_rounds(3, 12, view=None)
    options = {"exchange": exchange, "gate": None, "bucket_numel": 300}
    check_same(ranks.run(rounds_of, options, 12, world=3), plain, fired)


def averaging(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"compress": False},
        {"compress": True},
        {"offload": True},
        {"gate": "fp16"},
        {"outer_optimizer": averaging},
        {"outer_optimizer": partial(torch.optim.Adam, lr=1e-3)},
        {"bucket_numel": 1},
        {"verify": True, "exchange": "auto"},
    ],
    ids=str,
)
def test_options(ranks: Ranks, options: dict[str, Any]) -> None:
    rounds = 2 if options.get("bucket_numel") == 1 else 5
    plain, fired = plain_rounds(
        3,
        rounds,
        view=torch.float16 if options.get("gate") == "fp16" else torch.bfloat16,
        outer=options.get("outer_optimizer"),
    )
    check_same(ranks.run(rounds_of, options, rounds, world=3), plain, fired)
