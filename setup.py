"""Builds pulse_kernels/_cpu.abi3.so (csrc/cpu) and _cuda.abi3.so (csrc/cuda) on the LibTorch stable ABI.

PULSE_NATIVE=0 leaves both out; so does a machine without a C++ compiler, and the package then works through its
reference back end. The CUDA library needs nvcc of CUDA 12.8 or later ($NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or PATH),
but no GPU and no CUDA build of torch: it is left out where there is no such nvcc. PULSE_CUDA=1 makes that an error, and
so a variable that names no nvcc; PULSE_CUDA=0 leaves it out always. MAX_JOBS bounds parallel compilation. Nothing here
touches the network.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a fused multiply-add would round once where the reference rounds twice
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]
X86_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt"],
    "kernels_avx512.cpp": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt"),
        "-Wno-uninitialized",  # GCC 12 warns inside its own intrinsics
    ],
}
CUDA_ARCHITECTURES = (80, 90, 100, 120)  # and PTX of the last, for what comes after
OLDEST_NVCC = (12, 8)  # the first that knows sm_100 and sm_120


def say(message: str) -> None:
    print(f"pulse_kernels: {message}", file=sys.stderr, flush=True)


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


class CudaExtension(Extension):
    """Compiled and linked by ``nvcc``."""

    def __init__(self, name: str, nvcc: str, **arguments: object):
        super().__init__(name, **arguments)  # type: ignore[arg-type]
        self.nvcc = nvcc


def run(command: list[str]) -> None:
    print(*command, flush=True)
    subprocess.run(command, check=True)


class BuildExt(build_ext):
    """Compiles each source with its own flags, MAX_JOBS at a time."""

    def run(self) -> None:
        # A library that an earlier build left here, and this one leaves out, is no part of the wheel.
        for stale in (Path(self.build_lib) / "pulse_kernels").glob("_c*.so"):
            stale.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        objects_dir = Path(self.build_temp) / ext.name
        objects_dir.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        if isinstance(ext, CudaExtension):
            self.build_cuda(ext, objects_dir, jobs)
        else:
            self.build_cpp(ext, objects_dir, jobs)

    def build_cuda(self, ext: CudaExtension, objects_dir: Path, jobs: int) -> None:
        host = [flag for flag in COMMON_FLAGS if flag.startswith("-f")]
        compiler = [ext.nvcc, "-ccbin", os.environ["CXX"].split(" ")[0], "-std=c++17", "-O3"]
        compiler += [f"-Xcompiler={','.join(['-fPIC', *host])}"]
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHITECTURES]
        targets += [f"-gencode=arch=compute_{CUDA_ARCHITECTURES[-1]},code=compute_{CUDA_ARCHITECTURES[-1]}"]
        names = ",".join(map(str, CUDA_ARCHITECTURES))
        includes = [f"-I{folder}" for folder in ext.include_dirs]
        defines = [*(flag for flag in COMMON_FLAGS if flag.startswith("-D")), f'-DPULSE_CUDA_ARCHITECTURES="{names}"']

        def compile_one(source: str) -> str:
            target = str(objects_dir / f"{Path(source).name}.o")
            flags = [*targets, "--compress-mode=size"] if source.endswith(".cu") else [*includes, *defines]
            run([*compiler, *flags, "-c", source, "-o", target])
            return target

        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        # libtorch.so is what brings libtorch_cuda.so in a CUDA build: needed although a CPU build's has none of the
        # symbols. The CUDA runtime comes along, and stays inside: torch's own has the same symbols.
        linker = ["--no-as-needed", "--exclude-libs=ALL", "--strip-all"]
        run(
            [
                *(*compiler, "-shared", "--cudart=static", *objects, "-o", str(library)),
                *(f"-Xlinker={flag}" for flag in linker),
                *(f"-L{folder}" for folder in ext.library_dirs),
                *(f"-l{name}" for name in ext.libraries),
            ]
        )

    def build_cpp(self, ext: Extension, objects_dir: Path, jobs: int) -> None:

        def compile_one(source: str) -> list[str]:
            flags = [*COMMON_FLAGS, *(X86_FLAGS.get(Path(source).name, []) if is_x86() else [])]
            return self.compiler.compile(
                [source], output_dir=str(objects_dir), include_dirs=ext.include_dirs, extra_postargs=flags
            )

        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects,
            str(target),
            libraries=ext.libraries,
            library_dirs=ext.library_dirs,
            extra_postargs=[] if sys.platform == "darwin" else ["-Wl,--strip-all"],
            target_lang="c++",
        )


class Abi3Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        if self.distribution.has_ext_modules():
            self.py_limited_api = "cp310"
        super().finalize_options()


def first_line(*command: str) -> str:
    """Of what a program says of its version."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    return next(iter(done.stdout.strip().splitlines()), "tells no version")


def why_no_compiler() -> str:
    """Empty where the C++ compiler that setuptools would use knows C++17; else what was found, and the fix."""
    asked = os.environ.get("CXX", "").split(" ")[0]
    fix = "install a compiler of C++17, such as g++ 9 or later, and name it in CXX"
    if asked and shutil.which(asked) is None:
        return f"CXX={os.environ['CXX']} names no program; correct or unset it, or {fix}"
    found = next((path for name in (asked, "c++", "g++", "clang++") if name and (path := shutil.which(name))), None)
    if found is None:
        return f"no C++ compiler (looked for c++, g++ and clang++ in PATH, CXX is not set); {fix}"
    os.environ.setdefault("CXX", found)
    os.environ.setdefault("CC", found)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <optional>\nint main() { return std::optional<int>(0).value(); }\n")
        command = [found, "-std=c++17", "-c", str(source), "-o", f"{source}.o"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip()[:300] or f"exit status {done.returncode}"
    return f"{found} ({first_line(found, '--version')}) does not compile C++17 ({said}); {fix}"


def find_nvcc() -> tuple[str | None, list[str]]:
    """(the first nvcc found, what the variables before it name in vain)"""
    wrong = []
    for variable in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            name = value if variable == "NVCC" else str(Path(value, "bin", "nvcc"))
            if path := shutil.which(name):
                return path, wrong
            wrong.append(f"{variable}={value}, but {name} is no program")
    return shutil.which("nvcc"), wrong


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    except OSError:  # such as a program of another machine
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def why_no_cuda(nvcc: str | None, torch_version: str, torch_cuda: str | None) -> str:
    """Empty where the CUDA library can be built; else what is there, what is needed, and what to do."""
    torch_is = f"torch {torch_version} ({f'CUDA {torch_cuda}' if torch_cuda else 'a CPU build'})"
    wanted = f"CUDA {torch_cuda.split('.')[0]}.x" if torch_cuda else "CUDA"
    fix = f"install a toolkit of {wanted}, {'.'.join(map(str, OLDEST_NVCC))} or later, and name it in CUDA_HOME"
    if sys.platform != "linux":
        return f"{sys.platform} is not supported, only linux"
    if nvcc is None:
        return f"no nvcc in $NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or PATH, beside {torch_is}; {fix}"
    version = nvcc_version(nvcc)
    if version is None:
        return f"{nvcc} --version tells no release, beside {torch_is}; {fix}"
    nvcc_is = f"{nvcc} is of CUDA {version[0]}.{version[1]}"
    if version < OLDEST_NVCC or (torch_cuda and version[0] != int(torch_cuda.split(".")[0])):
        return f"{nvcc_is}, beside {torch_is}; {fix}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("__global__ void probe() {}\n")
        host = os.environ["CXX"].split(" ")[0]
        command = [nvcc, "-ccbin", host, "-std=c++17", "-c", str(source), "-o", f"{source}.o"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            host_is = f"{host} ({first_line(host, '--version')})"
            said = done.stderr.strip()[:300] or f"exit status {done.returncode}"
            return f"{nvcc_is} and does not compile with {host_is}: {said}; name a compiler that it supports in CXX"
    return ""


def cuda_extensions(torch_dir: Path, torch_version: str, torch_cuda: str | None) -> list[Extension]:
    wish = os.environ.get("PULSE_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"pulse_kernels: PULSE_CUDA={wish}: expected 1 (required), 0 (left out) or nothing")
    if wish == "0":
        say("PULSE_CUDA=0: installing without the CUDA library")
        return []
    nvcc, wrong = find_nvcc()
    if wrong and wish == "1":
        raise SystemExit(f"pulse_kernels: PULSE_CUDA=1 and {'; '.join(wrong)}; correct or unset it")
    for line in wrong:
        say(f"{line}: looking further; correct or unset it")
    reason = why_no_cuda(nvcc, torch_version, torch_cuda)
    if reason and wish == "1":
        raise SystemExit(f"pulse_kernels: PULSE_CUDA=1, but the CUDA library cannot be built: {reason}")
    if reason or nvcc is None:
        say(f"installing without the CUDA library: {reason}")
        return []
    say(f"building the CUDA library with {nvcc} for sm_{', sm_'.join(map(str, CUDA_ARCHITECTURES))} and PTX")
    folder = ROOT / "csrc" / "cuda"
    return [
        CudaExtension(
            "pulse_kernels._cuda",
            nvcc,
            sources=[str(path.relative_to(ROOT)) for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cpp")])],
            include_dirs=[str(torch_dir / "include")],
            library_dirs=[str(torch_dir / "lib")],
            libraries=["torch"],
            py_limited_api=True,
            depends=[str(path) for path in (ROOT / "csrc").rglob("*.h")],
        )
    ]


def extensions() -> list[Extension]:
    if os.environ.get("PULSE_NATIVE") == "0":
        if os.environ.get("PULSE_CUDA") == "1":
            raise SystemExit("pulse_kernels: PULSE_CUDA=1 demands what PULSE_NATIVE=0 leaves out; unset one of them")
        say("PULSE_NATIVE=0: installing without the compiled libraries")
        return []
    missing = why_no_compiler()
    if not missing:
        try:
            import torch
        except ImportError:
            missing = (
                "torch is not importable in the build environment; install it, and build with --no-build-isolation"
            )
    if missing:
        if os.environ.get("PULSE_CUDA") == "1":
            raise SystemExit(f"pulse_kernels: PULSE_CUDA=1, but the CUDA library cannot be built: {missing}")
        say(f"{missing}: installing without the compiled libraries")
        return []
    torch_dir = Path(torch.__file__).parent
    cpu = Extension(
        "pulse_kernels._cpu",
        sources=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))],
        include_dirs=[str(torch_dir / "include")],
        library_dirs=[str(torch_dir / "lib")],
        libraries=["torch", "torch_cpu", "c10"],
        py_limited_api=True,
        depends=[str(path) for path in (ROOT / "csrc").rglob("*.h")],
    )
    return [cpu, *cuda_extensions(torch_dir, torch.__version__, torch.version.cuda)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt, "bdist_wheel": Abi3Wheel})
