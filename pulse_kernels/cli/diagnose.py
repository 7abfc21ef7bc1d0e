"""doctor, bench, demo: is the installation sound, is it fast, what does it do."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pulse_kernels import backends
from pulse_kernels.backends import native
from pulse_kernels.cli.arguments import command
from pulse_kernels.errors import BackEndError


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    command(commands, "doctor", _doctor, "say which back ends are present, and why the others are not")

    bench = command(commands, "bench", _bench, "time the operators beside eager PyTorch on this machine")
    bench.add_argument(
        "--elements", type=positive_number, default=20_000_000, metavar="N", help="tensor size (%(default)s)"
    )
    bench.add_argument("--density", type=share, default=0.01, metavar="X", help="share that changed (%(default)s)")
    bench.add_argument(
        "--repeats", type=positive_number, default=7, metavar="N", help="rounds, medians are shown (%(default)s)"
    )

    demo = command(commands, "demo", _demo, "train a small model with RL while two rollout workers follow by patches")
    demo.add_argument("--steps", type=positive_number, default=150, metavar="N", help="optimizer steps (%(default)s)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (%(default)s)")
    demo.add_argument("--workers", type=positive_number, default=2, metavar="N", help="rollout processes (%(default)s)")
    demo.add_argument("--out", metavar="DIR", help="keep versions, chart and summary here (default: only the chart)")
    demo.add_argument("--store", metavar="STORE", help="where versions go, a folder or URL: s3://bucket/prefix")


def positive_number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _triton_entry() -> dict[str, Any]:
    from pulse_kernels.backends import triton

    reason = triton.why_not()
    if not reason and not torch.version.cuda and not triton.interpreted():
        reason = (
            f"triton {_version_of('triton')} serves CUDA tensors, and torch {torch.__version__} is a CPU-only build"
        )
    return {
        "name": "triton",
        "present": not reason,
        "detail": reason or f"fused kernels, triton {_version_of('triton')}",
    }


def _cuda_entry() -> dict[str, Any]:
    from pulse_kernels.backends import cuda

    library = native.cuda_library()
    detail = f"{', '.join(cuda.architectures())} and PTX, {library.path}" if library.loaded else library.reason
    return {"name": "cuda", "present": library.loaded, "detail": detail}


def _cuda_devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    return [
        {"name": device.name, "architecture": f"sm_{device.major}{device.minor}", "memory_bytes": device.total_memory}
        for device in properties
    ]


# What changes which back end computes, how fast, or what is told.
_VARIABLES = (
    *("PULSE_BACKEND", "PULSE_CPU", "PULSE_NATIVE", "PULSE_DEBUG", "MAX_JOBS", "TRITON_INTERPRET"),
    "CUDA_VISIBLE_DEVICES",
)


def _order(device_type: str, devices: list[dict[str, Any]]) -> tuple[list[str], str]:
    """(the back ends of a device type, first to last, a line about them)"""
    if device_type == "cuda" and not devices:
        return [], "nobody: no CUDA device"
    try:
        wanted, names = backends.order(device_type)
    except BackEndError as error:
        return [], f"nobody: {error}"
    line = ", then ".join(names)
    if device_type == "cuda" and "cuda" not in names and wanted != ["reference"]:
        line += "; indices are packed on the CPU"
    if names == ["reference"]:
        line += " (every result is the same, at a fraction of the speed)"
    return names, line


def _doctor(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels import __version__
    from pulse_kernels.backends import cpu

    library = native.cpu_library()
    back_ends = [
        {
            "name": "cpu",
            "present": library.loaded,
            "detail": f"{cpu.instruction_set()} kernels, {library.path}" if library.loaded else library.reason,
        },
        {"name": "reference", "present": True, "detail": "plain PyTorch, any device; what every other must equal"},
        _triton_entry(),
        _cuda_entry(),
    ]
    devices = _cuda_devices()
    packages = {
        name: _version_of(name)
        for name in ("torch", "triton", "numpy", "zstandard", "safetensors", "rich", "matplotlib")
    }
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    orders = {device_type: _order(device_type, devices) for device_type in ("cpu", "cuda")}
    data = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "cuda_devices": devices,
        "packages": packages,
        "environment": environment,
        "back_ends": back_ends,
        "order": {device_type: names for device_type, (names, _) in orders.items()},
    }
    lines = [
        f"pulse_kernels {__version__}  Python {platform.python_version()}  {platform.platform()}",
        f"CPU          {_cpu_name()}, {torch.get_num_threads()} threads",
        "packages     " + "  ".join(f"{name} {version or 'absent'}" for name, version in packages.items()),
    ]
    no_devices = f"none{'' if torch.version.cuda else ': torch is a CPU-only build'}"
    lines.append("CUDA         " + ("  ".join(map(_device_line, devices)) or no_devices))
    if environment:
        lines.append("environment  " + "  ".join(f"{name}={value}" for name, value in environment.items()))
    lines.append("back ends")
    for entry in back_ends:
        lines.append(f"  {'yes' if entry['present'] else 'no ':3}  {entry['name']:<10} {entry['detail']}")
    lines.append("who computes, the first that has the operator")
    lines += [f"  {device_type.upper():<5} tensors  {line}" for device_type, (_, line) in orders.items()]
    return 0, data, "\n".join(lines)


def _device_line(device: dict[str, Any]) -> str:
    return f"{device['name']} ({device['architecture']}, {device['memory_bytes'] / 2**30:.0f} GiB)"


def _bench(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels.cli.bench_quick import run_quick

    rows = run_quick(arguments.elements, arguments.density, arguments.repeats)
    data = {"cpu": _cpu_name(), "threads": torch.get_num_threads(), "elements": arguments.elements, "rows": rows}
    head = f"{_cpu_name()}, {torch.get_num_threads()} threads, {arguments.elements:,} elements, {arguments.density:.2%}"
    return 0, data, "\n".join([head, *_table(rows)])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of one kind as aligned columns; numbers to three digits."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [names] + [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _demo(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels.demo import run_demo

    options: dict[str, Any] = {
        "steps": arguments.steps,
        "seed": arguments.seed,
        "workers": arguments.workers,
        "json": arguments.json,
    }
    if arguments.out is not None:
        options["out_dir"] = arguments.out
    if arguments.store is not None:
        options["store"] = arguments.store
    report = run_demo(**options)
    return (0 if report.improved else 1), report.to_dict(), report.summary()
