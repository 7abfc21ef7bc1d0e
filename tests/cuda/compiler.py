"""nvcc, found as setup.py finds it, and what it makes of csrc/cuda."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))
ARCHITECTURES = (80, 90, 100, 120)
WHY_NOT = "no nvcc of CUDA 12.8 or later in $NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or PATH"


@functools.cache
def nvcc() -> str | None:
    folders = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    names = [os.environ.get("NVCC"), *(str(Path(folder, "bin/nvcc")) for folder in folders if folder), "nvcc"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return None
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", text)
    return found if version and (int(version[1]), int(version[2])) >= (12, 8) else None


def jobs() -> int:
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def _output(command: list[str], name: str) -> tuple[str, Path]:
    """(what the compiler said, its output) of a command in build/cuda-tests, kept until a source or command changes."""
    files = sorted(path for folder in ("bits", "cuda") for path in (ROOT / "csrc" / folder).iterdir())
    content = b"".join(path.name.encode() + path.read_bytes() for path in files)
    key = hashlib.sha256(repr(command).encode() + content).hexdigest()[:20]
    folder = ROOT / "build" / "cuda-tests"
    folder.mkdir(parents=True, exist_ok=True)
    output, log = folder / f"{key}-{name}", folder / f"{key}-{name}.log"
    if not (output.exists() and log.exists()):
        part = output.with_name(f"{os.getpid()}-{output.name}")
        done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        log.write_text(done.stderr)
        part.replace(output)
    return log.read_text(), output


def ptx(nvcc: str, architecture: int) -> str:
    """The PTX of all kernels."""
    flags = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-ptx"]
    with ThreadPoolExecutor(jobs()) as pool:
        results = pool.map(lambda source: _output([*flags, str(source)], f"{source.stem}.ptx"), SOURCES)
        return [path.read_text() for _, path in results]


def resources(nvcc: str) -> dict[tuple[str, int], dict[str, int]]:
    """(kernel, architecture) -> registers, bytes of stack and of spills, as ptxas reports them."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    flags = [nvcc, "-std=c++17", "-O3", *targets, "-Xptxas=-v", "-c"]
    with ThreadPoolExecutor(jobs()) as pool:
        results = pool.map(lambda source: _output([*flags, str(source)], f"{source.stem}.o"), SOURCES)
        logs = [log for log, _ in results]
    found: dict[tuple[str, int], dict[str, int]] = {}
    for log in logs:
        for part in log.split("Compiling entry function")[1:]:
            name = re.search(r"'(\w+)' for 'sm_(\d+)'", part)
            stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
            registers = re.search(r"Used (\d+) registers", part)
            assert name, part
            assert stack, part
            assert registers, part
            found[name[1], int(name[2])] = {
                "registers": int(registers[1]),
                "stack": int(stack[1]),
                "spills": int(stack[2]) + int(stack[3]),
            }
    return found
