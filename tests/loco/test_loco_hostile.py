"""What a program around PULSELoCo may do to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loco_models import PlainLoCo, model, moved
from ranks_pool import Ranks
from torch import Tensor

from pulse_kernels.loco import PulseLoCo


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def plain_theta(world: int, rounds: int, **options: Any) -> list[Tensor]:
    plain = PlainLoCo(list(model().values()), world, **options)
    for k in range(rounds):
        for rank, local in enumerate(plain.local):
            moved(local, seed=1000 * k + rank)
        plain.round()
    return plain.theta


# ---- torch's own settings -------------------------------------------------------------------------------------------


def with_default(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    local = model()
    moves = [model() for _ in range(2)]
    for k, move in enumerate(moves):
        for tensor in move.values():
            tensor.zero_()
        moved(list(move.values()), seed=1000 * k + rank)
    try:
        torch.set_default_dtype(dtype)
        loco = PulseLoCo(local, **options)
        for move in moves:
            for name, tensor in local.items():
                tensor += move[name]
            loco.sync()
    finally:
        torch.set_default_dtype(torch.float32)
    return list(loco.theta.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"gate": None}, {"gate": None, "exchange": "reduce"}], ids=str)
def test_sums_are_fp32_whatever_the_default_dtype(ranks: Ranks, dtype: torch.dtype, options: dict[str, Any]) -> None:
    expected = plain_theta(3, 2, **({"view": None} if "gate" in options else {}))
    for theta in ranks.run(with_default, dtype, options, world=3):
        assert all(torch.equal(own, right) for own, right in zip(theta, expected, strict=True))
