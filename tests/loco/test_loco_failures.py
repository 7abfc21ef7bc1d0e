"""Rounds that fail: no rank changes anything, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loco_models import PlainLoCo, model, moved
from ranks_pool import Died, Ranks
from torch import Tensor

from pulse_kernels.errors import GroupError, NonFiniteError
from pulse_kernels.loco import PulseLoCo, exchange, fragment

KEPT: dict[str, Any] = {}  # in each rank's process, from one call to the next


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def state(loco: PulseLoCo, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """All that a round may change, copied."""
    tensors = {f"theta {name}": tensor for name, tensor in loco.theta.items()}
    tensors |= {f"residual {name}": tensor for name, tensor in loco.residual.items()}
    tensors |= {f"local {name}": tensor for name, tensor in local.items()}
    for k, values in loco.outer_optimizers[0].state_dict()["state"].items():
        tensors |= {f"outer {k} {key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)


# ---- a rank dies ----------------------------------------------------------------------------------------------------

PHASES: dict[str, tuple[Any, str, int]] = {
    "gate": (fragment.Fragment, "gate", 2),
    "pack": (exchange, "encode", 2),
    "first header": (exchange, "gather_rows", 1),
    "a later header": (exchange, "gather_rows", 4),
    "bytes": (exchange.Exchange, "_gather", 3),
    "parts": (exchange.dist, "all_to_all_single", 2),
    "sums": (exchange.Exchange, "_land", 2),
    "agreement": (exchange.Exchange, "agree", 1),
}


def dies_at(owner: Any, name: str, call: int) -> None:
    """This process is killed at the given call of a function, counted from 1."""
    real: Callable[..., Any] = getattr(owner, name)
    left = [call]

    def deadly(*args: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **keywords)

    setattr(owner, name, deadly)


def until_one_dies(rank: int, phase: str, mode: str) -> list[Any]:
    local = model()
    loco = PulseLoCo(local, bucket_numel=100, exchange=mode)
    KEPT.update(loco=loco, local=local)
    moved(list(local.values()), seed=rank)
    loco.sync()
    moved(list(local.values()), seed=100 + rank)
    before = state(loco, local)
    if rank == 3:
        dies_at(*PHASES[phase])
    try:
        loco.sync()
    except GroupError as error:
        return [str(error), same(before, state(loco, local)), bool(loco.fragments[0].sent)]
    return ["no error", False, False]


def go_on(rank: int, mode: str) -> list[Any]:
    """A new group, in which the dead rank's place is taken by a new process with other weights."""
    if rank == 3:
        local = model(seed=99)
        loco = PulseLoCo(local, bucket_numel=100, exchange=mode)
    else:
        loco, local = KEPT["loco"], KEPT["local"]
        loco.regroup()
    if rank == 3:
        moved(list(local.values()), seed=103)
    reports = [loco.sync()]
    return [reports[0].digest, {name: tensor.clone() for name, tensor in loco.theta.items()}, loco.residual]


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        *(("gather", phase) for phase in PHASES if phase != "parts"),
        *(("reduce", phase) for phase in ("parts", "sums", "agreement")),
    ],
)
def test_a_rank_is_killed(ranks: Ranks, mode: str, phase: str) -> None:
    answers = ranks.run(until_one_dies, phase, mode, world=4, seconds=20)
    ranks.restart(3)
    assert isinstance(answers[3], Died)
    for told, unchanged, doubtful in answers[:3]:
        assert "failed" in told
        assert "call regroup() on the ranks that are left" in told
        assert unchanged
        assert doubtful == (phase == "agreement")
    # What the others had to send goes with the next round, in which the new rank starts from their weights.
    answers = ranks.run(go_on, mode, world=4, seconds=20)
    plain = PlainLoCo(list(model().values()), 4)
    for rank, local in enumerate(plain.local):
        moved(local, seed=rank)
    plain.round()
    for rank, local in enumerate(plain.local):
        moved(local, seed=100 + rank)
    plain.residual[3] = [torch.zeros_like(tensor) for tensor in plain.theta]
    plain.round()
    for rank, (digest, theta, residual) in enumerate(answers):
        assert digest == answers[0][0]
        for k, name in enumerate(theta):
            assert torch.equal(theta[name], plain.theta[k])
            assert torch.equal(residual[name], plain.residual[rank][k])


# ---- a rank fails ---------------------------------------------------------------------------------------------------


def failing(rank: int, what: str) -> list[Any]:
    local = model()
    loco = PulseLoCo(local, bucket_numel=100)
    moved(list(local.values()), seed=rank)
    loco.sync()
    moved(list(local.values()), seed=100 + rank)
    healthy = local["c"].clone()
    real = exchange.decode
    if rank == 1 and what in ("inf", "nan"):
        local["c"].view(-1)[3] = float(what)
    if what == "overflow" and rank < 2:
        local["c"].view(-1)[3] = -3e38
    if rank == 1 and what == "memory":

        def decode(*args: Any) -> Any:
            raise MemoryError("no memory")

        exchange.decode = decode  # type: ignore[assignment]
    before = state(loco, local)
    error: Exception | None = None
    try:
        loco.sync()
    except Exception as caught:
        error = caught
    finally:
        exchange.decode = real
    unchanged = same(before, state(loco, local))
    local["c"].copy_(healthy)
    report = loco.sync()  # on the same group
    return [type(error), str(error), unchanged, report.digest, report.round]


@pytest.mark.parametrize("what", ["inf", "nan", "overflow", "memory"])
def test_one_rank_fails_and_all_know_why(ranks: Ranks, what: str) -> None:
    answers = ranks.run(failing, what, world=3)
    plain = PlainLoCo(list(model().values()), 3)
    for rank, local in enumerate(plain.local):
        moved(local, seed=rank)
    plain.round()
    for rank, (kind, told, unchanged, digest, number) in enumerate(answers):
        assert unchanged
        assert (digest, number) == (answers[0][3], 2)
        if what == "overflow":  # all see the sum
            assert kind is NonFiniteError
            assert "the sum over all ranks" in told
        elif rank == 1:
            assert kind is (MemoryError if what == "memory" else NonFiniteError)
        else:
            assert kind is GroupError
            assert "rank 1: " in told
            assert ("no memory" if what == "memory" else "infinite or NaN") in told


def voting(rank: int) -> list[Any]:
    votes = [[True, False, True], [False, True, True], [True, True, True]]
    calls = iter(votes)
    local = model()
    loco = PulseLoCo(local, sync_every=1, commit=lambda: next(calls)[rank])
    moved(list(local.values()), seed=rank)
    seen = []
    for _ in votes:
        before = state(loco, local)
        report = loco.step()
        assert report is not None
        seen.append((report.committed, report.round, same(before, state(loco, local)), set(loco.due)))
    return [seen, {name: tensor.clone() for name, tensor in loco.theta.items()}]


def test_the_commit_hook_of_any_rank_can_refuse(ranks: Ranks) -> None:
    plain = PlainLoCo(list(model().values()), 3)
    for rank, local in enumerate(plain.local):
        moved(local, seed=rank)
    plain.round()
    for seen, theta in ranks.run(voting, world=3):
        assert seen == [(False, 1, True, {0}), (False, 1, True, {0}), (True, 1, False, set())]
        assert all(torch.equal(theta[name], plain.theta[k]) for k, name in enumerate(theta))


def hook_raises(rank: int) -> str:
    def commit() -> bool:
        if rank == 1:
            raise RuntimeError("the manager is gone")
        return True

    local = model()
    loco = PulseLoCo(local, commit=commit)
    moved(list(local.values()), seed=rank)
    before = state(loco, local)
    try:
        loco.sync()
    except Exception as error:
        return f"{type(error).__name__} {error} {same(before, state(loco, local))}"
    return "no error"


def test_the_commit_hook_fails(ranks: Ranks) -> None:
    answers = ranks.run(hook_raises, world=2)
    assert "rank 1: RuntimeError: the manager is gone" in answers[0]
    assert "the manager is gone" in answers[1]
    assert all(answer.endswith("True") for answer in answers)


def damaged(rank: int) -> list[str]:
    """One rank's global weights are damaged after a round: the next digests tell."""
    local = model()
    loco = PulseLoCo(local)
    moved(list(local.values()), seed=rank)
    loco.sync()
    if rank == 2:
        loco.theta["b"].view(torch.int32)[5] ^= 1
    told = []
    for _ in range(2):
        try:
            loco.sync()
        except Exception as error:
            told.append(str(error))
    return told


def test_other_weights_are_found(ranks: Ranks) -> None:
    for told in ranks.run(damaged, world=3):
        assert len(told) == 2
        assert all("the global weights of ranks [2] have another digest" in each for each in told)
