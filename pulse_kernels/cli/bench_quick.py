"""A quick benchmark: each operator and profile beside eager PyTorch and beside a plain read of the same bytes.

Contenders run in turns, round by round, in one process, so that whatever else the machine does meets all of them; the
figure is the median. The full suite is in bench/ and builds on the pieces here. Needs no package the library does not
need itself.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zstandard
from torch import Tensor

import pulse_kernels as pk
from pulse_kernels.patch import Patch

# ---- timing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """Something to time. before: runs ahead of each timed call, outside the timing; must be safe to repeat.

    calls: how often ``run`` is called in one timing, for what takes less than a millisecond.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    calls: int = 1


def time_once(contender: Contender) -> float:
    """Seconds of one call, results freed inside the timing, as in a loop that uses them."""
    if contender.before is not None:
        contender.before()
    start = time.perf_counter()
    for _ in range(contender.calls):
        contender.run()
    return (time.perf_counter() - start) / contender.calls


def interleave(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender in each of ``rounds`` rounds, after one untimed round."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for k in range(-1, rounds):
            for contender in rotated(contenders, k):
                elapsed = time_once(contender)
                if k >= 0:
                    seconds[contender.name].append(elapsed)
    finally:
        if collecting:
            gc.enable()
    return seconds


def rotated(contenders: Sequence[Contender], k: int) -> list[Contender]:
    """The contenders from the k-th on and round again: no one always follows the same one out of the cache."""
    cut = k % len(contenders) if contenders else 0
    return [*contenders[cut:], *contenders[:cut]]


# ---- data ------------------------------------------------------------------------------------------------------------


def changed_positions(numel: int, density: float, seed: int = 0) -> Tensor:
    """Sorted positions in [0, numel), int64, each position taken with probability ``density`` of its own."""
    generator = torch.Generator().manual_seed(seed)
    expected = numel * density
    draws = int(expected + 8 * expected**0.5) + 16
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator).clamp_min(1e-300)
    scale = torch.tensor(1.0 - density, dtype=torch.float64).log()
    positions = ((uniform.log() / scale).floor() + 1).cumsum(0).long() - 1
    return positions[: int(torch.searchsorted(positions, numel))]


def random_masters(numel: int, seed: int = 0) -> Tensor:
    """FP32 [numel], normal with the spread of a language model's weights (0.02)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).mul_(0.02)


def flip_last_bit_(weight: Tensor, positions: Tensor) -> None:
    """Move 2-byte floats by one unit in the last place, up or down: what a small step does to a weight it changes."""
    bits = weight.view(torch.int16)
    bits[positions] = bits[positions] ^ 1


# ---- what ours is compared with --------------------------------------------------------------------------------------


def plain_read(*tensors: Tensor) -> None:
    """Read every byte with all threads: an int64 sum, the fastest reader among torch's and numpy's reductions."""
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        flat[: flat.numel() // 8 * 8].view(torch.int64).sum()


def eager_gate(master: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast, compare bits, nonzero, gather."""
    rounded = master.to(weight.dtype)
    positions = (rounded.view(torch.int16) != weight.view(torch.int16)).nonzero().squeeze(1)
    return positions, rounded[positions]


def eager_diff(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Compare bits, nonzero, gather."""
    positions = (new.view(torch.int16) != old.view(torch.int16)).nonzero().squeeze(1)
    return positions, new[positions]


def eager_exchange(weight: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Gather the old values, write the new ones."""
    old = weight[indices]
    weight.index_put_((indices,), values)
    return old


def eager_encode(new: Tensor, old: Tensor) -> tuple[bytes, bytes]:
    """``new != old``, nonzero, gaps as 16 bits, absolute values, each through zstd level 1."""
    positions = (new != old).nonzero().squeeze(1)
    gaps = torch.diff(positions, prepend=positions.new_zeros(1)).to(torch.uint16)
    values = new[positions].view(torch.int16)
    compressor = zstandard.ZstdCompressor(level=1)
    return compressor.compress(gaps.numpy().tobytes()), compressor.compress(values.numpy().tobytes())


def eager_decode(coded: tuple[bytes, bytes], weight: Tensor) -> None:
    """The other way, into ``weight``."""
    decompressor = zstandard.ZstdDecompressor()
    raw_gaps, raw_values = (bytearray(decompressor.decompress(stream)) for stream in coded)
    if raw_gaps:
        indices = torch.frombuffer(raw_gaps, dtype=torch.uint16).to(torch.int64).cumsum(0)
        weight.index_put_((indices,), torch.frombuffer(raw_values, dtype=weight.dtype))


# ---- the quick run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Contenders of one table row or a few: num_bytes is what GB/s counts; the eager one is named "eager"."""

    num_bytes: int
    contenders: list[Contender]


def run_quick(elements: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Time everything on ``elements`` weights of which ``density`` changed; rows in the order of a table.

    A row: name; seconds, the median; gb_per_s, counting the bytes of the tensors that an operator reads (of the whole
    old and new weights for encode, of the whole weights for decode); ratio_to_eager, how many times as long the eager
    form takes, or None where there is none. A few seconds at 2e7 elements and 7 repeats on two cores.
    """
    if elements < 1 or not 0 < density < 1 or repeats < 1:
        raise ValueError(
            f"run_quick: elements is {elements}, density {density}, repeats {repeats}; "
            "expected elements >= 1, 0 < density < 1, repeats >= 1"
        )
    rows: list[dict[str, Any]] = []
    for group in _groups(elements, density):
        seconds = {name: statistics.median(runs) for name, runs in interleave(group.contenders, repeats).items()}
        for name, median in seconds.items():
            if name != "eager":
                eager = seconds.get("eager")
                rows.append(
                    {
                        "name": name,
                        "seconds": median,
                        "gb_per_s": group.num_bytes / median / 1e9,
                        "ratio_to_eager": None if eager is None else eager / median,
                    }
                )
    return rows


def _groups(elements: int, density: float) -> list[_Group]:
    master = random_masters(elements)
    new = master.bfloat16()
    positions = changed_positions(elements, density)
    old = new.clone()
    flip_last_bit_(old, positions)
    indices = positions.int()
    new_values, old_values = new[positions], old[positions]
    weight, spare, spare_master = old.clone(), torch.empty_like(old), torch.empty_like(master)
    packed = pk.pack_indices(indices, elements)
    patch = Patch.diff({"weight": old}, {"weight": new})
    coded = {profile: patch.to_bytes(profile) for profile in ("fast", "balanced")}
    coded_eagerly = eager_encode(new, old)
    num_changed, dense_bytes = positions.numel(), 2 * elements

    def to_old() -> None:
        pk.apply_patch_(weight, indices, old_values)

    def encode(profile: str) -> bytes:
        return Patch.diff({"weight": old}, {"weight": new}).to_bytes(profile)

    def decode(profile: str) -> None:
        received = Patch.from_bytes(coded[profile], {"weight": weight}, current_digest=patch.base_digest)
        received.apply_({"weight": weight}, current_digest=patch.base_digest)

    def copy() -> None:
        spare_master.copy_(master)
        spare.copy_(old)

    def unpack_eagerly(gaps: Tensor) -> Tensor:
        return gaps.to(torch.int64).cumsum(0)

    gaps = torch.diff(positions, prepend=positions.new_zeros(1)).to(torch.int32)
    return [
        _Group(3 * dense_bytes, [Contender("plain read", lambda: plain_read(master, old)), Contender("copy", copy)]),
        _Group(
            3 * dense_bytes,
            [
                Contender("gate_compact, update", lambda: pk.gate_compact(master, weight, update=True), to_old),
                Contender("gate_compact", lambda: pk.gate_compact(master, old)),
                Contender("eager", lambda: eager_gate(master, old)),
            ],
        ),
        _Group(
            2 * dense_bytes,
            [
                Contender("diff_compact", lambda: pk.diff_compact(new, old)),
                Contender("eager", lambda: eager_diff(new, old)),
            ],
        ),
        _Group(
            4 * num_changed,
            [
                Contender("pack_indices", lambda: pk.pack_indices(indices, elements)),
                Contender("eager", lambda: torch.diff(indices, prepend=indices.new_zeros(1)).to(torch.uint16)),
            ],
        ),
        _Group(
            packed.numel(),
            [
                Contender("unpack_indices", lambda: pk.unpack_indices(packed)),
                Contender("eager", lambda: unpack_eagerly(gaps)),
            ],
        ),
        _Group(
            6 * num_changed,
            [
                Contender("apply_patch_", lambda: pk.apply_patch_(weight, indices, new_values), to_old),
                Contender("eager", lambda: weight.index_put_((positions,), new_values), to_old),
            ],
        ),
        _Group(
            6 * num_changed,
            [
                Contender("exchange_patch_", lambda: pk.exchange_patch_(weight, indices, new_values), to_old),
                Contender("eager", lambda: eager_exchange(weight, positions, new_values), to_old),
            ],
        ),
        _Group(dense_bytes, [Contender("digest", lambda: pk.digest(old, 1))]),
        _Group(
            2 * dense_bytes,
            [
                Contender("diff and encode, fast", lambda: encode("fast")),
                Contender("diff and encode, balanced", lambda: encode("balanced")),
                Contender("eager", lambda: eager_encode(new, old)),
            ],
        ),
        _Group(
            dense_bytes,
            [
                Contender("decode and apply, fast", lambda: decode("fast"), to_old),
                Contender("decode and apply, balanced", lambda: decode("balanced"), to_old),
                Contender("eager", lambda: eager_decode(coded_eagerly, weight), to_old),
            ],
        ),
    ]
