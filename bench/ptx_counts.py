"""``python -m bench.ptx_counts``: what compiled GPU kernels do, counted by a PTX simulator on the CPU. No time.

Writes bench/results/ptx_counts.json, which ``bench.report`` puts into docs/performance.md. Needs ptxsim (PULSE_PTXSIM
names its folder) and, for csrc/cuda, nvcc.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "bench" / "results" / "ptx_counts.json"
ELEMENTS = 64 * 8192
DENSITIES = (0.001, 0.01, 0.05)


@dataclass(frozen=True)
class Count:
    """One kernel at one density; bytes and instructions a parameter. model: issue-bound over memory-bound estimate."""

    library: str
    kernel: str
    density: float
    compulsory: float
    requested: float
    warp_instructions: float
    bank_conflicts: float
    model: float


def count(library: str, kernel: str, density: float, stats: Any) -> Count:
    model = stats.estimate()
    return Count(
        library,
        kernel,
        density,
        stats.compulsory_bytes / ELEMENTS,
        stats.bytes_moved / ELEMENTS,
        stats.warp_instructions / ELEMENTS,
        stats.bank_conflict_cycles / ELEMENTS,
        model.issue / model.memory_compulsory,
    )


def inputs(density: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A master, the weight that differs from its rounding in ``density``, and where."""
    generator = torch.Generator().manual_seed(7)
    master = torch.randn(ELEMENTS, generator=generator)
    weight = master.bfloat16()
    hit = torch.rand(ELEMENTS, generator=generator) < density
    weight.view(torch.int16)[hit] ^= 1
    return master, weight, hit.nonzero().squeeze(1).int()


def operators(density: float) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(what a reader calls it, call) of each operator; each launch of a call becomes a row."""
    import pulse_kernels as pk

    master, weight, where = inputs(density)
    values = weight[where.long()].clone()
    theta, local = master, master.clone()
    residual = torch.zeros(ELEMENTS)
    residual[where.long()] = master[where.long()]
    yield "gate_compact(update=True)", lambda: pk.gate_compact(master, weight.clone(), update=True)
    yield "gate_compact", lambda: pk.gate_compact(master, weight)
    new = master.bfloat16()
    yield "diff_compact, BF16", lambda: pk.diff_compact(new, weight, return_old=True)
    yield "gate_residual", lambda: pk.gate_residual(theta, local, residual)
    yield "commit_residual_", lambda: pk.commit_residual_(theta, local, residual.clone(), where)
    yield "exchange_patch_", lambda: pk.exchange_patch_(weight.clone(), where, values)
    yield "digest_update", lambda: pk.digest_update(torch.zeros(2, dtype=torch.int64), where, values, values, 3)
    if density == DENSITIES[0]:
        yield "visibility_mask", lambda: pk.visibility_mask(master, weight)
        yield "digest, BF16", lambda: pk.digest(weight, 3)
        yield "digest, FP32", lambda: pk.digest(master, 3)


def triton_counts(ptxsim: Any) -> Iterator[Count]:
    from triton_code import Simulated

    for density in DENSITIES:
        simulation = Simulated(ptxsim)
        with simulation.operators():
            for name, call in operators(density):
                simulation.launches.clear()
                call()
                for kernel, stats in simulation.launches:
                    yield count("Triton", f"{name}: {kernel}", density, stats)


def cuda_counts(ptxsim: Any) -> Iterator[Count]:
    import compiler
    import device_code

    from pulse_kernels.backends import cuda, reference
    from pulse_kernels.backends.two_pass import TwoPass

    nvcc = compiler.nvcc()
    if nvcc is None:
        print(compiler.WHY_NOT, file=sys.stderr)
        return
    kernels = device_code.Kernels(ptxsim, nvcc)
    for density in DENSITIES:
        master, weight, where = inputs(density)
        values, blob = weight[where.long()].clone(), reference.pack_indices(where, ELEMENTS)
        gate = ("gate_compact", [master], [weight], [torch.int32], True, False)
        calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
            ("gate_compact(update=True)", TwoPass(cuda).compact_many, gate),
            ("pack_indices", cuda.pack_indices_many, ([where], [ELEMENTS])),
            ("unpack_indices", cuda.unpack_indices_many, ([blob], [torch.int32])),
            ("exchange_packed_patch_", cuda.exchange_packed_many_, ([weight], [blob], [values], True)),
        ]
        raw = device_code.Simulated(kernels)
        raw.allow(master, weight, where, values, blob)
        before, cuda._raw = cuda._raw, raw
        try:
            for name, call, arguments in calls:
                raw.launches.clear()
                call(*arguments)
                for kernel, stats in raw.launches:
                    yield count("CUDA", f"{name}: {kernel.removeprefix('pulse_')}", density, stats)
        finally:
            cuda._raw = before


def section() -> Iterator[str]:
    """The figures as a section of docs/performance.md."""
    if not OUTPUT.exists():
        return
    found = [Count(**row) for row in json.loads(OUTPUT.read_text())]
    yield "## GPU kernels: counts and a model, no time"
    yield ""
    yield "Not yet measured on a GPU: what follows was computed."
    yield ""
    yield (
        f"The kernels' PTX for sm_90, run on the CPU by a simulator that counts (`python -m bench.ptx_counts`; "
        f"{ELEMENTS:,} parameters, launches of one tensor). *Compulsory*: bytes of all 32-byte sectors touched, each "
        "once. *Requested*: the same summed over requests of warps, as without any cache. Both, instructions and bank "
        "conflict cycles are a parameter of the whole tensor, not a change. *Model*: the time that an H200 would take "
        "to issue the PTX instructions (4 a clock, 132 SMs, 1.755 GHz) over the time for the compulsory bytes at 4.3 "
        "TB/s; under 1 memory decides. It leaves out latency, occupancy, caches and launches."
    )
    yield ""
    for density in DENSITIES:
        passes = [c for c in found if c.density == density and c.kernel.startswith("gate_compact(update=True)")]
        ours = [c for c in passes if c.library == "Triton"]
        if ours:
            total = sum(c.compulsory for c in ours)
            yield f"- `gate_compact(update=True)`, both passes, {density:.1%} changed: {total:.2f} compulsory bytes"
    yield ""
    yield "| library | kernel | changed | compulsory B | requested B | warp instructions | bank conflicts | model |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for c in found:
        figures = [f"{c.compulsory:.3f}", f"{c.requested:.3f}", f"{c.warp_instructions:.4f}", f"{c.bank_conflicts:.4f}"]
        yield f"| {c.library} | {c.kernel} | {c.density:.1%} | {' | '.join(figures)} | {c.model:.2f} |"
    yield ""


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("ptx", "ops", "triton", "cuda")]
    import simulator

    if reason := simulator.why_not():
        sys.exit(reason)
    ptxsim = simulator.load()
    found = [*triton_counts(ptxsim), *cuda_counts(ptxsim)]
    OUTPUT.parent.mkdir(exist_ok=True)
    rows = [{key: round(x, 5) if isinstance(x, float) else x for key, x in asdict(c).items()} for c in found]
    OUTPUT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print("\n".join(section()))


if __name__ == "__main__":
    main()
