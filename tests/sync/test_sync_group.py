"""Versions over a process group: real processes, gloo on 127.0.0.1; rank 0 trains, the others receive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_pool import Died, Ranks
from sync_models import Trainer, assert_same_bits, blank
from torch import Tensor

from pulse_kernels import GroupError, NonFiniteError, StateDigest, VerificationError
from pulse_kernels.ranks import collectives
from pulse_kernels.sync import GroupPublisher, GroupSubscriber
from pulse_kernels.sync.agreement import RECEIVER, RECORD_BYTES, TRAINER, WHOLE, Record, agree


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


def trainer_of(masters: bool) -> Trainer:
    return Trainer(masters=masters, seed=5)


def told(call: Callable[[], object]) -> tuple[str, str]:
    """(kind, message) of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Counter:
    """Counts the collectives that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in ("all_gather", "broadcast"):
            self._wrap(name)

    def _wrap(self, name: str) -> None:
        inner = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return inner(*args, **kwargs)

        setattr(collectives.dist, name, counted)
        setattr(self, f"_{name}", inner)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def close(self) -> None:
        for name in ("all_gather", "broadcast"):
            setattr(collectives.dist, name, getattr(self, f"_{name}"))


def follow(rank: int, masters: bool, verify: str) -> None:
    trainer, twin = trainer_of(masters), trainer_of(masters)  # the twin knows what the trainer has
    counter = Counter()
    try:
        if rank == 0:
            publisher = GroupPublisher(trainer.weights, masters=trainer.masters)
            for version in range(20):
                if version:
                    trainer.step()
                report = publisher.publish()
                assert (report.version, report.committed) == (version, True)
                assert report.digest == StateDigest.of(trainer.weights).hexdigest()
                assert report.kind == ("patch" if version else "anchor")
                if version:
                    assert report.payload_bytes < report.dense_bytes / 4
                    assert counter.take() == ["all_gather", "broadcast", "all_gather"]
                else:
                    assert report.payload_bytes == report.dense_bytes
                    assert counter.take() == ["all_gather", *["broadcast"] * 4, "all_gather"]  # one tensor is empty
            return
        weights = blank(trainer.weights)
        subscriber = GroupSubscriber(weights, verify=verify)
        for version in range(20):
            if version:
                twin.step()
            report = subscriber.receive()
            assert (report.version, subscriber.version) == (version, version)
            assert report.digest == subscriber.digest == StateDigest.of(weights).hexdigest()
            # with masters the trainer's weights are its masters, rounded
            expected = {name: tensor.bfloat16() for name, tensor in twin.state.items()} if masters else twin.weights
            assert_same_bits(weights, expected)
            assert len(counter.take()) == (3 if version else 6)
    finally:
        counter.close()


@pytest.mark.parametrize(("masters", "verify"), [(True, "digest"), (False, "full")])
def test_every_rank_has_the_trainers_bits_at_every_version(ranks: Ranks, masters: bool, verify: str) -> None:
    ranks.run(follow, masters, verify)


def some_masters(rank: int) -> list[dict[str, Any]]:
    """Weights of which one has no master: it is compared with a copy."""
    trainer = trainer_of(True)
    assert trainer.masters is not None
    masters = dict(trainer.masters)
    name = min(masters)
    del masters[name]
    states = []
    publisher = GroupPublisher(trainer.weights, masters=masters) if rank == 0 else None
    weights = blank(trainer.weights)
    subscriber = None if rank == 0 else GroupSubscriber(weights)
    for version in range(4):
        if version:
            trainer.step()
            trainer.weights[name].copy_(trainer.masters[name])
        if publisher is not None:
            assert publisher.publish().kind == ("patch" if version else "anchor")
        else:
            assert subscriber is not None
            subscriber.receive()
        states.append({key: tensor.clone() for key, tensor in (trainer.weights if rank == 0 else weights).items()})
    return states


def test_a_trainer_with_masters_of_some_weights(ranks: Ranks) -> None:
    sent, *received = ranks.run(some_masters)
    for states in received:
        for expected, found in zip(sent, states, strict=True):
            assert_same_bits(found, expected)


def start_alike(rank: int) -> list[str]:
    trainer = trainer_of(False)
    counter = Counter()
    try:
        if rank == 0:
            report = GroupPublisher(trainer.weights).publish()
            assert (report.version, report.payload_bytes) == (0, 0)
        else:
            report = GroupSubscriber(trainer.weights).receive()
            assert report.num_changed == 0
        return counter.take()
    finally:
        counter.close()


def test_ranks_that_have_the_state_already_are_sent_nothing(ranks: Ranks) -> None:
    assert ranks.run(start_alike) == [["all_gather", "all_gather"]] * 3


def damaged(rank: int, masters: bool) -> Any:
    trainer = trainer_of(masters)
    if rank == 0:
        publisher = GroupPublisher(trainer.weights, masters=trainer.masters)
        publisher.publish()
        trainer.step()
        failed = told(publisher.publish)
        assert publisher.version == 0
        trainer.step()
        report = publisher.publish()
        assert report.kind == "anchor"
        trainer.step()
        after = publisher.publish()
        assert (after.version, after.kind, after.folded) == (2, "patch", 1)
        return failed, trainer.saved_weights()
    weights = blank(trainer.weights)
    subscriber = GroupSubscriber(weights)
    subscriber.receive()
    trainer.step()
    name, position = trainer.first_change(weights)
    if rank == 1:
        weights[name].view(-1)[position] = 99.0
    before = {name: tensor.clone() for name, tensor in weights.items()}
    failed = told(subscriber.receive)
    assert_same_bits(weights, before)
    assert subscriber.version == (None if rank == 1 else 0)
    assert subscriber.receive().version == 1
    assert subscriber.receive().version == 2
    return failed, weights


@pytest.mark.parametrize("masters", [True, False])
def test_weights_written_by_others_take_all_back_and_are_mended_by_the_next_version(
    ranks: Ranks, masters: bool
) -> None:
    (failed, expected), (odd, mended), (other, weights) = ranks.run(damaged, masters)
    assert odd[0] == VerificationError.__name__
    for kind, message in (failed, other):
        assert kind == GroupError.__name__
        assert "rank 1: VerificationError" in message
    assert_same_bits(mended, expected)
    assert_same_bits(weights, expected)


def folded(rank: int) -> None:
    """A failure on a receiver that leaves its weights sound: what was not sent goes with the next patch."""
    trainer, twin = trainer_of(True), trainer_of(True)
    if rank == 0:
        publisher = GroupPublisher(trainer.weights, masters=trainer.masters)
        publisher.publish()
        trainer.step()
        assert told(publisher.publish)[0] == "GroupError"
        trainer.step()
        report = publisher.publish()
        assert (report.version, report.kind, report.folded) == (1, "patch", 2)
        return
    weights = blank(trainer.weights)
    subscriber = GroupSubscriber(weights)
    subscriber.receive()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    stage = subscriber._receiver.stage_patch

    def no_room(*_: object) -> Any:
        raise MemoryError("no room")

    if rank == 2:
        subscriber._receiver.stage_patch = no_room  # type: ignore[method-assign]
    kind, message = told(subscriber.receive)
    assert kind == ("MemoryError" if rank == 2 else "GroupError")
    assert "no room" in message
    assert_same_bits(weights, before)
    assert subscriber.version == 0
    subscriber._receiver.stage_patch = stage  # type: ignore[method-assign]
    subscriber.receive()
    twin.step()
    twin.step()
    assert_same_bits(weights, {name: tensor.bfloat16() for name, tensor in twin.state.items()})


def test_what_a_receiver_refused_is_folded_into_the_next_patch(ranks: Ranks) -> None:
    ranks.run(folded)


def non_finite(rank: int) -> tuple[str, str]:
    trainer = trainer_of(True)
    if rank == 0:
        publisher = GroupPublisher(trainer.weights, masters=trainer.masters)
        publisher.publish()
        sound = trainer.state["layer.0.bias"][3].clone()
        before = trainer.saved_weights()
        trainer.state["layer.0.bias"][3] = float("nan")
        failed = told(publisher.publish)
        assert_same_bits(trainer.weights, before)
        trainer.state["layer.0.bias"][3] = sound
        publisher.publish(7)
        return failed
    subscriber = GroupSubscriber(blank(trainer.weights))
    subscriber.receive()
    failed = told(subscriber.receive)
    assert subscriber.version == 0
    assert subscriber.receive().version == 7
    return failed


def test_non_finite_weights_are_refused_on_every_rank(ranks: Ranks) -> None:
    trainer, *receivers = ranks.run(non_finite)
    assert trainer[0] == NonFiniteError.__name__
    for kind, message in receivers:
        assert kind == GroupError.__name__
        assert "rank 0: NonFiniteError" in message
        assert "layer.0.bias" in message


def misfits(rank: int) -> list[tuple[str, str]]:
    trainer = trainer_of(False)
    seen = []
    # another model on rank 2
    weights = {**trainer.weights, "more": torch.zeros(3)} if rank == 2 else trainer.weights
    seen.append(told(GroupPublisher(weights).publish if rank == 0 else GroupSubscriber(weights).receive))
    # something else over the group, on rank 1
    if rank == 1:
        seen.append(("", ""))
        collectives.gather_rows(b"\x80\x04pickled?" + bytes(RECORD_BYTES - 10), None)
    else:
        mine = trainer.weights
        seen.append(told(GroupPublisher(mine).publish if rank == 0 else GroupSubscriber(mine).receive))
    # a patch that is larger than rank 2 takes
    data = b"x" * 1000 if rank == 0 else None
    seen.append(told(lambda: collectives.broadcast_bytes(data, 0, None, 999 if rank == 2 else 5000)))
    # the sender failed
    seen.append(told(lambda: collectives.broadcast_bytes(None, 0, None, 10)))
    # one wants to send too much to all
    seen.append(told(lambda: collectives.gather_bytes(b"y" * rank, None, limit=1)))
    # after all that the ranks are still in step
    assert collectives.gather_bytes(b"z" * rank, None) == [b"", b"z", b"zz"]
    assert bytes(collectives.broadcast_bytes(data, 0, None, 1000)) == b"x" * 1000
    return seen


def test_what_does_not_fit_is_refused_by_every_rank_before_anything_is_allocated(ranks: Ranks) -> None:
    for rank, (model, foreign, large, failed, many) in enumerate(ranks.run(misfits)):
        assert model[0] == "GroupError"
        assert "rank 2 has tensors of other names" in model[1]
        if rank != 1:
            assert foreign[0] == "GroupError"
            assert "rank 1 sent b'\\x80\\x04pickle'" in foreign[1]
        assert large[0] == failed[0] == many[0] == "GroupError"
        assert "1000 bytes, rank 2 takes up to 999" in large[1]
        assert "rank 0 could not" in failed[1]
        assert "rank 2 wants to send 2 bytes" in many[1]


def test_a_patch_over_a_receivers_limit_or_of_negative_size_is_no_patch() -> None:
    a, b = "a" * 32, "b" * 32
    receiver = Record(RECEIVER, 100, 3, digest=a)
    with pytest.raises(GroupError, match="101 bytes, rank 1 takes up to 100"):
        agree([Record(TRAINER, 101, 4, base=a, digest=b), receiver], 0)
    assert agree([Record(TRAINER, -5, 4, base=a, digest=b), receiver], 0).mode == WHOLE
    assert agree([Record(TRAINER, 100, 0, base=a, digest=b), receiver], 0).version == 4
    with pytest.raises(GroupError, match="version 3 is not above version 3, which rank 1 has"):
        agree([Record(TRAINER, 100, 3, base=a, digest=b, fixed=True), receiver], 0)


def killed(rank: int) -> tuple[str, str]:
    trainer = trainer_of(True)
    if rank == 0:
        publisher = GroupPublisher(trainer.weights, masters=trainer.masters)
        publisher.publish()
        trainer.step()
        failed = told(publisher.publish)
        assert publisher.version == 0
        return failed
    weights = blank(trainer.weights)
    subscriber = GroupSubscriber(weights)
    subscriber.receive()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    if rank == 2:
        subscriber._receiver.apply = lambda *_, **__: os.kill(os.getpid(), 9)  # type: ignore[method-assign]
    failed = told(subscriber.receive)
    assert_same_bits(weights, before)
    assert (subscriber.version, subscriber.digest) == (0, StateDigest.of(weights).hexdigest())
    return failed


def test_a_killed_rank_makes_the_others_raise_with_weights_whole() -> None:
    pool = Ranks(3)
    try:
        trainer, survivor, dead = pool.run(killed, seconds=15)
    finally:
        pool.close()
    assert isinstance(dead, Died)
    for kind, _ in (trainer, survivor):
        assert kind
        assert kind not in ("GroupError", "AssertionError")


def rejoined(rank: int) -> dict[str, Tensor]:
    """The trainer and one receiver go on in another group, which a rank with other weights has joined."""
    trainer = trainer_of(True)
    first = dist.new_group([0, 1])
    second = dist.new_group([2, 0, 1])  # group ranks follow the global ones
    if rank == 0:
        publisher = GroupPublisher(trainer.weights, masters=trainer.masters, group=first)
        for _ in range(3):
            trainer.step()
            publisher.publish()
        publisher.join(second)
        trainer.step()
        report = publisher.publish()
        assert (report.version, report.kind, report.note) == (3, "anchor", "a rank had other weights than the last")
        trainer.step()
        assert publisher.publish().kind == "patch"
        with pytest.raises(ValueError, match="use GroupSubscriber"):
            publisher.join(second, src=1)
        return trainer.saved_weights()
    weights = blank(trainer.weights)
    subscriber = GroupSubscriber(weights, group=first if rank == 1 else second)
    if rank == 1:
        for version in range(3):
            assert subscriber.receive().version == version
        subscriber.join(second)
    else:
        time.sleep(0.1)
    assert [subscriber.receive().version for _ in range(2)] == [3, 4]
    return weights


def test_ranks_go_on_in_another_group_and_newcomers_get_the_whole_state(ranks: Ranks) -> None:
    expected, *others = ranks.run(rejoined)
    for weights in others:
        assert_same_bits(weights, expected)


def restarted(rank: int) -> None:
    """A trainer that begins anew numbers on from what its receivers have."""
    trainer = trainer_of(False)
    if rank == 0:
        GroupPublisher(trainer.weights).publish(41)
        trainer.step()
        report = GroupPublisher(trainer.weights).publish()
        assert (report.version, report.kind) == (42, "anchor")
        return
    subscriber = GroupSubscriber(blank(trainer.weights))
    assert [subscriber.receive().version for _ in range(2)] == [41, 42]


def test_a_restarted_trainer_counts_on(ranks: Ranks) -> None:
    ranks.run(restarted, world=2)


def test_every_dtype_travels_whole(ranks: Ranks) -> None:
    ranks.run(many_dtypes, world=2)


def many_dtypes(rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.int64]
    state = {}
    for dtype in kinds:
        raw = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8, generator=generator)
        state[str(dtype)] = raw.view(dtype).reshape(3, 5).t() if dtype.itemsize > 1 else raw.view(dtype)[..., 0].t()
    if rank == 0:
        GroupPublisher(state).publish()
        return
    weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    GroupSubscriber(weights).receive()
    for name, tensor in state.items():
        assert weights[name].view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name
