"""Which back end computes what: the order of layers, what PULSE_BACKEND asks for, what stands in for an absent one."""

from __future__ import annotations

import types
import warnings

import pytest
import torch

from pulse_kernels import backends
from pulse_kernels.backends import native, reference, triton
from pulse_kernels.errors import BackEndError


@pytest.fixture
def fresh(monkeypatch):
    """for_device decides anew, and nothing it decides here outlives the test."""
    monkeypatch.delenv("PULSE_BACKEND", raising=False)
    monkeypatch.delenv("PULSE_NATIVE", raising=False)
    backends.for_device.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    backends.for_device.cache_clear()


def library(name, reason=""):
    return native.Library(name, None, not reason, reason)


class TestCuda:
    @pytest.mark.parametrize(
        ("triton_reason", "library_reason", "names"),
        [
            ("", "", ("triton", "cuda", "reference")),
            ("", "no nvcc", ("triton", "reference")),
            ("no compiler", "", ("cuda", "reference")),
            ("no compiler", "no nvcc", ("reference",)),
        ],
    )
    def test_order_and_warning(self, fresh, triton_reason, library_reason, names):
        pytest.importorskip("triton")
        fresh.setattr(triton, "why_not", lambda: triton_reason)
        fresh.setattr(native, "cuda_library", lambda: library("cuda", library_reason))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = backends.for_device("cuda")
        assert found.names == names
        text = " ".join(str(warning.message) for warning in caught)
        assert bool(text) == bool(triton_reason or library_reason), text
        assert triton_reason in text
        assert library_reason in text
        home = {"triton": "pulse_kernels.backends.triton.operators", "cuda": "pulse_kernels.backends.cuda"}
        gate, pack = found.visibility_mask_many, found.pack_indices_many
        assert (gate.__module__ == home["triton"]) == ("triton" in names)
        assert (pack.__module__ == home["cuda"]) == ("cuda" in names)

    def test_without_the_library_the_cpu_packs(self, fresh):
        fresh.setattr(triton, "why_not", lambda: "no compiler")
        fresh.setattr(native, "cuda_library", lambda: library("cuda", "no nvcc"))
        with pytest.warns(UserWarning, match="no compiler"):
            found = backends.for_device("cuda")
        indices = [torch.arange(600) * 3, torch.tensor([7], dtype=torch.int32)]
        blobs = found.pack_indices_many(indices, [1800, 8])
        for blob, index, numel in zip(blobs, indices, [1800, 8], strict=True):
            assert torch.equal(blob, reference.pack_indices(index, numel))
        assert "ThroughHost" in found.pack_indices_many.__qualname__
        back = found.unpack_indices_many(blobs, [torch.int64, torch.int32])
        assert all(torch.equal(a, b) for a, b in zip(back, indices, strict=True))


class TestAsked:
    def test_nonsense(self, fresh):
        fresh.setenv("PULSE_BACKEND", "gpu")
        with pytest.raises(BackEndError, match="PULSE_BACKEND is 'gpu', expected one of triton, cuda, cpu, reference"):
            backends.for_device("cpu")

    @pytest.mark.parametrize("asked", ["triton", "cuda"])
    def test_what_does_not_serve_a_device_changes_nothing_there(self, fresh, asked):
        fresh.setattr(triton, "interpreted", lambda: False)
        expected = backends.for_device("cpu").names
        backends.for_device.cache_clear()
        fresh.setenv("PULSE_BACKEND", asked)
        assert backends.for_device("cpu").names == expected

    def test_triton_on_the_cpu_is_its_interpreter(self, fresh):
        pytest.importorskip("triton")
        fresh.setattr(triton, "interpreted", lambda: True)
        fresh.setattr(triton, "why_not", lambda: "")
        assert "triton" not in backends.for_device("cpu").names
        backends.for_device.cache_clear()
        fresh.setenv("PULSE_BACKEND", "triton")
        assert backends.for_device("cpu").names[0] == "triton"

    def test_what_is_absent(self, fresh):
        fresh.setattr(native, "cuda_library", lambda: library("cuda", "no nvcc of CUDA 12.8"))
        fresh.setenv("PULSE_BACKEND", "cuda")
        with pytest.raises(BackEndError, match="PULSE_BACKEND=cuda cannot compute cuda tensors: no nvcc of CUDA"):
            backends.for_device("cuda")

    def test_reference(self, fresh):
        fresh.setenv("PULSE_BACKEND", "reference")
        for device in ("cpu", "cuda"):
            found = backends.for_device(device)
            assert found.names == ("reference",)
            assert found.digest is reference.digest


def test_one_and_many_stand_for_each_other():
    calls = []
    singles = types.SimpleNamespace(apply_patch_=lambda *row: calls.append(row), digest=lambda a, b: a + b)
    lists = types.SimpleNamespace(gather_many=lambda a, b: [x * y for x, y in zip(a, b, strict=True)])
    found = backends.BackEnd(("here",), [singles, lists])
    assert found.digest_many([1, 2], [10, 20]) == [11, 22]
    found.apply_patch_many_([1, 2], [3, 4], [5, 6])
    assert calls == [(1, 3, 5), (2, 4, 6)]
    assert found.gather(3, 5) == 15
    with pytest.raises(AttributeError, match="no back end has scatter"):
        found.scatter  # noqa: B018
