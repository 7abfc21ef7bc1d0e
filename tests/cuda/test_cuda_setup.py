"""When setup.py builds the CUDA library, and what it says where it does not."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from packaging.requirements import Requirement

SETUP = Path(__file__).parents[2] / "setup.py"
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="setup.py wants a C++ compiler first")


@pytest.fixture
def extensions(monkeypatch):
    """Runs setup.py as far as deciding what to build, with torch said to be of CUDA ``torch_cuda``: the names."""
    found: list[str] = []
    monkeypatch.setattr(setuptools, "setup", lambda **asked: found.extend(ext.name for ext in asked["ext_modules"]))
    for name in [name for name in os.environ if name.startswith(("PULSE_", "CUDA_", "NVCC"))]:
        monkeypatch.delenv(name)
    for name in ("CXX", "CC"):
        monkeypatch.setenv(name, shutil.which("c++"))

    def decide(torch_cuda: str | None = None, **environment: str) -> list[str]:
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found.clear()
        runpy.run_path(str(SETUP))
        return found

    return decide


def fake_nvcc(folder: Path, version: str) -> str:
    """An nvcc of that version, which compiles nothing."""
    program = folder / "nvcc"
    program.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.1"\n')
    program.chmod(0o755)
    return str(program)


CPU, BOTH = ["pulse_kernels._cpu"], ["pulse_kernels._cpu", "pulse_kernels._cuda"]


def test_an_old_nvcc_is_told_and_left_alone(extensions, tmp_path, capfd):
    nvcc = fake_nvcc(tmp_path, "12.4")
    assert extensions(NVCC=nvcc) == CPU
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"pulse_kernels: installing without the CUDA library: {nvcc} is of CUDA 12.4, beside torch")
    for part in (f"torch {torch.__version__} (a CPU build)", "a toolkit of CUDA, 12.8 or later", "CUDA_HOME"):
        assert part in line
    with pytest.raises(SystemExit, match=f"PULSE_CUDA=1, but the CUDA library cannot be built: {nvcc} is of CUDA 12.4"):
        extensions(PULSE_CUDA="1")


def test_the_major_version_must_be_that_of_torch(extensions, tmp_path, capfd):
    nvcc = fake_nvcc(tmp_path, "13.0")
    with pytest.raises(SystemExit) as error:
        extensions("12.9", NVCC=nvcc, PULSE_CUDA="1")
    for part in (f"{nvcc} is of CUDA 13.0", f"torch {torch.__version__} (CUDA 12.9)", "a toolkit of CUDA 12.x"):
        assert part in str(error.value)
    assert extensions("12.9", PULSE_CUDA="") == CPU
    capfd.readouterr()
    assert extensions("13.2", PULSE_CUDA="1") == BOTH
    wanted = f"building the CUDA library with {nvcc} for sm_80, sm_90, sm_100, sm_120 and PTX"
    assert wanted in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "program"),
    [
        ("NVCC", "/nowhere/nvcc", "/nowhere/nvcc"),
        ("CUDA_HOME", "/nowhere", "/nowhere/bin/nvcc"),
        ("CUDA_PATH", "/nowhere", "/nowhere/bin/nvcc"),
    ],
)
def test_a_variable_that_names_no_nvcc(extensions, tmp_path, capfd, variable, value, program):
    """Another nvcc is not what was asked for: an error where the library is demanded, said where it is not."""
    nvcc = fake_nvcc(tmp_path, "13.0")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert extensions(PATH=path, **{variable: value}) == BOTH
    first, second = capfd.readouterr().err.splitlines()
    assert f"{variable}={value}, but {program} is no program: looking further; correct or unset it" in first
    assert f"building the CUDA library with {nvcc} " in second
    with pytest.raises(SystemExit) as error:
        extensions(PULSE_CUDA="1")
    wanted = f"PULSE_CUDA=1 and {variable}={value}, but {program} is no program; correct or unset it"
    assert str(error.value) == f"pulse_kernels: {wanted}"


def test_a_variable_that_nobody_came_to_is_not_told(extensions, tmp_path, capfd):
    assert extensions(NVCC=fake_nvcc(tmp_path, "13.0"), CUDA_HOME="/nowhere", PULSE_CUDA="1") == BOTH
    assert "nowhere" not in capfd.readouterr().err


class TestCompiler:
    def test_none(self, extensions, tmp_path, capfd, monkeypatch):
        monkeypatch.delenv("CXX")
        assert extensions(PATH=str(tmp_path)) == []
        (line,) = capfd.readouterr().err.splitlines()
        assert "no C++ compiler (looked for c++, g++ and clang++ in PATH, CXX is not set); install a compiler" in line
        assert line.endswith("name it in CXX: installing without the compiled libraries")
        with pytest.raises(SystemExit, match=r"PULSE_CUDA=1, but the CUDA library cannot be built: no C\+\+ compiler"):
            extensions(PULSE_CUDA="1")

    def test_cxx_names_none(self, extensions, capfd):
        assert extensions(CXX="/nowhere/g++-99") == []
        assert "CXX=/nowhere/g++-99 names no program; correct or unset it, or install" in capfd.readouterr().err

    def test_one_that_does_not_know_the_language(self, extensions, tmp_path, capfd):
        program = tmp_path / "old-g++"
        program.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo "old-g++ 4.8" || { echo "what is c++17" >&2; exit 1; }\n'
        )
        program.chmod(0o755)
        assert extensions(CXX=str(program)) == []
        assert f"{program} (old-g++ 4.8) does not compile C++17 (what is c++17); install" in capfd.readouterr().err


def test_cuda_home_comes_before_path(extensions, tmp_path, capfd):
    folder = tmp_path / "bin"
    folder.mkdir()
    nvcc = fake_nvcc(folder, "12.8")
    assert extensions(CUDA_HOME=str(tmp_path)) == BOTH
    assert f"building the CUDA library with {nvcc} " in capfd.readouterr().err


def test_no_nvcc(extensions, tmp_path, capfd):
    for tool in ("c++", "as"):
        if (found := shutil.which(tool)) is not None:
            (tmp_path / tool).symlink_to(found)
    assert extensions(PATH=str(tmp_path)) == CPU
    assert "no nvcc in $NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or PATH" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="no nvcc in"):
        extensions(PULSE_CUDA="1")


def test_an_nvcc_that_does_not_work_with_the_host_compiler(extensions, tmp_path):
    program = tmp_path / "nvcc"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0," || { echo "no such gcc" >&2; exit 1; }\n'
    )
    program.chmod(0o755)
    with pytest.raises(SystemExit, match=r"does not compile with .*c\+\+ \(.+\): no such gcc; name a compiler"):
        extensions(NVCC=str(program), PULSE_CUDA="1")


def test_left_out_when_asked(extensions, tmp_path, capfd):
    nvcc = fake_nvcc(tmp_path, "13.0")
    assert extensions(NVCC=nvcc, PULSE_CUDA="0") == CPU
    assert "PULSE_CUDA=0: installing without the CUDA library" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="expected 1"):
        extensions(PULSE_CUDA="yes")
    assert extensions(PULSE_CUDA="", PULSE_NATIVE="0") == []


def test_what_is_demanded_and_left_out_at_once_is_an_error(extensions, tmp_path):
    nvcc = fake_nvcc(tmp_path, "13.0")
    with pytest.raises(SystemExit) as error:
        extensions(NVCC=nvcc, PULSE_CUDA="1", PULSE_NATIVE="0")
    wanted = "PULSE_CUDA=1 demands what PULSE_NATIVE=0 leaves out; unset one of them"
    assert str(error.value) == f"pulse_kernels: {wanted}"


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_a_library_of_an_earlier_build_is_not_shipped(monkeypatch, tmp_path, cuda):
    """build/lib keeps what was built before, and a wheel takes all that lies there."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: asked.update(arguments))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("PULSE_NATIVE", raising=False)
    monkeypatch.setenv("NVCC", fake_nvcc(tmp_path, "13.0"))
    monkeypatch.setenv("PULSE_CUDA", cuda)
    for name in ("CXX", "CC"):
        monkeypatch.setenv(name, shutil.which("c++"))
    runpy.run_path(str(SETUP))
    folder = tmp_path / "lib" / "pulse_kernels"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "_cpu.abi3.so", "_cuda.abi3.so", "_cuda.cpython-310-x86_64-linux-gnu.so"):
        (folder / name).write_text("old")
    build = asked["cmdclass"]["build_ext"](setuptools.Distribution({"ext_modules": asked["ext_modules"]}))
    build.build_lib, build.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    build.ensure_finalized()
    build.build_extension = lambda ext: Path(build.get_ext_fullpath(ext.name)).write_text("new")
    build.run()
    found = {path.name: path.read_text() for path in folder.iterdir()}
    built = {"_cpu.abi3.so": "new"} | ({"_cuda.abi3.so": "new"} if cuda == "1" else {})
    assert found == {"__init__.py": "old", **built}


def test_the_pins_suit_both_builds_of_torch():
    """2.13.0 from PyPI, a CUDA build, asks for triton 3.7.1; its CPU build for none, and pip takes the highest."""
    lines = [line.split("#")[0].strip() for line in (SETUP.parent / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    assert all("==" in str(pin.specifier) for pin in pins if pin.name != "triton")
    by_name = {pin.name: pin for pin in pins}
    assert "2.13.0" in by_name["torch"].specifier
    assert [version in by_name["triton"].specifier for version in ("3.7.1", "3.9.0", "3.9.1")] == [True, True, False]
