"""Writing a patch into BF16 weights: time follows the changes."""

from __future__ import annotations

import pytest

import pulse_kernels as pk
from bench.conftest import Compare
from bench.peers import as_bits
from bench.workloads import DENSITIES, percent, random_pair
from pulse_kernels.cli.bench_quick import Contender, eager_exchange


@pytest.mark.parametrize("density", DENSITIES)
def test_apply_and_exchange(compare: Compare, elements: int, density: float) -> None:
    """Checks included. Every contender writes the same new values over the same old ones."""
    pair = random_pair(elements, density)
    weight = pair.old.clone()
    weight_bits, positions, values = as_bits(weight), pair.positions.numpy(), as_bits(pair.new_values)

    def put_back() -> None:
        pair.put_back(weight)

    def write_with_numpy() -> None:
        weight_bits[positions] = values

    compare(
        Contender("apply_patch_", lambda: pk.apply_patch_(weight, pair.indices, pair.new_values), put_back),
        Contender("exchange_patch_", lambda: pk.exchange_patch_(weight, pair.indices, pair.new_values), put_back),
        Contender(
            "apply_patch_, unchecked",
            lambda: pk.apply_patch_(weight, pair.indices, pair.new_values, check=False),
            put_back,
        ),
        Contender("index_put_", lambda: weight.index_put_((pair.positions,), pair.new_values), put_back),
        Contender("gather and index_put_", lambda: eager_exchange(weight, pair.positions, pair.new_values), put_back),
        Contender("numpy", write_with_numpy, put_back),
        section="Apply",
        title=f"`apply_patch_`, {percent(density)} changed",
        num_bytes=0,
        density=density,
        num_changed=pair.num_changed,
    )
