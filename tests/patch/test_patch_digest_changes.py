"""Patch.digest_changes: by how much each tensor's own digest moves."""

from __future__ import annotations

import pickle

import pytest
import torch

import pulse_kernels as pk
from pulse_kernels.state import StateDigest

Tensors = dict[str, torch.Tensor]


def assert_moves(patch: pk.Patch, old: Tensors, new: Tensors) -> None:
    """Each tensor's digest before, moved, is its digest after; tensors that do not change are not named."""
    assert list(patch.digest_changes) == list(patch.tensors)
    for name, lanes in patch.digest_changes.items():
        assert all(0 <= lane < 1 << 64 for lane in lanes)
        digest = StateDigest.of({name: old[name]})
        digest.add_lanes(lanes)
        assert digest == StateDigest.of({name: new[name]}), name


@pytest.mark.parametrize("base_digest", [False, True])
def test_diff(base_digest: bool) -> None:
    old = {
        "a": torch.arange(40.0),
        "b": torch.zeros(7, dtype=torch.bfloat16),
        "same": torch.ones(3),
        "kind": torch.ones(3),
    }
    new = {name: tensor.clone() for name, tensor in old.items()} | {"kind": torch.ones(4), "here": torch.ones(2)}
    new["a"][[3, 39]] = torch.tensor([-0.0, float("nan")])
    new["b"][0] = -0.0
    patch = pk.Patch.diff(old, new, base_digest=StateDigest.of(old).hexdigest() if base_digest else None)
    assert set(patch.tensors) == {"a", "b"}
    assert_moves(patch, old, new)
    assert pickle.loads(pickle.dumps(patch)).digest_changes == patch.digest_changes
    assert "digest_changes" not in repr(patch)


@pytest.mark.parametrize("update", [False, True])
def test_gate(update: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = {f"w{k}": torch.randn(50 + k, generator=generator).bfloat16() for k in range(3)}
    weights["tied"] = weights["w1"]
    masters = {name: tensor.float() for name, tensor in weights.items()}
    masters["w0"][7] += 3
    masters["tied"] = masters["w1"]
    masters["w1"][11] = -1000
    old = {name: tensor.clone() for name, tensor in weights.items()}
    patch = pk.Patch.gate(masters, weights, update=update)
    assert set(patch.tensors) == {"w0", "w1", "tied"}
    assert_moves(patch, old, {name: tensor.bfloat16() for name, tensor in masters.items()})


def test_elsewhere_nothing_is_known() -> None:
    patch = pk.Patch.diff({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    assert pk.Patch.from_bytes(patch.to_bytes("fast")).digest_changes == {}
    assert pk.Patch().digest_changes == {}
