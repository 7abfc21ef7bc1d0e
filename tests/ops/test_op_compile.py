"""Operators inside torch.compile(fullgraph=True): as in eager mode, writes included."""

from __future__ import annotations

import shutil

import pytest
import torch
from op_helpers import all_same_bits

import pulse_kernels as pk

BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")),
]
N = 96

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tensors(seed):
    """An optimizer step's masters as a product of matrices, a weight, a receiver and buffers for the patch."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(N, 4, generator=generator), torch.randn(4, 8, generator=generator)
    weight = (left @ right).bfloat16()
    weight[::7] += 1
    buffers = (
        torch.zeros(N * 8, dtype=torch.int32),
        torch.zeros(N * 8, dtype=torch.bfloat16),
        torch.zeros(1, dtype=torch.int64),
    )
    return left, right, weight, weight.clone(), *buffers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", [False, True])
def test_gate_out_and_apply(backend, update):
    # Matrix products around the operators: buffers of the compiled code come and go while they write.
    def step(left, right, weight, receiver, indices, values, count):
        master = left @ right
        pk.gate_compact_out(master, weight, indices, values, count, update=update)
        pk.apply_patch_(receiver, indices[:112], values[:112])
        return receiver.t() @ weight, count

    expected = tensors(1)
    indices, _ = pk.gate_compact(expected[0] @ expected[1], expected[2])
    assert indices.numel() == 112  # 14 rows of 8
    eager_result = step(*expected)
    compiled = tensors(1)
    torch._dynamo.reset()
    result = torch.compile(step, fullgraph=True, backend=backend)(*compiled)
    assert all_same_bits(compiled, expected)
    assert torch.equal(compiled[4][:112], indices)
    assert torch.equal(compiled[2], expected[2] if update else tensors(1)[2])
    torch.testing.assert_close(result, eager_result)


@pytest.mark.parametrize("backend", BACKENDS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data(backend):
    def step(master, weight, receiver):
        indices, values = pk.gate_compact(master, weight, update=True)
        old = pk.exchange_patch_(receiver, indices, values)
        blob = pk.pack_indices(indices, weight.numel())
        return indices, values, old, pk.unpack_indices(blob, index_dtype=torch.int64)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for seed in (1, 2):
        left, right, weight, receiver, *_ = tensors(seed)
        other_weight, other_receiver = weight.clone(), receiver.clone()
        result = compiled(left @ right, weight, receiver)
        assert all_same_bits(result, step(left @ right, other_weight, other_receiver))
        assert all_same_bits((weight, receiver), (other_weight, other_receiver))
        assert torch.equal(result[0].long(), result[3])


@pytest.mark.parametrize("backend", BACKENDS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_lists_of_weights(backend):
    def step(masters, weights, receivers):
        indices, values = pk.gate_compact_many(masters, weights, update=True)
        old = pk.exchange_patch_many_(receivers, indices, values)
        return indices + values + old

    def model():
        cases = [tensors(seed) for seed in (1, 2)]
        return [c[0] @ c[1] for c in cases], [c[2] for c in cases], [c[3] for c in cases]

    expected, compiled = model(), model()
    torch._dynamo.reset()
    result = torch.compile(step, fullgraph=True, backend=backend)(*compiled)
    assert all_same_bits(result, step(*expected))
    for ours, theirs in zip(compiled, expected, strict=True):
        assert all_same_bits(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_is_found_while_tracing(backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda m, w: pk.visibility_mask(m, w), fullgraph=True, backend=backend)
    with pytest.raises(Exception, match=r"weight has shape \[3\], master has \[4\]"):
        compiled(torch.zeros(4), torch.zeros(3, dtype=torch.bfloat16))
