"""Boxes of tensors: their positions and digests in the whole, and who sends what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pulse_kernels import StateDigest
from pulse_kernels.sync import sharding
from pulse_kernels.sync.sharding import Box, Shard, boxes_of, owners


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    local = tuple(draw(st.integers(0, size)) for size in shape)
    offset = tuple(draw(st.integers(0, size - part)) for size, part in zip(shape, local, strict=True))
    return Box(torch.bfloat16, shape, offset, local)


def whole_of(box: Box) -> Tensor:
    raw = torch.randint(-(2**15), 2**15, box.shape, dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    return raw.view(torch.bfloat16)


@given(boxes())
def test_positions_are_those_of_the_whole_in_its_order(box: Box) -> None:
    numbers = torch.arange(torch.Size(box.shape).numel()).reshape(box.shape)
    expected = numbers[box.slices].reshape(-1)
    found = box.positions(torch.arange(box.numel, dtype=torch.int32))
    assert found.dtype == torch.int32
    assert found.tolist() == expected.tolist() == sorted(expected.tolist())


@given(boxes(), st.integers(1, 7))
def test_a_box_adds_its_elements_to_the_digest_of_the_whole(box: Box, chunk: int) -> None:
    whole = whole_of(box)
    outside = whole.clone()
    outside.view(torch.int16)[box.slices] = 0
    digest = StateDigest.of({"x": outside})
    before, sharding._CHUNK = sharding._CHUNK, chunk
    try:
        digest.add_lanes(box.lanes("x", whole[box.slices]))
    finally:
        sharding._CHUNK = before
    assert digest == StateDigest.of({"x": whole})


def test_positions_in_large_tensors_are_64_bits_wide() -> None:
    box = Box(torch.bfloat16, (1 << 20, 1 << 12), ((1 << 20) - 2, 5), (2, 7))
    found = box.positions(torch.tensor([0, 6, 7, 13]))
    last = ((1 << 20) - 1) * (1 << 12)
    assert found.tolist() == [last - (1 << 12) + 5, last - (1 << 12) + 11, last + 5, last + 11]
    assert found.dtype == torch.int64


def box(shape: tuple[int, ...], offset: tuple[int, ...], local: tuple[int, ...]) -> Box:
    return Box(torch.bfloat16, shape, offset, local)


def test_equal_boxes_are_the_lowest_ranks_and_empty_ones_nobodys() -> None:
    upper, lower, none = box((4, 3), (0, 0), (3, 3)), box((4, 3), (3, 0), (1, 3)), box((4, 3), (0, 0), (0, 3))
    whole = box((5,), (0,), (5,))
    found = owners([{"a": none}, {"a": upper, "b": whole}, {"a": upper, "b": whole}, {"a": lower, "c": whole}])
    assert found == {"a": {1: upper, 3: lower}, "b": {1: whole}, "c": {3: whole}}


@pytest.mark.parametrize(
    ("mine", "problem"),
    [
        ([box((4, 4), (0, 0), (2, 4)), box((4, 4), (1, 0), (3, 4))], r"element at \[1, 0\] is in 2"),
        ([box((4, 4), (0, 0), (2, 4)), box((4, 4), (2, 0), (2, 3))], r"element at \[2, 3\] is in 0"),
        ([box((4, 4), (0, 0), (4, 4)), box((4, 4), (0, 0), (2, 2))], r"element at \[0, 0\] is in 2"),
        ([box((4,), (0,), (2,))], r"element at \[2\] is in 0"),
        ([box((4,), (0,), (4,)), box((5,), (0,), (5,))], r"\[4\] on rank 0 and bfloat16 \[5\] on rank 1; pass shards="),
    ],
)
def test_boxes_that_make_no_tensor_are_refused(mine: list[Box], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        owners([{"x": each} for each in mine])


@pytest.mark.parametrize(
    "shard",
    [Shard((4, 4), (3, 0)), Shard((4, 4), (-1, 0)), Shard((4,), (0,)), Shard((4, 4), (0,)), Shard((1, 4), (0, 0))],
)
def test_a_shard_that_does_not_fit_its_tensor_is_refused(shard: Shard) -> None:
    with pytest.raises(ValueError, match="'w' has shape"):
        boxes_of({"w": torch.zeros(2, 4)}, {"w": shard})


def test_a_shard_of_no_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="'v' is not among params"):
        boxes_of({"w": torch.zeros(2, 4)}, {"v": Shard((2, 4), (0, 0))})
