"""Run by test_sync_full_disk.py in a mount namespace of its own: publishes to a disk that is really full.

    python full_disk.py FOLDER masters|snapshot

Leaves so many pages free, from none on, until the version fits; each time that it does not, nothing may be left of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import StoreError
from pulse_kernels.sync import Publisher, Subscriber, open_store
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.retries import Retries

PAGE = 4096


def files(folder: Path) -> dict[str, int]:
    """Every file with its size, hidden ones, too."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def fill(path: Path, free_pages: int) -> None:
    """Take the disk's space but for so many pages."""
    path.unlink(missing_ok=True)
    disk = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (disk.f_bavail - free_pages) * disk.f_frsize)


def refusal(publisher: Publisher) -> str:
    """What the publisher says, "" where the version was committed."""
    try:
        publisher.publish()
    except StoreError as error:
        return str(error)
    return ""


def run_on(disk: Path, trainer: Trainer, anchor_every: int) -> int:
    """How often the second version was refused before it fitted."""
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    run, filler = disk / "run", disk / "filler"
    store = open_store(run, retries=Retries(first_wait_s=0.0))
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=anchor_every)
    publisher.publish()
    weights = blank(trainer.weights)
    subscriber = Subscriber(run, weights)
    subscriber.poll()
    refused = 0
    while True:
        trainer.step()
        before, held = files(run), trainer.rounded()
        fill(filler, refused)
        said = refusal(publisher)
        assert_same_bits(trainer.weights, held)  # training goes on
        if not said:
            break
        assert "free some space" in said, said
        assert "No space left" in said, said
        assert files(run) == before, files(run).keys() ^ before.keys()
        assert publisher.version == 0
        assert publisher.chain.versions() == [0]
        assert subscriber.poll() is None
        refused += 1
    assert publisher.version == 1
    subscriber.poll()
    assert_same_bits(weights, trainer.weights)
    filler.unlink()
    trainer.step()
    report = publisher.publish()
    assert (report.version, report.note) == (2, "")
    subscriber.poll()
    assert_same_bits(weights, trainer.weights)
    assert not fsck(store).problems
    return refused


def main() -> None:
    folder, source = Path(sys.argv[1]), sys.argv[2]
    for kind, anchor_every in (("anchor", 1), ("patch", 1000)):
        trainer = Trainer(masters=source == "masters", seed=9)
        print(run_on(folder / kind, trainer, anchor_every))


if __name__ == "__main__":
    main()
