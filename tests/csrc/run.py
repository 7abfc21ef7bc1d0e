"""Builds the C++ tests (tests/csrc, without torch) and runs them: ``python tests/csrc/run.py [variant ...]``.

Variants: ``asan`` (AddressSanitizer and UndefinedBehaviorSanitizer), ``asan-simde`` (the same with the AVX-512 kernels
compiled through SIMDe, for a CPU without AVX-512), ``tsan`` (ThreadSanitizer), ``simde`` (no sanitizer). Without
arguments the first two: that is ``make sanitize``. CXX names the compiler; MAX_JOBS bounds how many run at once.
Exit status: 0 all passed, 1 a check failed, 77 compiler or SIMDe headers missing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted(Path(__file__).parent.glob("*.cpp"))
KERNELS = [path for path in sorted((ROOT / "csrc/cpu").glob("*.cpp")) if path.name != "register.cpp"]
SANITIZERS = {
    "asan": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
    "plain": ["-O1", "-g0"],
}
VARIANTS = {  # name -> (sanitizer, whether AVX-512 goes through SIMDe)
    "asan": ("asan", False),
    "asan-simde": ("asan", True),
    "tsan": ("tsan", False),
    "simde": ("plain", True),
}
# As setup.py has them.
AVX2 = ["-mavx2", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *AVX2[1:], "-Wno-uninitialized"]
MISSING = 77


def compiler() -> str | None:
    """$CXX or the first C++ compiler found."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def simde_include() -> Path | None:
    """The folder that holds simde/: from the package simde-py, or the system's."""
    folders = [Path("/usr/include"), Path("/usr/local/include")]
    spec = importlib.util.find_spec("simde_py")
    if spec is not None and spec.origin is not None:
        folders.insert(0, Path(spec.origin).parent / "simde")
    return next((folder for folder in folders if (folder / "simde/x86/avx512.h").exists()), None)


def flags_of(source: Path, simde: bool) -> tuple[str, list[str]]:
    """(suffix of the object's name, flags): only what depends on ``simde`` is built once for each."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if simde and source.name == "kernels_avx512.cpp":
        # SIMDe adds vectors as signed integers, which wrap in the instruction that it stands for: -fwrapv.
        return "-simde", ["-DPULSE_SIMDE", f"-I{simde_include()}", "-fwrapv", "-Wno-psabi"]
    if simde and source.name == "main.cpp":
        return "-simde", ["-DPULSE_SIMDE"]
    if x86 and source.name == "kernels_avx2.cpp":
        return "", AVX2
    if x86 and source.name == "kernels_avx512.cpp":
        return "", AVX512
    return "", []


def build(variant: str, cxx: str, done: set[Path]) -> Path:
    """Compile and link ``variant``; objects in ``done`` are up to date."""
    sanitizer, simde = VARIANTS[variant]
    folder = ROOT / "build" / "csrc-tests" / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    common = [cxx, "-std=c++17", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread", *SANITIZERS[sanitizer]]
    objects, commands = [], []
    for source in [*KERNELS, *TESTS]:
        suffix, flags = flags_of(source, simde)
        target = folder / f"{source.stem}{suffix}.o"
        objects.append(target)
        if target not in done:
            commands.append([*common, *flags, "-c", str(source), "-o", str(target)])
            done.add(target)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    program = folder / f"tests-{variant}"
    subprocess.run([*common, *map(str, objects), "-o", str(program)], check=True)
    return program


def main(variants: list[str]) -> int:
    cxx = compiler()
    if cxx is None:
        print("no C++ compiler found (tried $CXX, c++, g++, clang++)", file=sys.stderr)
        return MISSING
    if any(VARIANTS[variant][1] for variant in variants) and simde_include() is None:
        print("SIMDe's headers are missing: pip install simde-py", file=sys.stderr)
        return MISSING
    done: set[Path] = set()
    for variant in variants:
        print(f"== {variant}", flush=True)
        try:
            subprocess.run([str(build(variant, cxx, done))], check=True)
        except subprocess.CalledProcessError as error:
            print(f"{variant}: {Path(error.cmd[0]).name} exited with {error.returncode}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["asan", "asan-simde"]))
