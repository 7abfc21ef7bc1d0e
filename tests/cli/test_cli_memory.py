"""The commands stream: memory follows the largest tensor, not the checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cli_checkpoints import save

NUMEL = 1 << 23  # of each tensor, all of one size
TENSORS = 8

# Prints by how much the command raised the process's peak memory over what it takes to be imported and warm.
CHILD = """
import sys
import torch
import pulse_kernels as pk
from pulse_kernels.cli import main

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

small = {"w": torch.zeros(1000)}, {"w": torch.ones(1000)}
pk.Patch.from_bytes(pk.Patch.diff(*small).to_bytes(), small[0])
before = peak()
code = main(sys.argv[1:])
print(peak() - before)
sys.exit(code)
"""


def extra_memory(*arguments: str | Path) -> int:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from Linux's /proc")
def test_peak_memory_follows_the_largest_tensor(tmp_path: Path) -> None:
    old = {f"layers.{k}.weight": torch.randn(NUMEL // 1024, 1024).bfloat16() for k in range(TENSORS)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor.view(torch.int16).view(-1)[torch.randint(NUMEL, (NUMEL // 100,))] ^= 1
    a, b = save(tmp_path / "a", old, 2), save(tmp_path / "b", new, 3)
    patch = tmp_path / "patch"
    # All tensors of one checkpoint take 8 of these; three is what is promised.
    taken = extra_memory("diff", a, b, "-o", patch)
    limit = 3 * 2 * NUMEL + patch.stat().st_size
    assert taken < limit
    assert extra_memory("apply", a, patch, "-o", tmp_path / "c") < limit
    assert extra_memory("verify", a, patch, b) < limit
    assert extra_memory("apply", a, patch, "--in-place") < limit
