"""doctor: what is present, and why the rest is not."""

from __future__ import annotations

import json
import shutil
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_kernels import backends
from pulse_kernels.backends import native, triton
from pulse_kernels.cli import main
from pulse_kernels.demo.run import STEPS

PACKAGE = Path(native.__file__).parents[1]
BUILT = sorted(PACKAGE.glob("_cuda*.so"))


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Libraries are looked for once in a process: here once in a test."""
    native.cuda_library.cache_clear()
    yield
    native.cuda_library.cache_clear()


@pytest.fixture
def empty_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder without compiled libraries."""
    native.cpu_library()  # stays as it is
    monkeypatch.delenv("PULSE_NATIVE", raising=False)
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    return tmp_path


def doctor(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def back_end(report: dict[str, Any], name: str) -> dict[str, Any]:
    (entry,) = [entry for entry in report["back_ends"] if entry["name"] == name]
    return entry


def test_what_is_there(capsys):
    report = doctor(capsys)
    assert [entry["name"] for entry in report["back_ends"]] == ["cpu", "reference", "triton", "cuda"]
    assert report["torch_cuda"] == torch.version.cuda
    assert len(report["cuda_devices"]) == torch.cuda.device_count()
    library = native.cuda_library()
    assert back_end(report, "cuda")["present"] == library.loaded
    if library.loaded:
        assert "sm_80, sm_90, sm_100, sm_120 and PTX" in back_end(report, "cuda")["detail"]
    else:
        assert back_end(report, "cuda")["detail"] == library.reason != ""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for entry in report["back_ends"]:
        assert f"{'yes' if entry['present'] else 'no '}  {entry['name']:<10} {entry['detail']}" in text


def test_not_built(capsys, empty_package):
    entry = back_end(doctor(capsys), "cuda")
    assert not entry["present"]
    assert "not built: no nvcc of CUDA 12.8 or later" in entry["detail"]
    assert "PULSE_CUDA=1 pip install" in entry["detail"]


def test_a_cpu_only_torch_is_told(capsys, empty_package, monkeypatch):
    (empty_package / "_cuda.abi3.so").write_bytes(b"")
    monkeypatch.setattr(torch.version, "cuda", None)
    entry = back_end(doctor(capsys), "cuda")
    assert not entry["present"]
    assert entry["detail"].startswith(f"torch {torch.__version__} is a CPU-only build")


def test_a_library_that_does_not_load_tells_why(capsys, empty_package, monkeypatch):
    (empty_package / "_cuda.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    entry = back_end(doctor(capsys), "cuda")
    assert not entry["present"]
    assert f"_cuda.abi3.so does not load in torch {torch.__version__}: " in entry["detail"]
    assert "file too short" in entry["detail"] or "invalid ELF header" in entry["detail"]


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built here")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_the_real_library_fails_softly_in_a_cpu_only_torch(empty_package, monkeypatch):
    """Even where the check before it were fooled."""
    shutil.copy(BUILT[0], empty_package)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    library = native.cuda_library()
    assert not library.loaded
    assert "undefined symbol: aoti_torch_get_current_cuda_stream" in library.reason


def test_a_runtime_newer_than_that_of_torch_is_not_used(monkeypatch):
    """Its kernels would fail at the first launch under a driver that is just new enough for torch."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert native.why_too_new(12090) == ""
    assert native.why_too_new(13000).startswith("built with CUDA 13.0, which a driver for CUDA 12.8")
    monkeypatch.setattr(torch.version, "cuda", "14.1")
    assert native.why_too_new(13000) == ""


def visible_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda k: capabilities[k])


class TestGpusWithoutCode:
    BUILT_FOR = "80,90,100,120"

    @pytest.mark.parametrize(
        "capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)]
    )
    def test_code_or_ptx_serves(self, monkeypatch, capability):
        visible_gpus(monkeypatch, (9, 0), capability)
        assert native.why_no_code(self.BUILT_FOR) == ""

    @pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (11, 0)])
    def test_none_serves(self, monkeypatch, capability):
        visible_gpus(monkeypatch, (9, 0), capability)
        reason = native.why_no_code(self.BUILT_FOR)
        assert reason.startswith(f"GPU 1 has compute capability {capability[0]}.{capability[1]}, the library has code")
        assert "sm_80, sm_90, sm_100, sm_120 and later" in reason
        assert "CUDA_VISIBLE_DEVICES" in reason

    def test_a_lower_minor_version_than_that_of_the_code(self, monkeypatch):
        visible_gpus(monkeypatch, (8, 0))
        assert "compute capability 8.0" in native.why_no_code("86,90")
        visible_gpus(monkeypatch, (8, 9))
        assert native.why_no_code("86,90") == ""

    def test_without_gpus_or_names_nothing_is_said(self, monkeypatch):
        visible_gpus(monkeypatch)
        assert native.why_no_code(self.BUILT_FOR) == ""
        visible_gpus(monkeypatch, (7, 0))
        assert native.why_no_code("unknown") == ""

    def test_gpus_that_cannot_be_asked(self, monkeypatch):
        visible_gpus(monkeypatch, (9, 0))

        def forked(k: int) -> None:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

        monkeypatch.setattr(torch.cuda, "get_device_capability", forked)
        assert native.why_no_code(self.BUILT_FOR).endswith("Cannot re-initialize CUDA in forked subprocess")

    @pytest.mark.parametrize(("capability", "packed_by"), [((9, 0), "cuda"), ((7, 0), "_ThroughHost")])
    def test_another_back_end_takes_over(self, monkeypatch, capability, packed_by):
        visible_gpus(monkeypatch, capability)
        raw = types.SimpleNamespace(runtime_version=lambda: 13000, architectures=lambda: self.BUILT_FOR)
        monkeypatch.setattr(torch.ops, "pulse_kernels_cuda", raw)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(native, "_load", lambda name, *rest: native.Library(name, None, True, ""))
        monkeypatch.setattr(triton, "why_not", lambda: "no compiler")
        monkeypatch.setattr(triton, "interpreted", lambda: False)
        for name in ("PULSE_BACKEND", "PULSE_NATIVE"):
            monkeypatch.delenv(name, raising=False)
        backends.for_device.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = backends.for_device("cuda")
        backends.for_device.cache_clear()
        served = packed_by == "cuda"
        assert found.names == (("cuda", "reference") if served else ("reference",))
        assert packed_by in f"{found.pack_indices_many.__module__} {found.pack_indices_many.__qualname__}"
        assert ("GPU 0 has compute capability 7.0" in str(caught[0].message)) != served


def test_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("PULSE_NATIVE", "0")
    report = doctor(capsys)
    assert back_end(report, "cuda")["detail"] == "PULSE_NATIVE=0 is set"
    assert report["environment"]["PULSE_NATIVE"] == "0"


def test_triton_missing(capsys, monkeypatch):
    monkeypatch.setattr(triton, "why_not", lambda: "triton is not installed; pip install triton")
    entry = back_end(doctor(capsys), "triton")
    assert (entry["present"], entry["detail"]) == (False, "triton is not installed; pip install triton")


def test_triton_present(capsys, monkeypatch):
    monkeypatch.setattr(triton, "why_not", lambda: "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    entry = back_end(doctor(capsys), "triton")
    assert entry["present"]
    assert entry["detail"].startswith("fused kernels, triton ")


def test_triton_is_of_no_use_in_a_cpu_only_torch(capsys, monkeypatch):
    """It is installed there, since it is a dependency, and serves CPU tensors in its interpreter alone."""
    monkeypatch.setattr(triton, "why_not", lambda: "")
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    entry = back_end(doctor(capsys), "triton")
    assert not entry["present"]
    assert f"serves CUDA tensors, and torch {torch.__version__} is a CPU-only build" in entry["detail"]
    monkeypatch.setattr(triton, "interpreted", lambda: True)
    assert back_end(doctor(capsys), "triton")["present"]


class TestWhoComputes:
    @pytest.fixture(autouse=True)
    def here(self, monkeypatch):
        """One GPU, and everything present."""
        for name in ("PULSE_BACKEND", "PULSE_NATIVE"):
            monkeypatch.delenv(name, raising=False)
        device = types.SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=1 << 34)
        visible_gpus(monkeypatch, (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: device)
        monkeypatch.setattr(triton, "why_not", lambda: "")
        monkeypatch.setattr(triton, "interpreted", lambda: False)
        for name in ("cpu", "cuda"):
            self.put(monkeypatch, name, "")
        raw = types.SimpleNamespace(architectures=lambda: "90", instruction_set=lambda: "avx2")
        monkeypatch.setattr(backends.cuda, "_raw", raw)
        monkeypatch.setattr(backends.cpu, "_raw", raw)

    def put(self, monkeypatch, name, reason):
        library = native.Library(name, Path("there"), not reason, reason)
        monkeypatch.setattr(native, f"{name}_library", lambda: library)

    def told(self, capsys) -> tuple[dict[str, list[str]], str, str]:
        """(the order in JSON, the text's line about CPU tensors, that about CUDA tensors)"""
        order = doctor(capsys)["order"]
        assert main(["doctor"]) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        at = lines.index("who computes, the first that has the operator")
        heads = ("CPU   tensors  ", "CUDA  tensors  ")
        assert [line[:15] for line in lines[at + 1 :]] == list(heads)
        return order, lines[at + 1][15:], lines[at + 2][15:]

    def test_all_there(self, capsys):
        order, cpu, cuda = self.told(capsys)
        assert order == {"cpu": ["cpu", "reference"], "cuda": ["triton", "cuda", "reference"]}
        assert (cpu, cuda) == ("cpu, then reference", "triton, then cuda, then reference")

    def test_libraries_absent(self, capsys, monkeypatch):
        for name in ("cpu", "cuda"):
            self.put(monkeypatch, name, "not built")
        order, cpu, cuda = self.told(capsys)
        assert order == {"cpu": ["reference"], "cuda": ["triton", "reference"]}
        assert cpu == "reference (every result is the same, at a fraction of the speed)"
        assert cuda == "triton, then reference; indices are packed on the CPU"

    def test_no_gpu(self, capsys, monkeypatch):
        visible_gpus(monkeypatch)
        order, _, cuda = self.told(capsys)
        assert order["cuda"] == []
        assert cuda == "nobody: no CUDA device"

    def test_what_is_asked_for(self, capsys, monkeypatch):
        monkeypatch.setenv("PULSE_BACKEND", "cuda")
        monkeypatch.setenv("PULSE_CPU", "portable")
        assert self.told(capsys)[0] == {"cpu": ["cpu", "reference"], "cuda": ["cuda", "reference"]}
        environment = doctor(capsys)["environment"]
        assert (environment["PULSE_BACKEND"], environment["PULSE_CPU"]) == ("cuda", "portable")
        self.put(monkeypatch, "cuda", "not built")
        order, _, cuda = self.told(capsys)
        assert order == {"cpu": ["cpu", "reference"], "cuda": []}
        assert cuda == "nobody: PULSE_BACKEND=cuda cannot compute cuda tensors: not built"


def test_the_demos_help_shows_how_many_steps_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert f"optimizer steps ({STEPS})" in " ".join(capsys.readouterr().out.split())
