"""What people do without this package: numpy forms of the operators, and codings of a whole step.

Each coding goes from two versions of a model's weights to bytes and from those bytes to the receiver's weights, tensor
by tensor. None of the peers checks anything; ours checks digests of the base and of the result, CRCs, order and bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

import pulse_kernels as pk
from bench.workloads import State
from pulse_kernels.cli.bench_quick import eager_decode, eager_encode

# ---- operators in numpy: no bfloat16 there, so bits ----------------------------------------------------------------


def as_bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as unsigned integers of the element's size."""
    wide = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(wide).numpy().view(f"u{tensor.element_size()}")


def numpy_gate(master: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Round to nearest even, compare, flatnonzero, gather; ``master``: FP32 bits, ``weight``: BF16 bits."""
    rounded = ((master + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16)
    positions = np.flatnonzero(rounded != weight)
    return positions, rounded[positions]


def numpy_diff(new: np.ndarray[Any, Any], old: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    positions = np.flatnonzero(new != old)
    return positions, new[positions]


# ---- codings ---------------------------------------------------------------------------------------------------------


class Coding(Protocol):
    name: str

    def encode(self, old: State, new: State) -> Any: ...

    def size(self, coded: Any) -> int: ...

    def decode(self, coded: Any, weights: State) -> None: ...


@dataclass
class Pulse:
    """Ours: diff, state digests, profile; on the way back the receiver knows its digest, as a subscriber does."""

    profile: str
    base_digest: str

    @property
    def name(self) -> str:
        return f"pulse_kernels, {self.profile}"

    def encode(self, old: State, new: State) -> bytes:
        return pk.Patch.diff(old, new).to_bytes(self.profile)

    def size(self, coded: bytes) -> int:
        return len(coded)

    def decode(self, coded: bytes, weights: State) -> None:
        patch = pk.Patch.from_bytes(coded, weights, current_digest=self.base_digest)
        patch.apply_(weights, current_digest=self.base_digest)


class _Streams:
    """A coding whose coded form is a list of byte strings for each tensor."""

    def size(self, coded: dict[str, Sequence[bytes]]) -> int:
        return sum(len(stream) for streams in coded.values() for stream in streams)


class Coo(_Streams):
    name = "int32 positions + values, raw"

    def encode(self, old: State, new: State) -> dict[str, Sequence[bytes]]:
        coded = {}
        for name, tensor in new.items():
            positions = (tensor.view(-1) != old[name].view(-1)).nonzero().squeeze(1)
            values = tensor.view(-1)[positions].view(torch.int16)
            coded[name] = (positions.int().numpy().tobytes(), values.numpy().tobytes())
        return coded

    def decode(self, coded: dict[str, Sequence[bytes]], weights: State) -> None:
        for name, (raw_positions, raw_values) in coded.items():
            if raw_positions:
                weight = weights[name].view(-1)
                positions = torch.frombuffer(bytearray(raw_positions), dtype=torch.int32).long()
                weight.index_put_((positions,), torch.frombuffer(bytearray(raw_values), dtype=weight.dtype))


class Gaps16(_Streams):
    name = "u16 gaps + values, zstd-1"

    def encode(self, old: State, new: State) -> dict[str, Sequence[bytes]]:
        return {name: eager_encode(tensor.view(-1), old[name].view(-1)) for name, tensor in new.items()}

    def decode(self, coded: dict[str, Any], weights: State) -> None:
        for name, streams in coded.items():
            eager_decode(streams, weights[name].view(-1))


class NumpyGaps16(Gaps16):
    name = "u16 gaps + values, zstd-1, numpy"

    def encode(self, old: State, new: State) -> dict[str, Sequence[bytes]]:
        coded = {}
        compressor = zstandard.ZstdCompressor(level=1)
        for name, tensor in new.items():
            positions, values = numpy_diff(as_bits(tensor.view(-1)), as_bits(old[name].view(-1)))
            gaps = np.diff(positions, prepend=0).astype(np.uint16)
            coded[name] = (compressor.compress(gaps.tobytes()), compressor.compress(values.tobytes()))
        return coded


class Xor(_Streams):
    name = "whole-tensor XOR, zstd-1"

    def encode(self, old: State, new: State) -> dict[str, Sequence[bytes]]:
        compressor = zstandard.ZstdCompressor(level=1)
        return {
            name: (compressor.compress(np.bitwise_xor(as_bits(tensor.view(-1)), as_bits(old[name].view(-1)))),)
            for name, tensor in new.items()
        }

    def decode(self, coded: dict[str, Sequence[bytes]], weights: State) -> None:
        decompressor = zstandard.ZstdDecompressor()
        for name, (stream,) in coded.items():
            bits = as_bits(weights[name].view(-1))
            np.bitwise_xor(bits, np.frombuffer(decompressor.decompress(stream), dtype=bits.dtype), out=bits)


def codings(old: State) -> list[Coding]:
    """Ours first, then the peers'."""
    digest = pk.StateDigest.of(old).hexdigest()
    return [Pulse("balanced", digest), Pulse("fast", digest), Coo(), Gaps16(), NumpyGaps16(), Xor()]
