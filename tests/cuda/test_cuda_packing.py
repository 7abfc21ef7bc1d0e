"""backends.cuda's packed indices, their kernels' PTX executed on CPU tensors, against the reference."""

from __future__ import annotations

import pytest
import torch
from allocations import Refusals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_helpers import all_same_bits, int_bits, random_bits, random_positions, seeds

import pulse_kernels as pk
from pulse_kernels import backends
from pulse_kernels.backends import cuda, reference
from pulse_kernels.errors import PatchFormatError

pytestmark = pytest.mark.ptx
few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
TWO_TO_62 = 1 << 62


def of_width(width: int, count: int) -> torch.Tensor:
    """Up to ``count`` positions below 2^62 with gaps of up to ``width`` bits, the first exactly that wide."""
    gaps = torch.randint(0, max(1 << width, 1), (count,), generator=torch.Generator().manual_seed(width))
    gaps[1:2] = (1 << width) - 1
    gaps[:1] = 3
    positions = (gaps + 1).cumsum(0) - 1
    valid = (positions >= 0) & (gaps >= 0) & (positions < TWO_TO_62)
    return positions[: int(valid.long().cumprod(0).sum())]


def assert_round_trip(indices: list[torch.Tensor], numels: list[int]) -> list[torch.Tensor]:
    blobs = cuda.pack_indices_many(indices, numels)
    assert len(blobs) == len(indices)
    for blob, index, numel in zip(blobs, indices, numels, strict=True):
        assert torch.equal(blob, reference.pack_indices(index, numel))
    back = cuda.unpack_indices_many(blobs, [index.dtype for index in indices])
    for found, index in zip(back, indices, strict=True):
        assert found.dtype is index.dtype
        assert torch.equal(found, index)
    return blobs


def test_every_width_and_edge_in_one_launch(simulated):
    counts = [0, 1, 2, 31, 32, 33, 255, 256, 257, 511, 2047, 2048, 2049, 4096]
    lists = [of_width(width, counts[width % len(counts)]) for width in range(62)]
    lists += [of_width(width, 300) for width in range(62)]
    numels = [int(index[-1]) + 1 if index.numel() else 5 for index in lists]
    narrow = [k % 2 == 0 and numel <= 2**31 - 1 for k, numel in enumerate(numels)]
    lists = [index.int() if short else index for index, short in zip(lists, narrow, strict=True)]
    assert_round_trip(lists, numels)
    assert [name for name, _ in simulated.launches] == ["pulse_pack_widths", "pulse_pack", "pulse_unpack"]


def test_edges_of_numel(simulated):
    lists = [torch.tensor([0, TWO_TO_62 - 1]), torch.tensor([2**32 - 1]), torch.tensor([2**32]), torch.arange(5, 262)]
    assert_round_trip(lists, [TWO_TO_62, 2**32, 2**32 + 1, 300])


def test_views_of_lists_and_blobs(simulated):
    """Lists that are not contiguous, and blobs at odd addresses."""
    strided = torch.arange(0, 4000)[::2]
    blobs = assert_round_trip([strided, strided[1:].int()], [4000, 4000])
    for shift in (1, 2, 4, 8):
        moved = [torch.cat([torch.zeros(shift, dtype=torch.uint8), blob])[shift:] for blob in blobs]
        assert torch.equal(cuda.unpack_indices_many(moved, [torch.int64] * 2)[0], strided)


def test_none_and_empty(simulated):
    assert cuda.pack_indices_many([], []) == []
    assert cuda.unpack_indices_many([], []) == []
    assert cuda.exchange_packed_many_([], [], [], True) == []
    empty = torch.zeros(0, dtype=torch.int32)
    assert_round_trip([empty], [0])
    assert_round_trip([empty, empty.long(), empty], [7, TWO_TO_62, 0])


@few
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2500), st.sampled_from([1, 2000, 65536, 2**31 - 1, 2**33, TWO_TO_62])),
        min_size=1,
        max_size=4,
    ),
    seed=seeds,
)
def test_round_trips(simulated, rows, seed):
    numels = [numel for _, numel in rows]
    assert_round_trip([random_positions(n, numel, seed + k) for k, (n, numel) in enumerate(rows)], numels)


def test_lists_out_of_order_stay_inside_their_buffers(simulated):
    """The simulator stops at the first byte outside; what comes out is refused or read as positions in range."""
    wild = torch.tensor([5, 4, -(2**63), 2**63 - 1, 0, -1])
    narrow = torch.randint(-(2**31), 2**31 - 1, (3000,), generator=torch.Generator().manual_seed(1)).int()
    blobs = cuda.pack_indices_many([wild, narrow, torch.arange(300).flip(0)], [100, 100, 300])
    for blob in blobs:
        with pytest.raises(PatchFormatError):
            cuda.unpack_indices_many([blob], [torch.int64])
    assert torch.equal(cuda.pack_indices_many([torch.arange(9)], [9])[0], reference.pack_indices(torch.arange(9), 9))


# ---- hostile blobs ---------------------------------------------------------------------------------------------------

SMALL = reference.pack_indices(torch.tensor([0, 5, 6, 100]), 1000)


def result_of(unpack, blob):
    try:
        return unpack(blob).tolist()
    except PatchFormatError:
        return "refused"


def by_kernel(blob):
    return cuda.unpack_indices_many([blob], [torch.int64])[0]


def by_reference(blob):
    return reference.unpack_indices(blob, torch.int64)


def damaged(blob, at, value):
    blob = blob.clone()
    blob[at] = value
    return blob


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0x51, "expected 'PKIX'"),
        (4, 2, "version 1"),
        (6, 1, "two zero bytes"),
        (5, 8, "base size 8, numel 1000 needs 4"),
        (15, 0x50, "count <= numel <= 2\\^62"),
        (17, 4, "count 1028 for numel 1000"),
        (16, 0, "need"),
        (24, 8, "need"),
        (36, 1, "offsets"),
        (40, 64, "width over 63"),
        (40, 6, "payload"),  # 24 bits take as many words, but the last one then has stray bits
        (41, 1, "pad byte"),
        (44, 1, "block 0"),
        (47, 0x8B, "block 0"),
        (33, 4, "block 0"),
    ],
)
def test_one_wrong_byte(simulated, at, value, message):
    good = reference.pack_indices(torch.arange(3), 3)
    cuda.unpack_indices_many([good], [torch.int64])
    if (at, value) == (40, 6):
        message = "block 0"
    for position in (0, 1):
        blobs = [good, good]
        blobs[position] = damaged(SMALL, at, value)
        with pytest.raises(PatchFormatError, match=message):
            cuda.unpack_indices_many(blobs, [torch.int64] * 2)
    with pytest.raises(PatchFormatError):
        reference.unpack_indices(damaged(SMALL, at, value), torch.int64)


def test_the_payload_must_be_what_the_widths_need(simulated):
    longer = torch.cat([damaged(SMALL, 24, 8), torch.zeros(4, dtype=torch.uint8)])
    empty = torch.cat([damaged(reference.pack_indices(torch.arange(0), 9), 24, 4), torch.zeros(4, dtype=torch.uint8)])
    for blob in (longer, empty):
        with pytest.raises(PatchFormatError, match="the payload is not what the widths need"):
            by_kernel(blob)
        assert result_of(by_reference, blob) == "refused"


def test_damage_that_gives_other_valid_indices(simulated):
    assert by_kernel(damaged(SMALL, 47, 0x0F)).tolist() == [0, 5, 6, 132]
    assert by_kernel(damaged(SMALL, 40, 8)).tolist() == [0, 3, 164, 176]


def test_every_truncation_is_refused(simulated):
    for size in range(SMALL.numel()):
        with pytest.raises(PatchFormatError):
            by_kernel(SMALL[:size])
    with pytest.raises(PatchFormatError, match="need"):
        by_kernel(torch.cat([SMALL, SMALL[:1]]))
    assert by_kernel(SMALL).tolist() == [0, 5, 6, 100]


def test_lying_counts_cost_no_memory(simulated):
    blob = damaged(reference.pack_indices(torch.zeros(0, dtype=torch.int64), TWO_TO_62), 23, 0x20)
    with pytest.raises(PatchFormatError, match=f"{2**61 // 256} blocks"):
        by_kernel(blob)
    assert by_kernel(SMALL).tolist() == [0, 5, 6, 100]


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 2049])
@pytest.mark.parametrize("width", [0, 3, 40])
def test_a_last_position_just_outside_is_refused(simulated, count, width):
    positions = of_width(width, count)
    last = int(positions[-1])
    blob = reference.pack_indices(positions, last + 1)
    assert torch.equal(by_kernel(blob), positions)
    blob[8:16] = torch.tensor([last]).view(torch.uint8)
    assert result_of(by_kernel, blob) == result_of(by_reference, blob) == "refused"


def test_blocks_out_of_order_are_refused(simulated):
    blob = reference.pack_indices(torch.arange(5, 262), 300)
    for low, high in ((4, 1), (4, 0), (5, 0)):  # on the last position of block 0, before its first, on its first
        with pytest.raises(PatchFormatError, match="block 1"):
            by_kernel(damaged(damaged(blob, 36, low), 37, high))


@few
@given(n=st.integers(1, 600), step=st.integers(1, 1 << 30), seed=seeds, data=st.data())
def test_the_same_blobs_are_refused(simulated, n, step, seed, data):
    positions = torch.arange(n) * step + random_positions(1, step, seed)
    blob = reference.pack_indices(positions, int(positions[-1]) + 1)
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([32, min(70, blob.numel()), blob.numel()]))
        blob = damaged(blob, data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 255)))
    assert result_of(by_kernel, blob) == result_of(by_reference, blob)


# ---- fused with apply ------------------------------------------------------------------------------------------------

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


def patches(sizes: list[tuple[int, int, torch.dtype]], shift: int = 0):
    """(weights, indices, values), weights ``shift`` elements behind an aligned address."""
    weights, indices, values = [], [], []
    for k, (numel, changes, dtype) in enumerate(sizes):
        weights.append(random_bits(numel + shift, dtype, k)[shift:])
        indices.append(random_positions(changes, numel, 50 + k))
        values.append(random_bits(indices[-1].numel(), dtype, 100 + k))
    return weights, indices, values


@pytest.mark.parametrize("keep_old", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_exchange(simulated, keep_old, shift):
    sizes = [(n, c, d) for d in DTYPES for n, c in [(1, 1), (7, 0), (0, 0), (300, 300), (5000, 2300), (70000, 700)]]
    weights, indices, values = patches(sizes, shift)
    blobs = [reference.pack_indices(index, weight.numel()) for index, weight in zip(indices, weights, strict=True)]
    expected = [weight.clone() for weight in weights]
    old = [reference.exchange_patch_(*row) for row in zip(expected, indices, values, strict=True)]
    simulated.allow(*weights)
    found = cuda.exchange_packed_many_(weights, blobs, values, keep_old)
    for weight, wanted in zip(weights, expected, strict=True):
        assert torch.equal(int_bits(weight), int_bits(wanted))
    for mine, theirs in zip(found, old, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(int_bits(mine), int_bits(theirs if keep_old else theirs[:0]))
    assert [name for name, _ in simulated.launches] == ["pulse_unpack", "pulse_exchange"]


def test_nothing_is_written_when_one_blob_is_bad(simulated):
    weights, indices, values = patches([(1000, 40, torch.bfloat16), (5000, 400, torch.float32)])
    blobs = [reference.pack_indices(index, weight.numel()) for index, weight in zip(indices, weights, strict=True)]
    simulated.allow(*weights)
    before = [weight.clone() for weight in weights]
    last_word = blobs[1].numel() - 1
    others = [
        [blobs[0], damaged(blobs[1], last_word, 0xFF)],  # found by the kernel
        [blobs[0], blobs[1][:-4]],  # by its header
        [blobs[1], blobs[0]],  # of other weights
    ]
    for bad in others:
        with pytest.raises(PatchFormatError):
            cuda.exchange_packed_many_(weights, bad, values, True)
        for weight, wanted in zip(weights, before, strict=True):
            assert torch.equal(int_bits(weight), int_bits(wanted))
    with pytest.raises(ValueError, match="contiguous"):
        cuda.exchange_packed_many_([weights[0].view(10, 100).t()], blobs[:1], values[:1], True)
    with pytest.raises(ValueError, match="dtype"):
        cuda.exchange_packed_many_(weights[:1], blobs[:1], [values[0].half()], True)


@pytest.mark.parametrize("n", [1, 5])
def test_operators_wait_once_for_headers_and_once_for_the_result(simulated, monkeypatch, n):
    back_end = backends.BackEnd(("cuda", "reference"), [cuda, reference])
    monkeypatch.setattr(backends, "for_device", lambda _: back_end)
    weights, indices, values = patches([(700 + k, 30, torch.float32) for k in range(n)])
    blobs = [reference.pack_indices(index, weight.numel()) for index, weight in zip(indices, weights, strict=True)]
    tied = [weights[0]] * n
    simulated.allow(*weights)
    waits, to_list = [], torch.Tensor.tolist

    def counted(tensor):
        waits.append(tensor)
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    calls = [
        lambda: pk.unpack_indices_many(blobs),
        lambda: pk.unpack_indices_many(blobs, index_dtype=torch.int64),
        lambda: pk.unpack_indices(blobs[0]),
        lambda: pk.exchange_packed_patch_many_(weights, blobs, values),
        lambda: pk.apply_packed_patch_many_([w.view(1, -1).t() for w in weights], blobs, values),
        lambda: pk.apply_packed_patch_many_(tied, [blobs[0]] * n, [values[0]] * n),
    ]
    for call in calls:
        waits.clear()
        call()
        assert len(waits) == 2
    for weight, index, value in zip(weights, indices, values, strict=True):
        assert torch.equal(int_bits(weight[index]), int_bits(value))


def test_running_out_of_memory_changes_nothing(simulated, monkeypatch):
    weights, indices, values = patches([(1000, 40, torch.bfloat16), (5000, 400, torch.float32)])
    values[1] = values[1].repeat_interleave(2)[::2]
    blobs = [reference.pack_indices(index, weight.numel()) for index, weight in zip(indices, weights, strict=True)]
    simulated.allow(*weights)
    before, expected = ([weight.clone() for weight in weights] for _ in range(2))
    for row in zip(expected, indices, values, strict=True):
        reference.exchange_patch_(*row)
    launch, refusals = simulated.kernels.launch, Refusals()

    def uncounted(*arguments, **options):
        with refusals.paused():
            return launch(*arguments, **options)

    monkeypatch.setattr(simulated.kernels, "launch", uncounted)
    for _ in refusals.until_done(lambda: cuda.exchange_packed_many_(weights, blobs, values, True)):
        assert all_same_bits(weights, before), f"allocation {refusals.last} failed"
    assert all_same_bits(weights, expected)
    assert refusals.last > 5


def test_lists_of_more_than_one_tile_on_both_sides(simulated):
    positions = torch.arange(0, 70000, 3)
    weight, values = torch.zeros(70000, dtype=torch.int16), torch.arange(positions.numel()).to(torch.int16)
    simulated.allow(weight)
    (blob,) = assert_round_trip([positions], [70000])
    (old,) = cuda.exchange_packed_many_([weight], [blob], [values], True)
    assert not old.any()
    assert torch.equal(weight[::3], values)
    assert int(weight.count_nonzero()) == int(values.count_nonzero())
