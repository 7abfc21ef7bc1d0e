"""What a call reads may lie in what it writes, or hold bytes that torch's own copies would not keep."""

from __future__ import annotations

import pytest
import torch
from op_helpers import all_same_bits, same_bits

import pulse_kernels as pk
from pulse_kernels.backends import reference


class TestPositionsInsideAWeight:
    def test_apply_many(self):
        # The first row overwrites the second's positions, with ones far out of range.
        positions, weight = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(10)
        far = torch.tensor([2_000_000_000] * 2, dtype=torch.int32)
        pk.apply_patch_many_([positions, weight], [torch.tensor([0, 1]), positions], [far, torch.tensor([1.0, 2.0])])
        assert weight.tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0, 0]
        assert torch.equal(positions, far)

    def test_exchange_many(self):
        positions, weight = torch.tensor([0, 1]), torch.arange(4.0)
        old = pk.exchange_patch_many_(
            [positions, weight], [torch.tensor([1]), positions], [torch.tensor([99]), weight[2:]]
        )
        assert positions.tolist() == [0, 99]
        assert [item.tolist() for item in old] == [[1], [0.0, 1.0]]
        assert weight.tolist() == [2, 3, 2, 3]

    def test_commit_many(self):
        residuals = [torch.tensor([0, 1], dtype=torch.int32).view(torch.float32), torch.ones(3)]
        thetas, locals_ = [torch.full((2,), 9.0), torch.ones(3)], [torch.zeros(2), torch.ones(3)]
        pk.commit_residual_many_(thetas, locals_, residuals, [torch.tensor([1]), residuals[0].view(torch.int32)])
        assert residuals[0].tolist() == [9, 0]
        assert residuals[1].tolist() == [0, 0, 1]

    def test_a_patch_in_the_weights_it_changes(self):
        positions, weight = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(10)
        far = torch.tensor([2_000_000_000] * 2, dtype=torch.int32)
        tensors = {
            "a": pk.TensorPatch("a", (2,), torch.int32, torch.tensor([0, 1]), far),
            "b": pk.TensorPatch("b", (10,), torch.float32, positions, torch.tensor([1.0, 2.0])),
        }
        pk.Patch(tensors=tensors).apply_({"a": positions, "b": weight})
        assert weight[:3].tolist() == [1, 2, 0]
        assert torch.equal(positions, far)


@pytest.mark.parametrize("buffer", ["indices", "values", "old_values", "count"])
def test_a_buffer_of_an_out_form_inside_the_source(buffer):
    source, target = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    buffers = {name: torch.zeros(8, dtype=torch.int64) for name in ("indices", "values", "old_values")}
    buffers["count"] = torch.zeros(1, dtype=torch.int64)
    buffers[buffer] = source[: buffers[buffer].numel()]
    with pytest.raises(ValueError, match="a buffer shares memory with an input or another"):
        pk.diff_compact_out(source, target, **buffers, update=True)
    assert torch.equal(source, torch.arange(64))
    assert not target.any()


class TestBytesOfBool:
    """A bool's byte may be any; all 256 are values of their own here."""

    RAW = torch.tensor([2, 7, 3, 9, 1, 5, 0, 8], dtype=torch.uint8)

    def strided(self):
        return self.RAW.clone().view(4, 2).view(torch.bool)[:, 0]

    def whole(self):
        return self.RAW.view(4, 2)[:, 0].contiguous().view(torch.bool)

    def test_digest(self):
        assert torch.equal(pk.digest(self.strided(), 5), pk.digest(self.whole(), 5))
        expected = pk.digest(torch.tensor([2, 3, 1, 0], dtype=torch.uint8), 5)
        assert torch.equal(pk.digest(self.strided(), 5), expected)
        assert torch.equal(reference.digest(self.strided(), 5, 0), expected)

    def test_diff(self):
        assert pk.diff_compact(self.whole(), self.strided())[0].numel() == 0
        other = torch.tensor([2, 6, 1, 4], dtype=torch.uint8).view(torch.bool)
        indices, values, old = pk.diff_compact(other, self.strided(), return_old=True)
        assert (indices.tolist(), values.view(torch.uint8).tolist(), old.view(torch.uint8).tolist()) == (
            [1, 3],
            [6, 4],
            [3, 0],
        )

    def test_apply(self):
        weight, values = torch.zeros(4, dtype=torch.bool), self.strided()
        pk.apply_patch_(weight, torch.arange(4), values)
        assert weight.view(torch.uint8).tolist() == [2, 3, 1, 0]

    def test_overlapping_update(self):
        for compact in (pk.diff_compact, reference_diff):
            raw = self.RAW.clone().view(torch.bool)
            found = compact(raw[1:5], raw[:4], update=True, return_old=True)
            assert raw.view(torch.uint8).tolist() == [7, 3, 9, 1, 1, 5, 0, 8]
            assert found[1].view(torch.uint8).tolist() == [7, 3, 9, 1]

    @pytest.mark.parametrize("computed", [pk.diff_compact_out, "reference"])
    def test_out(self, computed):
        new, old = self.whole(), torch.zeros(4, dtype=torch.bool)
        indices, count = torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        values, before = torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
        if computed == "reference":
            reference.compact_out("diff_compact", new, old, indices, values, count, before, True)
        else:
            computed(new, old, indices, values, count, update=True, old_values=before)
        assert count.item() == 3
        assert values.view(torch.uint8)[:3].tolist() == [2, 3, 1]
        assert same_bits(old, new)

    def test_patch(self):
        old, new = {"b": self.strided()}, {"b": torch.tensor([9, 3, 0, 4], dtype=torch.uint8).view(torch.bool)}
        pk.Patch.diff(old, new).apply_(old)
        assert all_same_bits([old["b"].view(torch.uint8)], [new["b"].view(torch.uint8)])


def reference_diff(new, old, update, return_old):
    (new,) = pk.checks.apart([old], [new])
    return reference.compact("diff_compact", new, old, torch.int32, update)


def test_another_default_device(tmp_path):
    """CPU tensors stay CPU tensors where new ones would be made elsewhere."""
    old = {"w": torch.randn(500).bfloat16(), "b": torch.zeros(3, dtype=torch.int64)}
    new = {"w": (old["w"].float() * 1.01).bfloat16(), "b": torch.tensor([1, 0, 2])}
    result = {name: tensor.clone() for name, tensor in old.items()}
    with torch.device("meta"):
        patch = pk.Patch.diff(old, new)
        for profile in ("fast", "balanced"):
            again = pk.Patch.from_bytes(patch.to_bytes(profile), base=old)
            assert again.num_changed == patch.num_changed
        again.apply_(result)
    assert all_same_bits(result.values(), new.values())
