"""The demo and the command line over the S3 protocol: processes that share nothing but the URL and the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pulse_kernels import ChainError
from pulse_kernels.demo import run_demo
from pulse_kernels.sync import Subscriber, open_store

SMALL: dict[str, Any] = {"prompts_per_step": 4, "samples_per_prompt": 8, "held_out": 16, "json": True, "chart": False}


@pytest.fixture
def url(s3_url: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the bucket, reachable by what obstore finds in the environment."""
    place, options = s3_url
    for name, value in options["config"].items():
        monkeypatch.setenv(f"AWS_{name}".upper(), str(value).lower() if isinstance(value, bool) else value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return place


def test_the_demo(url: str) -> None:
    report = run_demo(steps=2, workers=2, store=url, **SMALL)
    follower = Subscriber(url)
    follower.poll()
    assert (follower.version, follower.digest) == (2, report.steps[-1].digest)
    follower.close()


def test_the_demo_refuses_damage(url: str) -> None:
    with pytest.raises(ChainError, match="rollout process 0: patches/00000001/"):
        run_demo(steps=2, workers=1, store=url, damage_version=1, **SMALL)


def test_publish_and_follow(url: str, tmp_path: Path) -> None:
    weights = {"w": torch.randn(50, 40).bfloat16(), "b": torch.ones(7)}
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    (live / "config.json").write_text("{}")

    def pulse(*arguments: object) -> str:
        words = [sys.executable, "-m", "pulse_kernels", *map(str, arguments), "--once"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        return done.stdout

    for version in range(3):
        save_file(weights, live / "model.safetensors")
        assert pulse("publish", live, url, "--settle", "0").startswith(f"version {version}  ")
        assert pulse("follow", url, copy).startswith(f"version {version}  ")
        assert (copy / "config.json").read_text() == "{}"
        found = load_file(copy / "model.safetensors")
        assert all(torch.equal(found[name].view(torch.uint8), weights[name].view(torch.uint8)) for name in weights)
        weights["w"][version].neg_()
    with open_store(url) as store:
        assert store.exists("anchors/00000002/config.json")  # each new process begins with an anchor
