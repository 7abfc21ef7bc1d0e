"""The tensors that are measured: one large pair, and a checkpoint of many tensors, with a known share changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import pulse_kernels as pk
from pulse_kernels.cli.bench_quick import changed_positions, flip_last_bit_, random_masters

DENSITIES = (0.001, 0.01, 0.05)


def percent(density: float) -> str:
    return f"{100 * density:g}%"


@dataclass
class Pair:
    """One weight before and after a step. Its changes in both index dtypes and with the values of both sides."""

    old: Tensor
    new: Tensor
    positions: Tensor  # int64, as eager PyTorch wants them
    indices: Tensor  # int32
    old_values: Tensor
    new_values: Tensor

    @property
    def num_changed(self) -> int:
        return self.positions.numel()

    def put_back(self, weight: Tensor) -> None:
        """``weight``, somewhere between old and new, becomes old again; touches only the changed places."""
        pk.apply_patch_(weight, self.indices, self.old_values, check=False)


def pair_of(new: Tensor, density: float) -> Pair:
    """``new`` and an old weight that differs from it by one unit in the last place at ``density`` of the positions."""
    positions = changed_positions(new.numel(), density)
    old = new.clone()
    flip_last_bit_(old, positions)
    return Pair(old, new, positions, positions.int(), old[positions], new[positions])


def random_pair(numel: int, density: float, dtype: torch.dtype = torch.bfloat16) -> Pair:
    return pair_of(random_masters(numel).to(dtype), density)


State = dict[str, Tensor]


@dataclass
class StatePair:
    """Two consecutive versions of a model's BF16 weights."""

    name: str
    old: State
    new: State

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.new.values())

    @property
    def num_bytes(self) -> int:
        return 2 * self.numel


def checkpoint_shapes(numel: int) -> dict[str, int]:
    """Sizes of a decoder's tensors: an embedding of a fifth, then eight layers of attention and feed-forward."""
    embedding = numel // 5
    layer = (numel - embedding) // 8
    sizes = {"embed_tokens.weight": embedding}
    for k in range(8):
        attention = layer * 3 // 10
        sizes[f"layers.{k}.self_attn.weight"] = attention
        sizes[f"layers.{k}.mlp.weight"] = layer - attention
    return sizes


def random_checkpoint(numel: int, density: float) -> StatePair:
    """Normal weights; positions drawn one by one, each change one unit in the last place."""
    old, new = {}, {}
    for seed, (name, size) in enumerate(checkpoint_shapes(numel).items()):
        new[name] = random_masters(size, seed).bfloat16()
        old[name] = new[name].clone()
        flip_last_bit_(old[name], changed_positions(size, density, seed))
    return StatePair(f"drawn at random, {percent(density)}", old, new)
