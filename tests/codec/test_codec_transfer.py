"""Patches that lie on a device: copies begin before the first is waited for, and the bytes are those of the CPU."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from codec_helpers import bits, changed_bits, random_bits, same_bits, segments_of
from hypothesis import given
from hypothesis import strategies as st
from late_copies import late_copies
from torch import Tensor

import pulse_kernels as pk
from pulse_kernels import ops, transfer
from pulse_kernels.backends import reference

PROFILES = ("fast", "balanced")


# ---- to_host ---------------------------------------------------------------------------------------------------------


def test_cpu_tensors_pass_through() -> None:
    tensors = [torch.randn(3), torch.zeros(0), torch.randn(4, 6).t()]
    assert all(sent.get() is tensor for sent, tensor in zip(transfer.to_host(tensors), tensors, strict=True))
    assert not any(sent.travelling for sent in transfer.to_host(tensors))
    assert transfer.to_host([]) == []


@given(st.data())
def test_views_of_one_storage(data: st.DataObject) -> None:
    """Any views, overlapping, strided, of all sizes: each arrives as what it is."""
    storage = random_bits("U8", (4096,), 1)
    tensors: list[Tensor] = []
    for _ in range(data.draw(st.integers(1, 8))):
        dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, torch.int64]))
        flat = storage.view(dtype)
        start = data.draw(st.integers(0, flat.numel()))
        stop = data.draw(st.integers(start, flat.numel()))
        tensors.append(flat[start : stop : data.draw(st.integers(1, 3))])
    with late_copies(piece=data.draw(st.sampled_from([1, 100, 10_000]))):
        sent = transfer.to_host(tensors)
        for k in data.draw(st.permutations(range(len(tensors)))):
            found = sent[k].get()
            assert (found.dtype, bits(found)) == (tensors[k].dtype, bits(tensors[k]))


def test_parts_of_one_allocation_travel_together() -> None:
    """As one launch returns them: three allocations, each a part for each of 100 tensors."""
    columns = [torch.arange(5000.0).split(50) for _ in range(3)]
    tensors = [part for row in zip(*columns, strict=True) for part in row]
    with late_copies(piece=1 << 30) as lane:
        sent = transfer.to_host(tensors)
        assert lane.log == ["follow", "copy", "copy", "copy"]
        assert sum(source.numel() for _, source in lane.late) == 3 * 5000 * 4
        assert all(same_bits(one.get(), tensor) for one, tensor in zip(sent, tensors, strict=True))


def test_far_parts_of_one_allocation_travel_alone() -> None:
    big = torch.zeros(1 << 20)
    with late_copies() as lane:
        transfer.to_host([big[:10], big[-8:], big[20:30]])
    assert sum(source.numel() for _, source in lane.late) == 4 * (30 + 8)


def test_a_range_may_begin_at_any_byte() -> None:
    storage = random_bits("U8", (64,), 2)
    tensors = [storage[1:4], storage.view(torch.int64)[1:3]]
    with late_copies() as lane:
        sent = transfer.to_host(tensors)
        assert len(lane.late) == 1
        assert all(same_bits(one.get(), tensor) for one, tensor in zip(sent, tensors, strict=True))


def test_early_tensors_do_not_wait_for_late_ones() -> None:
    indices, values = torch.arange(4000).split(1000), torch.randn(4000, dtype=torch.float64).split(1000)
    tensors = [part for row in zip(indices, values, strict=True) for part in row]
    with late_copies(piece=8000) as lane:
        sent = transfer.to_host(tensors)
        for k, tensor in enumerate(tensors):
            assert lane.arrived == k, "wanted in this order, so sent in this order"
            assert same_bits(sent[k].get(), tensor)


def test_lazy_conjugates_are_resolved() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    with late_copies():
        (sent,) = transfer.to_host([numbers.conj()])
        assert not sent.get().is_conj()
        assert sent.get().tolist() == [1 - 2j, 3 + 4j]


def test_several_threads_wait() -> None:
    tensors = [torch.randn(500) for _ in range(40)]
    with late_copies():
        sent = transfer.to_host(tensors)
        wrong: list[int] = []

        def look(order: range) -> None:
            wrong.extend(k for k in order if not same_bits(sent[k].get(), tensors[k]))

        threads = [threading.Thread(target=look, args=[order]) for order in (range(40), range(39, -1, -1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


class Recorder:
    """Streams and events that note what is asked of them."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Recorder) -> None:
        self.log.append((self.name, "waits for", other.name))

    def record(self, stream: Recorder) -> None:
        self.log.append(("event", "recorded on", stream.name))

    def synchronize(self) -> None:
        self.log.append(("event", "waited for"))


def test_what_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies' stream waits for the current one, before it copies; the event follows the copy it stands for."""
    log: list[Any] = []
    device, empty = torch.device("cuda:1"), torch.empty

    class Source(Tensor):
        def record_stream(self, stream: Any) -> None:
            log.append(("source", "used by", stream.name))

    class Target(Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
            log.append(("copied", "beside" if non_blocking else "here"))
            return self

    def pinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        log.append(("memory", "pinned" if pin_memory else "pageable"))
        return empty(*size, **options).as_subclass(Target)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def on(stream: Recorder) -> Any:
        log.append(("from here on", stream.name))
        yield
        log.append(("until here", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorder(log, f"side of {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorder(log, f"current of {device}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Recorder(log, "event"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    lane = transfer.Lane(device)
    lane.follow()
    monkeypatch.setattr(torch, "empty", pinned)
    _, wait = lane.copy(torch.zeros(4, dtype=torch.uint8).as_subclass(Source))
    side = "side of cuda:1"
    assert log == [
        (side, "waits for", "current of cuda:1"),
        ("memory", "pinned"),
        ("from here on", side),
        ("copied", "beside"),
        ("until here", side),
        ("source", "used by", side),
        ("event", "recorded on", side),
    ]
    wait()
    assert log[-1] == ("event", "waited for")


# ---- to_bytes --------------------------------------------------------------------------------------------------------


def states(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Small and large, dense and sparse, unchanged, empty, new, gone and replaced tensors."""
    old = {
        "a": random_bits("BF16", (70, 90), seed),
        "b": random_bits("F32", (3000,), seed + 1),
        "c": random_bits("F8_E4M3", (5000,), seed + 2),
        "d": random_bits("I64", (31, 8), seed + 3),
        "e": random_bits("C64", (200,), seed + 4),
        "f": random_bits("BOOL", (999,), seed + 5),
        "same": torch.ones(5),
        "empty": torch.zeros(0),
        "gone": torch.ones(3),
        "replaced": torch.ones(3),
    }
    densities = {"a": 0.02, "b": 0.5, "c": 0.003, "d": 1.0, "e": 0.1, "f": 0.2}
    new = {name: changed_bits(old[name], density, seed) for name, density in densities.items()}
    new |= {name: old[name] for name in ("same", "empty")}
    return old, new | {"replaced": torch.arange(4000), "new": torch.randn(40, 50).t(), "nothing": torch.zeros(0, 3)}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("segment", [256, 1000, 1 << 24])
@pytest.mark.parametrize("knows_old", [True, False])
def test_bytes_are_those_of_the_cpu(profile: str, packs: bool, segment: int, knows_old: bool) -> None:
    old, new = states(segment)
    patch = pk.Patch.diff(old, new)
    if not knows_old:
        for name, item in patch.tensors.items():
            patch.tensors[name] = pk.TensorPatch(name, item.shape, item.dtype, item.indices.long(), item.values)
    with segments_of(segment):
        expected = patch.to_bytes(profile, None if knows_old else old)
        with late_copies(packs=packs) as lane:
            found = patch.to_bytes(profile, None if knows_old else old)
    assert found == expected
    assert lane.arrived == len(lane.late) > 3
    assert pk.Patch.from_bytes(found, old).apply_(dict(old)) == patch.digest


@pytest.mark.parametrize("profile", PROFILES)
def test_all_copies_begin_before_the_first_is_waited_for(profile: str) -> None:
    patch = pk.Patch.diff(*states(0))
    with late_copies() as lane:
        patch.to_bytes(profile)
    changes, added = lane.log.index("follow"), lane.log.index("follow", 1)
    assert changes < added < lane.log.index("wait")
    assert "copy" not in lane.log[lane.log.index("wait") :]


def test_coding_begins_before_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from pulse_kernels import codec

    patch, arrived, encode = pk.Patch.diff(*states(0)), [], codec.encode_segments
    with late_copies() as lane:

        def watched(*arguments: Any) -> Any:
            arrived.append(lane.arrived)
            return encode(*arguments)

        monkeypatch.setattr(codec, "encode_segments", watched)
        patch.to_bytes()
    assert arrived[0] < arrived[-1] == len(lane.late)
    assert arrived == sorted(arrived)


def test_packed_positions_travel_and_no_others() -> None:
    positions = torch.arange(0, 100_000, 9, dtype=torch.int32)
    item = pk.TensorPatch("w", (100_000,), torch.uint8, positions, positions.to(torch.uint8))
    with late_copies(packs=True) as lane:
        pk.Patch(tensors={"w": item}).to_bytes("fast")
    packed = pk.pack_indices(positions, 100_000).numel()
    assert sum(source.numel() for _, source in lane.late) == packed + positions.numel()


def bad_patches() -> list[tuple[type[Exception], str, list[tuple[list[int], bool]]]]:
    """(error, message, for each tensor: its positions below 10, and whether it knows old values)."""
    return [
        (IndexError, "patch of 't0': indices.1. is 10, expected 0 <= index < 10", [([1, 10], True)]),
        (IndexError, "patch of 't0': indices.1. is 1 after 1", [([1, 1], True)]),
        (IndexError, "patch of 't1': indices.0. is -1", [([1], True), ([-1], True)]),
        (IndexError, "patch of 't0'", [([3, 2], False), ([1], False)]),
        (ValueError, "'t0' against the base", [([1], False), ([2, 1], True)]),
    ]


@pytest.mark.parametrize(("error", "message", "rows"), bad_patches())
@pytest.mark.parametrize("packs", [True, False])
def test_errors_are_those_of_the_cpu(
    error: type[Exception], message: str, rows: list[tuple[list[int], bool]], packs: bool
) -> None:
    """The first in the patch's order, before anything is read at positions that may not be there."""
    tensors = {}
    for k, (positions, knows_old) in enumerate(rows):
        values = torch.zeros(len(positions))
        indices = torch.tensor(positions)
        tensors[f"t{k}"] = pk.TensorPatch(f"t{k}", (10,), torch.float32, indices, values, values if knows_old else None)
    patch = pk.Patch(tensors=tensors)
    with pytest.raises(error, match=message) as on_cpu:
        patch.to_bytes()
    with late_copies(packs=packs) as lane:
        with pytest.raises(error, match=message) as away:
            patch.to_bytes()
        if error is IndexError:
            with pytest.raises(error, match=message):
                patch.to_bytes("fast")
    assert str(away.value) == str(on_cpu.value)
    assert not lane.late


# ---- Patch.gate sends ahead ------------------------------------------------------------------------------------------


def model(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    masters = {f"m{k}": torch.randn(60, 50 + k, generator=torch.Generator().manual_seed(seed + k)) for k in range(5)}
    weights = {
        name: reference.round_bits(m, torch.bfloat16).view(torch.bfloat16).view(m.shape) for name, m in masters.items()
    }
    return {name: m * (1 + torch.randn(m.shape) * 0.003) for name, m in masters.items()}, weights


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("packs", [True, False])
def test_what_was_gated_travels_while_the_next_group_is_gated(
    profile: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    masters, weights = model(1)
    old = {name: weight.clone() for name, weight in weights.items()}
    gate = ops.gate_compact_many
    with late_copies(packs=packs) as lane:

        def watched(*arguments: Any, **options: Any) -> Any:
            lane.log.append("gate")
            return gate(*arguments, **options)

        monkeypatch.setattr(ops, "gate_compact_many", watched)
        patch = pk.Patch.gate(masters, weights, profile=profile, group_bytes=1)
        without_copies = [event for event in lane.log if event != "copy"]
        assert without_copies == ["gate", "follow"] * 5, "nothing was waited for"
        begun = len(lane.late)
        found = patch.to_bytes(profile)
        assert len(lane.late) == begun, "what was sent is not sent again"
        other = next(name for name in PROFILES if name != profile)
        found_other = patch.to_bytes(other)
        assert len(lane.late) > begun, "for another profile all is sent anew"
    expected = pk.Patch.diff(old, weights)
    assert found == expected.to_bytes(profile)
    assert found_other == expected.to_bytes(other)


def test_nothing_is_sent_ahead_unless_asked() -> None:
    with late_copies() as lane:
        patch = pk.Patch.gate(*model(2), profile=None)
        assert not lane.log
        patch.to_bytes()
        assert lane.late


def changes_of(name: str) -> list[tuple[str, Callable[[pk.Patch], None]]]:
    def replace(patch: pk.Patch) -> None:
        item = patch.tensors[name]
        patch.tensors[name] = pk.TensorPatch(
            name, item.shape, item.dtype, item.indices[:3], item.values[:3], item.values[:3]
        )

    return [
        ("values written", lambda patch: patch.tensors[name].values.zero_()),
        ("indices written", lambda patch: patch.tensors[name].indices.sub_(int(patch.tensors[name].indices[0]))),
        ("old values written", lambda patch: patch.tensors[name].old_values.zero_()),  # type: ignore[union-attr]
        ("replaced", replace),
        ("removed", lambda patch: patch.tensors.pop(name)),
    ]


@pytest.mark.parametrize(
    ("what", "change"), changes_of("m2"), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_patch_that_was_changed_since_is_sent_as_it_is_now(
    what: str, change: Callable[[pk.Patch], None], profile: str
) -> None:
    with late_copies() as lane:
        patch = pk.Patch.gate(*model(3), profile=profile)
        lane.wait(len(lane.late))  # as it was
        change(patch)
        found = patch.to_bytes(profile)
    patch.sent = {}
    assert found == patch.to_bytes(profile)


def test_copies_of_a_patch_take_nothing_along() -> None:
    with late_copies():
        patch = pk.Patch.gate(*model(4))
        assert patch.sent
        for again in (copy.deepcopy(patch), copy.copy(patch), pickle.loads(pickle.dumps(patch))):
            assert not again.sent
            assert again.to_bytes() == patch.to_bytes()
