"""Counted traffic of the gate's two passes: what the simulator saw of the compiled PTX, no time."""

from __future__ import annotations

import pytest
import torch
from op_helpers import altered

import pulse_kernels as pk
from pulse_kernels.backends import reference, triton

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(triton.interpreted(), reason="interpreted kernels have no counters"),
]


@pytest.mark.parametrize("many", [False, True])
def test_gate_at_one_percent(kernels, many):
    n = 48 * 8192
    master = torch.randn(n, generator=torch.Generator().manual_seed(0))
    weight = altered(reference.round_bits(master, torch.bfloat16).view(torch.bfloat16), 0.01, 0)
    if many:
        pk.gate_compact_many(list(master.chunk(4)), list(weight.chunk(4)), update=True)
    else:
        pk.gate_compact(master, weight, update=True)
    (first, mark), (second, collect) = kernels.launches
    assert (first, second) == ("mark", "collect")
    assert 6.125 <= mark.compulsory_bytes / n <= 6.14  # 4 + 2 bytes, a bit, a count a tile
    assert mark.compulsory_bytes + collect.compulsory_bytes <= 7.0 * n
    assert mark.bytes_moved <= 1.15 * mark.compulsory_bytes
    models = [mark.estimate(), collect.estimate()]  # an H200's bandwidth and issue rate
    assert sum(m.issue for m in models) < 0.8 * sum(m.memory_compulsory for m in models)
    assert mark.bank_conflict_cycles == collect.bank_conflict_cycles == 0
