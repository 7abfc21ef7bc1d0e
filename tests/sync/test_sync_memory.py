"""Memory that syncing takes beside the weights, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memory_script.py")
NUMEL = 50_000_000

# Not the patch's: allocators keep what was freed, and each of the threads (torch's two, obstore's, BLAKE3's, one per
# core) has an arena and a stack of its own. An arena grows in steps of 128 KiB up to 64 MiB, and gives back what lies
# above its last block only; 64 MiB is one full arena, and less than the 100 MB that a copy of the weights would take.
SLACK = 64 << 20


def measured(role: str, folder: Path) -> dict[str, int]:
    words = [sys.executable, str(SCRIPT), role, str(folder), str(NUMEL)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == 2 * NUMEL
    assert found["changed"] == NUMEL // 100
    return found


def test_a_patch_is_made_sent_and_staged_without_a_copy_of_the_weights(tmp_path: Path) -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of resident memory cannot be reset here: {error}")
    published = measured("publish", tmp_path / "run")
    assert published["growth"] <= 0.2 * NUMEL + SLACK, published
    staged = measured("stage", tmp_path / "run")
    assert staged["growth"] < 0.25 * staged["model"], staged
