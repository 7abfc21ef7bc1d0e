"""Replacing a checkpoint in place: killed, failing or full at every single step, it is whole.

Every operation on the file system that changes something counts as a step. The work stops dead before step k; then
loaders must see all of the old or all of the new checkpoint. k goes up until the work gets to its end. It is stopped in
a forked process, by SIGKILL, or, much faster and for more cases, by an exception after which nothing can change the
file system any more, so that no clean-up code has an effect.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    Tensors,
    all_bits,
    layout_of,
    load_as_transformers,
    load_with_reader,
    visible,
    write,
)

from pulse_kernels.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    TensorSink,
    checkpoint_state,
    recover,
    replace_in_place,
)
from pulse_kernels.errors import CheckpointError

A, B = "digest-of-the-old", "digest-of-the-new"
OLD = {"a": torch.zeros(6), "b": torch.arange(4, dtype=torch.int16), "c": torch.tensor(1.0)}
NEW = {"a": torch.ones(6), "b": torch.arange(4, dtype=torch.int16) + 1, "c": torch.ones(2, dtype=torch.bfloat16)}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def part(tensors: Tensors, names: str) -> Tensors:
    return {name: tensors[name] for name in names}


def shards(tensors: Tensors, *parts: str, stem: str = "model", index: bool = True) -> dict[str, Any]:
    files = [
        (f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors", part(tensors, names)) for i, names in enumerate(parts, 1)
    ]
    return layout_of(*files, index={"by": "us"} if index else None, metadata={"format": "pt"})


@dataclass(frozen=True)
class Case:
    """One kind of transition; `loadable`: transformers loads the old one and the new one."""

    old: dict[str, Any]
    new: dict[str, Any]
    names: tuple[str, ...]  # the folder's files afterwards
    loadable: bool = True
    file: str | None = None  # the path is this file, not the folder


def named(layout: dict[str, Any]) -> tuple[str, ...]:
    index = () if layout["index"] is None else (INDEX,)
    return tuple(sorted([*(file["name"] for file in layout["files"]), *index]))


def case(old: dict[str, Any], new: dict[str, Any], names: tuple[str, ...] | None = None, **options: Any) -> Case:
    return Case(old, new, names or named(new), **options)


def single(tensors: Tensors, name: str = SINGLE, folder: bool = True) -> dict[str, Any]:
    return layout_of((name, tensors), folder=folder)


CASES = {
    "single to single": case(single(OLD), single(NEW)),
    "single to shards": case(single(OLD), shards(NEW, "a", "bc")),
    "shards to single": case(shards(OLD, "a", "bc"), single(NEW)),
    "same shards": case(shards(OLD, "a", "bc"), shards(NEW, "ab", "c")),
    "more shards": case(shards(OLD, "ab", "c"), shards(NEW, "a", "b", "c")),
    "fewer shards": case(shards(OLD, "a", "b", "c"), shards(NEW, "abc")),
    "renamed shards": case(shards(OLD, "a", "bc"), shards(NEW, "a", "bc", stem="weights")),
    "loose file to itself": case(single(OLD, "one.safetensors"), single(NEW, "one.safetensors"), loadable=False),
    "loose file to another": case(
        single(OLD, "x.safetensors"), single(NEW, "y.safetensors"), (INDEX, "y.safetensors"), loadable=False
    ),
    "loose files to single": case(shards(OLD, "a", "bc", index=False), single(NEW), loadable=False),
    "loose files to loose files": case(
        shards(OLD, "a", "bc", index=False),
        shards(NEW, "ab", "c", index=False),
        named(shards(NEW, "ab", "c")),
        loadable=False,
    ),
    "single to loose files": case(
        single(OLD), shards(NEW, "ab", "c", index=False), named(shards(NEW, "ab", "c"))
    ),
    "a file": case(
        single(OLD, "x.safetensors"), single(NEW, "y.safetensors", folder=False), ("x.safetensors",),
        loadable=False, file="x.safetensors",
    ),
}  # fmt: skip


def write_new(sink: TensorSink) -> None:
    for name, tensor in NEW.items():
        writer = sink.open_tensor(name)
        for values in tensor.reshape(-1).split(4):
            writer.append(values)


def apply(case: Case, folder: Path) -> Any:
    path = folder / case.file if case.file else folder
    return replace_in_place(path, case.new, write_new, old_digest=A, new_digest=B, version=2)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder, in memory where the system has such a place: thousands of small files come and go."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def make(scratch: Path) -> Callable[[Case], Path]:
    """Makes a folder with the case's old checkpoint."""
    count = 0

    def new_folder(case: Case) -> Path:
        nonlocal count
        count += 1
        template = scratch / "template"
        if not template.exists():
            write(template, case.old, OLD, digest=A, version=1)
            (template / "config.json").write_text("{}")
        folder = scratch / str(count)
        shutil.copytree(template, folder)
        return folder

    return new_folder


IGNORE_FORK = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
CHANGES = (
    "open",
    "write",
    "pwrite",
    "fchmod",
    "ftruncate",
    "fsync",
    "rename",
    "replace",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)


@contextmanager
def at_every_step(act: Callable[[str], None]) -> Iterator[None]:
    """Call `act` with the operation's name before every change to the file system. Nothing is really synced."""
    real = {name: getattr(os, name) for name in CHANGES}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                act(name)
            return None if name == "fsync" else real[name](*args, **options)

        return call

    try:
        for name in CHANGES:
            setattr(os, name, wrap(name))
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Dead(BaseException):
    """The process is as good as dead."""


def stopped_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` until just before its `step`-th change; False where it came to its end."""
    count = 0

    def stop(name: str) -> None:
        nonlocal count
        count += 1
        if count >= step:
            raise Dead

    try:
        with at_every_step(stop):
            work()
    except Dead:
        return True
    assert count < step
    return False


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that dies just before its `step`-th change; False where it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def die(name: str) -> None:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            with at_every_step(die):
                work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def holds(case: Case, folder: Path) -> str:
    """Which checkpoint is there, after checking that every loader sees it whole and that the state says so."""
    path = folder / case.file if case.file else folder
    seen = all_bits(load_with_reader(path))
    assert seen in (all_bits(OLD), all_bits(NEW)), "neither the old nor the new checkpoint"
    side = "old" if seen == all_bits(OLD) else "new"
    if case.loadable or (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        assert all_bits(load_as_transformers(folder)) == seen
    state = checkpoint_state(path)
    assert not state.running
    if state.interrupted:
        assert (state.interrupted.old_digest, state.interrupted.new_digest) == (A, B)
        assert state.interrupted.holds == side
        assert f"the {side} checkpoint is in place" in str(state)
    if state.interrupted or len(case.old["files"]) == 1 or case.old["index"] or side == "new":
        assert state.digest == (A if side == "old" else B)
    assert (folder / "config.json").read_text() == "{}"
    return side


def check_recovered(case: Case, folder: Path, side: str) -> None:
    state = checkpoint_state(folder / case.file if case.file else folder)
    assert (state.interrupted, state.leftovers) == (None, ())
    names = named(case.old) if side == "old" else case.names
    assert visible(folder) == sorted([*names, "config.json"])
    assert holds(case, folder) == side


@pytest.fixture
def quick() -> Iterator[None]:
    """Tests here run without syncing: a killed process loses nothing that it handed to the system."""
    with at_every_step(lambda name: None):
        yield


@pytest.mark.parametrize("name", CASES)
def test_replacing(make: Callable[[Case], Path], name: str) -> None:
    case = CASES[name]
    folder = make(case)
    assert holds(case, folder) == "old"
    state = apply(case, folder)
    check_recovered(case, folder, "new")
    assert (state.digest, state.version, state.interrupted, state.leftovers) == (B, 2, None, ())
    with Checkpoint.open(folder / case.file if case.file else folder) as checkpoint:
        layout = checkpoint.layout()
        assert [file["tensors"] for file in layout["files"]] == [file["tensors"] for file in case.new["files"]]
        assert [file["metadata"] for file in layout["files"]] == [file["metadata"] for file in case.new["files"]]
        if case.new["index"]:
            assert layout["index"]["metadata"] == {"by": "us", "total_size": 24 + 8 + 4}


def stoppings() -> Iterator[Any]:
    for name in CASES:
        yield pytest.param(name, stopped_at, id=name)
    for name in ("single to shards", "shards to single"):
        yield pytest.param(name, killed_at, id=f"{name}, SIGKILL", marks=IGNORE_FORK)


@pytest.mark.parametrize(("name", "dies_at"), list(stoppings()))
def test_killed_at_every_step(
    make: Callable[[Case], Path], quick: None, name: str, dies_at: Callable[[int, Callable[[], object]], bool]
) -> None:
    case = CASES[name]
    sides = []
    for step in range(1, 1000):
        folder = make(case)
        killed = dies_at(step, lambda folder=folder: apply(case, folder))
        side = holds(case, folder)
        sides.append(side)
        if step % 2:  # a second apply recovers by itself
            assert recover(folder / case.file if case.file else folder).interrupted is None
            check_recovered(case, folder, side)
        apply(case, folder)
        check_recovered(case, folder, "new")
        shutil.rmtree(folder)
        if not killed:
            break
    assert len(sides) > 20
    assert sides == sorted(sides, reverse=True), "once new, never old again"
    assert sides[0] == "old"
    assert sides[-1] == "new"


@pytest.mark.parametrize("name", ["same shards", "single to shards", "shards to single"])
def test_recovery_killed_at_every_step(make: Callable[[Case], Path], quick: None, name: str) -> None:
    case = CASES[name]
    seen: set[tuple[str, ...]] = set()
    for step in range(1, 1000):
        folder = make(case)
        done = not stopped_at(step, lambda folder=folder: apply(case, folder))
        side, names = holds(case, folder), tuple(visible(folder))
        kinds = tuple(name[22:] if name.startswith("pulse-") else name for name in names)
        if (side, *kinds) not in seen:  # the same files are left: recovery takes the same steps
            seen.add((side, *kinds))
            for recovery_step in range(1, 1000):
                again = folder.with_name("again")
                shutil.copytree(folder, again)
                # Hard links become copies, which recovery has to do again: more steps, not fewer.
                killed = stopped_at(recovery_step, lambda again=again: recover(again))
                assert holds(case, again) == side
                recover(again)
                check_recovered(case, again, side)
                shutil.rmtree(again)
                if not killed:
                    break
        shutil.rmtree(folder)
        if done:
            break
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("name", "lasting"),
    [*((name, True) for name in CASES), *((name, False) for name in ("single to shards", "same shards", "a file"))],
)
def test_an_error_at_every_step(make: Callable[[Case], Path], name: str, lasting: bool) -> None:
    """A full disk: from some step on, or once, everything that may need space fails."""
    case = CASES[name]
    for step in range(1, 1000):
        folder = make(case)
        count = 0

        def fail(operation: str, step: int = step) -> None:
            nonlocal count
            if operation in ("open", "write", "pwrite", "fsync", "rename", "link"):
                count += 1
                if count == step or (lasting and count > step):
                    raise OSError(errno.ENOSPC, "No space left on device")

        with at_every_step(fail):
            try:
                state = apply(case, folder)
            except CheckpointError as error:
                state, message = None, str(error)
        side = holds(case, folder)
        assert side == ("old" if state is None else "new")
        if side == "old":
            assert "No space left" in message
            check_recovered(case, folder, "old")  # all traces are gone, without another call
        elif state is not None and state.interrupted:
            recover(folder / case.file if case.file else folder)
            check_recovered(case, folder, "new")
        shutil.rmtree(folder)
        if count < step:
            break
    assert step > 10


def test_without_hard_links(make: Callable[[Case], Path], quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files keep the names they were staged under, and serve as the old checkpoint of the next apply."""

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    case = CASES["more shards"]
    for step in range(1, 1000):
        folder = make(case)
        killed = stopped_at(step, lambda folder=folder: apply(case, folder))
        side = holds(case, folder)
        recover(folder)
        assert holds(case, folder) == side
        for _ in range(2):
            state = apply(case, folder)
            assert (state.interrupted, state.leftovers) == (None, ())
            assert holds(case, folder) == "new"
            assert len(visible(folder)) == 3 + 2  # shards, index, config
            assert sum(name.startswith("pulse-") for name in visible(folder)) == 3
        shutil.rmtree(folder)
        if not killed:
            break
    folder = make(case)
    apply(case, folder)
    monkeypatch.undo()
    apply(case, folder)
    check_recovered(case, folder, "new")


def test_an_ignored_index_survives_a_failure(make: Callable[[Case], Path]) -> None:
    """model.safetensors has an index beside it that says something else; transformers ignores it, and so do we."""
    case = CASES["single to shards"]
    for step in range(1, 1000):
        folder = make(case)
        (folder / INDEX).write_text("stale")
        count = 0

        def fail(operation: str, step: int = step) -> None:
            nonlocal count
            count += operation == "rename" or operation == "unlink"
            if count == step:
                raise OSError(errno.EIO, "Input/output error")

        failed = False
        with at_every_step(fail):
            try:
                apply(case, folder)
            except CheckpointError:
                failed = True
        recover(folder)
        if holds(case, folder) == "old":
            assert failed
            assert (folder / INDEX).read_text() == "stale"
        shutil.rmtree(folder)
        if count < step:
            break


def test_what_the_callback_raises_goes_through(make: Callable[[Case], Path]) -> None:
    case = CASES["same shards"]
    folder = make(case)

    def interrupt(sink: TensorSink) -> None:
        sink.write("a", NEW["a"])
        state = checkpoint_state(folder)
        assert (state.running, state.digest) == (True, A)
        assert "is being written" in str(state)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_in_place(folder, case.new, interrupt, old_digest=A, new_digest=B)
    check_recovered(case, folder, "old")
    with pytest.raises(CheckpointError, match="3 of 3 tensors were not written"):
        replace_in_place(folder, case.new, lambda sink: None, old_digest=A, new_digest=B)
    check_recovered(case, folder, "old")


def test_the_old_checkpoint_can_be_read_meanwhile(make: Callable[[Case], Path]) -> None:
    case = CASES["same shards"]
    folder = make(case)

    def double(sink: TensorSink) -> None:
        with Checkpoint.open(folder) as old:
            for name in "ab":
                sink.write(name, old.read(name) + 1)
        sink.write("c", NEW["c"])

    replace_in_place(folder, case.new, double, old_digest=A, new_digest=B)
    assert holds(case, folder) == "new"


def test_a_reader_never_sees_a_mixture(make: Callable[[Case], Path]) -> None:
    case = CASES["same shards"]
    folder = make(case)
    stop = threading.Event()
    seen: set[bool] = set()
    problems: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                bits = all_bits(load_with_reader(folder))
                (seen.add if bits in (all_bits(OLD), all_bits(NEW)) else problems.append)(bits == all_bits(NEW))
            except BaseException as error:
                problems.append(error)
                return

    def write_old(sink: TensorSink) -> None:
        for name, tensor in OLD.items():
            sink.write(name, tensor)

    thread = threading.Thread(target=read)
    thread.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        apply(case, folder)
        replace_in_place(folder, case.old, write_old, old_digest=B, new_digest=A)
    stop.set()
    thread.join()
    assert not problems
    assert seen == {False, True}


@IGNORE_FORK
def test_a_second_process_has_to_wait(make: Callable[[Case], Path]) -> None:
    case = CASES["single to single"]
    folder = make(case)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:

            def wait(sink: TensorSink) -> None:
                os.write(writing, b"!")
                time.sleep(100)

            replace_in_place(folder, case.new, wait, old_digest=A, new_digest=B)
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"!"
        for attempt in (lambda: apply(case, folder), lambda: recover(folder)):
            with pytest.raises(CheckpointError, match="another process"):
                attempt()
        with pytest.raises(CheckpointError, match="another process"):
            CheckpointWriter(folder, case.new, overwrite=True)
        assert checkpoint_state(folder).running
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    assert holds(case, folder) == "old"
    apply(case, folder)
    check_recovered(case, folder, "new")


def test_links_are_replaced_and_their_targets_left_alone(make: Callable[[Case], Path], tmp_path: Path) -> None:
    case = CASES["same shards"]
    blobs = make(case)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in visible(blobs):
        os.symlink(blobs / name, folder / name)
    apply(case, folder)
    check_recovered(case, folder, "new")
    assert holds(case, blobs) == "old"
    link = tmp_path / "link.safetensors"
    os.symlink(blobs / case.old["files"][0]["name"], link)
    replace_in_place(link, single(NEW, folder=False), write_new, old_digest=A, new_digest=B)
    assert not link.is_symlink()
    assert holds(case, blobs) == "old"


def test_permissions_stay(make: Callable[[Case], Path]) -> None:
    for name in ("same shards", "shards to single", "a file"):
        case = CASES["same shards"] if name == "same shards" else CASES[name]
        folder = make(case)
        for path in folder.glob("*.safetensors"):
            path.chmod(0o640)
        apply(case, folder)
        assert {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors*")} == {0o640}
        shutil.rmtree(folder.parent / "template")


def test_a_lone_files_layout_takes_the_name_it_finds(make: Callable[[Case], Path]) -> None:
    lone = single(NEW, "whatever.safetensors", folder=False)
    for name, expected in (
        ("loose file to itself", "one.safetensors"),
        ("single to single", SINGLE),
        ("shards to single", SINGLE),
    ):
        folder = make(CASES[name])
        replace_in_place(folder, lone, write_new, old_digest=A, new_digest=B)
        assert visible(folder) == sorted([expected, "config.json"])
        shutil.rmtree(folder.parent / "template")


def test_refusals(make: Callable[[Case], Path], tmp_path: Path) -> None:
    case = CASES["a file"]
    folder = make(case)
    with pytest.raises(CheckpointError, match="cannot be replaced by 2 files and an index"):
        replace_in_place(folder / "x.safetensors", shards(NEW, "a", "bc"), write_new, old_digest=A, new_digest=B)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        replace_in_place(folder / "nope", case.new, write_new, old_digest=A, new_digest=B)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        replace_in_place(tmp_path / "empty", case.new, write_new, old_digest=A, new_digest=B)
    huge = single({}, "x.safetensors", folder=False)
    huge["files"][0]["tensors"] = [["a", "U8", [1 << 60]]]
    with pytest.raises(CheckpointError, match="not enough disk space"):
        replace_in_place(folder, huge, write_new, old_digest=A, new_digest=B)
    with pytest.raises(CheckpointError, match="file name"):
        replace_in_place(folder, single(NEW, "../x.safetensors"), write_new, old_digest=A, new_digest=B)
    assert visible(tmp_path / "empty") == []
    check_recovered(case, folder, "old")


@pytest.mark.parametrize(
    "change",
    [
        {"old_files": ["../precious.safetensors"]},
        {"names": ["/precious.safetensors"]},
        {"token": "../../../../../x"},
        {"token": "0"},
        {"entry": "config.json"},
        {"old_kind": "other"},
        {"new_version": "1"},
        {"format": 2},
        {"more": 1},
    ],
)
def test_a_foreign_journal_is_not_obeyed(make: Callable[[Case], Path], change: dict[str, Any]) -> None:
    import json

    case = CASES["same shards"]
    folder = make(case)
    precious = folder.parent / "precious.safetensors"
    precious.write_text("x")
    journal = {
        "format": 1, "token": "0" * 16, "old_digest": A, "new_digest": A, "new_version": 1, "entry": INDEX,
        "names": ["x.safetensors"], "old_files": ["y.safetensors"], "old_kind": "index",
    }  # fmt: skip
    (folder / ".pulse-apply.json").write_text(json.dumps(journal | change))
    for attempt in (checkpoint_state, recover, lambda folder: apply(case, folder)):
        with pytest.raises(CheckpointError, match="not a journal"):
            attempt(folder)
    assert precious.exists()
    (folder / ".pulse-apply.json").unlink()
    assert holds(case, folder) == "old"


def test_a_stale_marker_does_not_pass_for_the_new_checkpoint(make: Callable[[Case], Path]) -> None:
    """The old checkpoint already says that it is B: which one is in place follows from the files alone."""
    case = CASES["same shards"]
    folder = make(case)

    def look(sink: TensorSink) -> None:
        interrupted = checkpoint_state(folder).interrupted
        assert interrupted
        assert interrupted.holds == "old"
        raise KeyError

    with pytest.raises(KeyError):
        replace_in_place(folder, case.new, look, old_digest="X", new_digest=A)
    assert all_bits(load_with_reader(folder)) == all_bits(OLD)


@pytest.mark.parametrize("name", ["single", "shards", "loose"])
def test_a_new_write_killed_at_every_step(scratch: Path, quick: None, name: str) -> None:
    """`CheckpointWriter`: no loader finds anything before the last step, and writing again needs no cleaning."""
    layout = {
        "single": single(NEW),
        "shards": shards(NEW, "a", "bc"),
        "loose": shards(NEW, "a", "bc", index=False),
    }[name]
    finished = 0
    for step in range(1, 1000):
        folder = scratch / str(step)
        killed = stopped_at(step, lambda folder=folder: write(folder, layout, NEW))
        try:
            found = all_bits(load_with_reader(folder))
        except CheckpointError:
            with pytest.raises(FileNotFoundError):
                load_as_transformers(folder)
            write(folder, layout, NEW)
            found = all_bits(load_with_reader(folder))
        else:
            finished += 1
            recover(folder)
        assert found == all_bits(NEW)
        assert visible(folder) == sorted(named(layout))
        if not killed:
            break
    assert step > 10
    assert 1 <= finished <= 6
