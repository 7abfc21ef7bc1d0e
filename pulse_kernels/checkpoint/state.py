"""What a checkpoint says about itself: its recorded digest and version, and an apply that did not come to its end.

The journal of an apply lies beside the checkpoint from before the first byte of the new weights until the last old one
is gone. It is written once; which side of the switch the files are on follows from the files (see replace.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pulse_kernels.errors import CheckpointError

from .files import Workspace, os_errors
from .folder import Weights, find_weights
from .layout import DIGEST_KEY, INDEX_FILE, SINGLE_FILE, VERSION_KEY
from .reader import Checkpoint
from .validate import check_file_name, parse_json, show

_MAX_JOURNAL_BYTES = 16_000_000


@dataclass(frozen=True)
class Interrupted:
    """An apply that did not come to its end, or has not yet."""

    old_digest: str
    new_digest: str
    new_version: int | None
    holds: Literal["old", "new"]  # the checkpoint that a loader sees now


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint file or folder says about itself.

    digest, version: of the checkpoint a loader sees now: as the last apply recorded them, or, during an apply and
        after an interrupted one, as that apply knows them. None where neither says anything. Whoever edits the
        files by other means does not change them.
    interrupted: the apply that was cut off, or is `running`.
    leftovers: names of files in the folder that `recover` would remove.
    running: another process is writing this checkpoint at this moment.
    """

    path: Path
    digest: str | None
    version: int | None
    interrupted: Interrupted | None
    leftovers: tuple[str, ...]
    running: bool

    def __str__(self) -> str:
        known = f"digest {self.digest or 'not recorded'}"
        if self.version is not None:
            known = f"version {self.version}, {known}"
        if self.interrupted is None:
            return f"{self.path}: {known}"
        apply = "is being written" if self.running else "was interrupted"
        return (
            f"{self.path}: an apply from {self.interrupted.old_digest} to {self.interrupted.new_digest} {apply}; "
            f"the {self.interrupted.holds} checkpoint is in place, whole ({known})"
        )


@dataclass(frozen=True)
class Journal:
    """What step 1 writes; all that `recover` needs."""

    token: str
    old_digest: str
    new_digest: str
    new_version: int | None
    entry: str  # the name the switch gives to the entry
    names: list[str]  # the new files' own names, in layout order
    old_files: list[str]
    old_kind: str

    @property
    def has_index(self) -> bool:
        return self.entry == INDEX_FILE

    @property
    def staged_names(self) -> list[str]:
        """The names step 2 gives to the new files; a single file has none."""
        if not self.has_index:
            return []
        return [Workspace.staged_shard(self.token, i) for i in range(1, len(self.names) + 1)]

    def encode(self) -> bytes:
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()


class Target:
    """The file or folder at a path, and the places where writers leave things beside or in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with os_errors("open", self.path):
            self.is_folder = self.path.is_dir()
            if not self.is_folder and not self.path.is_file():
                raise CheckpointError(f"{self.path}: no such file or folder; expected a checkpoint to replace")
        self.folder = self.path if self.is_folder else self.path.parent
        self.workspace = Workspace(self.folder, None if self.is_folder else self.path.name)
        self.entry_temporary = self.workspace.temporary("entry")

    def weights(self) -> Weights:
        """The weight files as a loader finds them."""
        if not self.is_folder:
            return Weights("loose", (self.path.name,))
        weights = find_weights(self.folder)
        if weights.unfinished:
            raise CheckpointError(f"{self.path}: the write of this checkpoint was interrupted; write it again")
        return weights

    def recorded(self) -> tuple[str | None, int | None]:
        """The digest and version in the metadata of what a loader sees."""
        weights = self.weights()
        if weights.kind == "index":
            metadata = weights.index_metadata or {}
        elif weights.entry is not None:
            with Checkpoint.open(self.folder / weights.entry) as single:
                metadata = single.recorded
        else:
            return None, None
        digest, version = metadata.get(DIGEST_KEY), metadata.get(VERSION_KEY)
        try:
            number = None if version is None else int(version)
        except (TypeError, ValueError):
            number = None
        return (digest if isinstance(digest, str) else None), number

    def journal(self) -> Journal | None:
        path = self.workspace.journal
        with os_errors("read the journal", path):
            try:
                if path.stat().st_size > _MAX_JOURNAL_BYTES:
                    raise CheckpointError(f"{path}: too large for a journal; look at it and remove it")
                document = parse_json(path.read_bytes(), str(path))
            except FileNotFoundError:
                return None
        return _parse_journal(document, path, self)

    def holds(self, journal: Journal) -> Literal["old", "new"]:
        """Which side of the switch the files are on."""
        if self.entry_temporary.exists() or (journal.has_index and (self.folder / SINGLE_FILE).is_file()):
            return "old"
        # The entry is gone without having become what loaders see: somebody cleaned up by hand.
        return "new" if self.recorded()[0] == journal.new_digest else "old"


def checkpoint_state(path: str | os.PathLike[str]) -> CheckpointState:
    """What the checkpoint at `path` says about itself; changes nothing and waits for nobody.

    Raises:
        CheckpointError: there is no checkpoint, or a file that tells its state cannot be read.
    """
    target = Target(path)
    for last in (False, False, True):
        try:
            running = target.workspace.is_locked()
            journal = target.journal()
            digest, version = target.recorded()
            interrupted = None
            if journal is not None:
                holds = target.holds(journal)
                interrupted = Interrupted(journal.old_digest, journal.new_digest, journal.new_version, holds)
                if holds == "new":
                    digest, version = journal.new_digest, journal.new_version
                elif digest != journal.old_digest:
                    digest, version = journal.old_digest, None
            with os_errors("list the folder", target.folder):
                leftovers = target.workspace.leftovers(target.weights().files)
            if not running:
                own = (target.workspace.journal, target.workspace.lock)
                leftovers += [file.name for file in own if os.path.lexists(file)]
            break
        except CheckpointError:
            if last or not running:  # an apply that runs meanwhile may take a file away between two looks
                raise
    return CheckpointState(target.path, digest, version, interrupted, tuple(sorted(leftovers)), running)


def _parse_journal(document: object, path: Path, target: Target) -> Journal:
    """The journal of `target`; it names files to remove, so it is believed only where it can be one."""
    try:
        if not isinstance(document, dict) or document.pop("format", None) != 1:
            raise TypeError("format")
        journal = Journal(**document)
        texts = (journal.token, journal.old_digest, journal.new_digest)
        if not all(isinstance(text, str) for text in texts) or len(journal.token) != 16:
            raise TypeError("token or digest")
        if not (journal.new_version is None or type(journal.new_version) is int) or not journal.names:
            raise TypeError("version or names")
        if target.is_folder:
            for name in [*journal.names, *journal.old_files]:
                check_file_name(name, str(path))
            allowed = {INDEX_FILE, journal.names[0]}
        else:
            allowed = {target.path.name}
            if {*journal.names, *journal.old_files} != allowed:
                raise TypeError("names")
        if journal.entry not in allowed or journal.old_kind not in ("single", "index", "loose"):
            raise TypeError("entry or kind")
        if not all(c in "0123456789abcdef" for c in journal.token):
            raise TypeError("token")
        return journal
    except (TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path}: not a journal of this package ({show(str(error))}); if no apply made it, remove it"
        ) from error
