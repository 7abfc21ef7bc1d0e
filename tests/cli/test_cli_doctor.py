"""doctor: what is present, and why the rest is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_kernels.backends import native, triton
from pulse_kernels.cli import main

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
    entry = back_end(doctor(capsys), "triton")
    assert entry["present"]
    assert entry["detail"].startswith("fused kernels, triton ")
