"""From two versions of a model's BF16 weights to bytes and back, beside the codings others use; bytes on the wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pulse_kernels as pk
from bench.conftest import Compare
from bench.peers import Coding, codings
from bench.trace import traced_pairs
from bench.workloads import StatePair, random_checkpoint
from pulse_kernels.cli.bench_quick import Contender, changed_positions

DATA = ("trained, about 2.8%", "trained, about 1%", "random, 1%")


@pytest.fixture(scope="module")
def traced() -> dict[str, StatePair]:
    return dict(zip(DATA, traced_pairs([0.028, 0.01]), strict=False))


@pytest.fixture(scope="module")
def random_state(elements: int) -> StatePair:
    return random_checkpoint(elements, 0.01)


@pytest.fixture(params=DATA)
def pair(request: pytest.FixtureRequest) -> StatePair:
    if request.param in DATA[:2]:
        return request.getfixturevalue("traced")[request.param]
    return request.getfixturevalue("random_state")


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a)


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _encode(coding: Coding, pair: StatePair) -> Contender:
    return Contender(coding.name, lambda: coding.encode(pair.old, pair.new))


def test_encode(compare: Compare, pair: StatePair) -> None:
    """Weights to bytes. Sizes are whole files, ours with header, digests and checksums."""
    num_changed = pk.Patch.diff(pair.old, pair.new).num_changed
    ours, *peers = codings(pair.old)
    coded = {coding.name: coding.encode(pair.old, pair.new) for coding in (ours, *peers)}
    sizes = {coding.name: coding.size(coded[coding.name]) for coding in (ours, *peers)}
    balanced = pk.Patch.peek(coded[ours.name])
    streams = sum(s.index_bytes + s.value_bytes for tensor in balanced.tensors for s in tensor.segments)
    compare(
        _encode(ours, pair),
        *(_encode(peer, pair) for peer in peers),
        section="Codings: weights to bytes",
        title=pair.name,
        num_bytes=pair.num_bytes,
        num_changed=num_changed,
        density=num_changed / pair.numel,
        sizes=sizes,
        header_bytes=sizes[ours.name] - streams,
    )


def test_decode(compare: Compare, pair: StatePair) -> None:
    """Bytes into the receiver's weights. Ours checks everything, the peers nothing."""
    weights = {name: tensor.clone() for name, tensor in pair.old.items()}
    contenders = []
    for coding in codings(pair.old):
        coded = coding.encode(pair.old, pair.new)
        _copy(pair.old, weights)
        coding.decode(coded, weights)
        assert _equal(weights, pair.new), f"{coding.name} does not give the new weights"
        contenders.append(
            Contender(
                coding.name,
                lambda coding=coding, coded=coded: coding.decode(coded, weights),
                lambda: _copy(pair.old, weights),
            )
        )
    compare(
        *contenders,
        section="Codings: bytes to weights",
        title=pair.name,
        num_bytes=pair.num_bytes,
    )


# ---- the steps of both ways ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patch(random_state: StatePair) -> pk.Patch:
    return pk.Patch.diff(random_state.old, random_state.new)


def test_steps_of_diff(compare: Compare, random_state: StatePair, patch: pk.Patch) -> None:
    old, new = random_state.old, random_state.new
    before = list(old.values())
    after = list(new.values())

    def update_digest() -> None:
        digest = pk.StateDigest()
        for name, item in patch.tensors.items():
            digest.update(name, new[name], item.indices, item.old_values, item.values)

    compare(
        Contender("Patch.diff", lambda: pk.Patch.diff(old, new)),
        Contender("diff_compact_many", lambda: pk.diff_compact_many(after, before, return_old=True)),
        Contender("digest of the base", lambda: pk.StateDigest.of(old)),
        Contender("digest update", update_digest),
        section="Steps",
        title="`Patch.diff`",
        num_bytes=2 * random_state.num_bytes,
    )


@pytest.mark.parametrize("profile", ["balanced", "fast"])
def test_steps_of_a_profile(compare: Compare, random_state: StatePair, patch: pk.Patch, profile: str) -> None:
    coded = patch.to_bytes(profile)
    weights = {name: tensor.clone() for name, tensor in random_state.old.items()}

    def put_back() -> None:
        for name, item in patch.tensors.items():
            pk.apply_patch_(weights[name], item.indices, item.old_values, check=False)

    digest = patch.base_digest
    compare(
        Contender("to_bytes", lambda: patch.to_bytes(profile)),
        Contender("from_bytes", lambda: pk.Patch.from_bytes(coded, random_state.old, current_digest=digest)),
        Contender("apply_", lambda: patch.apply_(weights, current_digest=digest), put_back),
        section="Steps",
        title=f"`to_bytes`, {profile}",
        num_changed=patch.num_changed,
        num_file_bytes=len(coded),
    )


@pytest.mark.parametrize("density", [0.001, 0.05])
def test_densities(compare: Compare, elements: int, density: float) -> None:
    """``Patch.diff`` and ``to_bytes`` in one, away from 1%."""
    pair = random_checkpoint(elements, density)
    changed = sum(changed_positions(t.numel(), density, k).numel() for k, t in enumerate(pair.new.values()))
    ours, *peers = codings(pair.old)
    wanted = [peer for peer in peers if peer.name.endswith(("fast", "zstd-1")) and "XOR" not in peer.name]
    compare(
        _encode(ours, pair),
        *(_encode(peer, pair) for peer in wanted),
        section="Codings: weights to bytes",
        title=pair.name,
        num_bytes=pair.num_bytes,
        num_changed=changed,
        density=density,
        sizes={coding.name: coding.size(coding.encode(pair.old, pair.new)) for coding in (ours, *wanted)},
    )
