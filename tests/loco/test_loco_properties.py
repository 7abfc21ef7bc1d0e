"""What holds of every round, whatever the numbers: nothing is lost, and the residual stays small."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loco_models import PlainLoCo, model, moved
from torch import Tensor, nn

from pulse_kernels.errors import GroupError, NonFiniteError
from pulse_kernels.loco import PulseLoCo
from pulse_kernels.loco.fragment import Fragment
from pulse_kernels.loco.tensors import cut, fragments

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.1754944e-38, 1.0, -1.0, 1 / 3, 65504.0, 1e30, -1.7e38]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.int32)


def sent_by(loco: PulseLoCo) -> dict[str, tuple[Tensor, Tensor]]:
    """What a round of one worker would send now, by name: (indices, values)."""
    found = {}
    for fragment in loco.fragments:
        for bucket in fragment.buckets:
            entries = fragment.gate(bucket)
            assert entries.indices is not None
            for piece in bucket.pieces:
                here = (entries.indices >= piece.at) & (entries.indices < piece.at + piece.stop - piece.start)
                indices = entries.indices[here].long() - piece.at + piece.start
                old = found.get(piece.name, (indices[:0], entries.values[:0]))
                found[piece.name] = torch.cat([old[0], indices]), torch.cat([old[1], entries.values[here]])
    return found


def check_conservation(loco: PulseLoCo, local: dict[str, Tensor]) -> None:
    """One round: residual after + sent == residual before + (theta - local), bit for bit."""
    pending = {name: loco.residual[name] + (loco.theta[name] - local[name]) for name in loco.theta}
    sent = sent_by(loco)
    loco.sync()
    for name, residual in loco.residual.items():
        total = residual.clone().reshape(-1)
        indices, values = sent.get(name, (torch.empty(0, dtype=torch.int64), torch.empty(0)))
        assert not bits(total)[indices].any()  # +0 where it was sent
        total[indices] = values
        assert torch.equal(bits(total), bits(pending[name])), name


@settings(max_examples=60, deadline=None)
@given(
    theta=st.lists(st.sampled_from(SPECIAL) | st.floats(-4, 4, width=32), min_size=1, max_size=40),
    moves=st.lists(st.lists(st.sampled_from(SPECIAL[:9]) | st.floats(-1, 1, width=32), min_size=40, max_size=40),
                   min_size=1, max_size=5),
    view=st.sampled_from(["bf16", "fp16"]),
    bucket_numel=st.integers(1, 50),
    scale=st.sampled_from([1.0, 1e-3, 1e-6]),
)  # fmt: skip
def test_nothing_is_lost(
    theta: list[float], moves: list[list[float]], view: str, bucket_numel: int, scale: float
) -> None:
    local = {"w": torch.tensor(theta), "scalar": torch.tensor(theta[0]), "none": torch.empty(2, 0)}
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    loco = PulseLoCo(local, gate=view, bucket_numel=bucket_numel, outer_optimizer=outer)
    for move in moves:
        local["w"] += scale * torch.tensor(move[: len(theta)])
        local["scalar"] += scale * move[0]
        check_conservation(loco, local)


def test_nothing_is_lost_in_rounds_that_fail() -> None:
    local = model()
    loco = PulseLoCo(local, bucket_numel=64)
    for k in range(10):
        moved(list(local.values()), seed=k)
        healthy = local["a"].clone()
        pending = {name: loco.fragments[0].pending(name) for name in local}
        local["a"].view(-1)[k] = float("nan")
        with pytest.raises(NonFiniteError, match=r"1 of .* values of the pseudo-gradient of 'a'"):
            loco.sync()
        local["a"].copy_(healthy)
        for name in local:
            assert torch.equal(bits(loco.fragments[0].pending(name)), bits(pending[name]))
        check_conservation(loco, local)


def test_a_silent_round_and_one_that_fires_all_over() -> None:
    local = {"w": torch.full((5, 5), 1.0), "v": torch.zeros(3)}
    loco = PulseLoCo(local)
    report = loco.sync()  # nothing moved
    assert (report.num_fired, report.density, report.committed) == (0, 0.0, True)
    assert local["w"].tolist() == [[1.0] * 5] * 5
    local["w"] -= 2.0**-10  # a quarter of the distance between neighbours below 1
    assert loco.sync().num_fired == 0
    assert loco.residual["w"].tolist() == [[2.0**-10] * 5] * 5
    assert local["w"].tolist() == [[1.0] * 5] * 5  # what nobody sent moves nobody
    for tensor in local.values():
        tensor -= 0.5
    report = loco.sync()
    assert (report.num_fired, report.density) == (28, 1.0)
    assert not loco.residual["w"].any()


def test_huge_values() -> None:
    local = {"w": torch.tensor([3e38, -3e38, 1.0])}
    loco = PulseLoCo(local)
    local["w"].copy_(torch.tensor([-3e38, -3e38, 1.0]))  # theta - local overflows
    with pytest.raises(NonFiniteError):
        loco.sync()
    assert loco.theta["w"].tolist() == torch.tensor([3e38, -3e38, 1.0]).tolist()


# ---- which tensors --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=True)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.ones(2))


def test_tied_and_frozen_parameters() -> None:
    model = Tied()
    loco = PulseLoCo(model)
    assert list(loco.theta) == ["embed.weight", "head.bias"]
    assert loco.tied == {"head.weight": "embed.weight"}
    before = model.embed.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight -= 0.25
        model.frozen += 1
    report = loco.sync()
    assert (report.numel, report.num_fired) == (35, 28)
    # Once: theta - 0.7 (g + 0.9 g), g being 0.25.
    torch.testing.assert_close(model.head.weight, before - 0.7 * 1.9 * 0.25)
    assert model.frozen.tolist() == [2.0] * 3


def test_masters_and_their_casts() -> None:
    weights = nn.Linear(30, 20).bfloat16()
    masters = {name: weight.detach().float() for name, weight in weights.named_parameters()}
    loco = PulseLoCo(weights, masters=masters)
    plain = PlainLoCo(list(masters.values()), 1)
    for k in range(3):
        moved(list(masters.values()), seed=k)
        moved(plain.local[0], seed=k)
        loco.sync()
        plain.round()
    for (name, weight), theta in zip(weights.named_parameters(), plain.theta, strict=True):
        assert torch.equal(masters[name], theta)
        assert torch.equal(weight, theta.bfloat16())


def test_arguments() -> None:
    good = {"w": torch.zeros(3)}
    half = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"params": {}}, ValueError, "no trainable parameters"),
        ({"params": half}, TypeError, "'w' is bfloat16, expected float32: hand over the FP32 weights"),
        ({"params": good, "sync_every": 0}, ValueError, "sync_every is 0"),
        ({"params": good, "gate": "int8"}, ValueError, "gate is 'int8', expected 'bf16', 'fp16' or None"),
        ({"params": good, "exchange": "ring"}, ValueError, "exchange is 'ring'"),
        ({"params": good, "fragments": 9}, ValueError, r"fragments is 9, expected 1 to sync_every \(8\)"),
        ({"params": good, "fragments": 2}, ValueError, "only 1 tensors"),
        ({"params": good, "bucket_numel": 1 << 31}, ValueError, "bucket_numel is 2147483648"),
        ({"params": good, "threads": 0}, ValueError, "threads is 0"),
        ({"params": half, "masters": {"v": torch.zeros(3)}}, ValueError, "'v' is no trainable parameter"),
        ({"params": half, "masters": {"w": torch.zeros(4)}}, ValueError, r"'w' is \[4\], its weight \[3\]"),
        ({"params": {"w": torch.zeros(3, 4).t()}}, ValueError, "'w' is not contiguous"),
    ]
    for arguments, kind, told in cases:
        params = arguments.pop("params")
        with pytest.raises(kind, match=told):
            PulseLoCo(params, **arguments)
    whole = torch.zeros(10)
    with pytest.raises(ValueError, match="share part of their memory"):
        PulseLoCo({"a": whole[:6], "b": whole[4:]})
    loco = PulseLoCo(good)
    with pytest.raises(ValueError, match=r"fragments \[1\]: expected some of 0 to 0"):
        loco.sync(1)
    with pytest.raises(TypeError, match="expected their numbers, 0 to 0"):
        loco.sync("w")


# ---- buckets and fragments ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 40))
def test_buckets_hold_every_element_once(sizes: list[int], bucket_numel: int) -> None:
    numels = {str(k): size for k, size in enumerate(sizes)}
    buckets = cut(numels, bucket_numel)
    assert all(bucket.numel == bucket_numel for bucket in buckets[:-1])
    seen = [(piece.name, k) for bucket in buckets for piece in bucket.pieces for k in range(piece.start, piece.stop)]
    assert seen == [(name, k) for name, numel in numels.items() for k in range(numel)]
    for bucket in buckets:
        at = 0
        for piece in bucket.pieces:
            assert piece.at == at
            at += piece.stop - piece.start


def test_a_parameter_of_more_than_2_to_the_31_elements() -> None:
    numel = (1 << 32) + 5
    theta = {"huge": torch.empty(numel, device="meta"), "small": torch.empty(3, device="meta")}
    buckets = cut({name: tensor.numel() for name, tensor in theta.items()}, 1 << 30)
    assert [bucket.numel for bucket in buckets] == [1 << 30] * 4 + [8]
    assert [(piece.name, piece.start, piece.at) for piece in buckets[-1].pieces] == [
        ("huge", 1 << 32, 0),
        ("small", 0, 5),
    ]
    assert [part.numel() for part in buckets[3].of(theta)] == [1 << 30]
    fragment = Fragment(theta, theta, theta, torch.optim.SGD([torch.zeros(1)]), buckets, torch.bfloat16)
    assert fragment.numel == numel + 3


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_fragments_are_even(sizes: list[int], data: st.DataObject) -> None:
    numels = {str(k): size for k, size in enumerate(sizes)}
    count = data.draw(st.integers(1, len(sizes)))
    groups = fragments(numels, count)
    assert len(groups) == count
    assert all(groups)
    assert [name for group in groups for name in group] == list(numels)
    if min(sizes) > 0:
        largest = max(sum(numels[name] for name in group) for group in groups)
        assert largest <= sum(sizes) / count + max(sizes) * 2


def test_each_fragment_at_its_own_offset() -> None:
    local = {name: torch.ones(10) for name in "abcd"}
    seen = []
    loco = PulseLoCo(local, sync_every=8, fragments=4, on_report=lambda report: seen.append((loco.steps, report)))
    for _ in range(16):
        loco.step()
    assert [(steps, report.fragments, report.numel) for steps, report in seen] == [
        (2 * k, ((k - 1) % 4,), 10) for k in range(1, 9)
    ]
    assert loco.rounds == 2


def test_fragments_are_each_a_loco_of_their_own() -> None:
    local = model()
    loco = PulseLoCo(local, sync_every=4, fragments=2)
    names = [list(part.theta) for part in loco.fragments]
    plain = [PlainLoCo([local[name] for name in group], 1) for group in names]
    for k in range(12):
        for part, group in zip(plain, names, strict=True):
            moved([local[name] for name in group], seed=k)
            moved(part.local[0], seed=k)
        loco.step()
        if k % 4 == 1:
            plain[0].round()
        if k % 4 == 3:
            plain[1].round()
    for part, group in zip(plain, names, strict=True):
        for i, name in enumerate(group):
            assert torch.equal(local[name], part.local[0][i])
            assert torch.equal(loco.theta[name], part.theta[i])


def test_attached_to_an_optimizer() -> None:
    layer = nn.Linear(6, 5)
    loco = PulseLoCo(layer, sync_every=3)
    inner = torch.optim.Adam(layer.parameters(), lr=1e-3)
    handle = loco.attach(inner)
    for k in range(7):
        layer(torch.ones(2, 6)).pow(2).sum().backward()
        inner.step()
        inner.zero_grad()
        assert loco.rounds == (k + 1) // 3
    handle.remove()
    inner.step()
    assert loco.steps == 7


def test_what_cannot_be_attached() -> None:
    layer = nn.Linear(6, 5)
    loco = PulseLoCo(layer)
    for wrong in (layer, None):
        with pytest.raises(TypeError, match="expected the torch optimizer of the weights"):
            loco.attach(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps none of the 2 weights"):
        loco.attach(torch.optim.SGD(nn.Linear(6, 5).parameters()))
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = loco.attach(inner)
    with pytest.raises(ValueError, match="steps would count twice"):
        loco.attach(inner)
    handle.remove()
    loco.attach(inner)
    inner.step()
    assert loco.steps == 1


def test_masters_are_what_an_optimizer_must_step() -> None:
    layer = nn.Linear(6, 5).bfloat16()
    masters = {name: weight.detach().float() for name, weight in layer.named_parameters()}
    loco = PulseLoCo(layer, masters=masters)
    with pytest.raises(ValueError, match="with masters= it must step those"):
        loco.attach(torch.optim.SGD(layer.parameters()))
    loco.attach(torch.optim.SGD(masters.values()))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"outer_optimizer": "sgd"}, "outer_optimizer is a str, expected what makes a torch optimizer"),
        ({"outer_optimizer": lambda tensors: 0.7}, "outer_optimizer made a float"),
        ({"commit": True}, "commit is a bool, expected a function without arguments"),
        ({"on_report": 3}, "on_report is a int"),
    ],
)
def test_what_must_be_callable(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        PulseLoCo({"w": torch.zeros(3)}, **options)


def test_a_launcher_whose_group_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(GroupError, match=r"WORLD_SIZE is 3, .* call torch.distributed.init_process_group\(\) first"):
        PulseLoCo({"w": torch.zeros(3)})
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert PulseLoCo({"w": torch.zeros(3)}).world == 1


def test_a_failed_round_is_tried_again_at_the_next_step() -> None:
    local = model()
    loco = PulseLoCo(local, sync_every=2)
    moved(list(local.values()), seed=1)
    assert loco.step() is None
    healthy = local["b"].clone()
    local["b"][0] = float("inf")
    with pytest.raises(NonFiniteError):
        loco.step()
    local["b"].copy_(healthy)
    report = loco.step()
    assert report is not None
    assert report.committed
    assert loco.step() is not None  # the fourth step's own


# ---- the residual over a long run -----------------------------------------------------------------------------------


def test_the_residual_stays_small() -> None:
    """500 rounds of a toy task, minimising |w - goal|^2 by noisy SGD in H = 4 inner steps.

    Bound: after a commit an entry is 0, or s with bf16(theta_old - s) == bf16(theta_old). Both then round to one BF16
    number b, so that |s| is at most the width of the interval of numbers that round to b: one distance between BF16
    neighbours, 2^-7 of the power of two at or below |b| (half of it to each side; below a power of two the inner half
    is smaller). |b| <= |theta_old| (1 + 2^-8), so |s| <= 2^-7 |b| <= 2^-7 (1 + 2^-8) |theta_old|, for normal numbers.
    """
    generator = torch.Generator().manual_seed(0)
    goal = torch.randn(400, generator=generator)
    local = {"w": torch.randn(400, generator=generator)}
    loco = PulseLoCo(local, sync_every=4)
    largest, start = 0.0, float((local["w"] - goal).abs().mean())
    for _ in range(500):
        before = loco.theta["w"].clone()
        for _ in range(4):
            gradient = local["w"] - goal + 0.1 * torch.randn(400, generator=generator)
            local["w"] -= 1e-3 * gradient
            loco.step()
        residual = loco.residual["w"]
        assert (residual.abs() <= 2.0**-7 * (1 + 2.0**-8) * before.abs()).all()
        largest = max(largest, float((residual != 0).float().mean()))
    assert loco.rounds == 500
    assert largest > 0.1  # there were residuals to bound
    assert float((local["w"] - goal).abs().mean()) < start / 10
