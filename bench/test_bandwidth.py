"""How fast this machine reads and copies memory: the yardstick of every dense pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from bench.conftest import Compare
from pulse_kernels.cli.bench_quick import Contender, plain_read, random_masters

SECTION = "Memory"


def test_read_and_copy(compare: Compare, elements: int) -> None:
    """An FP32 and a BF16 tensor, read by several reductions with all threads; the fastest is the plain read."""
    master = random_masters(elements)
    weight = master.bfloat16()
    tensors = (master, weight)
    spare = [torch.empty_like(tensor) for tensor in tensors]
    words = [tensor.view(torch.int64) for tensor in tensors]
    floats = [tensor.view(torch.float32) for tensor in tensors]
    pool = ThreadPoolExecutor(torch.get_num_threads())
    chunks = [chunk.numpy() for tensor in words for chunk in tensor.split(1 << 20)]

    def copy() -> None:
        for tensor, target in zip(tensors, spare, strict=True):
            target.copy_(tensor)

    compare(
        Contender("plain read", lambda: plain_read(*tensors)),
        Contender("int64 max", lambda: [tensor.max() for tensor in words]),
        Contender("float32 sum", lambda: [tensor.sum() for tensor in floats]),
        Contender("float32 dot", lambda: [torch.dot(tensor, tensor) for tensor in floats]),
        Contender("numpy int64 max, threads", lambda: list(pool.map(lambda chunk: chunk.max(), chunks))),
        Contender("copy", copy),
        section=SECTION,
        title="plain read (int64 sum) of an FP32 and a BF16 tensor",
        num_bytes=6 * elements,
    )
