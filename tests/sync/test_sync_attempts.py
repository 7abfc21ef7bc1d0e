"""Attempts at a version whose commit failed: which of them the store has is found out; none is taken for another's."""

from __future__ import annotations

import pytest
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import StoreError
from pulse_kernels.sync import Publisher, Subscriber


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("order", [("before", "after"), ("after",), ("before", "before", "after"), ("before",)])
def test_of_several_attempts_at_one_number_the_one_in_the_store_counts(masters: bool, order: tuple[str, ...]) -> None:
    store, trainer = MemoryStore(), Trainer(masters=masters, seed=4)
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    create = publisher.store.create
    expected = trainer.saved_weights()
    for when in order:

        def failing(key: str, data: bytes, when: str = when) -> None:
            if when == "after":
                create(key, data)
            raise StoreError("no answer")

        trainer.step()
        publisher.store.create = failing  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="no answer"):
            publisher.publish()
        expected = trainer.saved_weights()
    publisher.store.create = create  # type: ignore[method-assign]
    trainer.step()
    assert publisher.publish().version == (2 if "after" in order else 1)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    if "after" in order:
        subscriber.stage(1)
        subscriber.apply()
        assert_same_bits(weights, expected)
    subscriber.poll()
    assert_same_bits(weights, trainer.weights)
