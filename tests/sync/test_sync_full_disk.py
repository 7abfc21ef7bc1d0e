"""A disk that is really full: a tmpfs of 2 MB, in a mount namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("full_disk.py")


def namespace() -> list[str]:
    """The command that gives a process mounts of its own; skips where that is not permitted."""
    words = ["unshare", "-Urm"]
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("mounting a small disk needs Linux and unshare")
    tried = subprocess.run(
        [*words, "mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", "/mnt"], capture_output=True, text=True, timeout=30
    )
    if tried.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {tried.stderr.strip()}")
    return words


@pytest.mark.parametrize("source", ["masters", "snapshot"])
def test_nothing_is_committed_left_or_lost(source: str, tmp_path: Path) -> None:
    words = [*namespace(), sys.executable, str(SCRIPT), str(tmp_path), source]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    anchor, patch = map(int, done.stdout.split())
    assert patch >= 2  # the patch did not fit, then the manifest
    assert anchor >= 4  # of several pages
