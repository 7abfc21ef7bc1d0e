"""What is no named tensors is told by the argument's own name, with types and never with contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore

from pulse_kernels import Patch, StateDigest
from pulse_kernels.state import named_tensors
from pulse_kernels.sync import Publisher, Subscriber

SECRET = 0.123456
TENSOR = torch.full((3,), SECRET)
WEIGHTS = {"w": TENSOR.bfloat16()}
EXPECTED = "expected an nn.Module, a dict of tensors or (name, tensor) pairs, as model.named_parameters() gives them"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([TENSOR], f"params[0] is a Tensor, which has no name; {EXPECTED}"),
        (iter([("w", TENSOR), torch.nn.Parameter(TENSOR)]), f"params[1] is a Parameter, which has no name; {EXPECTED}"),
        (TENSOR, f"params is a Tensor, {EXPECTED}"),
        (None, f"params is None, {EXPECTED}"),
        (7, f"params is an int, {EXPECTED}"),
        ([(TENSOR, "w")], f"params[0] is a tuple of (Tensor, str), which has no name; {EXPECTED}"),
        ([(TENSOR,) * 9], "params[0] is a tuple of (Tensor, Tensor, Tensor, Tensor, ...), which has no name; "),
        ({"w": [SECRET]}, "params['w'] is a list, expected a tensor"),
        ({3: TENSOR}, "a name in params is an int, expected a str"),
    ],
)
def test_messages(given: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        named_tensors(given)
    assert str(caught.value).startswith(message)
    assert "0.12" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("old", lambda bad: Patch.diff(bad, WEIGHTS)),
        ("new", lambda bad: Patch.diff(WEIGHTS, bad)),
        ("masters", lambda bad: Patch.gate(bad, WEIGHTS)),
        ("weights", lambda bad: Patch.gate(WEIGHTS, bad)),
        ("weights", lambda bad: Patch().apply_(bad)),
        ("base", lambda bad: Patch().to_bytes(base=bad)),
        ("base", lambda bad: Patch.from_bytes(Patch().to_bytes(), bad)),
        ("params", lambda bad: StateDigest.of(bad)),
        ("params", lambda bad: Publisher(MemoryStore(), bad)),
        ("masters", lambda bad: Publisher(MemoryStore(), WEIGHTS, masters=bad)),
        ("params", lambda bad: Subscriber(MemoryStore(), bad)),
    ],
)
def test_the_argument_that_is_wrong_is_named(name: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(
        TypeError, match=rf"^{name}\[0\] is a Tensor, which has no name; expected an nn\.Module, a dict"
    ):
        call([TENSOR])
