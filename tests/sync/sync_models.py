"""A small trainer whose steps change about one weight in a hundred, and comparisons of bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SHAPES = {"embed.weight": (64, 96), "layer.0.weight": (48, 64), "layer.0.bias": (48,), "scale": (), "none": (0, 4)}


class Trainer:
    """weights: BF16. masters: FP32, or None where steps write the weights themselves. latest: whichever is stepped."""

    def __init__(self, *, masters: bool, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state = {name: torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()}
        self.weights = {name: tensor.bfloat16() for name, tensor in self.state.items()}
        self.masters = self.state if masters else None
        self.latest: dict[str, Tensor] = self.state if masters else self.weights

    def step(self) -> None:
        """One update, so small that rounding absorbs most of it."""
        for name, tensor in self.state.items():
            tensor.add_(torch.randn(tensor.shape, generator=self.generator) * tensor.abs() * 1e-4)
            if tensor.numel() > 9:  # something always changes, and there are signed zeros
                tensor.view(-1)[int(torch.randint(9, (), generator=self.generator))].neg_()
                tensor.view(-1)[int(torch.randint(9, (), generator=self.generator))] = -0.0
            if self.masters is None:
                self.weights[name].copy_(tensor)

    def rounded(self) -> dict[str, Tensor]:
        """The weights that the next version has."""
        return {name: tensor.bfloat16() for name, tensor in self.state.items()}

    def saved(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def saved_weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        for name, tensor in saved.items():
            self.state[name].copy_(tensor)
            self.weights[name].copy_(tensor)

    def first_change(self, before: Mapping[str, Tensor]) -> tuple[str, int]:
        """Where the next version's weights (masters rounded) first differ from ``before``."""
        for name, tensor in self.state.items():
            changed = (bits(tensor.bfloat16()) != bits(before[name])).nonzero()
            if changed.numel():
                return name, int(changed[0, 0])
        raise AssertionError("nothing changed")

    def first_silent(self, before: Mapping[str, Tensor]) -> tuple[str, int]:
        """Where they first do not."""
        for name, tensor in self.state.items():
            same = (bits(tensor.bfloat16()) == bits(before[name])).nonzero()
            if same.numel():
                return name, int(same[0, 0])
        raise AssertionError("everything changed")


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.int16)


def blank(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same kinds with other contents."""
    return {name: torch.full_like(tensor, 7.0) for name, tensor in like.items()}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name
