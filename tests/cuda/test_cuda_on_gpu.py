"""backends.cuda on a GPU: what the other tests here run in a simulator, on the streams and devices of torch."""

from __future__ import annotations

import pytest
import torch
from op_helpers import altered, int_bits, random_bits, random_positions, same_bits

from pulse_kernels.backends import cuda, native, reference, two_pass
from pulse_kernels.errors import PatchFormatError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not native.cuda_library().loaded, reason=native.cuda_library().reason),
]
DEVICES = [f"cuda:{k}" for k in range(torch.cuda.device_count())]


def lists() -> tuple[list[torch.Tensor], list[int]]:
    numels = [5, 300, 10**6, 2**31 - 1, 2**33, 2**62]
    counts = [0, 257, 50_000, 3000, 2048, 700]
    indices = [random_positions(count, numel, count) for count, numel in zip(counts, numels, strict=True)]
    return [index.int() if numel <= 10**6 else index for index, numel in zip(indices, numels, strict=True)], numels


@pytest.mark.parametrize("device", DEVICES)
def test_packing_is_that_of_the_reference(device):
    indices, numels = lists()
    blobs = cuda.pack_indices_many([index.to(device) for index in indices], numels)
    for blob, index, numel in zip(blobs, indices, numels, strict=True):
        assert blob.device == torch.device(device)
        assert torch.equal(blob.cpu(), reference.pack_indices(index, numel))
    back = cuda.unpack_indices_many(blobs, [index.dtype for index in indices])
    assert all(torch.equal(mine.cpu(), index) for mine, index in zip(back, indices, strict=True))
    broken = [blobs[0], blobs[1].clone()]
    broken[1][-1] ^= 0xFF
    with pytest.raises(PatchFormatError, match="packed indices"):
        cuda.unpack_indices_many(broken, [torch.int64] * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_exchange(device):
    weight, positions = random_bits(10**6, torch.bfloat16, 1), random_positions(20_000, 10**6, 2)
    values, on_device = random_bits(positions.numel(), torch.bfloat16, 3), weight.to(device)
    old = reference.exchange_patch_(weight, positions, values)
    blobs = cuda.pack_indices_many([positions.to(device)], [10**6])
    (found,) = cuda.exchange_packed_many_([on_device], blobs, [values.to(device)], True)
    assert same_bits(found.cpu(), old)
    assert same_bits(on_device.cpu(), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate(device, dtype):
    masters = [random_bits(4 * n, torch.uint8, n).view(torch.float32) for n in (100, 8192, 3 * 10**6 + 1)]
    weights = [altered(reference.round_bits(master, dtype).view(dtype), 0.01, 5) for master in masters]
    on_device = [weight.to(device) for weight in weights]
    wide = [torch.int64] * 3
    expected = reference.compact_many("gate_compact", masters, weights, wide, True, True)
    sources = [master.to(device) for master in masters]
    found = two_pass.TwoPass(cuda).compact_many("gate_compact", sources, on_device, wide, True, True)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(same_bits(a.cpu(), b) for a, b in zip(mine, theirs, strict=True))
    assert all(same_bits(a.cpu(), b) for a, b in zip(on_device, weights, strict=True))


def test_work_goes_to_the_current_stream():
    """On a stream that first waits long: a launch on another would read the list before it is there."""
    indices = random_positions(50_000, 10**8, 1)
    stream, list_on_device = torch.cuda.Stream(), torch.zeros(indices.numel(), dtype=torch.int64, device="cuda")
    source = indices.to("cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        list_on_device.copy_(source)
        (blob,) = cuda.pack_indices_many([list_on_device], [10**8])
    assert torch.equal(blob.cpu(), reference.pack_indices(indices, 10**8))


def test_the_passes_can_be_captured_in_a_graph():
    master = torch.randn(100_000, device="cuda")
    weight = master.bfloat16()
    indices = torch.empty(100_000, dtype=torch.int32, device="cuda")
    values, count = (
        torch.empty(100_000, dtype=weight.dtype, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )

    def gate() -> None:
        two_pass.TwoPass(cuda).compact_out("gate_compact", master, weight, indices, values, count, None, True)

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate()  # once outside, so that nothing is set up inside
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gate()
    master[::7] *= 1.5
    expected = weight.cpu().clone()
    wanted = reference.compact("gate_compact", master.cpu(), expected, torch.int32, True)
    graph.replay()
    found = int(count)
    assert found == wanted[0].numel() > 0
    assert torch.equal(indices[:found].cpu(), wanted[0])
    assert same_bits(values[:found].cpu(), wanted[1])
    assert torch.equal(int_bits(weight.cpu()), int_bits(expected))
