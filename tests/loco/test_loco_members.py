"""Ranks that join, leave, or missed that a round was committed; states on disk."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loco_models import PlainLoCo, model, moved
from ranks_pool import Ranks
from test_loco_failures import same, state
from torch import Tensor

from pulse_kernels.errors import CheckpointError, GroupError
from pulse_kernels.loco import PulseLoCo, exchange

KEPT: dict[str, Any] = {}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# ---- joining --------------------------------------------------------------------------------------------------------


def started_apart(rank: int) -> list[Any]:
    local = model(seed=rank)
    loco = PulseLoCo(local)
    return [copied(local), copied(loco.theta)]


def test_all_start_from_rank_0(ranks: Ranks) -> None:
    expected = model(seed=0)
    for local, theta in ranks.run(started_apart, world=3):
        assert same(local, expected)
        assert same(theta, expected)


def other_models(rank: int) -> str:
    local = model()
    if rank == 1:
        del local["c"]
    try:
        PulseLoCo(local)
    except GroupError as error:
        return str(error)
    return "no error"


def other_settings(rank: int) -> str:
    try:
        PulseLoCo(model(), gate=None if rank == 1 else "bf16")
    except GroupError as error:
        return str(error)
    return "no error"


def test_ranks_that_differ_are_told(ranks: Ranks) -> None:
    for told in ranks.run(other_models, world=2):
        assert "rank 1 has other tensors than rank 0" in told
        assert "give the same model" in told
    for told in ranks.run(other_settings, world=2):
        assert "rank 1 has other settings than rank 0: None where rank 0 has bf16; give the same arguments" in told


# ---- a rank that did not hear of the commit -------------------------------------------------------------------------


def misses_the_commit(rank: int, gate: str | None) -> list[Any]:
    """Rank 2 loses the answer of the agreement, which the others had."""
    local = model()
    loco = PulseLoCo(local, bucket_numel=100, gate=gate)
    KEPT.update(loco=loco, local=local)
    real = exchange.Exchange.agree
    for k in range(2):
        moved(list(local.values()), seed=10 * k + rank)
        if k == 1 and rank == 2:

            def lost(self: Any) -> None:
                real(self)
                raise RuntimeError("connection reset by peer")

            exchange.Exchange.agree = lost  # type: ignore[method-assign]
        before = state(loco, local)
        try:
            loco._verify = k == 0  # the digest is one collective more than rank 2 takes part in
            loco.sync()
        except GroupError as error:
            told = [str(error), same(before, state(loco, local))]
            exchange.Exchange.agree = real  # type: ignore[method-assign]
            try:
                loco.sync()
            except GroupError as again:
                return [*told, str(again)]
    return []


def meets_again(rank: int) -> list[Any]:
    loco, local = KEPT["loco"], KEPT["local"]
    if rank == 2:
        moved(list(local.values()), seed=77)  # it trained on
    loco.regroup()
    loco._verify = True
    regrouped = [copied(loco.theta), copied(loco.residual), copied(local)]
    moved(list(local.values()), seed=20 + rank)
    return [*regrouped, loco.sync().digest, copied(loco.theta)]


@pytest.mark.parametrize("gate", ["bf16", None])
def test_a_rank_makes_up_for_a_commit_it_missed(ranks: Ranks, gate: str | None) -> None:
    answers = ranks.run(misses_the_commit, gate, world=3)
    assert answers[:2] == [[], []]
    told, unchanged, again = answers[2]
    assert "connection reset by peer" in told
    assert unchanged
    assert "others may have" in again
    plain = PlainLoCo(list(model().values()), 3, view=None if gate is None else torch.bfloat16)
    for k in range(2):
        for rank, local in enumerate(plain.local):
            moved(local, seed=10 * k + rank)
        plain.round()
    late = [torch.zeros_like(tensor) for tensor in plain.theta]
    moved(late, seed=77)  # about how far rank 2 trained on
    answers = ranks.run(meets_again, world=3)
    for rank, (theta, residual, local, digest, after) in enumerate(answers):
        for k, name in enumerate(theta):
            assert torch.equal(theta[name], plain.theta[k])
            if gate is None:  # what it did since stays in its weights, to rounding
                since = late[k] if rank == 2 else torch.zeros(())
                torch.testing.assert_close(local[name], plain.theta[k] + since, rtol=0, atol=1e-8)
                continue
            assert torch.equal(local[name], plain.theta[k])
            if rank < 2:
                assert torch.equal(residual[name], plain.residual[rank][k])
            else:  # what it did since is pending: theta - local, to rounding
                torch.testing.assert_close(residual[name], plain.residual[2][k] - late[k], rtol=0, atol=1e-8)
        assert digest == answers[0][3]
        assert same(after, answers[0][4])


def is_left_behind(rank: int) -> None:
    """Rank 2 goes before it agrees: no rank commits, but none can know."""
    local = model()
    loco = PulseLoCo(local)
    KEPT.update(loco=loco, local=local)
    moved(list(local.values()), seed=rank)
    loco.sync()
    moved(list(local.values()), seed=10 + rank)
    if rank == 2:

        def gone(self: Any) -> None:
            raise RuntimeError("connection reset by peer")

        real, exchange.Exchange.agree = exchange.Exchange.agree, gone  # type: ignore[method-assign]
    with pytest.raises(GroupError, match="call regroup"):
        loco.sync()
    if rank == 2:
        exchange.Exchange.agree = real  # type: ignore[method-assign]
    assert loco.fragments[0].sent


def go_on_without(rank: int) -> None:
    loco, local = KEPT["loco"], KEPT["local"]
    loco.regroup()
    moved(list(local.values()), seed=20 + rank)
    loco.sync()


def comes_back(rank: int) -> list[Any]:
    loco = KEPT["loco"]
    pending = {name: loco.fragments[0].pending(name) for name in loco.theta}
    loco.regroup()
    return [pending, copied(loco.residual), loco.rounds, loco.sync().digest]


def test_what_was_never_committed_stays_pending_though_the_others_went_on(ranks: Ranks) -> None:
    ranks.run(is_left_behind, world=3)
    ranks.run(go_on_without, world=2)
    answers = ranks.run(comes_back, world=3)
    pending, residual, rounds, digest = answers[2]
    assert (rounds, digest) == (2, answers[0][3])
    assert same(pending, residual)


# ---- leaving --------------------------------------------------------------------------------------------------------


def leaves(rank: int, to: int | None, gate: str | None) -> list[Any]:
    local = model()
    loco = PulseLoCo(local, gate=gate)
    moved(list(local.values()), seed=rank)
    loco.sync()
    moved(list(local.values()), seed=10 + rank)
    before = {name: loco.fragments[0].pending(name) for name in loco.theta}
    masses = loco.hand_over([2], to)
    return [masses, before, {name: loco.fragments[0].pending(name) for name in loco.theta}]


@pytest.mark.parametrize("gate", ["bf16", None])
@pytest.mark.parametrize("to", [0, None])
def test_a_rank_leaves(ranks: Ranks, to: int | None, gate: str | None) -> None:
    answers = ranks.run(leaves, to, gate, world=3)
    left = answers[2][1]
    mass = sum(float(tensor.double().abs().sum()) for tensor in left.values())
    assert mass > 0
    for rank, (masses, before, after) in enumerate(answers):
        assert masses == {2: pytest.approx(mass, rel=1e-12)}
        for name in before:
            if rank == 2:
                assert not after[name].any()
            elif rank == to:
                torch.testing.assert_close(after[name], before[name] + left[name], rtol=1e-6, atol=1e-8)
            else:
                assert torch.equal(after[name], before[name])


def leaves_wrongly(rank: int) -> list[str]:
    loco = PulseLoCo(model())
    told = []
    for leaving, to in (([], 0), ([3], None), ([1], 1), ([1], 7), ([rank], None)):
        try:
            loco.hand_over(leaving, to)
        except (ValueError, GroupError) as error:
            told.append(type(error).__name__)
    return told


def test_nonsense_about_leaving(ranks: Ranks) -> None:
    assert ranks.run(leaves_wrongly, world=2) == [["ValueError"] * 4 + ["GroupError"]] * 2


# ---- states on disk -------------------------------------------------------------------------------------------------

OUTERS = {"sgd": None, "adam": partial(torch.optim.Adam, lr=1e-4)}


def trains(loco: PulseLoCo, local: dict[str, Tensor], rank: int, first: int, count: int) -> None:
    for k in range(first, first + count):
        moved(list(local.values()), seed=1000 * k + rank)
        loco.step()


def saves(rank: int, folder: str, options: dict[str, Any]) -> list[Any]:
    options = dict(options)
    options["outer_optimizer"] = OUTERS[options.pop("outer", "sgd")]
    local = model()
    loco = PulseLoCo(local, sync_every=3, **options)
    trains(loco, local, rank, 0, 7)
    loco.save(folder)
    saved = copied(local)
    trains(loco, local, rank, 7, 8)
    ended = state(loco, local)
    # The same from the checkpoint, in an object with other weights.
    other = model(seed=5)
    again = PulseLoCo(other, sync_every=3, **options)
    again.load(folder)
    for name, tensor in saved.items():
        other[name].copy_(tensor)
    trains(again, other, rank, 7, 8)
    return [same(ended, state(again, other)), loco.steps == again.steps]


@pytest.mark.parametrize(
    "options",
    [{}, {"fragments": 3}, {"outer": "adam"}, {"gate": None}, {"offload": True, "fragments": 2}],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    assert ranks.run(saves, str(tmp_path / "state"), options, world=3) == [[True, True]] * 3


def test_alone(tmp_path: Path) -> None:
    assert saves(0, str(tmp_path / "state"), {"fragments": 2}) == [True, True]


def keeps(rank: int, folder: str) -> dict[str, Tensor]:
    local = model()
    loco = PulseLoCo(local)
    moved(list(local.values()), seed=rank)
    loco.sync()
    loco.save(folder)
    return copied(loco.residual)


def resumes(rank: int, folder: str, policy: str) -> list[Any]:
    loco = PulseLoCo(model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loco.load(folder, residuals=policy)
    told = [str(warning.message) for warning in caught if "residual" in str(warning.message)]
    return [copied(loco.residual), loco.rounds, told, loco.sync().digest]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_another_number_of_ranks(ranks: Ranks, tmp_path: Path, world: int) -> None:
    folder = str(tmp_path / "state")
    saved = ranks.run(keeps, folder, world=3)
    for policy in ("sum", "drop"):
        answers = ranks.run(resumes, folder, policy, world=world)
        for rank, (residual, rounds, told, digest) in enumerate(answers):
            assert rounds == 1
            assert digest == answers[0][3]
            own = saved[rank::world] if policy == "sum" else []
            for name, tensor in residual.items():
                expected = sum((each[name] for each in own), torch.zeros_like(tensor))
                assert torch.equal(tensor, expected)
            assert bool(told) == (policy == "drop")
            assert all("saved by 3 ranks and there are" in each for each in told)


def test_what_is_loaded_is_in_the_local_weights_and_their_casts(tmp_path: Path) -> None:
    weights = torch.nn.Linear(20, 10).bfloat16()
    masters = {name: weight.detach().float() for name, weight in weights.named_parameters()}
    loco = PulseLoCo(weights, masters=masters)
    moved(list(masters.values()), seed=1, spread=0.1)
    loco.sync()
    loco.save(tmp_path / "state")
    others = torch.nn.Linear(20, 10).bfloat16()
    local = {name: weight.detach().float() for name, weight in others.named_parameters()}
    for load in (
        lambda other: other.load(tmp_path / "state"),
        lambda other: other.load_state_dict(copy.deepcopy(loco.state_dict())),
    ):
        for tensor in local.values():
            tensor += 1
        other = PulseLoCo(others, masters=local)
        load(other)
        assert same(local, loco.theta)
        for name, weight in others.named_parameters():
            assert torch.equal(weight, loco.theta[name].bfloat16())
        assert other.fragments[0].pending("weight").equal(loco.residual["weight"])


def test_state_dict_goes_on_bit_for_bit() -> None:
    local = model()
    loco = PulseLoCo(local, sync_every=2, fragments=2)
    trains(loco, local, 0, 0, 5)
    kept, weights = copy.deepcopy(loco.state_dict()), copied(local)
    trains(loco, local, 0, 5, 6)
    other = model(seed=3)
    again = PulseLoCo(other, sync_every=2, fragments=2)
    again.load_state_dict(kept)
    for name, tensor in weights.items():
        other[name].copy_(tensor)
    trains(again, other, 0, 5, 6)
    assert same(state(loco, local), state(again, other))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.update(format=2), "format 2, expected 1"),
        (lambda s: s.update(fragments=[["a"]]), "another model or of other fragments"),
        (lambda s: s.update(gated=False), "gate None"),
        (lambda s: s.update(world=4), "one of 4 ranks, there are 1 now"),
        (lambda s: s["theta"].update(a=torch.zeros(3)), "theta of 'a' does not fit"),
        (lambda s: s["residual"].pop("b"), "residual of 'b' does not fit"),
        (lambda s: s["outer"][0]["param_groups"].clear(), "group"),
    ],
    ids=str,
)
def test_states_that_do_not_fit(change: Any, told: str) -> None:
    local = model()
    loco = PulseLoCo(local)
    moved(list(local.values()), seed=1)
    loco.sync()
    wrong = copy.deepcopy(loco.state_dict())
    change(wrong)
    before = state(loco, local)
    with pytest.raises(ValueError, match=told):
        loco.load_state_dict(wrong)
    assert same(before, state(loco, local))


def test_folders_that_hold_no_state(tmp_path: Path) -> None:
    loco = PulseLoCo(model())
    with pytest.raises(CheckpointError, match="no checkpoint that can be read"):
        loco.load(tmp_path / "none")
    with pytest.raises(ValueError, match="residuals is 'mean', expected 'sum' or 'drop'"):
        loco.load(tmp_path, residuals="mean")
    loco.save(tmp_path / "state")
    smaller = model()
    del smaller["a"]
    with pytest.raises(ValueError, match="another model"):
        PulseLoCo(smaller).load(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
