"""The gate: FP32 masters against BF16 weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pulse_kernels as pk
from bench.conftest import Compare
from bench.peers import as_bits, numpy_gate
from bench.workloads import DENSITIES, pair_of, percent
from pulse_kernels.cli.bench_quick import Contender, eager_gate, plain_read, random_masters

SECTION = "Gate"


@pytest.fixture(scope="module")
def master(elements: int) -> Tensor:
    return random_masters(elements)


@pytest.mark.parametrize("density", DENSITIES)
def test_gate_compact_update(compare: Compare, master: Tensor, density: float) -> None:
    """The trainer's pass. Eager with and without writing the new weights; ours always writes them."""
    pair = pair_of(master.bfloat16(), density)
    weight, eager_weight = pair.old.clone(), pair.old.clone()
    spare_master, spare = torch.empty_like(master), torch.empty_like(weight)
    bits = as_bits(master), as_bits(pair.old)

    def eager_with_write_back() -> None:
        rounded = master.bfloat16()
        positions = (rounded.view(torch.int16) != eager_weight.view(torch.int16)).nonzero().squeeze(1)
        rounded[positions]
        eager_weight.copy_(rounded)

    def put_back(changed: Tensor) -> None:
        pair.put_back(changed)
        plain_read(master)  # so that what was just written is out of the caches

    def copy() -> None:
        spare_master.copy_(master)
        spare.copy_(weight)

    peers = [
        Contender("eager", lambda: eager_gate(master, pair.old)),
        Contender("eager and write back", eager_with_write_back, lambda: put_back(eager_weight)),
        Contender("plain read", lambda: plain_read(master, weight)),
        Contender("copy", copy),
    ]
    if density == 0.01:
        peers.append(Contender("numpy", lambda: numpy_gate(*bits)))
    compare(
        Contender(
            "gate_compact(update=True)",
            lambda: pk.gate_compact(master, weight, update=True),
            lambda: put_back(weight),
        ),
        *peers,
        section=SECTION,
        title=f"`gate_compact(update=True)`, {percent(density)} changed",
        num_bytes=6 * master.numel(),
        density=density,
        num_changed=pair.num_changed,
    )
    assert torch.equal(weight, pair.new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_compact(compare: Compare, master: Tensor, dtype: torch.dtype) -> None:
    pair = pair_of(master.to(dtype), 0.01)
    compare(
        Contender("gate_compact", lambda: pk.gate_compact(master, pair.old)),
        Contender("eager", lambda: eager_gate(master, pair.old)),
        Contender("plain read", lambda: plain_read(master, pair.old)),
        section=SECTION,
        title=f"`gate_compact`, {str(dtype).removeprefix('torch.')}, 1% changed",
        num_bytes=6 * master.numel(),
    )


def test_visibility_mask(compare: Compare, master: Tensor) -> None:
    pair = pair_of(master.bfloat16(), 0.01)
    old_bits = pair.old.view(torch.int16)
    compare(
        Contender("visibility_mask", lambda: pk.visibility_mask(master, pair.old)),
        Contender("eager", lambda: master.bfloat16().view(torch.int16) != old_bits),
        Contender("plain read", lambda: plain_read(master, pair.old)),
        section=SECTION,
        title="`visibility_mask`, 1% changed",
        num_bytes=6 * master.numel(),
    )
