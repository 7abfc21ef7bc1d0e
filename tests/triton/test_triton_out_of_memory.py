"""Running out of memory at any allocation of a call that writes leaves every tensor as it was; how many there are."""

from __future__ import annotations

import pytest
import torch
from allocations import Refusals
from op_helpers import all_same_bits, altered, random_bits, random_positions

from pulse_kernels.backends import reference, tiles, triton
from pulse_kernels.backends.triton import launch

pytestmark = [] if triton.interpreted() else [pytest.mark.ptx]

# Two sizes of values and two of indices, so that several launches write; strided weights among them.
SIZES = [(torch.bfloat16, 700), (torch.float32, 90), (torch.bfloat16, 9000), (torch.bfloat16, 50)]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in two dimensions with gaps between them."""
    room = torch.zeros(10, 2 * (tensor.numel() // 10), dtype=tensor.dtype)
    view = room[:, ::2].t()
    view.copy_(tensor.view(view.shape))
    return view


def weights_of(dtypes_and_sizes) -> list[torch.Tensor]:
    flat = [random_bits(n, dtype, k) for k, (dtype, n) in enumerate(dtypes_and_sizes)]
    return [*flat, *(strided(tensor) for tensor in flat)]


@pytest.fixture
def refusals(kernels, monkeypatch):
    """Refuses the back end's allocations only, not those of what runs its kernels."""
    run, refusals = launch.run, Refusals()

    def uncounted(*arguments):
        with refusals.paused():
            run(*arguments)

    monkeypatch.setattr(launch, "run", uncounted)
    return refusals


def assert_all_or_nothing(refusals, call, written: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    before = [tensor.clone(memory_format=torch.preserve_format) for tensor in written]
    for _ in refusals.until_done(call):
        assert all_same_bits(written, before), f"allocation {refusals.last} failed"
    assert all_same_bits(written, expected)
    assert refusals.last > 3


@pytest.mark.parametrize("op", ["gate_compact", "diff_compact"])
@pytest.mark.parametrize("return_old", [False, True])
def test_compact(refusals, op, return_old):
    from pulse_kernels.backends.triton import operators

    targets = weights_of([(dtype if op == "diff_compact" else torch.float16, n) for dtype, n in SIZES])
    targets += weights_of([(torch.bfloat16, 40)])
    if op == "gate_compact":
        sources = [random_bits(t.numel(), torch.float32, 9).view(t.shape) for t in targets]
        expected = [
            reference.round_bits(s, t.dtype).view(t.dtype).view(t.shape) for s, t in zip(sources, targets, strict=True)
        ]
    else:
        sources = expected = [altered(t, 0.2, 3).contiguous() for t in targets]
    dtypes = [torch.int32, torch.int64] * 5

    def call():
        tiles._kept.cache_clear()
        operators.compact_many(op, sources, targets, dtypes, True, return_old)

    assert_all_or_nothing(refusals, call, targets, expected)


@pytest.mark.parametrize("keep_old", [False, True])
def test_patches(refusals, keep_old):
    from pulse_kernels.backends.triton import operators

    weights = weights_of(SIZES)
    indices = [random_positions(30, t.numel(), k, [torch.int32, torch.int64][k % 2]) for k, t in enumerate(weights)]
    values = [random_bits(2 * i.numel(), t.dtype, 7)[::2] for i, t in zip(indices, weights, strict=True)]
    expected = [t.clone(memory_format=torch.preserve_format) for t in weights]
    old = [reference.exchange_patch_(*row) for row in zip(expected, indices, values, strict=True)]
    found = []

    def call():
        if keep_old:
            found[:] = operators.exchange_patch_many_(weights, indices, values)
        else:
            operators.apply_patch_many_(weights, indices, values)

    assert_all_or_nothing(refusals, call, weights, expected)
    assert not keep_old or all_same_bits(found, old)


def test_commit(refusals):
    from pulse_kernels.backends.triton import operators

    thetas, locals_ = ([torch.randn(n) for n in (9000, 60, 120)] for _ in range(2))
    residuals = [torch.randn(9000), torch.randn(60), strided(torch.randn(120))]
    thetas[2], locals_[2] = thetas[2].view(residuals[2].shape), locals_[2].view(residuals[2].shape)
    indices = [
        random_positions(n, 60, n, dtype) for n, dtype in ((20, torch.int32), (9, torch.int64), (5, torch.int32))
    ]
    expected = [t.clone(memory_format=torch.preserve_format) for t in residuals]
    for row in zip(thetas, locals_, expected, indices, strict=True):
        reference.commit_residual_(*row)
    call = lambda: operators.commit_residual_many_(thetas, locals_, residuals, indices)  # noqa: E731
    assert_all_or_nothing(refusals, call, residuals, expected)


def test_digests_of_many_take_no_more_allocations_than_those_of_few(refusals):
    from pulse_kernels.backends.triton import operators

    def counts(n: int) -> tuple[int, int]:
        tensors = [random_bits(5 * (k % 4), torch.bfloat16, k) for k in range(n)]  # empty ones among them
        keys, digests = list(range(n)), [torch.tensor([k, -k]) for k in range(n)]
        indices = [random_positions(3, t.numel(), 1) for t in tensors]
        old, new = (
            [t[i] for t, i in zip(tensors, indices, strict=True)],
            [random_bits(len(i), torch.bfloat16, 2) for i in indices],
        )
        found = []
        dense = refusals.count(lambda: found.extend(operators.digest_many(tensors, keys, keys)))
        update = refusals.count(lambda: found.extend(operators.digest_update_many(digests, indices, old, new, keys)))
        expected = [reference.digest(t, k, k) for t, k in zip(tensors, keys, strict=True)]
        expected += [reference.digest_update(*row) for row in zip(digests, indices, old, new, keys, strict=True)]
        assert all_same_bits(found, expected)
        assert all_same_bits(digests, [torch.tensor([k, -k]) for k in range(n)])
        return dense, update

    assert counts(6) == counts(60)
