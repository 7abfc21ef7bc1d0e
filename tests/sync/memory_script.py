"""Run by test_sync_memory.py: how far one step of syncing lifts a process's memory, in bytes of resident pages.

    python memory_script.py publish|stage FOLDER PARAMETERS

Prints JSON: growth, the peak during the step over the level before it; params, model, bytes of the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from pulse_kernels.sync import Publisher, Subscriber, open_store

TENSORS = 8


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since ``begin``), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def begin() -> int:
    """Forget the peak so far; the level."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def masters_of(numel: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {f"layer.{k}": torch.randn(numel // TENSORS // 1000, 1000, generator=generator) for k in range(TENSORS)}


def main() -> None:
    role, folder, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(2)  # each has caches of its own in the allocator
    masters = masters_of(numel)
    weights = {name: tensor.bfloat16() for name, tensor in masters.items()}
    store = open_store(folder, durable=False)
    if role == "publish":
        publisher = Publisher(store, weights, masters=masters)
        publisher.publish()
        for tensor in masters.values():
            tensor.view(-1)[7::100].neg_()
        level = begin()
        report = publisher.publish()
        growth = resident("VmHWM") - level
        assert (report.kind, report.version) == ("patch", 1)
        changed = report.num_changed
    else:
        masters.clear()
        subscriber = Subscriber(store, weights)
        assert subscriber.stage(0) is None  # finds out that the weights are version 0
        level = begin()
        staged = subscriber.stage(1)
        growth = resident("VmHWM") - level
        assert staged is not None
        assert not staged.from_anchor
        changed = staged.num_changed
        assert subscriber.apply().version == 1
    model = sum(tensor.nbytes for tensor in weights.values())
    print(json.dumps({"growth": growth, "model": model, "changed": changed}))


if __name__ == "__main__":
    main()
