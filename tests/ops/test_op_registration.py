"""torch.library.opcheck on every registered operator: schema, fake implementation, autograd and AOT dispatch."""

from __future__ import annotations

import pytest
import torch
from op_helpers import random_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import pulse_kernels as pk
from pulse_kernels import ops

N = 130


def master(seed=1):
    return random_bits(N, torch.float32, seed).nan_to_num(1.0)


def weight(seed=2):
    return random_bits(N, torch.bfloat16, seed).nan_to_num(1.0)


def strided():
    return torch.zeros(10, 13, dtype=torch.bfloat16).t()


def ints(seed=3):
    return random_bits(N, torch.int32, seed)


def position():
    return torch.tensor([1, 5, 77])


def patch():
    return position(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)


def out_buffers(dtype, capacity=N):
    return (
        torch.zeros(capacity, dtype=torch.int32),
        torch.zeros(capacity, dtype=dtype),
        torch.zeros(1, dtype=torch.int64),
    )


def compact_samples(op, source, target):
    """Samples of ``op`` and its forms; the in-place ones (a trailing underscore) get fresh targets."""
    one = [
        ((source(), target()), {"return_old": True, "index_dtype": torch.int64}),
        ((source()[:0], target()[:0]), {}),
    ]
    many = [(([source(), source()[:5]], [target(), target()[:5]]), {"return_old": True})]
    out = [
        ((source(), target(), *out_buffers(target().dtype), torch.zeros(N, dtype=target().dtype)), {}),
        ((source(), target(), *out_buffers(target().dtype, 3)), {}),  # too small
    ]
    return {f"{op}{mark}": one for mark in ("", "_")} | {
        f"{op}_many": many,
        f"{op}_many_": many,
        f"{op}_out": out,
        f"{op}_out_": out,
    }


def samples():
    """Operator -> list of (arguments, options)."""
    digest = torch.tensor([1, 2])
    triple = (master(1), master(2), master(3) * 1e-3)
    lists = tuple([t] for t in triple)
    old, new = torch.zeros(3, dtype=torch.bfloat16), patch()[1]
    packed = pk.pack_indices(position(), N)
    return {
        "visibility_mask": [((master(), weight()), {}), ((master().view(13, 10), strided()), {})],
        "visibility_mask_many": [(([master(), master()], [weight(), weight()]), {})],
        **compact_samples("gate_compact", master, weight),
        **compact_samples("diff_compact", ints, lambda: ints(4)),
        "gate_residual": [(triple, {}), (triple, {"view": torch.float16, "index_dtype": torch.int64})],
        "gate_residual_many": [(lists, {})],
        "commit_residual_": [((*triple, position()), {}), ((*triple, position()), {"check": False})],
        "commit_residual_many_": [((*lists, [position()]), {})],
        "apply_patch_": [((weight(), *patch()), {}), ((strided(), *patch()), {"check": False})],
        "apply_patch_many_": [(([weight(), strided()], [position()] * 2, [patch()[1]] * 2), {})],
        "exchange_patch_": [((weight(), *patch()), {}), ((strided(), *patch()), {"check": False})],
        "exchange_patch_many_": [(([weight(), strided()], [position()] * 2, [patch()[1]] * 2), {})],
        "pack_indices": [((position(), N), {}), ((position().int(), 2**40), {})],
        "pack_indices_many": [(([position(), position()], [N, N]), {})],
        "unpack_indices": [((packed,), {}), ((packed,), {"index_dtype": torch.int32})],
        "unpack_indices_many": [(([packed, packed],), {})],
        "apply_packed_patch_": [((weight(), packed, patch()[1]), {}), ((strided(), packed, patch()[1]), {})],
        "apply_packed_patch_many_": [(([weight(), strided()], [packed] * 2, [patch()[1]] * 2), {})],
        "exchange_packed_patch_": [((weight(), packed, patch()[1]), {}), ((strided(), packed, patch()[1]), {})],
        "exchange_packed_patch_many_": [(([weight(), strided()], [packed] * 2, [patch()[1]] * 2), {})],
        "digest": [((weight(), 7), {}), ((strided(), -7, 300), {})],
        "digest_many": [(([weight(), ints()], [1, 2]), {})],
        "digest_update": [((digest, position(), old, new, 7), {})],
        "digest_update_many": [(([digest, digest], [position()] * 2, [old] * 2, [new] * 2, [1, 2]), {})],
    }


def test_every_operator_has_samples():
    assert sorted(samples()) == sorted(ops.registered_operators())
    for name in ops.registered_operators():
        assert hasattr(torch.ops.pulse_kernels, name)


@pytest.mark.parametrize("name", ops.registered_operators())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_opcheck(name):
    operator = getattr(torch.ops.pulse_kernels, name).default
    for arguments, options in samples()[name]:
        torch.library.opcheck(operator, arguments, options)


@pytest.mark.parametrize("name", ops.registered_operators())
def test_a_trailing_underscore_marks_what_writes_its_weight(name):
    schema = getattr(torch.ops.pulse_kernels, name).default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    buffers = {"indices", "values", "count", "old_values"} if "_out" in name else set()
    assert buffers <= set(written)
    assert bool(set(written) - buffers) == name.endswith("_")


def test_fakes_choose_index_dtypes_by_size():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode.shape_env = ShapeEnv()
        for numel, expected in [(2**31 - 1, torch.int32), (2**31, torch.int64)]:
            master, weight = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
            assert pk.gate_compact(master, weight)[0].dtype is expected
            assert pk.gate_compact_many([master], [weight], update=True)[0][0].dtype is expected
            assert pk.diff_compact(master, master)[0].dtype is expected
            assert pk.gate_residual(master, master, master)[0].dtype is expected
        with pytest.raises(ValueError, match="2147483648 elements do not fit int32 indices"):
            pk.gate_compact(master, weight, index_dtype=torch.int32)
        buffers = (
            torch.empty(5, dtype=torch.int32),
            torch.empty(5, dtype=torch.bfloat16),
            torch.empty(1, dtype=torch.int64),
        )
        with pytest.raises(ValueError, match="do not fit int32 indices"):
            pk.gate_compact_out(master, weight, *buffers)
        assert pk.exchange_patch_(weight, torch.empty(7, dtype=torch.int64), weight[:7]).shape == (7,)
        assert pk.digest(weight, 1).shape == (2,)
        assert pk.visibility_mask(master, weight).dtype is torch.bool
