"""Which checkpoint of a folder to publish next: the one that lies there, or the newest complete one of many steps.

Layouts: DIR is a safetensors file, or a folder with weights, replaced again and again; or DIR holds a folder a step
whose name ends in the step's number (`checkpoint-10`, `global_step_20`, `step_000123`, `iter_0000400`), with the
weights in it or in one of the places below. A step is published once, and none before it afterwards.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from pulse_kernels.checkpoint import Checkpoint
from pulse_kernels.checkpoint.files import is_staged_shard
from pulse_kernels.checkpoint.layout import INDEX_FILE
from pulse_kernels.errors import CheckpointError

_STEP = re.compile(r"(?:.*\D)?(\d{1,15})\Z", re.DOTALL)
# Where trainers leave a step's Hugging Face weights, below its folder.
_PLACES = ("", "huggingface", "hf", "model", "policy", "actor/huggingface", "actor")

State = tuple[tuple[str, int, int, int], ...]  # (file, inode, size, time of the last write) of each weight file


@dataclass(frozen=True)
class Found:
    """A checkpoint as it was when it was looked at. step: its number, None where it has none."""

    path: Path
    step: int | None
    state: State


class Watch:
    """Looks for checkpoints below ``path``. settle: seconds for which a checkpoint's files must have been at rest.

    waiting: why the last look found nothing, "" where there was nothing to wait for.
    """

    def __init__(self, path: str | os.PathLike[str], settle: float) -> None:
        self.path = Path(path)
        self.settle = settle
        self.waiting = ""
        self._done: Found | None = None
        self._seen: dict[Path, tuple[State, float]] = {}

    def look(self) -> Found | None:
        """The checkpoint to publish: complete, at rest, and not what was ``done`` last, nor of a step before that."""
        self.waiting = ""
        candidates = self._candidates()
        self._seen = {path: seen for path, seen in self._seen.items() if any(path == at for at, _ in candidates)}
        for path, step in candidates:
            found = Found(path, step, weights_state(path))
            if self._is_old(found):
                break
            if why := self._unready(found):
                self.waiting = self.waiting or why
                continue
            return found
        return None

    def done(self, found: Found) -> None:
        """``found`` was published."""
        self._done = found

    def _is_old(self, found: Found) -> bool:
        done = self._done
        if done is None or found == done:
            return done is not None
        return found.step is not None and done.step is not None and found.step <= done.step

    def _unready(self, found: Found) -> str:
        now = time.monotonic()
        state, since = self._seen.setdefault(found.path, (found.state, now))
        if state != found.state:
            self._seen[found.path] = found.state, now
        if state != found.state or now - since < self.settle:
            return f"{found.path} is being written"
        try:
            Checkpoint.open(found.path).close()
        except CheckpointError as error:
            return str(error)
        return ""

    def _candidates(self) -> list[tuple[Path, int | None]]:
        """Where weights are, the newest step first."""
        if self.path.is_file() or _has_weights(self.path):
            return [(self.path, None)]
        found: list[tuple[int, str, Path]] = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    match = _STEP.match(entry.name)
                    if match and not entry.name.startswith((".", "tmp")) and entry.is_dir():
                        places = (Path(entry.path, place) for place in _PLACES)
                        inner = next((place for place in places if _has_weights(place)), None)
                        if inner is not None:
                            found.append((int(match[1]), entry.name, inner))
        except OSError as error:
            self.waiting = f"{self.path}: {error.strerror}"
            return []
        if not found:
            self.waiting = f"{self.path}: no safetensors checkpoint in it, nor in a folder whose name ends in a number"
        return [(path, step) for step, _, path in sorted(found, reverse=True)]


def weights_state(path: Path) -> State:
    """What changes whenever a weight file at ``path``, a file or a folder, is written or replaced."""
    try:
        if not path.is_dir():
            return (_entry(path),)
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if _is_weights(entry.name)]
        return tuple(_entry(path / name) for name in sorted(names))
    except OSError:  # replaced at this moment
        return ()


def _entry(path: Path) -> tuple[str, int, int, int]:
    status = os.stat(path)
    return path.name, status.st_ino, status.st_size, status.st_mtime_ns


def _is_weights(name: str) -> bool:
    plain = not name.startswith(".") and not is_staged_shard(name)
    return plain and (name == INDEX_FILE or name.endswith(".safetensors"))


def _has_weights(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(_is_weights(entry.name) for entry in entries)
    except OSError:
        return False
