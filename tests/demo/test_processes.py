"""What one end of a pipe sees when the other fails, ends or says something else."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from pulse_kernels.demo.messages import DemoError, Failed, Synced
from pulse_kernels.demo.processes import receive, send
from pulse_kernels.errors import PatchFormatError, VerificationError


def test_a_failure_is_raised_as_what_it_was() -> None:
    ours, theirs = Pipe()
    theirs.send(Failed.of("rollout process 1", VerificationError("digest a, expected b")))
    with pytest.raises(VerificationError, match="rollout process 1: digest a, expected b"):
        receive(ours, Synced, "rollout process 1")


def test_other_errors_keep_their_name() -> None:
    error = Failed.of("trainer", FileNotFoundError("no such file")).exception()
    assert isinstance(error, DemoError)
    assert str(error) == "trainer: FileNotFoundError: no such file"


def test_an_end_without_an_answer_is_an_error() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(DemoError, match="rollout process 0 ended without an answer"):
        receive(ours, Synced, "rollout process 0")


def test_an_order_to_a_failed_process_raises_its_failure() -> None:
    ours, theirs = Pipe()
    theirs.send(Failed.of("rollout process 0", PatchFormatError("truncated")))
    theirs.close()
    with pytest.raises(PatchFormatError, match="truncated"):
        send(ours, "order", "rollout process 0")


def test_an_unexpected_answer_is_an_error() -> None:
    ours, theirs = Pipe()
    theirs.send("hello")
    with pytest.raises(DemoError, match="sent str, expected Synced"):
        receive(ours, Synced, "rollout process 0")
