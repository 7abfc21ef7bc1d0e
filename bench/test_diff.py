"""Two versions of a BF16 tensor: where do their bits differ?"""

from __future__ import annotations

import pytest

import pulse_kernels as pk
from bench.conftest import Compare
from bench.peers import as_bits, numpy_diff
from bench.workloads import DENSITIES, percent, random_pair
from pulse_kernels.cli.bench_quick import Contender, eager_diff, plain_read


@pytest.mark.parametrize("density", DENSITIES)
def test_diff_compact(compare: Compare, elements: int, density: float) -> None:
    pair = random_pair(elements, density)
    bits = as_bits(pair.new), as_bits(pair.old)
    compare(
        Contender("diff_compact", lambda: pk.diff_compact(pair.new, pair.old, return_old=True)),
        Contender("eager", lambda: eager_diff(pair.new, pair.old)),
        Contender("numpy", lambda: numpy_diff(*bits)),
        Contender("plain read", lambda: plain_read(pair.new, pair.old)),
        section="Diff",
        title=f"`diff_compact(return_old=True)`, {percent(density)} changed",
        num_bytes=4 * elements,
    )
