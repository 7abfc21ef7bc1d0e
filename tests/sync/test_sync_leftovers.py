"""What killed publishers and removed versions leave in a local folder, and who tidies it up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import StoreError
from pulse_kernels.sync import Publisher, Subscriber, open_store
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.leftovers import MIN_AGE, dead_uploads
from pulse_kernels.sync.retention import prune

KILLED = """
import os, sys
sys.path.insert(0, sys.argv[2])
from sync_models import Trainer
from pulse_kernels.sync import Publisher
from pulse_kernels.sync.backend import ObstoreBackend
trainer = Trainer(masters=True, seed=5)
publisher = Publisher(sys.argv[1], trainer.weights, masters=trainer.masters)
if sys.argv[3] == "patch":
    publisher.publish()
    trainer.step()
ObstoreBackend._sync = lambda *_: os.kill(os.getpid(), 9)
publisher.publish()
"""


def killed(folder: Path, kind: str) -> Path:
    """The temporary file of a publisher that was killed in the middle of uploading a first anchor, or a patch."""
    arguments = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent), kind]
    assert subprocess.run(arguments, check=False).returncode == -9
    (left,) = folder.rglob(".upload-*")
    return left


def aged(path: Path, seconds: float) -> Path:
    os.utime(path, times=(time.time() - seconds,) * 2)
    return path


@pytest.mark.parametrize("kind", ["anchor", "patch"])
def test_what_a_killed_upload_left_goes_once_it_is_old(tmp_path: Path, kind: str) -> None:
    left = killed(tmp_path / "run", kind)
    chain, size = Chain(open_store(tmp_path / "run")), left.stat().st_size
    for age in (0, MIN_AGE - 60):  # it may be an upload that runs
        aged(left, age)
        assert prune(chain).objects == 0
        assert left.exists()
        assert not fsck(chain.store).problems
    aged(left, MIN_AGE + 60)
    (problem,) = fsck(chain.store).problems
    assert (problem.kind, problem.version) == ("leftover", 1 if kind == "patch" else 0)
    assert problem.key == left.relative_to(tmp_path / "run").as_posix()
    assert not fsck(chain.store).damaged
    meant = prune(chain, dry_run=True)
    assert left.exists()
    done = prune(chain)
    assert not left.exists()
    assert (meant.objects, meant.nbytes) == (done.objects, done.nbytes) == (1, size)
    assert not fsck(chain.store).problems


def test_a_publisher_with_retention_tidies_up_as_well(tmp_path: Path) -> None:
    left = aged(killed(tmp_path / "run", "patch"), 2 * MIN_AGE)
    trainer = Trainer(masters=True, seed=6)
    with Publisher(tmp_path / "run", trainer.weights, masters=trainer.masters, keep_anchors=1) as publisher:
        assert publisher.publish().kind == "anchor"
    assert not left.exists()


def test_files_of_others_stay(tmp_path: Path) -> None:
    left = killed(tmp_path / "run", "patch")
    outside = tmp_path / "outside" / left.name
    outside.parent.mkdir()
    others = [
        outside,
        tmp_path / "run" / left.name,  # no chain writes there
        left.with_name(".upload-notes"),
        left.with_name(".hidden"),
        tmp_path / "run" / "mine" / left.name,
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        aged(path, 9 * MIN_AGE)
    (tmp_path / "run" / "anchors" / "00000009").symlink_to(outside.parent, target_is_directory=True)
    left.with_name(left.name[:-1]).symlink_to(outside)
    aged(left, 9 * MIN_AGE)
    store = open_store(tmp_path / "run")
    assert [entry.key for entry in dead_uploads(store)] == [left.relative_to(tmp_path / "run").as_posix()]
    prune(Chain(store))
    assert not left.exists()
    assert all(path.exists() for path in others)


def test_a_file_that_cannot_go_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = aged(killed(tmp_path / "run", "patch"), 2 * MIN_AGE)

    def refused(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(StoreError, match=f"cannot delete patches/00000001/{left.name}: Permission denied; check"):
        prune(Chain(open_store(tmp_path / "run")))


def test_folders_of_removed_versions_go(tmp_path: Path) -> None:
    trainer, folder = Trainer(masters=True, seed=5), tmp_path / "run"
    aux = tmp_path / "aux"
    (aux / "inner").mkdir(parents=True)
    (aux / "inner" / "config.json").write_text("{}")
    publisher = Publisher(folder, trainer.weights, masters=trainer.masters, anchor_every=3, aux_files=aux)
    for _ in range(8):
        publisher.publish()
        trainer.step()
    assert (folder / "anchors" / "00000000" / "inner").is_dir()
    for name in ("00000099", "other"):  # somebody may be about to write there
        (folder / "patches" / name).mkdir()
    chain = Chain(open_store(folder))
    prune(chain, keep_patches=1, dry_run=True)
    assert (folder / "anchors" / "00000000" / "inner").is_dir()
    prune(chain, keep_patches=1)
    assert chain.versions() == [6, 7]
    assert sorted(path.name for path in (folder / "anchors").iterdir()) == ["00000006"]
    # 6 has a patch file of its own beside its anchor
    assert sorted(path.name for path in (folder / "patches").iterdir()) == ["00000006", "00000007", "00000099", "other"]
    trainer.step()
    publisher.publish()
    follower = Subscriber(folder, blank(trainer.weights))
    follower.poll()
    assert_same_bits(follower.params, trainer.weights)  # type: ignore[arg-type]


def test_folders_that_go_under_a_writer_cost_nothing(tmp_path: Path) -> None:
    store, done, went = open_store(tmp_path), threading.Event(), 0

    def tidy() -> None:
        nonlocal went
        while not done.is_set():
            with suppress(OSError):
                (tmp_path / "patches" / "00000001").rmdir()
                went += 1

    thread = threading.Thread(target=tidy)
    thread.start()
    try:
        for _ in range(100):
            store.put("patches/00000001/part", b"x")
            assert store.read("patches/00000001/part", 9) == b"x"
            store.delete(["patches/00000001/part"])
    finally:
        done.set()
        thread.join()
    assert went > 1
