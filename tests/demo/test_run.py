"""Whole runs with real processes: bit-identical at the end, loud about damage, and nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pulse_kernels as pk
from pulse_kernels.demo import run_demo
from pulse_kernels.demo.model import warm_start_path
from pulse_kernels.demo.rollout import weights_hash
from pulse_kernels.sync import Publisher, Subscriber

SMALL = {"prompts_per_step": 4, "samples_per_prompt": 8, "held_out": 16}
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def temporary_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("pulse-demo-*"))


def test_a_run_ends_bit_identical_and_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_demo(steps=3, seed=7, out_dir=tmp_path, **SMALL)
    assert multiprocessing.active_children() == []

    # Anyone can follow the run from its files alone, with a Subscriber or by hand.
    (anchor,) = (tmp_path / "store" / "anchors" / "00000000").glob("*.safetensors")
    weights = load_file(anchor)
    assert weights_hash(weights) == weights_hash(load_file(warm_start_path()))
    late = Subscriber(tmp_path / "store", {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    digest = None
    for version in (1, 2, 3):
        (path,) = (tmp_path / "store" / "patches" / f"{version:08d}").glob("*.safetensors")
        assert path.stat().st_size == report.steps[version - 1].payload_bytes
        patch = pk.Patch.load(path, base=weights)
        assert (patch.base_version, patch.version) == (version - 1, version)
        digest = patch.apply_(weights, current_digest=digest)
        assert digest == report.steps[version - 1].digest
        late.stage(version)
        assert late.apply().digest == digest
    assert late.latest() == 3
    final = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(weights[name].view(torch.int16), final[name].view(torch.int16)) for name in final)
    assert weights_hash(weights) == report.summary_of_trainer.weights_hash

    assert 0 < report.density < 0.3
    assert report.ratio_to_dense > 5
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()
    assert (tmp_path / "pulse-demo.png").read_bytes().startswith(b"\x89PNG")
    assert {"rollout", "train", "gate", "encode", "fetch+decode", "apply", "verify"} <= set(report.seconds)
    assert "digest" in capsys.readouterr().out


def test_a_damaged_patch_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = temporary_folders()
    with pytest.raises(pk.PulseError, match="rollout process 0") as caught:
        run_demo(steps=3, workers=1, json=True, chart=False, damage_version=2, **SMALL)
    assert isinstance(caught.value, pk.ChainError)
    assert "patches/00000002/" in str(caught.value)
    assert multiprocessing.active_children() == []
    assert temporary_folders() <= before
    assert capsys.readouterr().out == ""


def test_a_store_of_ones_own(tmp_path: Path) -> None:
    store = tmp_path / "versions"
    report = run_demo(steps=2, workers=1, json=True, chart=False, store=store, **SMALL)
    with Subscriber(store) as follower:
        assert (follower.poll(), follower.version) == (None, 2)
        assert follower.digest == report.steps[-1].digest
    with pytest.raises(pk.PulseError, match="has versions up to 2"):
        run_demo(steps=2, store=store, **SMALL)
    with pytest.raises(ValueError, match="memory"):
        run_demo(steps=2, store="memory://x", **SMALL)


def test_an_earlier_runs_versions_are_cleared(tmp_path: Path) -> None:
    Publisher(tmp_path / "store", {"other": torch.zeros(3)}).publish(9)
    report = run_demo(steps=1, workers=1, json=True, chart=False, out_dir=tmp_path, **SMALL)
    assert len(report.steps) == 1
    assert Subscriber(tmp_path / "store").latest() == 1


@LINUX
def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "from pulse_kernels.demo import run_demo\nif __name__ == '__main__':\n    run_demo(steps=100000, chart=False)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    while "version 0" not in parent.stdout.readline():
        assert parent.poll() is None
    children = children_of(parent.pid)
    assert len(children) >= 3
    assert list(tmp_path.glob("pulse-demo-*"))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not any(alive(child) for child in children))
    assert eventually(lambda: not list(tmp_path.glob("pulse-demo-*")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"samples_per_prompt": 1}, "at least 2"),
        ({"workers": 5, "prompts_per_step": 4}, "5 workers share 4 prompts"),
        ({"held_out": 5000}, "held_out is 5000"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_demo(**options)  # type: ignore[arg-type]


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pk.PulseError, match="cannot be made"):
        run_demo(out_dir=tmp_path / "file" / "out")


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: object, seconds: float = 60.0) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
