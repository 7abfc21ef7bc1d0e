"""Every bad argument gets an error that names what was found and what was expected, and changes no tensor.

Each case calls an operator on the tensors of ``Tensors``, where something is off; lists have the bad entry last.
"""

from __future__ import annotations

import pytest
import torch
from op_helpers import int_bits, random_bits

import pulse_kernels as pk

N = 100


class Tensors:
    """Good arguments of every operator."""

    def __init__(self):
        self.master = random_bits(N, torch.float32, 1)
        self.weight, self.weight2 = (random_bits(N, torch.bfloat16, seed) for seed in (2, 3))
        self.theta, self.local, self.residual, self.residual2 = (random_bits(N, torch.float32, s) for s in (4, 5, 6, 7))
        self.new, self.old, self.old2 = (random_bits(N, torch.int32, seed) for seed in (8, 9, 10))
        self.index, self.value = torch.tensor([1, 5, 99]), random_bits(3, torch.bfloat16, 11)
        self.out_indices, self.out_values = torch.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.bfloat16)
        self.out_old, self.count = torch.zeros(N, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
        self.digest = torch.tensor([1, 2])

    def bits(self):
        return {name: int_bits(tensor).clone() for name, tensor in vars(self).items()}


def meta(tensor):
    return tensor.to("meta")


def gate_cases(t, call, many, place):
    """(id, call, error, message) of a gate: ``call(master, weight)``, ``many(masters, weights)``."""
    bad = {
        "float64 master": ((t.master.double(), t.weight), TypeError, "master is float64, expected float32"),
        "float32 weight": ((t.master, t.master), TypeError, "weight is float32, expected bfloat16 or float16"),
        "shapes": ((t.master, t.weight[:50]), ValueError, r"weight has shape \[50\], master has \[100\]"),
        "reshaped": ((t.master.view(10, 10), t.weight), ValueError, r"\[100\], master has \[10, 10\]"),
        "devices": ((meta(t.master), t.weight), ValueError, "master is on meta and weight on cpu"),
        "sparse": ((t.master.to_sparse(), t.weight), TypeError, "master is torch.sparse_coo"),
    }
    for name, (arguments, error, message) in bad.items():
        yield f"{place}, {name}", lambda a=arguments: call(*a), error, message
        if many is not None and name != "devices":
            yield (
                f"{place}_many, {name}",
                lambda a=arguments: many([t.master, a[0]], [t.weight2, a[1]]),
                error,
                message,
            )
    if many is not None:
        yield f"{place}_many, unequal", lambda: many([t.master], []), ValueError, "1 masters and 0 weights"


def out(t, **changes):
    arguments = {
        "master": t.master,
        "weight": t.weight,
        "indices": t.out_indices,
        "values": t.out_values,
        "count": t.count,
        "old_values": t.out_old,
        "update": True,
    } | changes
    pk.gate_compact_out(**arguments)


def out_cases(t):
    bad = {
        "int16 indices": ({"indices": t.out_indices.short()}, TypeError, "indices is int16, expected int32 or int64"),
        "2-d indices": ({"indices": t.out_indices.view(10, 10)}, ValueError, "indices has 2 dimensions, expected 1"),
        "values of another dtype": ({"values": t.out_values.half()}, TypeError, "values is float16, expected bfloat16"),
        "old values of another dtype": (
            {"old_values": t.residual},
            TypeError,
            "old_values is float32",
        ),
        "values too short": ({"values": t.out_values[:99]}, ValueError, "values has 99 entries, indices has 100"),
        "old values too short": ({"old_values": t.out_old[:99]}, ValueError, "old_values has 99 entries"),
        "int32 count": ({"count": t.count.int()}, TypeError, "count is int32, expected int64"),
        "two counts": ({"count": t.digest}, ValueError, "count has 2 elements, expected one int64"),
        "strided indices": (
            {"indices": torch.zeros(2 * N, dtype=torch.int32)[::2]},
            ValueError,
            "indices is not contiguous",
        ),
        "strided values": ({"values": t.out_values.repeat(2)[::2]}, ValueError, "values is not contiguous"),
        "values on another device": ({"values": meta(t.out_values)}, ValueError, "values on meta"),
        "values in the weight": ({"values": t.weight}, ValueError, "shares memory"),
        "one buffer twice": ({"old_values": t.out_values}, ValueError, "shares memory"),
        "a count in the indices": (
            {"indices": t.index[:1], "values": t.value[:1], "old_values": None, "count": t.index[:1]},
            ValueError,
            "shares memory",
        ),
    }
    for name, (changes, error, message) in bad.items():
        yield f"gate_compact_out, {name}", lambda c=changes: out(t, **c), error, message


def diff_cases(t):
    for update in (False, True):
        bad = {
            "dtypes": ((t.new.short(), t.old), TypeError, "new is int16 and old is int32"),
            "16 bytes": ((t.new.to(torch.complex128),) * 2, TypeError, "complex128, expected a dtype of 1, 2, 4 or 8"),
            "shapes": ((t.new, t.old[:50]), ValueError, r"old has shape \[50\], new has \[100\]"),
        }
        for name, (arguments, error, message) in bad.items():
            yield (
                f"diff_compact, {name}, {update}",
                lambda a=arguments, u=update: pk.diff_compact(*a, update=u),
                error,
                message,
            )
            yield (
                f"diff_compact_many, {name}, {update}",
                lambda a=arguments, u=update: pk.diff_compact_many([t.new, a[0]], [t.old2, a[1]], update=u),
                error,
                message,
            )
    yield (
        "diff_compact, devices",
        lambda: pk.diff_compact(t.new, meta(t.old)),
        ValueError,
        "new is on cpu and old on meta",
    )
    yield "diff_compact_many, unequal", lambda: pk.diff_compact_many([t.new], []), ValueError, "1 new and 0 old"
    huge = t.new[:1].expand(2**31)
    yield (
        "diff_compact, int32 for 2^31",
        lambda: pk.diff_compact(huge, huge, index_dtype=torch.int32),
        ValueError,
        "2147483648 elements do not fit int32",
    )
    for dtype in (torch.int16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        message = f"index_dtype is {name}, expected int32 or int64"
        yield (
            f"{name} positions",
            lambda d=dtype: pk.gate_compact(t.master, t.weight, index_dtype=d),
            TypeError,
            message,
        )
        yield (
            f"{name} positions, update",
            lambda d=dtype: pk.gate_compact(t.master, t.weight, update=True, index_dtype=d),
            TypeError,
            message,
        )


# What is wrong with positions of a tensor of 100 elements, and how the message says it.
DISORDER = {
    "unsorted": ([1, 5, 3], r"indices\[2\] is 3 after 5; indices must be strictly increasing"),
    "duplicate": ([1, 5, 5], r"indices\[2\] is 5 after 5; indices must be strictly increasing"),
    "negative": ([-1, 5, 99], r"indices\[0\] is -1, expected 0 <= index < 100"),
    "beyond": ([1, 5, 100], r"indices\[2\] is 100, expected 0 <= index < 100"),
    "far beyond": ([1, 5, 2**31 - 1], r"indices\[2\] is 2147483647, expected 0 <= index < 100"),
}


def patch_cases(t):
    operators = {
        "apply_patch_": (pk.apply_patch_, pk.apply_patch_many_),
        "exchange_patch_": (pk.exchange_patch_, pk.exchange_patch_many_),
    }
    bad = {
        "float indices": (
            (t.weight, t.index.float(), t.value),
            TypeError,
            "indices is float32, expected int32 or int64",
        ),
        "int16 indices": ((t.weight, t.index.short(), t.value), TypeError, "indices is int16, expected int32 or int64"),
        "bool indices": ((t.weight, t.index.bool(), t.value), TypeError, "indices is bool, expected int32 or int64"),
        "2-d indices": ((t.weight, t.index.view(3, 1), t.value), ValueError, "indices has 2 dimensions, expected 1"),
        "2-d values": ((t.weight, t.index, t.value.view(1, 3)), ValueError, "values has 2 dimensions, expected 1"),
        "lengths": ((t.weight, t.index, t.value[:2]), ValueError, "values has 2 entries, indices has 3"),
        "dtypes": ((t.weight, t.index, t.value.half()), TypeError, "values are float16, weight is bfloat16"),
        "values' device": ((t.weight, t.index, meta(t.value)), ValueError, "values on meta"),
        "indices' device": ((t.weight, meta(t.index), t.value), ValueError, "indices on meta"),
        "sparse values": ((t.weight, t.index, t.value.to_sparse()), TypeError, "values is torch.sparse_coo"),
        "16 bytes": (
            (t.master.to(torch.complex128), t.index, t.value.to(torch.complex128)),
            TypeError,
            "weight is complex128, expected a dtype of 1, 2, 4 or 8 bytes",
        ),
    }
    for name, (wrong, message) in DISORDER.items():
        for dtype in (torch.int32, torch.int64):
            bad[f"{name} {dtype}"] = ((t.weight, torch.tensor(wrong, dtype=dtype), t.value), IndexError, message)
    for op, (one, many) in operators.items():
        for name, (arguments, error, message) in bad.items():
            yield f"{op}, {name}", lambda one=one, a=arguments: one(*a), error, f"{op}: .*{message}"
            if "device" not in name:
                lists = [[good, wrong] for good, wrong in zip((t.weight2, t.index, t.value), arguments, strict=True)]
                yield f"{op}many, {name}", lambda many=many, ls=lists: many(*ls), error, message
        unequal = lambda many=many: many([t.weight], [t.index], [])  # noqa: E731
        yield f"{op}many, unequal", unequal, ValueError, "1 weights and 0 values"


def residual_cases(t):
    bad = {
        "float64 theta": ((t.theta.double(), t.local, t.residual), TypeError, "theta is float64, expected float32"),
        "bf16 local": ((t.theta, t.local.bfloat16(), t.residual), TypeError, "local is bfloat16, expected float32"),
        "shapes": ((t.theta, t.local, t.residual[:50]), ValueError, r"residual has shape \[50\], theta has \[100\]"),
        "devices": ((t.theta, meta(t.local), t.residual), ValueError, "local on meta"),
    }
    good = (t.theta, t.local, t.residual2)
    for name, (arguments, error, message) in bad.items():
        yield f"gate_residual, {name}", lambda a=arguments: pk.gate_residual(*a), error, message
        yield f"commit_residual_, {name}", lambda a=arguments: pk.commit_residual_(*a, t.index), error, message
        if name != "devices":
            lists = [[first, wrong] for first, wrong in zip(good, arguments, strict=True)]
            yield f"gate_residual_many, {name}", lambda ls=lists: pk.gate_residual_many(*ls), error, message
            yield (
                f"commit_residual_many_, {name}",
                lambda ls=lists: pk.commit_residual_many_(*ls, [t.index, t.index]),
                error,
                message,
            )
    triple = (t.theta, t.local, t.residual)
    wrong_view = lambda: pk.gate_residual(*triple, view=torch.float32)  # noqa: E731
    yield "gate_residual, view", wrong_view, TypeError, "view is float32, expected bfloat16 or float16"
    for name, (wrong, message) in DISORDER.items():
        index = torch.tensor(wrong)
        yield f"commit_residual_, {name}", lambda i=index: pk.commit_residual_(*triple, i), IndexError, message
        lists = [list(pair) for pair in zip(good, triple, strict=True)]
        yield (
            f"commit_residual_many_, {name}",
            lambda i=index, ls=lists: pk.commit_residual_many_(*ls, [t.index, i]),
            IndexError,
            message,
        )
    floats = lambda: pk.commit_residual_(*triple, t.index.float())  # noqa: E731
    yield "commit_residual_, float indices", floats, TypeError, "indices is float32, expected int32 or int64"
    unequal = lambda: pk.commit_residual_many_([t.theta], [t.local], [], [t.index])  # noqa: E731
    yield "commit_residual_many_, unequal", unequal, ValueError, "1 thetas and 0 residuals"
    unequal = lambda: pk.gate_residual_many([t.theta], [], [t.residual])  # noqa: E731
    yield "gate_residual_many, unequal", unequal, ValueError, "1 thetas and 0 locals"


def packing_cases(t):
    for name, (wrong, message) in DISORDER.items():
        for dtype in (torch.int32, torch.int64):
            index = torch.tensor(wrong, dtype=dtype)
            yield f"pack_indices, {name} {dtype}", lambda i=index: pk.pack_indices(i, N), IndexError, message
            many = lambda i=index: pk.pack_indices_many([t.index, i], [N, N])  # noqa: E731
            yield f"pack_indices_many, {name} {dtype}", many, IndexError, message
    floats = "indices is float32, expected int32 or int64"
    yield "pack_indices, floats", lambda: pk.pack_indices(t.index.float(), N), TypeError, floats
    yield "pack_indices, 2-d", lambda: pk.pack_indices(t.index.view(3, 1), N), ValueError, "2 dimensions, expected 1"
    for numel in (-1, 2**62 + 1):
        message = f"numel is {numel}, expected 0 <= numel <= 2\\^62"
        yield f"pack_indices, {numel} elements", lambda n=numel: pk.pack_indices(t.index, n), ValueError, message
    yield (
        "pack_indices_many, unequal",
        lambda: pk.pack_indices_many([t.index], []),
        ValueError,
        "1 indices and 0 numels",
    )
    yield "unpack_indices, dtype", lambda: pk.unpack_indices(t.index), TypeError, "packed is int64, expected uint8"
    blob = pk.pack_indices(t.index, N)
    for index_dtype in (None, torch.int64):
        flat = lambda d=index_dtype: pk.unpack_indices(blob.view(-1, 2), index_dtype=d)  # noqa: E731
        yield f"unpack_indices, 2-d, {index_dtype}", flat, ValueError, "packed has 2 dimensions, expected 1"
    narrow = lambda: pk.unpack_indices(blob, index_dtype=torch.int8)  # noqa: E731
    yield "unpack_indices, int8", narrow, TypeError, "index_dtype is int8, expected int32 or int64"
    broken = lambda: pk.unpack_indices_many([blob, blob[:-4]])  # noqa: E731
    yield "unpack_indices_many, truncated", broken, pk.PatchFormatError, "payload of 4"


def digest_cases(t):
    digest, update = pk.digest, pk.digest_update
    yield "digest, 16 bytes", lambda: digest(t.new.to(torch.complex128), 1), TypeError, "complex128"
    yield "digest, start", lambda: digest(t.new, 1, -1), ValueError, "start is -1, expected a position >= 0"
    yield "digest_many, unequal", lambda: pk.digest_many([t.new], []), ValueError, "1 tensors and 0 keys"
    v = t.value
    bad = {
        "digest's dtype": ((t.digest.int(), t.index, v, v), TypeError, "digest is int32, expected int64"),
        "digest's shape": (
            (t.index, t.index, v, v),
            ValueError,
            r"shape \[3\], expected \[2\] as digest",
        ),
        "float indices": ((t.digest, t.index.float(), v, v), TypeError, "indices is float32"),
        "dtypes": ((t.digest, t.index, v, v.half()), TypeError, "old is bfloat16 and new is float16"),
        "lengths": ((t.digest, t.index, v[:2], v), ValueError, "old has 2 entries, indices has 3"),
        "devices": ((t.digest, t.index, v, meta(v)), ValueError, "new on meta"),
        "unsorted": ((t.digest, t.index.flip(0), v, v), IndexError, r"indices\[1\] is 5 after 99"),
        "negative": ((t.digest, t.index - 2, v, v), IndexError, r"indices\[0\] is -1"),
    }
    for name, (arguments, error, message) in bad.items():
        yield f"digest_update, {name}", lambda a=arguments: update(*a, 1), error, message
    unequal = lambda: pk.digest_update_many([t.digest], [t.index], [v], [], [1])  # noqa: E731
    yield "digest_update_many, unequal", unequal, ValueError, "1 digests and 0 new"


def cases(t):
    def updating(function):
        return lambda *arguments: function(*arguments, update=True)

    yield from gate_cases(t, pk.visibility_mask, pk.visibility_mask_many, "visibility_mask")
    yield from gate_cases(t, pk.gate_compact, pk.gate_compact_many, "gate_compact")
    yield from gate_cases(t, updating(pk.gate_compact), updating(pk.gate_compact_many), "gate_compact_")
    yield from gate_cases(t, lambda master, weight: out(t, master=master, weight=weight), None, "gate_compact_out")
    yield from out_cases(t)
    yield from diff_cases(t)
    yield from patch_cases(t)
    yield from residual_cases(t)
    yield from packing_cases(t)
    yield from digest_cases(t)


NAMES = [case[0] for case in cases(Tensors())]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused_and_nothing_changes(name):
    tensors = Tensors()
    ((_, call, error, message),) = [case for case in cases(tensors) if case[0] == name]
    before = tensors.bits()
    with pytest.raises(error, match=message) as caught:
        call()
    assert caught.type is error
    for key, bits in tensors.bits().items():
        assert torch.equal(bits, before[key]), key


def test_meta_tensors_among_others_are_refused_in_every_list_form():
    """torch hands such a call to the fake implementations, which leave the CPU tensors' results unset."""
    t = Tensors()
    index, value = t.index, t.value
    blob, digest = pk.pack_indices(index, N), torch.tensor([1, 2])
    rows = {
        pk.visibility_mask_many: (t.master, t.weight),
        pk.gate_compact_many: (t.master, t.weight),
        pk.diff_compact_many: (t.new, t.old),
        pk.gate_residual_many: (t.theta, t.local, t.residual),
        pk.commit_residual_many_: (t.theta, t.local, t.residual, index),
        pk.apply_patch_many_: (t.weight, index, value),
        pk.exchange_patch_many_: (t.weight, index, value),
        pk.apply_packed_patch_many_: (t.weight, blob, value),
        pk.exchange_packed_patch_many_: (t.weight, blob, value),
        pk.pack_indices_many: (index, N),
        pk.unpack_indices_many: (blob,),
        pk.digest_many: (t.weight, 1),
        pk.digest_update_many: (digest, index, value, value, 1),
    }
    before = t.bits()
    for function, row in rows.items():
        columns = [[item, meta(item) if isinstance(item, torch.Tensor) else item] for item in row]
        with pytest.raises(ValueError, match=f"^{function.__name__}: .* meta"):
            function(*columns)
    assert set(rows) == {value for name, value in vars(pk).items() if "_many" in name}
    with pytest.raises(ValueError, match="packed is on meta, where no header can be read"):
        pk.unpack_indices(meta(blob))
    for key, bits in t.bits().items():
        assert torch.equal(bits, before[key]), key


@pytest.mark.parametrize("lazy", ["conjugated", "negated"])
def test_lazily_conjugated_or_negated_tensors_are_read_but_not_written(lazy):
    base = random_bits(8 * N, torch.uint8, 1).view(torch.complex64)
    tensor = base.conj() if lazy == "conjugated" else base.conj().imag
    assert tensor.is_conj() or tensor.is_neg()
    resolved, before = tensor.resolve_conj().resolve_neg(), int_bits(base)
    index, value, blob = torch.tensor([1, 5]), tensor[:2], pk.pack_indices(torch.tensor([1, 5]), N)
    assert torch.equal(pk.digest(tensor, 1), pk.digest(resolved, 1))
    assert pk.diff_compact(tensor, resolved)[0].numel() == 0
    plain = resolved.clone()
    pk.apply_patch_(plain, index, value)
    assert torch.equal(int_bits(plain[index]), int_bits(resolved[:2]))
    calls = {
        "apply_patch_: weight": lambda: pk.apply_patch_(tensor, index, value),
        "exchange_patch_many_: weights": lambda: pk.exchange_patch_many_([plain, tensor], [index] * 2, [value] * 2),
        "apply_packed_patch_: weight": lambda: pk.apply_packed_patch_(tensor, blob, value),
        "diff_compact_: old": lambda: pk.diff_compact(plain, tensor, update=True),
        "diff_compact_many_: olds": lambda: pk.diff_compact_many([plain], [tensor], update=True),
    }
    for place, call in calls.items():
        with pytest.raises(ValueError, match=f"^{place} is lazily conjugated or negated"):
            call()
    assert torch.equal(int_bits(base), before)


def test_wrong_types_are_refused():
    t = Tensors()
    for call, message in [
        (lambda: pk.apply_patch_(None, t.index, t.value), "^apply_patch_: weight is None, expected a tensor"),
        (lambda: pk.gate_compact(t.master, None), "^gate_compact: weight is None, expected a tensor"),
        (lambda: pk.digest_many(t.new, [1] * N), "^digest_many: tensors is a Tensor, expected a list"),
        (lambda: pk.unpack_indices_many(None), "^unpack_indices_many: packed is a NoneType, expected a list"),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


def test_every_case_has_its_name():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("place", [0, 1, 262143, 262144, 262145, 524288, 599999])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_bad_position_is_named_wherever_it_is(place, dtype, threads):
    n = 600000
    good = torch.arange(n, dtype=dtype) * 2
    weight = torch.zeros(2 * n, dtype=torch.uint8)
    values = torch.ones(n, dtype=torch.uint8)
    for wrong in (-5, good[place - 1].item() if place else -1, 2 * n):
        bad = good.clone()
        bad[place] = wrong
        bad[-1:] = 2 * n if place < n - 1 else bad[-1:]  # another one, further on
        if wrong == 2 * n or wrong < 0:
            message = rf"indices\[{place}\] is {wrong}, expected 0 <= index < {2 * n}"
        else:
            message = rf"indices\[{place}\] is {wrong} after {wrong}"
        with pytest.raises(IndexError, match=message):
            pk.apply_patch_(weight, bad, values)
    assert not weight.any()


def test_unchecked_patches_skip_the_check():
    # check=False is for positions this package made itself; here order alone is wrong, which scattering survives.
    weight = torch.zeros(5)
    pk.apply_patch_(weight, torch.tensor([3, 1]), torch.tensor([1.0, 2.0]), check=False)
    assert weight.tolist() == [0, 2, 0, 1, 0]
