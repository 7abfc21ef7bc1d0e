"""A weight written behind the subscriber's back is found by the next patch that touches it, whatever bit it was."""

from __future__ import annotations

import pytest
import torch
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, bits, blank
from torch import Tensor

from pulse_kernels import Patch, VerificationError
from pulse_kernels.sync import Publisher, Subscriber


def touched(trainer: Trainer, before: dict[str, Tensor]) -> list[tuple[str, int]]:
    """Where the weights differ from ``before``."""
    return [
        (name, int(position))
        for name, tensor in trainer.weights.items()
        for position in (bits(tensor) != bits(before[name])).nonzero().view(-1)
    ]


@pytest.mark.parametrize("profile", ["balanced", "fast"])
@pytest.mark.parametrize("behind", [1, 3])
def test_any_bit_of_a_touched_weight(profile: str, behind: int) -> None:
    """Values are coded as differences to the base, which damage does not change: only the values' own digest tells."""
    trainer = Trainer(masters=True, seed=1)
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, profile=profile, anchor_every=100)
    publisher.publish()
    first = trainer.saved_weights()
    for _ in range(behind):
        trainer.step()
        publisher.publish()
    places = touched(trainer, first)
    for bit in range(16):
        name, position = places[bit * 7 % len(places)]
        weights = {key: tensor.clone() for key, tensor in first.items()}
        subscriber = Subscriber(store, weights)
        subscriber.stage(0)
        assert subscriber.version == 0
        weights[name].view(-1).view(torch.int16)[position] ^= (1 << bit) if bit < 15 else -(1 << 15)
        damaged = {key: tensor.clone() for key, tensor in weights.items()}
        with pytest.raises(VerificationError):
            subscriber.poll()
        assert subscriber.version is None
        assert_same_bits(weights, damaged)
        subscriber.poll()  # from the anchor
        assert subscriber.version == behind
        assert_same_bits(weights, trainer.weights)


def test_damage_between_stage_and_apply() -> None:
    trainer = Trainer(masters=True, seed=2)
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    subscriber.poll()
    before = trainer.saved_weights()
    trainer.step()
    publisher.publish()
    subscriber.stage()
    name, position = touched(trainer, before)[0]
    weights[name].view(-1).view(torch.int16)[position] ^= 1
    with pytest.raises(VerificationError):
        subscriber.apply()
    subscriber.poll()
    assert_same_bits(weights, trainer.weights)


def test_the_patch_file_carries_the_digest_only_where_asked() -> None:
    old = {"w": torch.arange(64, dtype=torch.float32).bfloat16()}
    new = {"w": old["w"].clone()}
    new["w"][5:9] *= 1.01
    patch = Patch.diff(old, new)
    assert Patch.peek(patch.to_bytes()).values_digest == ""
    patch.values_digest = patch.digest_of_values()
    data = patch.to_bytes()
    assert Patch.peek(data).values_digest == patch.values_digest
    assert torch.equal(Patch.from_bytes(data, old).tensors["w"].values, patch.tensors["w"].values)
    old["w"][6] += 1
    with pytest.raises(VerificationError, match="Something else wrote them"):
        Patch.from_bytes(data, old, current_digest=patch.base_digest)
    patch.values_digest = "0"
    with pytest.raises(ValueError, match="values_digest"):
        patch.to_bytes()
