"""pack_indices and unpack_indices: the bytes, round trips with every width, and blobs that nobody vouches for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import back_end, random_positions, seeds

import pulse_kernels as pk
from pulse_kernels.backends import reference

TWO_TO_62 = 1 << 62


def test_a_blob_by_hand():
    # Gaps less one: 4, 0, 93, and 0 for the first; 93 needs 7 bits. Entry k lies at bit 7k: 4 << 7 | 93 << 21.
    blob = pk.pack_indices(torch.tensor([0, 5, 6, 100]), 1000)
    assert bytes(blob.tolist()).hex(" ") == (
        "50 4b 49 58 01 04 00 00 "  # PKIX, version 1, 4 bytes a base, two zero bytes
        "e8 03 00 00 00 00 00 00 "  # 1000 elements
        "04 00 00 00 00 00 00 00 "  # 4 indices
        "04 00 00 00 00 00 00 00 "  # 4 bytes of payload: 28 bits in 32-bit words
        "00 00 00 00 "  # the block's base
        "00 00 00 00 "  # its offset
        "07 00 00 00 "  # its width, padded
        "00 02 a0 0b"  # 0x0BA00200
    )
    assert pk.unpack_indices(blob).tolist() == [0, 5, 6, 100]


def test_neighbours_cost_nothing():
    # 257 positions in a row: two blocks of width 0, bases 5 and 261, no payload.
    blob = pk.pack_indices(torch.arange(5, 262), 300)
    assert bytes(blob.tolist())[8:].hex(" ") == (
        "2c 01 00 00 00 00 00 00 01 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 "
        "05 00 00 00 05 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00"
    )
    assert pk.unpack_indices(blob).tolist() == list(range(5, 262))


def test_no_indices_are_a_header():
    for numel in (0, 7, TWO_TO_62):
        blob = pk.pack_indices(torch.zeros(0, dtype=torch.int64), numel)
        assert blob.numel() == 32
        assert pk.unpack_indices(blob).shape == (0,)


def of_width(width, count, seed):
    """``count`` positions with gaps of up to ``width`` bits, the first of them exactly that wide."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.randint(0, max(1 << width, 1), (count,), generator=generator)
    gaps[1:2] = (1 << width) - 1
    gaps[0] = 3
    positions = (gaps + 1).cumsum(0) - 1
    valid = (positions >= 0) & (gaps >= 0) & (positions < TWO_TO_62)
    return positions[: int(valid.long().cumprod(0).sum())]


@pytest.mark.parametrize("width", range(62))
@pytest.mark.parametrize("count", [2, 256, 600])
def test_every_width(width, count):
    positions = of_width(width, count, width)
    assert 2 <= positions.numel() <= count
    numel = int(positions[-1]) + 1
    blob = pk.pack_indices(positions, numel)
    assert torch.equal(blob, reference.pack_indices(positions, numel))
    assert int(blob[32 + (8 if numel <= 1 << 32 else 12) * (-(-positions.numel() // 256))]) == width
    back = pk.unpack_indices(blob, index_dtype=torch.int64)
    assert torch.equal(back, positions)
    assert torch.equal(reference.unpack_indices(blob, torch.int64), positions)
    if numel <= 2**31 - 1:
        assert torch.equal(pk.pack_indices(positions.int(), numel), blob)
        assert pk.unpack_indices(blob).dtype is torch.int32
        assert torch.equal(pk.unpack_indices(blob).long(), positions)
    else:
        assert pk.unpack_indices(blob).dtype is torch.int64


def test_the_widest_gap_there_is():
    positions = torch.tensor([0, TWO_TO_62 - 1])
    blob = pk.pack_indices(positions, TWO_TO_62)
    assert torch.equal(pk.unpack_indices(blob), positions)
    assert torch.equal(blob, reference.pack_indices(positions, TWO_TO_62))


def test_an_outlier_widens_its_own_block_only():
    positions = torch.arange(1024) * 4
    positions[700:] += 1 << 40
    blob = pk.pack_indices(positions, 1 << 41)
    widths = blob[32 + 4 * 12 : 32 + 4 * 13]  # after four bases of 8 bytes and four offsets of 4
    assert widths.tolist() == [2, 2, 41, 2]  # 2^40 + 3 takes 41 bits
    assert torch.equal(pk.unpack_indices(blob), positions)


@given(n=st.integers(0, 1500), numel=st.sampled_from([1, 2000, 65536, 2**31 - 1, 2**31, 2**33, TWO_TO_62]), seed=seeds)
def test_round_trips(n, numel, seed):
    positions = random_positions(n, numel, seed)
    blob = pk.pack_indices(positions, numel)
    assert torch.equal(blob, reference.pack_indices(positions, numel))
    back = pk.unpack_indices(blob)
    assert back.dtype is (torch.int32 if numel <= 2**31 - 1 else torch.int64)
    assert torch.equal(back.long(), positions)
    assert torch.equal(reference.unpack_indices(blob, torch.int64), positions)


@pytest.mark.parametrize("n", [65536, 65537, 200000])
def test_every_number_of_threads_gives_the_same(n, threads):
    positions = torch.arange(n) * 3 + (torch.arange(n) % 7 == 0)
    blob = pk.pack_indices(positions.int(), 3 * n + 1)
    assert torch.equal(blob, reference.pack_indices(positions, 3 * n + 1))
    assert torch.equal(pk.unpack_indices(blob).long(), positions)


def test_many_is_each():
    indices = [torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int32), torch.tensor([2**40])]
    numels = [5, 3, 2**41]
    blobs = pk.pack_indices_many(indices, numels)
    for blob, index, numel in zip(blobs, indices, numels, strict=True):
        assert torch.equal(blob, pk.pack_indices(index, numel))
    assert [i.dtype for i in pk.unpack_indices_many(blobs)] == [torch.int32, torch.int32, torch.int64]
    wide = pk.unpack_indices_many(blobs, index_dtype=torch.int64)
    assert [i.tolist() for i in wide] == [[1, 2], [], [2**40]]
    assert pk.pack_indices_many([], []) == []
    assert pk.unpack_indices_many([]) == []
    assert pk.unpack_indices_many([], index_dtype=torch.int64) == []


# ---- hostile blobs ---------------------------------------------------------------------------------------------------

SMALL = pk.pack_indices(torch.tensor([0, 5, 6, 100]), 1000)


def result_of(unpack, blob):
    try:
        return unpack(blob, torch.int64).tolist()
    except pk.PatchFormatError:
        return "refused"


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
        (16, 0, "need"),  # no block, yet bytes for one
        (24, 8, "need"),  # a payload longer than the blob
        (36, 1, "offsets"),
        (40, 64, "width|63"),
        (41, 1, "pad byte"),
        (44, 1, "block 0"),  # the first entry must be 0
        (47, 0x8B, "block 0"),  # a bit behind the last entry
        (33, 4, "block 0"),  # a base of 1024
    ],
)
def test_one_wrong_byte(at, value, message):
    blob = damaged(SMALL, at, value)
    with pytest.raises(pk.PatchFormatError, match=message):
        pk.unpack_indices(blob)
    with pytest.raises(pk.PatchFormatError):
        reference.unpack_indices(blob, torch.int64)


def test_damage_that_gives_other_valid_indices_is_for_a_checksum_to_find():
    assert pk.unpack_indices(damaged(SMALL, 47, 0x0F)).tolist() == [0, 5, 6, 132]  # the last gap 125 in place of 93
    assert pk.unpack_indices(damaged(SMALL, 40, 8)).tolist() == [0, 3, 164, 176]  # bytes 0, 2, 160, 11 as gaps


def test_every_truncation_is_refused():
    for size in range(SMALL.numel()):
        with pytest.raises(pk.PatchFormatError):
            pk.unpack_indices(SMALL[:size])
    with pytest.raises(pk.PatchFormatError, match="need"):
        pk.unpack_indices(torch.cat([SMALL, SMALL[:1]]))


def test_lying_counts_cost_no_memory():
    # 2^61 indices announced in 32 bytes.
    blob = damaged(pk.pack_indices(torch.zeros(0, dtype=torch.int64), TWO_TO_62), 23, 0x20)
    with pytest.raises(pk.PatchFormatError, match=f"{2**61 // 256} blocks"):
        pk.unpack_indices(blob)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 512])
@pytest.mark.parametrize("width", [0, 3, 40])
def test_a_last_position_just_outside_is_refused(count, width):
    positions = of_width(width, count, width)
    last = int(positions[-1])
    blob = pk.pack_indices(positions, last + 1)
    blob[8:16] = torch.tensor([last]).view(torch.uint8)  # the header's number of elements
    for unpack in (back_end().unpack_indices, reference.unpack_indices):
        with pytest.raises(pk.PatchFormatError):
            unpack(blob, torch.int64)


def test_blocks_out_of_order_are_refused():
    blob = pk.pack_indices(torch.arange(5, 262), 300)
    with pytest.raises(pk.PatchFormatError, match="block 1"):
        pk.unpack_indices(damaged(damaged(blob, 36, 4), 37, 0))  # the second block starts at 4, before the first
    assert result_of(reference.unpack_indices, damaged(damaged(blob, 36, 4), 37, 0)) == "refused"


@given(n=st.integers(1, 600), step=st.integers(1, 1 << 30), seed=seeds, data=st.data())
def test_back_ends_refuse_the_same_blobs(n, step, seed, data):
    positions = torch.arange(n) * step + random_positions(1, step, seed)
    blob = pk.pack_indices(positions, int(positions[-1]) + 1)
    for _ in range(data.draw(st.integers(1, 3))):
        # Tables and header are more interesting than the payload.
        end = data.draw(st.sampled_from([32, min(70, blob.numel()), blob.numel()]))
        blob = damaged(blob, data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 255)))
    assert result_of(back_end().unpack_indices, blob) == result_of(reference.unpack_indices, blob)


def test_a_bad_blob_of_many_is_named_by_its_place():
    blob = pk.pack_indices(torch.arange(5, 262), 300)
    bad = {"a header alone": blob[:31], "expected 'PKIX'": damaged(blob, 0, 1), "block 1": damaged(blob, 36, 4)}
    for message, broken in bad.items():
        for options in ({}, {"index_dtype": torch.int64}):
            with pytest.raises(pk.PatchFormatError, match=rf"^unpack_indices_many: packed\[2\]: .*{message}"):
                pk.unpack_indices_many([blob, blob, broken, blob], **options)
            with pytest.raises(pk.PatchFormatError, match=f"^unpack_indices: .*{message}"):
                pk.unpack_indices(broken, **options)
        weights, values = [torch.zeros(300) for _ in range(3)], [torch.ones(257)] * 3
        with pytest.raises(pk.PatchFormatError, match=rf"^apply_packed_patch_many_: packed\[1\]: .*{message}"):
            pk.apply_packed_patch_many_(weights, [blob, broken, blob], values)
        with pytest.raises(pk.PatchFormatError, match=f"^exchange_packed_patch_: .*{message}"):
            pk.exchange_packed_patch_(weights[0], broken, values[0])
        assert not torch.stack(weights).any()


def test_each_of_many_gets_the_dtype_its_numel_needs():
    lists, numels = [torch.tensor([5]), torch.tensor([2**40]), torch.tensor([], dtype=torch.int64)], [9, 2**41, 2**31]
    found = pk.unpack_indices_many(pk.pack_indices_many(lists, numels))
    assert [(index.dtype, index.tolist()) for index in found] == [
        (torch.int32, [5]),
        (torch.int64, [2**40]),
        (torch.int64, []),
    ]
    assert pk.unpack_indices_many([]) == []


def test_int32_is_refused_for_a_larger_tensor():
    blob = pk.pack_indices(torch.tensor([3]), 2**31)
    with pytest.raises(ValueError, match="2147483648 elements do not fit int32"):
        pk.unpack_indices(blob, index_dtype=torch.int32)
