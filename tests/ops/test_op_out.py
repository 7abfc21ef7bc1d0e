"""gate_compact_out and diff_compact_out: the caller's buffers, exactly full, one too small, and of no size at all."""

from __future__ import annotations

import pytest
import torch
from op_helpers import GATE_DTYPES, altered, random_bits, same_bits

import pulse_kernels as pk
from pulse_kernels.backends import reference

N = 70000  # two tasks


def gate_case(dtype):
    source = random_bits(N, torch.float32, 3)
    return (
        pk.gate_compact_out,
        pk.gate_compact,
        source,
        altered(reference.round_bits(source, dtype).view(dtype), 0.02, 3),
    )


def diff_case(dtype):
    target = random_bits(N, dtype, 4)
    return pk.diff_compact_out, pk.diff_compact, altered(target, 0.02, 4), target


CASES = {f"gate-{dtype}": lambda dtype=dtype: gate_case(dtype) for dtype in GATE_DTYPES} | {
    f"diff-{dtype}": lambda dtype=dtype: diff_case(dtype)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def buffers(capacity, dtype, index_dtype=torch.int32):
    indices = torch.full((capacity,), -7, dtype=index_dtype)
    values, old_values = torch.zeros(capacity, dtype=dtype), torch.zeros(capacity, dtype=dtype)
    return indices, values, torch.full((1,), -7), old_values


@pytest.mark.parametrize("spare", [0, 1, 5000])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_it_fills_the_buffers(case, spare, update, index_dtype):
    out, plain, source, target = case
    expected = plain(source, target, return_old=True, index_dtype=index_dtype)
    found = expected[0].numel()
    weight = target.clone()
    indices, values, count, old_values = buffers(found + spare, target.dtype, index_dtype)
    out(source, weight, indices, values, count, update=update, old_values=old_values)
    assert count.tolist() == [found]
    for buffer, column in zip((indices, values, old_values), expected, strict=True):
        assert same_bits(buffer[:found], column)
    assert indices[found:].tolist() == [-7] * spare
    wanted = target.clone()
    if update:
        wanted[expected[0].long()] = expected[1]
    assert same_bits(weight, wanted)


@pytest.mark.parametrize("missing", [1, 100, "all"])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("keep_old", [False, True])
def test_too_small_a_buffer_changes_nothing_and_says_what_is_needed(case, missing, update, keep_old):
    out, plain, source, target = case
    found = plain(source, target)[0].numel()
    weight = target.clone()
    capacity = 0 if missing == "all" else found - missing
    indices, values, count, old_values = buffers(capacity, target.dtype)
    out(source, weight, indices, values, count, update=update, old_values=old_values if keep_old else None)
    assert count.tolist() == [found]
    assert same_bits(weight, target)
    # With the size it named, the next call succeeds.
    indices, values, count, _ = buffers(int(count), target.dtype)
    out(source, weight, indices, values, count, update=update)
    assert same_bits(values, plain(source, target)[1])


@pytest.mark.parametrize("update", [False, True])
def test_no_change_needs_no_room(update):
    weight = torch.ones(100, dtype=torch.bfloat16)
    indices, values, count, old_values = buffers(0, torch.bfloat16)
    pk.gate_compact_out(torch.ones(100), weight, indices, values, count, update=update, old_values=old_values)
    assert count.tolist() == [0]


@pytest.mark.parametrize("update", [False, True])
def test_a_strided_weight(update):
    source = torch.arange(12.0).view(3, 4)
    weight = torch.zeros(4, 3, dtype=torch.bfloat16).t()
    indices, values, count, old_values = buffers(11, torch.bfloat16)
    pk.gate_compact_out(source, weight, indices, values, count, update=update, old_values=old_values)
    assert count.tolist() == [11]
    assert indices.tolist() == values.tolist() == list(range(1, 12))
    assert weight.flatten().tolist() == (list(range(12)) if update else [0] * 12)
    weight.zero_()
    indices, values, count, _ = buffers(10, torch.bfloat16)
    indices.fill_(3)  # a place and values that would show if they were written
    values.fill_(9)
    pk.gate_compact_out(source, weight, indices, values, count, update=update)
    assert count.tolist() == [11]
    assert weight.flatten().tolist() == [0] * 12


def test_count_may_have_any_shape_of_one_element():
    for count in (torch.tensor(-1), torch.tensor([-1]), torch.tensor([[-1]])):
        indices, values, _, _ = buffers(3, torch.bfloat16)
        pk.gate_compact_out(torch.ones(3), torch.zeros(3, dtype=torch.bfloat16), indices, values, count)
        assert int(count) == 3


@pytest.mark.parametrize("update", [False, True])
def test_old_values_on_another_device(update):
    weight = torch.zeros(4, dtype=torch.bfloat16)
    indices, values, count, old_values = buffers(4, torch.bfloat16)
    with pytest.raises(ValueError, match="old_values on meta"):
        pk.gate_compact_out(
            torch.ones(4), weight, indices, values, count, update=update, old_values=old_values.to("meta")
        )
    assert weight.tolist() == [0] * 4
    assert count.tolist() == [-7]
