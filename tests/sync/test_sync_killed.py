"""kill -9 at moments that are known: within a publisher's anchor, and within a subscriber's apply and save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sync_models import SHAPES, Trainer, assert_same_bits, bits, blank
from torch import Tensor

from pulse_kernels import StateDigest
from pulse_kernels.sync import Publisher, Subscriber, open_store
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.fsck import fsck
from pulse_kernels.sync.retention import prune

State = dict[str, Tensor]
SEED = 7
SHARD_BYTES = 6144  # three files an anchor


class Launcher:
    """Runs scripts in processes of their own, forked from one that has imported what takes long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def killed(self, script: str, *arguments: object) -> None:
        """Run ``script`` until it says that it is there, and kill it: it has no chance to tidy up."""
        print(json.dumps([script, *map(str, arguments)]), file=self.process.stdin, flush=True)
        pid = int(self._line())
        try:
            assert self._line() == "here"
        finally:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so that the number is still its own
            last = self._line()
        assert last == f"ended {-signal.SIGKILL}"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Launcher(process)
        process.stdin.close()  # type: ignore[union-attr]


def states(count: int) -> list[State]:
    """What the scripts' trainer has at each version."""
    trainer, found = Trainer(masters=True, seed=SEED), []
    for _ in range(count):
        found.append(trainer.rounded())
        trainer.step()
    return found


LAUNCHER = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import torch
from sync_models import Trainer
from pulse_kernels.sync import Publisher
torch.set_num_threads(1)

def here():
    print("here", flush=True)
    sys.stdin.read()  # until it is killed, or there is nobody left to do so
    os._exit(1)

for line in sys.stdin:
    script, *arguments = json.loads(line)
    pid = os.fork()
    if not pid:
        try:
            exec(script, {"arguments": arguments, "here": here})
        except BaseException:
            traceback.print_exc()
        print("got past it", flush=True)
        sys.stdin.read()  # its number stays its own until it is killed
        os._exit(1)
    print(pid, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

# ---- a publisher -------------------------------------------------------------------------------------------------

PUBLISH = """
import os
from faults import Fault, FaultyBackend
from obstore.store import LocalStore
from safetensors.torch import save_file
from sync_models import Trainer
from pulse_kernels.sync import Publisher, Store
from pulse_kernels.sync.backend import ObstoreBackend

folder, saved, moment, masters, seed, shard_bytes = arguments

class Watched(ObstoreBackend):
    def _sync(self, key):
        if moment == "file not named yet" and key.startswith("anchors/00000003/.upload-") and "-00002-of-" in key:
            here()
        super()._sync(key)

def plan(number, name, key):
    at = {
        "no file yet": ("put", "anchors/00000003/", "-00001-of-00003.safetensors"),
        "between files": ("put", "anchors/00000003/", "-00003-of-00003.safetensors"),
        "no manifest yet": ("create", "manifests/00000003", ""),
    }.get(moment)
    if at is not None and name == at[0] and key.startswith(at[1]) and key.endswith(at[2]):
        return Fault(run=here)

os.mkdir(folder)
store = Store(FaultyBackend(Watched(LocalStore(folder)), plan), folder)
trainer = Trainer(masters=masters == "True", seed=int(seed))
publisher = Publisher(
    store, trainer.weights, masters=trainer.masters, anchor_every=3, shard_bytes=int(shard_bytes)
)
while True:
    publisher.publish()
    if publisher.version == 1:
        save_file(trainer.saved(), saved)
    trainer.step()
"""


@pytest.mark.parametrize(
    ("moment", "masters", "named", "unnamed"),
    [
        ("no file yet", False, 0, 0),
        ("file not named yet", True, 1, 1),
        ("between files", False, 2, 0),
        ("no manifest yet", True, 3, 0),
    ],
)
def test_a_publisher_killed_in_an_anchor_and_an_older_trainer(
    launcher: Launcher, moment: str, masters: bool, named: int, unnamed: int, tmp_path: Path
) -> None:
    """Versions 0 to 2 exist, the anchor of 3 is on its way; the trainer starts again from what it had at version 1."""
    run, saved = tmp_path / "run", tmp_path / "saved.safetensors"
    launcher.killed(PUBLISH, run, saved, moment, masters, SEED, SHARD_BYTES)
    before = states(3)
    store = open_store(run)
    chain = Chain(store)
    assert chain.versions() == [0, 1, 2]
    left = store.list("anchors/00000003")
    assert len(left) == named  # the moment is the one that is meant
    assert len(list(run.glob("anchors/00000003/.upload-*"))) == unnamed
    left += store.list("patches/00000003")
    assert len(left) == named + 1
    assert fsck(store).problems == []  # what is above the newest version may be on its way

    follower = Subscriber(run, blank(before[0]))
    for version, state in enumerate(before):
        follower.stage(version)
        follower.apply()
        assert_same_bits(follower.params, state)  # type: ignore[arg-type]
        assert chain.manifest(version).digest == StateDigest.of(state).hexdigest()

    trainer = Trainer(masters=masters, seed=99)
    trainer.restore(load_file(saved))
    assert_same_bits(trainer.weights, before[1])
    publisher = Publisher(run, trainer.weights, masters=trainer.masters, anchor_every=3, shard_bytes=SHARD_BYTES)
    assert publisher.version == 2
    kinds = []
    for version in range(3, 8):
        report = publisher.publish()
        kinds.append(report.kind)
        assert report.version == version
        assert report.digest == StateDigest.of(trainer.rounded()).hexdigest()
        applied = follower.poll()
        assert applied is not None
        assert (applied.version, applied.digest) == (version, report.digest)
        assert_same_bits(follower.params, trainer.rounded())  # type: ignore[arg-type]
        trainer.step()
    assert kinds == ["anchor", "patch", "patch", "anchor", "patch"]

    assert chain.versions() == list(range(8))
    for version in chain.versions():
        manifest = chain.manifest(version)
        parts = (*manifest.anchor, *manifest.patch)
        assert parts
        assert [store.size(part.key) for part in parts] == [part.bytes for part in parts]
    report = fsck(store)
    assert report.unverified == []
    assert [problem.kind for problem in report.problems] == ["orphan"] * len(left)
    assert sorted(problem.key for problem in report.problems) == sorted(entry.key for entry in left)
    prune(chain)
    assert fsck(store).problems == []
    assert_same_bits(Subscriber(run).params, follower.params)  # type: ignore[arg-type]


# ---- a subscriber ------------------------------------------------------------------------------------------------

SERVE = """
import os
from test_sync_killed import shared
from pulse_kernels import StateDigest, ops
from pulse_kernels.sync import Subscriber

run, memory, state_dir, moment = arguments
subscriber = Subscriber(run, shared(memory), state_dir=state_dir, save_every=1)
subscriber.stage(1)
subscriber.apply()
subscriber.save()
subscriber.stage(3)

scatter, add_changes, rename = ops.apply_patch_many_, StateDigest.add_changes, os.rename
calls = 0

def stop_in_scatter(weights, indices, values, **options):
    global calls
    calls += 1
    if moment == "before the scatter":
        here()
    if moment == "within the scatter" and calls == 2:
        half = len(indices[0]) // 2
        scatter(weights[:1], [indices[0][:half]], [values[0][:half]], **options)
        here()
    scatter(weights, indices, values, **options)

def stop_behind_scatter(*arguments):
    if moment == "after the scatter":
        here()
    return add_changes(*arguments)

def stop_at_rename(source, target):
    entry = os.path.basename(target) == "model.safetensors" and os.path.dirname(target) == state_dir
    if entry and moment == "before the save is named":
        here()
    rename(source, target)
    if entry and moment == "after the save is named":
        here()

ops.apply_patch_many_, StateDigest.add_changes = stop_in_scatter, stop_behind_scatter
os.rename = stop_at_rename
subscriber.apply()
subscriber.close()  # saves what is due
raise SystemExit("it was not stopped")
"""


def shared(memory: str | Path) -> State:
    """Weights in files, whose bits outlive the process that writes them."""
    found = {}
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        found[name] = torch.empty(shape, dtype=torch.bfloat16)
        if numel:
            path = os.path.join(memory, name)
            found[name] = torch.from_file(path, shared=True, size=numel, dtype=torch.bfloat16).view(shape)
    return found


@pytest.mark.parametrize(
    ("moment", "weights_at", "saved_at"),
    [
        ("before the scatter", 1, 1),
        ("within the scatter", None, 1),
        ("after the scatter", 3, 1),
        ("before the save is named", 3, 1),
        ("after the save is named", 3, 3),
    ],
)
def test_a_subscriber_killed_in_apply(
    launcher: Launcher, moment: str, weights_at: int | None, saved_at: int, tmp_path: Path
) -> None:
    """It was taken from version 1, which is saved, to version 3."""
    run, memory, state_dir = tmp_path / "run", tmp_path / "memory", tmp_path / "state"
    memory.mkdir()
    trainer = Trainer(masters=True, seed=SEED)
    publisher = Publisher(run, trainer.weights, masters=trainer.masters, anchor_every=100)
    for _ in range(4):
        publisher.publish()
        trainer.step()
    truth = states(4)
    launcher.killed(SERVE, run, memory, state_dir, moment)

    torn = shared(memory)
    at = [version for version, state in enumerate(truth) if _same(torn, state)]
    assert at == ([] if weights_at is None else [weights_at])  # the moment is the one that is meant
    if weights_at is None:
        for name, tensor in torn.items():
            old, new = (bits(truth[version][name]) for version in (1, 3))
            assert bool(((bits(tensor) == old) | (bits(tensor) == new)).all())
    alone = Subscriber(run, {name: tensor.clone() for name, tensor in torn.items()})  # weights survive, the folder not
    alone.poll()
    assert_same_bits(alone.params, truth[3])  # type: ignore[arg-type]

    again = Subscriber(run, torn, state_dir=state_dir, verify="full")
    assert again.version == saved_at
    assert again.digest == StateDigest.of(truth[saved_at]).hexdigest()
    assert_same_bits(torn, truth[saved_at])
    publisher.publish()
    staged = again.stage()
    assert staged is not None
    assert (staged.from_version, staged.version, staged.from_anchor) == (saved_at, 4, False)
    again.apply()
    assert_same_bits(torn, trainer.weights)
    assert again.save() == 4
    assert_same_bits(load_file(state_dir / "model.safetensors"), trainer.weights)


def _same(found: State, expected: State) -> bool:
    return all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in expected.items())
