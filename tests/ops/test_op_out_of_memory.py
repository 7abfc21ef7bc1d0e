"""Running out of memory half way through an update leaves every weight as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from allocations import Refusals
from op_helpers import all_same_bits, random_bits, random_positions

from pulse_kernels.backends import cpu, native, reference

PROGRAM = """
    import resource
    import torch
    import pulse_kernels as pk

    torch.set_num_threads(1)
    n = 1 << 19

    def zeros(dtypes):
        return [torch.zeros(n, dtype=dtypes[0]), torch.zeros(n // 2, dtype=dtypes[1])]

    bf16, fp16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    forms = {
        "one pass": (pk.gate_compact_many, [torch.ones(n), torch.ones(n // 2)], zeros([bf16, bf16])),
        "both dtypes": (pk.gate_compact_many, [torch.ones(n), torch.ones(n // 2)], zeros([bf16, fp16])),
        "strided": (
            pk.gate_compact_many,
            [torch.ones(n), torch.ones(n // 2)],
            [torch.zeros(n, dtype=bf16), torch.zeros(n // 2, 2, dtype=bf16)[:, 0]],
        ),
        "a pass of 4 and one of 8 bytes": (
            pk.diff_compact_many, [torch.ones(n), torch.ones(n // 2, dtype=f64)], zeros([f32, f64])
        ),
    }
    for form, (op, sources, weights) in forms.items():
        op([source[:9] for source in sources], [weight[:9].clone() for weight in weights], update=True)  # warm
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        refused = 0
        for spare in range(0, 160 << 20, 2 << 20):
            resource.setrlimit(resource.RLIMIT_AS, (used + spare, -1))
            try:
                op(sources, weights, update=True)
                done = True
            except (RuntimeError, MemoryError):
                done = False
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            assert all(bool((weight == int(done)).all()) for weight in weights), f"{form}, {spare} bytes to spare"
            if done:
                break
            refused += 1
        assert done and refused > 1, f"{form}: {refused} limits were too low"
"""


@pytest.mark.skipif(not native.cpu_library().loaded, reason="the reference allocates while it writes")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS and /proc are Linux's")
def test_nothing_changes():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr


def rows():
    """(weights, indices, values) of two dtypes, a strided one among them; values are copied before they are read."""
    weights = [
        random_bits(500, torch.bfloat16, 1),
        random_bits(90, torch.float64, 2),
        random_bits(400, torch.float32, 3),
    ]
    weights.append(random_bits(800, torch.float32, 4).view(20, 40)[:, ::2])
    indices = [random_positions(30, t.numel(), k) for k, t in enumerate(weights)]
    values = [random_bits(2 * i.numel(), t.dtype, 7)[::2] for i, t in zip(indices, weights, strict=True)]
    return weights, indices, values


@pytest.mark.skipif(not native.cpu_library().loaded, reason="the reference allocates while it writes")
@pytest.mark.parametrize("function", ["apply_patch_many_", "exchange_patch_many_", "commit_residual_many_"])
def test_every_allocation_comes_before_the_first_write(function):
    weights, indices, values = rows()
    inputs = [weights, indices, values]
    if function.startswith("commit"):
        weights, indices = weights[2:], indices[2:]
        thetas, locals_ = ([random_bits(t.numel(), t.dtype, k).view(t.shape) for t in weights] for k in (8, 9))
        inputs = [thetas, locals_, weights, indices]
    before, expected = ([t.clone(memory_format=torch.preserve_format) for t in weights] for _ in range(2))
    one = getattr(reference, function.replace("_many", ""))
    for row in zip(*([expected if column is weights else column for column in inputs]), strict=True):
        one(*row)
    refusals = Refusals()
    for _ in refusals.until_done(lambda: getattr(cpu, function)(*inputs)):
        assert all_same_bits(weights, before), f"allocation {refusals.last} failed"
    assert all_same_bits(weights, expected)
    assert refusals.last > 2
