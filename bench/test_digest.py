"""The state digest, beside hashes people use for the same purpose."""

from __future__ import annotations

import hashlib
import zlib

import torch

import pulse_kernels as pk
from bench.conftest import Compare
from bench.peers import as_bits
from bench.workloads import random_pair
from pulse_kernels.cli.bench_quick import Contender, plain_read

SECTION = "Digest"


def test_digest(compare: Compare, elements: int) -> None:
    """The peers are serial; hash_tensor is torch's own XOR of all elements and sees no exchange of two of them."""
    weight = random_pair(elements, 0.01).new
    memory = memoryview(as_bits(weight)).cast("B")
    peers = [
        Contender("CRC-32", lambda: zlib.crc32(memory)),
        Contender("SHA-256", lambda: hashlib.sha256(memory).digest()),
        Contender("plain read", lambda: plain_read(weight)),
    ]
    if hasattr(torch, "hash_tensor"):
        peers.append(Contender("torch.hash_tensor", lambda: torch.hash_tensor(weight)))
    compare(
        Contender("digest", lambda: pk.digest(weight, 1)),
        *peers,
        section=SECTION,
        title="`digest`, BF16",
        num_bytes=2 * elements,
    )


def test_digest_update(compare: Compare, elements: int) -> None:
    pair = random_pair(elements, 0.01)
    before = pk.digest(pair.old, 1)

    def update() -> torch.Tensor:
        return pk.digest_update(before, pair.indices, pair.old_values, pair.new_values, 1)

    assert torch.equal(update(), pk.digest(pair.new, 1))
    compare(
        Contender("digest_update", update),
        Contender("digest of all", lambda: pk.digest(pair.new, 1)),
        section=SECTION,
        title="`digest_update`, 1% changed",
        num_changed=pair.num_changed,
    )
