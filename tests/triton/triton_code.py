"""Launches of the Triton back end compiled ahead of time: which variants there are, what they take, their PTX run on
CPU tensors by the simulator with every check on."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pulse_kernels import backends
from pulse_kernels.backends.triton import launch, operators

TYPES = {torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
CLEAN = ("uninit_shared_reads", "inactive_shuffle_reads", "store_conflicts", "local_requests")


@dataclass(frozen=True)
class Variant:
    """A kernel with all that its compilation depends on."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    num_warps: int

    @property
    def name(self) -> str:
        given = ",".join(
            f"{key}={value}" for key, value in self.constants if key.isupper() and key not in ("TILE", "STEP")
        )
        table = "table" if dict(self.signature).get("table") != "constexpr" else "lone"
        return f"{self.kernel.__name__}[{table},{given}]"


def variant(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int) -> Variant:
    """What launch.run compiles for these arguments."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature, fixed, aligned = {}, dict(constants), []
    for name, argument in zip(names, arguments, strict=True):
        if argument is None:
            fixed[name] = None
        elif isinstance(argument, Tensor):
            signature[name] = f"*{TYPES[argument.dtype]}"
            if argument.data_ptr() % 16 == 0:
                aligned.append(kernel.arg_names.index(name))
        else:
            assert -(2**63) <= argument < 2**63, f"{name}: {argument}"
            signature[name] = "i64"
    ordered = tuple((name, signature.get(name, "constexpr")) for name in kernel.arg_names)
    return Variant(kernel, ordered, tuple(sorted(fixed.items(), key=str)), tuple(aligned), num_warps)


@functools.cache
def compiled(item: Variant, architecture: int) -> Any:
    source = ASTSource(
        fn=item.kernel,
        signature=dict(item.signature),
        constexprs=dict(item.constants),
        attrs={(place,): [["tt.divisibility", 16]] for place in item.aligned},
    )
    options = {"num_warps": item.num_warps, "enable_fp_fusion": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a default that the options name
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """REG, STACK, LOCAL, SHARED of a compiled kernel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    output = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", output))
    assert len(found) == 4, output
    return {key: int(value) for key, value in found.items()}


@contextlib.contextmanager
def triton_back_end(run: Callable[..., None]) -> Iterator[None]:
    """All operators on CPU tensors through the Triton back end, its launches given to ``run``."""
    back_end = backends.BackEnd(("triton", "reference"), [operators, backends.reference])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "for_device", lambda _: back_end)
        patch.setattr(launch, "run", run)
        yield


class Launches:
    """Runs launches as they are, in Triton's interpreter."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any]] = []  # (kernel, counters where there are any)

    def run(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int
    ) -> None:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
        self.launches.append((kernel.__name__, None))

    @contextlib.contextmanager
    def operators(self) -> Iterator[Launches]:
        with triton_back_end(self.run):
            yield self


class Simulated(Launches):
    """Runs launches in the simulator. Every tensor whose address was asked for is legal memory, and nothing else."""

    def __init__(self, ptxsim: Any, architecture: int = 90):
        super().__init__()
        self.ptxsim, self.architecture = ptxsim, architecture
        self.legal: list[Tensor] = []
        self.launching = False  # the simulator asks for addresses, too

    def run(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int
    ) -> None:
        item = variant(kernel, arguments, constants, num_warps)
        self.launching = True
        try:
            stats = self.ptxsim.launch_triton(
                compiled(item, self.architecture),
                (programs,),
                [argument for argument in arguments if argument is not None],
                race_check=True,
                schedule="random",
                seed=len(self.launches),
                resident=3,
                extra=[tensor for tensor in self.legal if tensor.numel()],
            )
        finally:
            self.launching = False
        for counter in CLEAN:
            assert getattr(stats, counter) == 0, f"{item.name}: {counter} is {getattr(stats, counter)}"
        self.launches.append((kernel.__name__, stats))

    @contextlib.contextmanager
    def operators(self) -> Iterator[Launches]:
        address_of = Tensor.data_ptr

        def remembering(tensor: Tensor) -> int:
            if not self.launching:
                self.legal.append(tensor)
            return address_of(tensor)

        with triton_back_end(self.run), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "data_ptr", remembering)
            yield self
            self.legal.clear()
