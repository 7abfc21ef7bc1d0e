"""What a program around PULSELoCo may do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loco_models import PlainLoCo, model, moved
from ranks_pool import Ranks
from torch import Tensor, nn

from pulse_kernels.errors import GroupError, PulseError
from pulse_kernels.loco import PulseLoCo, exchange


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


def test_inference_mode() -> None:
    expected = plain_theta(1, 2)
    with torch.inference_mode():
        made = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'w' was made in torch.inference_mode"):
        PulseLoCo({"w": made})
    local = model()
    with torch.inference_mode():
        loco = PulseLoCo(local)
    moved(list(local.values()), seed=0)
    with torch.inference_mode():
        loco.sync()  # makes the momentum
    moved(list(local.values()), seed=1000)
    loco.sync()
    assert all(torch.equal(own, right) for own, right in zip(loco.theta.values(), expected, strict=True))


# ---- parameters that change -----------------------------------------------------------------------------------------


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


def emptied(parameter: nn.Parameter) -> None:
    parameter.data.untyped_storage().resize_(0)  # as FSDP frees memory


def turned(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t()


def narrowed(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.bfloat16()


@pytest.mark.parametrize("change", [replaced, emptied, turned, narrowed])
@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_that_has_other_memory(change: Callable[[nn.Parameter], None], offload: bool) -> None:
    layer = nn.Linear(4, 4)
    loco = PulseLoCo(layer, offload=offload)
    loco.sync()
    change(layer.weight)
    with pytest.raises(PulseError, match=r"'weight' has other memory, shape or dtype"):
        loco.sync()
    assert loco.rounds == 1


def test_meta_tensors_and_tensors_without_elements() -> None:
    with pytest.raises(ValueError, match="'w' is on the meta device"):
        PulseLoCo({"w": torch.empty(3, device="meta")})
    loco = PulseLoCo({"w": torch.empty(0), "v": torch.empty(2, 0)})
    assert (loco.sync().numel, loco.rounds) == (0, 1)


def on_one_rank(rank: int) -> list[str]:
    layer = nn.Linear(4, 4)
    loco = PulseLoCo(layer)
    if rank == 1:
        old = layer.weight.data
        replaced(layer.weight)
    told = []
    for again in range(2):
        try:
            loco.sync()
            told.append("")
        except PulseError as error:
            told.append(str(error))
        if rank == 1 and not again:
            layer.weight.data = old
    return told


def test_ranks_are_told_of_a_parameter_that_has_other_memory(ranks: Ranks) -> None:
    for told in ranks.run(on_one_rank, world=2, seconds=15):
        assert "'weight' has other memory" in told[0]
        assert told[1] == ""


@pytest.mark.parametrize("wrong", [lambda t: t[:1], lambda t: [each.clone() for each in t]])
def test_an_outer_optimizer_of_other_tensors(wrong: Callable[[list[Tensor]], list[Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"the outer optimizer does not hold '[av]'"):
        PulseLoCo({"a": torch.ones(2), "v": torch.ones(3)}, outer_optimizer=lambda t: torch.optim.SGD(wrong(t)))


# ---- one rank fails where the others wait ---------------------------------------------------------------------------


def wrong_model(rank: int) -> str:
    local = model()
    if rank == 1:
        local["a"] = local["a"].bfloat16()
    try:
        PulseLoCo(local)
    except (GroupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_the_constructor_fails_on_one_rank(ranks: Ranks) -> None:
    answers = ranks.run(wrong_model, world=2, seconds=15)
    assert answers[0].startswith("GroupError: 1 of 2 ranks failed meeting")
    assert answers[1].startswith("TypeError: 'a' is bfloat16, expected float32")


def fails_to_commit(rank: int, kind: type[BaseException], verify: bool) -> list[Any]:
    local = model()
    loco = PulseLoCo(local, sync_every=2, fragments=2, verify=verify)
    told: list[str] = []
    for k in range(4):
        moved(list(local.values()), seed=1000 * k + rank)
        if rank == 1 and k == 1:

            def step() -> None:
                raise kind("no step")

            loco.fragments[1].outer.step = step  # type: ignore[method-assign]
        try:
            loco.step()
        except (PulseError, kind) as error:
            told.append(f"{type(error).__name__}: {error}")
            if rank == 1 and k == 1:
                del loco.fragments[1].outer.step
            if k == 2 or verify:
                loco.regroup()
    theta = {name: tensor.clone() for name, tensor in loco.theta.items()}
    return [told, loco.steps, loco.due, loco.last_report.digest if loco.last_report else "", theta]


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("verify", [True, False])
def test_one_rank_fails_to_commit(ranks: Ranks, kind: type[BaseException], verify: bool) -> None:
    answers = ranks.run(fails_to_commit, kind, verify, world=3, seconds=15)
    for rank, (told, steps, due, digest, theta) in enumerate(answers):
        assert (steps, due, digest) == (4, *answers[0][2:4])
        assert all(torch.equal(theta[name], answers[0][4][name]) for name in theta)
        if verify:
            assert len(told) == 1
            assert ("no step" in told[0]) == (rank == 1) or "the others have: call regroup()" in told[0]
        elif rank == 1:
            assert [line.split(":")[0] for line in told] == [kind.__name__, "PulseError"]
        else:
            assert len(told) == 1
            assert "rank 1: PulseError: a round was interrupted while it was committed" in told[0]


def interrupted_in_doubt(rank: int) -> list[Any]:
    """Rank 2 is interrupted when it has agreed and the others commit."""
    local = model()
    loco = PulseLoCo(local, sync_every=1, verify=False)
    moved(list(local.values()), seed=rank)
    real = exchange.Exchange.agree
    if rank == 2:

        def interrupted(self: Any) -> None:
            real(self)
            raise KeyboardInterrupt

        exchange.Exchange.agree = interrupted  # type: ignore[method-assign]
    try:
        loco.step()
    except KeyboardInterrupt:
        loco.steps += 5  # it counts on
    finally:
        exchange.Exchange.agree = real  # type: ignore[method-assign]
    loco.regroup()
    return [loco.rounds, loco.steps, loco.due, dict(loco.theta), dict(loco.residual)]


def test_an_interrupt_after_the_agreement(ranks: Ranks) -> None:
    plain = PlainLoCo(list(model().values()), 3)
    for rank, local in enumerate(plain.local):
        moved(local, seed=rank)
    plain.round()
    for rank, (rounds, steps, due, theta, residual) in enumerate(ranks.run(interrupted_in_doubt, world=3, seconds=15)):
        assert (rounds, steps, due) == (1, 1, set())
        for k, name in enumerate(theta):
            assert torch.equal(theta[name], plain.theta[k])
            assert torch.equal(residual[name], plain.residual[rank][k])  # what counted is not pending once more


def all_broken(rank: int) -> list[str]:
    loco = PulseLoCo(model())
    if rank == 1:
        loco.theta["b"].view(torch.int32)[5] ^= 1
    told = []
    for act in (loco.sync, loco.regroup, loco.state_dict, lambda: loco.save("never"), loco.regroup):
        try:
            act()
        except PulseError as error:
            told.append(str(error))
    return told


def test_no_rank_is_sound(ranks: Ranks) -> None:
    for told in ranks.run(all_broken, world=2, seconds=15):
        assert len(told) == 5
        assert "no rank has a sound state" in told[1]
        assert "no rank has a sound state" in told[4]
        assert all("another digest" in each for each in (told[0], told[2], told[3]))


class Odd(torch.optim.SGD):
    """Its state is nothing that can be sent."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"what": object()}}, "param_groups": []}


def odd_state(rank: int) -> str:
    try:
        PulseLoCo(model(seed=rank), outer_optimizer=lambda tensors: Odd(tensors, lr=1.0))
    except (GroupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_outer_optimizer_that_cannot_be_sent(ranks: Ranks) -> None:
    answers = ranks.run(odd_state, world=2, seconds=15)
    assert answers[0].startswith("TypeError: the outer optimizer's what is a object")
    assert answers[1].startswith("GroupError: 1 of 2 ranks failed making ready to meet")


# ---- process groups -------------------------------------------------------------------------------------------------


def in_a_group(rank: int, folder: str) -> list[Any]:
    group = dist.new_group([1, 3])
    told = ""
    if rank not in (1, 3):
        try:
            PulseLoCo(model(), process_group=group)
        except ValueError as error:
            told = str(error)
        return [told]
    local = model(seed=0 if rank == 1 else 9)
    loco = PulseLoCo(local, process_group=group, exchange="reduce")
    for k in range(2):
        moved(list(local.values()), seed=1000 * k + loco.rank)
        loco.sync()
    before = {name: tensor.clone() for name, tensor in loco.residual.items()}
    loco.save(folder)
    for tensor in loco.residual.values():
        tensor.zero_()
    loco.load(folder)
    kept = all(torch.equal(loco.residual[name], before[name]) for name in before)
    loco.process_group = None  # another group than it has met
    try:
        loco.sync()
    except GroupError as error:
        told = str(error)
    return [told, kept, list(loco.theta.values())]


def test_a_group_of_some_ranks(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(in_a_group, str(tmp_path / "state"), world=4, seconds=15)
    assert answers[0] == answers[2] == ["Invalid process group specified"]
    for told, kept, theta in answers[1::2]:
        assert "Call regroup() on all ranks" in told
        assert kept
        assert all(torch.equal(own, right) for own, right in zip(theta, plain_theta(2, 2), strict=True))


def many_fragments(rank: int) -> list[Any]:
    local = {str(k): torch.ones(3) for k in range(70)}
    loco = PulseLoCo(local, sync_every=70, fragments=70)
    for tensor in local.values():
        tensor -= 0.5
    for _ in range(70):
        loco.step()
    return [loco.rounds, {float(value) for tensor in local.values() for value in tensor}]


def test_more_fragments_than_bits_of_a_number(ranks: Ranks) -> None:
    expected = torch.tensor(1.0) - 0.7 * torch.tensor(1.9) * 0.5
    for rounds, values in ranks.run(many_fragments, world=2):
        assert rounds == 1
        assert [pytest.approx(float(expected), rel=1e-6)] == list(values)


def crossed(rank: int) -> list[str]:
    """Two at once on a group, in another order on rank 1."""
    both = [PulseLoCo({name: torch.ones(4)}) for name in "ab"]
    told = []
    for loco in both[:: 1 - 2 * rank]:
        try:
            loco.sync()
        except GroupError as error:
            told.append(str(error))
    return told


def test_two_on_a_group_in_another_order(ranks: Ranks) -> None:
    for told in ranks.run(crossed, world=2, seconds=15):
        assert len(told) == 2
        assert all("of another PulseLoCo" in each for each in told)


def one_position(rank: int) -> list[Any]:
    local = {"w": torch.ones(2)}
    loco = PulseLoCo(local, exchange="reduce", bucket_numel=1)
    local["w"] -= 0.25 * rank
    loco.sync()
    return local["w"].tolist()


def test_fewer_positions_than_ranks(ranks: Ranks) -> None:
    expected = 1 - 0.7 * 1.9 * 0.375
    assert ranks.run(one_position, world=4) == [[pytest.approx(expected, rel=1e-6)] * 2] * 4


# ---- leaving --------------------------------------------------------------------------------------------------------


def leaves_badly(rank: int) -> list[str]:
    local = model()
    loco = PulseLoCo(local, fragments=2, offload=True)
    if rank == 1:
        local["b"][3] = float("nan")
    told = []
    for leaving in ([1, 1], [1]):
        try:
            loco.hand_over(leaving, to=0)
        except (ValueError, PulseError) as error:
            told.append(str(error))
    clean = not any(tensor.any() for tensor in loco.residual.values())
    return [*told, str(clean)]


def test_what_cannot_be_handed_over(ranks: Ranks) -> None:
    for twice, nan, clean in ranks.run(leaves_badly, world=2, seconds=15):
        assert "name each rank once" in twice
        assert "what this rank has not sent of 'b'" in nan
        assert clean == "True"


def test_leaving_alone() -> None:
    local = {"w": torch.ones(2)}
    loco = PulseLoCo(local)
    local["w"] -= 0.25
    assert loco.hand_over([0]) == {0: 0.5}
    assert local["w"].tolist() == [1.0, 1.0]
