"""What the CUDA compiler makes of csrc/cuda, for every architecture of the wheel."""

from __future__ import annotations

import re

import compiler

KERNELS = {
    *(f"pulse_{step}_{kind}" for step in ("mark", "collect") for kind in ("gate_bf16", "gate_fp16")),
    *(f"pulse_{step}_{kind}" for step in ("mark", "collect") for kind in ("residual_bf16", "residual_fp16")),
    *(f"pulse_{step}_diff_{size}" for step in ("mark", "collect") for size in (1, 2, 4, 8)),
    *("pulse_pack_widths", "pulse_pack", "pulse_unpack", "pulse_exchange"),
}


def test_no_kernel_spills_or_uses_local_memory(nvcc):
    found = compiler.resources(nvcc)
    assert set(found) == {(name, arch) for name in KERNELS for arch in compiler.ARCHITECTURES}
    for kernel, used in found.items():
        assert (used["stack"], used["spills"]) == (0, 0), (kernel, used)
        # 64 registers let four blocks of 256 threads share a multiprocessor.
        assert 0 < used["registers"] <= 64, (kernel, used)


def test_dense_passes_load_16_bytes_of_the_widest_input(nvcc):
    ptx = "\n".join(compiler.ptx(nvcc, 90))
    bodies = {m[1]: m[2] for m in re.finditer(r"\.entry (\w+)\((.*?)\n\}", ptx, re.S)}
    assert set(bodies) == KERNELS
    for name, body in bodies.items():
        if name.startswith("pulse_mark"):
            assert re.search(r"ld\.global(\.nc)?\.v4\.(b|u)32", body), name
        if name.startswith("pulse_mark_gate"):
            assert re.search(r"ld\.global(\.nc)?\.v2\.(b|u)32", body), name  # four elements of 16 bits
        assert ".local" not in body, name
