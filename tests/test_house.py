"""The house's rules that a machine can check: imports point one way, and importing the package does nothing else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pulse_kernels"

# From the ground up: a module may import those of lower rows, and of its own where they are one package. A new module
# gets its place here.
FLOORS = [
    {"errors", "checks", "dtypes", "transfer", "report", "backends.native"},
    {"backends"},
    {"ops"},
    {"state", "patch_fold"},
    {"patch"},
    {"codec", "checkpoint", "ranks"},
    {"checkpoint_patch"},
    {"sync", "loco", "integrations"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
# Leaves know nothing of the package, not even of each other.
LEAVES = {"errors", "checks", "dtypes", "transfer", "report", "backends.native"}


def place(module: str) -> str:
    """The name in FLOORS that a module, named from below pulse_kernels, belongs to."""
    return module if module == "backends.native" else module.split(".")[0]


def floor(module: str) -> int:
    for k, names in enumerate(FLOORS):
        if place(module) in names:
            return k
    pytest.fail(f"pulse_kernels.{module} has no place in the house: see FLOORS here and ARCHITECTURE.md")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module below pulse_kernels, line) of every import of the package in a file, also inside functions."""
    package = list(path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "pulse_kernels":
                    yield alias.name.removeprefix("pulse_kernels").removeprefix("."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                source = ".".join([*base, *([node.module] if node.module else [])])
            elif node.module and node.module.split(".")[0] == "pulse_kernels":
                source = node.module.removeprefix("pulse_kernels").removeprefix(".")
            else:
                continue
            for alias in node.names:
                inner = f"{source}.{alias.name}" if source else alias.name
                yield (inner if is_module(inner) else source), node.lineno


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    importer = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for imported, line in imports(path):
        where = f"{path.relative_to(PACKAGE.parent)}:{line}: {importer} imports {imported or 'the package itself'}"
        if not imported:
            # Only the top floors may take from the package what a user takes.
            assert floor(importer) >= floor("sync"), where
            continue
        if place(importer) in LEAVES:
            pytest.fail(f"{where}, but it is a leaf")
        same_package = place(imported) == place(importer)
        assert same_package or floor(imported) < floor(importer), f"{where}, which lies above or beside it"


def test_every_module_has_a_place() -> None:
    for path in files():
        floor(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def test_the_checks_here_see_imports() -> None:
    """The test above would be empty if this found nothing."""
    found = {module for module, _ in imports(PACKAGE / "codec" / "__init__.py")}
    assert {"patch", "backends", "codec.segment", "dtypes", "checks"} <= found
    assert {"checkpoint.files"} <= {module for module, _ in imports(PACKAGE / "checkpoint" / "reader.py")}
    assert not list(imports(PACKAGE / "errors.py"))


IMPORT = """
import os, sys, threading
# What the package stands on may start threads of its own (OpenMP, BLAS): it goes first and does not count.
import concurrent.futures, multiprocessing, subprocess, numpy, torch, torch.library, zstandard, safetensors

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

before, modules, seen = threads(), set(sys.modules), []
sys.addaudithook(lambda event, args: seen.append((event, args)))
import pulse_kernels
events = list(seen)

starting = {"subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.system", "_thread.start_new_thread"}
started = [event for event, _ in events if event in starting | {"socket.connect", "ctypes.dlopen"}]
assert not started, started
opened = [args for event, args in events if event == "open" and isinstance(args[1], str)]
written = [args for args in opened if set(args[1]) & set("wax+") and "__pycache__" not in str(args[0])]
assert not written, written
assert threads() == before and threading.active_count() == 1
new = {name.split(".")[0] for name in set(sys.modules) - modules}
unwanted = new & {"rich", "matplotlib", "triton", "pytest", "hypothesis", "PIL", "tqdm", "transformers",
    "obstore", "blake3", "cryptography"}
assert not unwanted, unwanted
upper = {"cli", "demo", "sync", "loco", "integrations", "checkpoint", "checkpoint_patch"}
above = [name for name in sys.modules if name.startswith("pulse_kernels.") and name.split(".")[1] in upper]
assert not above, above
if os.path.exists("/proc/self/maps"):
    maps = open("/proc/self/maps").read()
    assert "/_cpu" not in maps and "/_cuda" not in maps, "a compiled library is loaded"
pulse_kernels.pack_indices(torch.tensor([1]), 5)  # now it may be
print("fine")
"""


def test_importing_does_nothing_else() -> None:
    """No compiled library, no thread, no process, no file, no package that only the command line or the demo needs."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT],
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key != "PULSE_NATIVE"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"
