"""The codec's byte streams: back ends agree byte for byte, and refuse the same damaged streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import DIFF_DTYPES, all_same_bits, back_end, int_bits, random_bits, random_positions, same_bits, seeds

import pulse_kernels as pk
from pulse_kernels.backends import reference

BACK_ENDS = [back_end(), reference]


def encode_gaps(code, indices, shift, start=0):
    return [column[0] for column in code.encode_gaps_many([indices], [start], [shift])]


def encode_values(code, values, base):
    return code.encode_values_many([values], None if base is None else [base])[0]


def byte_tensor(*values):
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("code", BACK_ENDS, ids=lambda code: code.__name__.split(".")[-1])
class TestByHand:
    def test_gaps(self, code):
        # From 10 on: gaps 0, 1, 254, 255 and 1000. 255 announces LEB128: 255 -> 00, 1000 - 255 = 745 = 5 * 128 + 105.
        indices = torch.tensor([10, 12, 267, 523, 1524])
        top, low, escapes = encode_gaps(code, indices, 0, start=10)
        assert all_same_bits((top, low, escapes), encode_gaps(code, indices - 10, 0))
        assert top.tolist() == [0, 1, 254, 255, 255]
        assert low.numel() == 0
        assert escapes.tolist() == [0x00, 0x80 | 105, 5]
        assert code.decode_gaps(top, low, escapes, 10, 1525, torch.int64).tolist() == indices.tolist()

    def test_gaps_with_a_low_plane(self, code):
        # 0x1234 = top 0x12, low 0x34; 0x1FF80 = top 255 + 256 and low 0x80: 256 is 0x80 0x02 in LEB128.
        indices = torch.tensor([0x1234, 0x1234 + 1 + 0x1FF80], dtype=torch.int32)
        top, low, escapes = encode_gaps(code, indices, 8)
        assert (top.tolist(), low.tolist(), escapes.tolist()) == ([0x12, 255], [0x34, 0x80], [0x80, 0x02])
        assert code.decode_gaps(top, low, escapes, 0, 1 << 20, torch.int32).tolist() == indices.tolist()

    def test_values(self, code):
        # One step up; one down; from +0 to -0, one down; three up; four down; 0x304 up: signs 0, 1, 1, 0, 1, 0 make
        # 0b010110. The magnitudes less one are 0, 0, 0, 2, 3 and 0x303: codes 0, 0, 0, 2 make 0b10000000, and codes 3
        # and 3 make 0b1111 with 0 and 0x300 to follow, low plane first. No change at all has the magnitude 0, less one
        # 0xFFFF, less 3 0xFFFC.
        values = torch.tensor([0x3F81, 0x3F7F, 0x8000, 0x3F83, 0x3F7C, 0x4284]).to(torch.uint16).view(torch.bfloat16)
        base = torch.tensor([0x3F80, 0x3F80, 0x0000, 0x3F80, 0x3F80, 0x3F80]).to(torch.uint16).view(torch.bfloat16)
        planes = encode_values(code, values, base)
        assert planes.tolist() == [0b010110, 0b10000000, 0b1111, 0, 0, 0, 3]
        assert encode_values(code, base[:1], base[:1]).tolist() == [0, 3, 0xFC, 0xFF]
        assert same_bits(code.decode_values(planes, base, torch.bfloat16), values)
        planes = encode_values(code, values, None)
        assert planes.tolist() == [0x81, 0x7F, 0x00, 0x83, 0x7C, 0x84, 0x3F, 0x3F, 0x80, 0x3F, 0x3F, 0x42]

    @pytest.mark.parametrize("codes", [[0b1110, 0], [0b1111, 0b11], [0, 0], [0b1111_1111, 0b1111]])
    def test_codes_that_announce_another_number_are_refused(self, code, codes):
        base = torch.zeros(6, dtype=torch.bfloat16)
        with pytest.raises(pk.PatchFormatError, match="large changes"):
            code.decode_values(byte_tensor(0, *codes, 1, 2, 0, 0), base, torch.bfloat16)

    @pytest.mark.parametrize(
        ("top", "low", "escapes", "stop"),
        [
            ([255], [], [], 1 << 62),  # no escape bytes
            ([255], [], [0x80], 1 << 62),  # an unfinished one
            ([255], [], [0x80] * 9 + [0x01], 1 << 62),  # ten bytes
            ([255], [], [0xFF] * 8 + [0x7F], 1 << 62),  # 2^63 - 1
            ([255], [7], [0x81, 0xFE] + [0xFF] * 5 + [0x7F], 1 << 62),  # 2^56 before its shift by 8
            ([0], [], [0x00], 10),  # a byte left over
            ([10], [], [], 10),  # one beyond the range
            ([5, 4], [], [], 10),
            ([0], [10], [], 10),
            ([0], [], [], 0),  # an empty range
        ],
    )
    def test_damaged_gaps_are_refused(self, code, top, low, escapes, stop):
        with pytest.raises(pk.PatchFormatError, match="gaps"):
            code.decode_gaps(byte_tensor(*top), byte_tensor(*low), byte_tensor(*escapes), 0, stop, torch.int64)


@given(
    n=st.integers(0, 300),
    start=st.sampled_from([0, 1, 1000]),
    span=st.sampled_from([300, 70000, 2**31 - 2000, 2**40, 2**61]),
    shift=st.sampled_from([0, 8]),
    seed=seeds,
)
def test_gap_round_trips(n, start, span, shift, seed):
    stop = start + span
    indices = start + random_positions(n, span, seed)
    dtypes = [torch.int64, torch.int32] if stop <= 2**31 - 1 else [torch.int64]
    for dtype in dtypes:
        streams = encode_gaps(back_end(), (indices - start).to(dtype), shift)
        for ours, theirs in zip(streams, encode_gaps(reference, indices - start, shift), strict=True):
            assert torch.equal(ours, theirs)
        for code in BACK_ENDS:
            back = code.decode_gaps(*streams, start, stop, dtype)
            assert back.dtype is dtype
            assert torch.equal(back.long(), indices)


@given(
    top=st.lists(st.sampled_from([0, 1, 7, 254, 255]), max_size=6),
    low=st.booleans(),
    escapes=st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0x81, 0xFF]), max_size=20),
    start=st.integers(0, 300),
    span=st.sampled_from([0, 1, 255, 300, 2**20, 2**40, 2**62 - 300]),
)
def test_back_ends_refuse_the_same_gaps(top, low, escapes, start, span):
    def result_of(code):
        low_plane = byte_tensor(*([3] * len(top) if low else []))
        try:
            indices = code.decode_gaps(
                byte_tensor(*top), low_plane, byte_tensor(*escapes), start, start + span, torch.int64
            )
        except pk.PatchFormatError:
            return "refused"
        return indices.tolist()

    ours, theirs = (result_of(code) for code in BACK_ENDS)
    assert ours == theirs
    if ours != "refused":
        assert ours == sorted(set(ours))
        assert all(start <= index < start + span for index in ours)


@given(n=st.integers(0, 500), seed=seeds, dtype=st.sampled_from([*DIFF_DTYPES, torch.int16, torch.int64]))
def test_value_round_trips(n, seed, dtype):
    values, base = random_bits(n, dtype, seed), random_bits(n, dtype, seed + 1)
    steps = torch.randint(-6, 7, (n,), generator=torch.Generator().manual_seed(seed))  # around the largest code
    near = (int_bits(values) + steps.to(int_bits(values).dtype)).view(dtype)
    for against in (None, base, near):
        planes = encode_values(back_end(), values, against)
        assert torch.equal(planes, encode_values(reference, values, against))
        for code in BACK_ENDS:
            assert same_bits(code.decode_values(planes, against, dtype), values)


def test_many_segments_are_each(threads):
    indices = [random_positions(n, 100000, n, torch.int32) for n in (0, 1, 300, 40000)]
    shifts = [0, 8, 8, 0]
    starts = [0, 0, int(indices[2][0]), int(indices[3][0]) // 2]
    columns = back_end().encode_gaps_many(indices, starts, shifts)
    for index, start, shift, *streams in zip(indices, starts, shifts, *columns, strict=True):
        assert all_same_bits(streams, encode_gaps(reference, index, shift, start))
        assert all_same_bits(streams, encode_gaps(reference, index - start, shift))
    values = [random_bits(index.numel(), dtype, 1) for index, dtype in zip(indices, DIFF_DTYPES[2:6], strict=True)]
    bases = [random_bits(tensor.numel(), tensor.dtype, 2) for tensor in values]
    for against in (None, bases):
        planes = back_end().encode_values_many(values, against)
        assert all_same_bits(planes, reference.encode_values_many(values, against))


def test_gaps_of_positions_out_of_order_stay_inside_their_memory():
    """Nobody asks for them, but the raw operator's memory must not depend on that: such gaps wrap to 64 bits."""
    if back_end() is reference:
        pytest.skip("the reference has no memory of its own")
    top, _, escapes = encode_gaps(back_end(), torch.tensor([5, -7] * 1000), 0)
    assert top.tolist() == [5, *[255, 11] * 999, 255]
    assert escapes.numel() == 10 * 1000
