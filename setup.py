"""Builds the CPU library (csrc/cpu) as pulse_kernels/_cpu.abi3.so on the LibTorch stable ABI.

PULSE_NATIVE=0 leaves it out; so does a machine without a C++ compiler, and the package then works through its reference
back end. MAX_JOBS bounds parallel compilation. Nothing here touches the network.
"""

from __future__ import annotations

import os
import platform
import shutil
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


def say(message: str) -> None:
    print(f"pulse_kernels: {message}", file=sys.stderr, flush=True)


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


class BuildExt(build_ext):
    """Compiles each source with its own flags, MAX_JOBS at a time."""

    def build_extension(self, ext: Extension) -> None:
        objects_dir = Path(self.build_temp) / ext.name
        objects_dir.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)

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


def compiler_works() -> bool:
    """Whether the C++ compiler that setuptools would use compiles a C++17 file."""
    candidates = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    found = next((shutil.which(name) for name in candidates if name and shutil.which(name)), None)
    if found is None:
        return False
    os.environ.setdefault("CXX", found)
    os.environ.setdefault("CC", found)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <optional>\nint main() { return std::optional<int>(0).value(); }\n")
        command = f'"{found}" -std=c++17 -c "{source}" -o "{source}.o"'
        return os.system(command + " > /dev/null 2>&1") == 0


def extensions() -> list[Extension]:
    if os.environ.get("PULSE_NATIVE") == "0":
        say("PULSE_NATIVE=0: installing without the CPU library")
        return []
    if not compiler_works():
        say("no working C++17 compiler (tried $CXX, c++, g++, clang++): installing without the CPU library")
        return []
    try:
        import torch
    except ImportError:
        say("torch is not importable in the build environment: installing without the CPU library")
        return []
    torch_dir = Path(torch.__file__).parent
    return [
        Extension(
            "pulse_kernels._cpu",
            sources=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))],
            include_dirs=[str(torch_dir / "include")],
            library_dirs=[str(torch_dir / "lib")],
            libraries=["torch", "torch_cpu", "c10"],
            py_limited_api=True,
            depends=[str(path) for path in (ROOT / "csrc").rglob("*.h")],
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt, "bdist_wheel": Abi3Wheel})
