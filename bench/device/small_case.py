"""A few launches of every kernel around a tile's edge, each against the oracle: small enough for compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import pulse_kernels as pk
from bench.device.data import Pair, joined, random_master, same_bits, same_positions
from pulse_kernels.backends import cuda, native, reference, two_pass

SIZES = (8191, 8193)  # a tile of compaction has 8192 elements
KEY = 3


def problems(device: torch.device) -> list[str]:
    """What came out wrong; names of operators."""
    return [name for name, right in _cases(device) if not right]


def _cases(device: torch.device) -> Iterator[tuple[str, bool]]:
    for numel in SIZES:
        pair = Pair(random_master(numel, device), 0.02)
        result = pk.gate_compact(pair.master, pair.weight, update=True, return_old=True)
        yield "gate_compact", pair.is_right(*result[:2]) and same_bits(result[2], pair.old_values) and pair.is_new()
        pair.put_back()
        old = pair.weight.clone()
        new = pair.master.bfloat16()
        yield "diff_compact", pair.is_right(*pk.diff_compact(new, old))
        indices, values = pair.positions.int(), pair.new_values
        yield "exchange_patch_", same_bits(pk.exchange_patch_(old, indices, values), pair.old_values)
        yield "exchange_patch_", same_bits(old, new)
        yield "apply_patch_", _applied(pair, indices)
        yield "digest", torch.equal(pk.digest(new, KEY), reference.digest(new, KEY, 0))
        before = reference.digest(pair.weight, KEY, 0)
        updated = pk.digest_update(before, indices, pair.old_values, values, KEY)
        yield "digest_update", torch.equal(updated, reference.digest(new, KEY, 0))
        yield "visibility_mask", same_positions(pk.visibility_mask(pair.master, pair.weight).nonzero()[:, 0], indices)
        blob = pk.pack_indices(indices, numel)
        yield "pack_indices", torch.equal(blob.cpu(), reference.pack_indices(indices.cpu(), numel))
        yield "unpack_indices", same_positions(pk.unpack_indices(blob), indices)
        residual = (pair.master, pair.master - 1e-4, torch.zeros_like(pair.master))
        fired, s = pk.gate_residual(*residual)
        rows = reference.gate_residual_many(*([t] for t in residual), torch.bfloat16, [torch.int32])
        yield "gate_residual", same_positions(fired, rows[0][0]) and same_bits(s, rows[1][0])
        if device.type == "cuda" and native.cuda_library().loaded:
            yield from _of_cuda_library(pair, blob)
    yield from _of_many(device)


def _applied(pair: Pair, indices: Tensor) -> bool:
    pk.apply_patch_(pair.weight, indices, pair.new_values)
    right = pair.is_new()
    pair.put_back()
    return right


def _of_cuda_library(pair: Pair, blob: Tensor) -> Iterator[tuple[str, bool]]:
    arguments = "gate_compact", [pair.master], [pair.weight], [torch.int32], True, False
    result = two_pass.TwoPass(cuda).compact_many(*arguments)
    yield "CUB", pair.is_right(result[0][0], result[1][0]) and pair.is_new()
    pair.put_back()
    cuda.exchange_packed_many_([pair.weight], [blob], [pair.new_values], False)
    yield "exchange_packed_many_", pair.is_new()
    pair.put_back()


def _of_many(device: torch.device) -> Iterator[tuple[str, bool]]:
    sizes = [*SIZES, 1]
    pair = Pair(random_master(sum(sizes), device), 0.02)
    masters, weights = list(pair.master.split(sizes)), list(pair.weight.split(sizes))  # later ones are misaligned
    indices, values = pk.gate_compact_many(masters, weights, update=True)
    yield "gate_compact_many", pair.is_right(joined(indices, sizes), torch.cat(values)) and pair.is_new()


def main(device: torch.device) -> int:
    wrong = problems(device)
    print(f"small case: {', '.join(wrong)} WRONG" if wrong else "small case: every result equals the oracle's")
    return 1 if wrong else 0
