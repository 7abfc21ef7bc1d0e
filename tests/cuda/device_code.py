"""The raw operators of csrc/cuda on CPU tensors: their kernels' PTX, run by the simulator with every check on."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import compiler
from torch import Tensor

THREADS = 256
MARK_KINDS = {0: "gate_bf16", 1: "gate_fp16", 2: "diff_{size}", 3: "residual_bf16", 4: "residual_fp16"}


class Kernels:
    """Every kernel by its name."""

    def __init__(self, ptxsim: Any, nvcc: str):
        self.modules = {}
        for text in compiler.ptx(nvcc, 90):
            module = ptxsim.Module(text)
            for name in re.findall(r"\.entry (\w+)", text):
                self.modules[name] = module

    def launch(self, name: str, tiles: int, arguments: list[Any], legal: list[Tensor], seed: int) -> Any:
        stats = self.modules[name].launch(
            name,
            grid=tiles,
            block=THREADS,
            args=arguments,
            race_check=True,
            schedule="random",
            seed=seed,
            resident=3,
            extra=[tensor for tensor in legal if tensor.numel()],
        )
        for counter in ("uninit_shared_reads", "inactive_shuffle_reads", "store_conflicts", "local_requests"):
            assert getattr(stats, counter) == 0, f"{name}: {counter} is {getattr(stats, counter)}"
        return stats


class Simulated:
    """Stands in for torch.ops.pulse_kernels_cuda. ``legal``: tensors whose addresses may stand in tables."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
        self.legal: list[Tensor] = []
        self.launches: list[tuple[str, Any]] = []  # (kernel, counters)

    def allow(self, *tensors: Tensor) -> None:
        self.legal += tensors

    def remembering(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def inner(tensor: Tensor) -> Tensor:
            result = function(tensor)
            self.allow(result)
            return result

        return inner

    def _launch(self, name: str, tiles: int, *arguments: Any, also: tuple[Tensor | None, ...] = ()) -> None:
        assert 0 < tiles < 2**31
        legal = [*self.legal, *(tensor for tensor in also if tensor is not None)]
        stats = self.kernels.launch(name, tiles, list(arguments), legal, seed=len(self.launches))
        self.launches.append((name, stats))

    @staticmethod
    def _address(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    def _job(self, table: Tensor | None, tile_rows: Tensor | None, row: list[int]) -> bytes:
        assert (table is None) == (tile_rows is None) == (len(row) == 5)
        return struct.pack("<7Q", self._address(table), self._address(tile_rows), *(row or [0] * 5))

    def mark(self, kind, size, table, tile_rows, row, tiles, mask, counts):
        assert mask.numel() == 256 * tiles
        assert counts.numel() == tiles
        name = "pulse_mark_" + MARK_KINDS[kind].format(size=size)
        self._launch(name, tiles, self._job(table, tile_rows, row), mask, counts, also=(table, tile_rows))

    def collect(self, kind, size, table, tile_rows, row, tiles, mask, ends, indices, values, old_values, update):
        output = struct.pack(
            "<QqqQ?7xQQ?7x",
            ends.data_ptr(),
            tiles,
            indices.numel(),
            indices.data_ptr(),
            indices.element_size() == 8,
            values.data_ptr(),
            self._address(old_values),
            update,
        )
        name = "pulse_collect_" + MARK_KINDS[kind].format(size=size)
        also = (table, tile_rows, ends, indices, values, old_values)
        self._launch(name, tiles, self._job(table, tile_rows, row), mask, output, also=also)

    def pack_widths(self, table, tile_rows, widths):
        self._launch("pulse_pack_widths", tile_rows.numel(), table, tile_rows, widths)

    def pack(self, table, tile_rows, widths, ends, blobs):
        self._launch("pulse_pack", tile_rows.numel(), table, tile_rows, widths, ends, blobs)

    def unpack(self, table, tile_rows, errors, out):
        self._launch("pulse_unpack", tile_rows.numel(), table, tile_rows, errors, out)

    def exchange(self, table, tile_rows, old_values):
        self._launch("pulse_exchange", tile_rows.numel(), table, tile_rows, old_values)
