"""Replacing a checkpoint where it lies, so that it is whole at every moment, `kill -9` and power loss included.

A loader opens `model.safetensors` if it exists and else the files that `model.safetensors.index.json` names. So there
is always one operation on one name that takes a loader from the old checkpoint to the new one, the *switch*:

    new checkpoint   old checkpoint       switch
    a single file    anything             rename of the new file to model.safetensors
    an index         index, loose files   rename of the new index to model.safetensors.index.json
    an index         model.safetensors    its removal, after that rename

1. The *entry*, the file that the switch renames, is created under a temporary name; then the journal is written.
   From here on, the entry still having its temporary name means "old", and its having lost it means "new" (or, in
   the last row, once model.safetensors is gone). The journal itself is never changed.
2. The weights are written under temporary names and synced. With an index they then get visible names that no
   checkpoint uses (`pulse-<token>-00001.safetensors`), which the new index refers to.
3. The switch.
4. With an index: each file gets its own name as a second, hard link, renamed over whatever has that name: nothing
   looks there at this time. A second index, of the files' own names, replaces the first in one rename. Where the
   file system has no hard links, the first index stays, and with it the names it has.
5. What belonged to the old checkpoint and everything temporary is removed, the journal last.

`recover` undoes 1 to 2 or completes 4 to 5 after an interruption; it never changes which checkpoint a loader sees.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

from pulse_kernels.errors import CheckpointError

from .files import check_free_space, os_errors, remove, sync_folder, write_document
from .folder import Weights
from .layout import INDEX_FILE, SINGLE_FILE, Layout, encode_index, index_bytes
from .state import CheckpointState, Journal, Target, checkpoint_state
from .validate import parse_json, validate_layout
from .writer import TensorSink, marker, show_files, with_marker


def recover(path: str | os.PathLike[str]) -> CheckpointState:
    """Clean up after an interrupted apply: undo it where the old checkpoint is in place, complete it where the new is.

    Which checkpoint a loader sees does not change. Being interrupted itself does no harm: call it again. Where there
    is nothing to do, nothing is done.

    Raises:
        CheckpointError: another process is writing this checkpoint, or a file cannot be changed.
    """
    target = Target(path)
    with target.workspace.locked():
        _recover(target)
    return checkpoint_state(path)


def replace_in_place(
    path: str | os.PathLike[str],
    layout: object,
    write_tensors: Callable[[TensorSink], None],
    *,
    old_digest: str,
    new_digest: str,
    version: int | None = None,
) -> CheckpointState:
    """Replace the checkpoint at `path` by one of `layout`; at every moment one of the two is there, whole.

    Args:
        path: a checkpoint file or folder. In a folder, only its weight files change.
        layout: of the new checkpoint, from anywhere: it is validated. The layout of a lone file takes the name of the
            single file it replaces. Several files, or one of an unusual name, get an index even if the layout has
            none: without it there is no moment at which such files could be exchanged.
        write_tensors: called once, with the writer that takes the new tensors. It runs under the lock and may read the
            old checkpoint, which is in place all the while: the moment to check its digest.
        old_digest, new_digest, version: what the two checkpoints are called. The new digest and version become part
            of it, as `pulse_digest` and `pulse_version` in the index's metadata or the single file's `__metadata__`.

    Returns:
        The state afterwards. If its `interrupted` is not None, the new checkpoint is in place, but something of the
        old one could not be removed; `recover` tries again.

    Needs the space of the whole new checkpoint beside the old one. A symbolic link is replaced, not what it points
    to, so files of a Hugging Face cache are never written into. Permissions are those of the old weights.

    Raises:
        CheckpointError: no checkpoint here, an invalid layout, a full disk, an incomplete write, or another process at
            work here. The old checkpoint is then in place, untouched. Whatever `write_tensors` raises goes through,
            with the same guarantee.
    """
    target = Target(path)
    with target.workspace.locked():
        _recover(target)
        old = target.weights()
        checked = _adapt(validate_layout(layout), old, target)
        journal = Journal(
            token=secrets.token_hex(8),
            old_digest=old_digest,
            new_digest=new_digest,
            new_version=version,
            entry=INDEX_FILE if checked.has_index else checked.files[0].name,
            names=[file.name for file in checked.files],
            old_files=list(old.files),
            old_kind=old.kind,
        )
        with os_errors("look at the old weights", target.folder):
            mode = os.stat(target.folder / old.files[0]).st_mode & 0o777
        recorded = marker(new_digest, version)
        labels = [f"{i:05d}" for i in range(1, len(checked.files) + 1)] if checked.has_index else ["entry"]
        temporaries = [target.workspace.temporary(label) for label in labels]
        sink = TensorSink(with_marker(checked, recorded), temporaries, mode)
        check_free_space(target.folder, sink.nbytes)
        try:
            _prepare(target, journal, checked, recorded, sink, mode)
            write_tensors(sink)
            sink._finish()
            with os_errors("put the new files in place", target.folder):
                _switch(target, journal, temporaries)
        except BaseException as error:
            sink._close()
            if target.journal() is None or target.holds(journal) == "old":
                with suppress(OSError):  # a journal that is left tells the next call what to do
                    _undo(target, journal)
                raise
            if not isinstance(error, Exception):
                raise
        with suppress(OSError):  # likewise
            _complete(target, journal)
    return checkpoint_state(path)


def _adapt(layout: Layout, old: Weights, target: Target) -> Layout:
    """The layout as it can be put in the old one's place."""
    if not target.is_folder:
        if layout.has_index or len(layout.files) > 1:
            raise CheckpointError(
                f"{target.path}: one file cannot be replaced by {show_files(layout)}; write them to a new folder"
            )
        return layout.renamed(target.path.name)
    if not layout.folder:
        layout = layout.renamed(old.files[0] if old.kind != "index" and len(old.files) == 1 else SINGLE_FILE)
    names = tuple(file.name for file in layout.files)
    if layout.has_index or names == (SINGLE_FILE,) or (old.kind == "loose" and names == old.files and len(names) == 1):
        return layout
    return validate_layout(dataclass_replace(layout, index_metadata={}))


def _prepare(
    target: Target, journal: Journal, layout: Layout, recorded: dict[str, Any], sink: TensorSink, mode: int
) -> None:
    """Step 1."""
    with os_errors("prepare the folder", target.folder):
        if journal.has_index:
            write_document(target.entry_temporary, encode_index(layout, journal.staged_names, recorded), mode)
        sink._stage()
        sync_folder(target.folder)
        temporary = target.workspace.temporary("journal")
        write_document(temporary, journal.encode())
        os.rename(temporary, target.workspace.journal)
        sync_folder(target.folder)


def _switch(target: Target, journal: Journal, temporaries: list[Path]) -> None:
    """The end of step 2, and step 3."""
    folder, entry = target.folder, target.folder / journal.entry
    if journal.has_index:
        for temporary, name in zip(temporaries, journal.staged_names, strict=True):
            os.rename(temporary, folder / name)
        if journal.old_kind == "single" and os.path.lexists(entry):
            os.rename(entry, target.workspace.temporary("ignored-index"))  # back to its place if this is undone
    sync_folder(folder)
    os.rename(target.entry_temporary, entry)
    sync_folder(folder)
    if journal.has_index and journal.old_kind == "single":
        os.unlink(folder / SINGLE_FILE)
        sync_folder(folder)


def _recover(target: Target) -> None:
    journal = target.journal()
    with os_errors("clean up after an interrupted write", target.folder):
        if journal is None:
            if target.workspace.leftovers():
                target.workspace.sweep(target.weights().files)
        elif target.holds(journal) == "old":
            _undo(target, journal)
        else:
            _complete(target, journal)


def _undo(target: Target, journal: Journal) -> None:
    """Remove what steps 1 and 2 made. The journal goes before the entry, whose absence would mean "new"."""
    folder = target.folder
    if journal.has_index and journal.old_kind == "single":
        ignored = target.workspace.temporary("ignored-index")
        if ignored.exists():
            os.rename(ignored, folder / INDEX_FILE)
        elif _refers_to(folder / INDEX_FILE, journal.staged_names):
            remove(folder / INDEX_FILE)
    remove(target.workspace.journal)
    with suppress(OSError):  # a full disk may fail this too, and needs what follows all the more
        sync_folder(folder)
    target.workspace.sweep(target.weights().files)


def _complete(target: Target, journal: Journal) -> None:
    """Steps 4 and 5; every part of them may have been done before."""
    folder = target.folder
    if journal.has_index:
        _give_own_names(target, journal)
    weights = target.weights()
    keep = {*weights.files, journal.entry}
    old = set(journal.old_files)
    if journal.old_kind == "index":
        old.add(INDEX_FILE)
    for name in sorted(old - keep):
        remove(folder / name)
    target.workspace.sweep(weights.files)
    sync_folder(folder)
    remove(target.workspace.journal)
    sync_folder(folder)


def _give_own_names(target: Target, journal: Journal) -> None:
    folder, workspace = target.folder, target.workspace
    if not _refers_to(folder / INDEX_FILE, journal.staged_names):
        return
    own_name = dict(zip(journal.staged_names, journal.names, strict=True))
    try:
        for staged, own in own_name.items():
            if not _same_file(folder / staged, folder / own):
                link = workspace.temporary("link")
                remove(link)
                os.link(folder / staged, link)
                os.rename(link, folder / own)
    except OSError:  # no hard links here, or something is in the way: the staged names serve as well
        for staged, own in own_name.items():
            if _same_file(folder / staged, folder / own):
                remove(folder / own)
        return
    sync_folder(folder)
    document = parse_json((folder / INDEX_FILE).read_bytes(), str(folder / INDEX_FILE))
    document["weight_map"] = {tensor: own_name[name] for tensor, name in document["weight_map"].items()}
    mode = os.stat(folder / INDEX_FILE).st_mode & 0o777
    write_document(workspace.temporary("second-index"), index_bytes(document), mode)
    os.rename(workspace.temporary("second-index"), folder / INDEX_FILE)
    sync_folder(folder)


def _refers_to(index: Path, names: list[str]) -> bool:
    """Whether the index at `index` is about exactly these files."""
    try:
        weight_map = parse_json(index.read_bytes(), str(index))["weight_map"]
        return set(weight_map.values()) == set(names)
    except (FileNotFoundError, CheckpointError, KeyError, TypeError, AttributeError):
        return False


def _same_file(one: Path, other: Path) -> bool:
    return other.exists() and os.path.samefile(one, other)
