"""publish and follow as a user runs them: in this process, and as real processes that are interrupted and killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pulse_kernels.checkpoint import checkpoint_state
from pulse_kernels.cli import main
from pulse_kernels.errors import StoreError
from pulse_kernels.sync import Store
from pulse_kernels.sync.signing import generate_key

State = dict[str, torch.Tensor]
FAST = ("--interval", "0.05", "--settle", "0.1")


class Training:
    """A model that moves a little every step, and the checkpoints it leaves."""

    def __init__(self, numel: int = 6_000) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.state = {
            "embed.weight": torch.randn(numel // 100, 100, generator=self.generator).bfloat16(),
            "norm.weight": torch.ones(77, dtype=torch.bfloat16),
        }

    def step(self) -> State:
        flat = self.state["embed.weight"].view(-1).view(torch.int16)
        flat[torch.randint(flat.numel(), (20,), generator=self.generator)] ^= 1
        return self.state

    def save(self, folder: Path) -> Path:
        """As trainers do: not atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "toy"}')
        save_file(self.state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, the objects on stdout, stderr) with --json and --once."""
    capsys.readouterr()
    options = FAST if arguments[0] == "publish" else FAST[:2]
    code = main([str(argument) for argument in arguments] + [*options, "--once", "--json"])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


# ---- in this process ------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, store, copy = Training(), tmp_path / "store", tmp_path / "copy"
    live = training.save(tmp_path / "live")
    code, lines, _ = run(capsys, "publish", live, store)
    assert (code, lines[0]["version"], lines[0]["kind"], lines[0]["source"]) == (0, 0, "anchor", str(live))
    assert run(capsys, "publish", live, store)[:2] == (0, [])  # it is published

    code, lines, _ = run(capsys, "follow", store, copy)
    assert (code, lines[0]["version"], lines[0]["from_version"]) == (0, 0, None)
    assert_same(load_file(copy / "model.safetensors"), training.state)
    assert (copy / "config.json").read_bytes() == (live / "config.json").read_bytes()
    assert checkpoint_state(copy).version == 0

    training.step()
    training.save(live)
    (copy / "config.json").write_text("mine")
    assert run(capsys, "publish", live, store)[1][0]["version"] == 1
    code, lines, _ = run(capsys, "follow", store, copy, "--verify", "full")
    assert (code, lines[0]["version"], lines[0]["from_version"]) == (0, 1, 0)
    assert lines[0]["digest"] == checkpoint_state(copy).digest
    assert_same(load_file(copy / "model.safetensors"), training.state)
    assert (copy / "config.json").read_text() == "mine"
    assert run(capsys, "follow", store, copy)[:2] == (0, [])


def test_text_has_a_line_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = Training().save(tmp_path / "live")
    assert main(["publish", str(live), str(tmp_path / "store"), "--once", *FAST]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("version 0  anchor 12")
    assert main(["follow", str(tmp_path / "store"), str(tmp_path / "copy"), "--once"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("version 0  ")
    assert str(tmp_path / "copy") in line


@pytest.mark.parametrize(
    "layout", ["checkpoint-{}", "global_step_{}/actor/huggingface", "step_{:06d}", "iter_{:07d}/hf", "{}"]
)
def test_step_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    training, runs, store = Training(), tmp_path / "runs", tmp_path / "store"
    training.save(runs / layout.format(9))
    newest = training.step() and training.save(runs / layout.format(20))
    unfinished = training.save(runs / layout.format(100)) / "model.safetensors"
    unfinished.write_bytes(unfinished.read_bytes()[:-1])
    (runs / "tmp-checkpoint-200").mkdir()
    save_file(training.state, runs / "tmp-checkpoint-200" / "model.safetensors")
    code, lines, _ = run(capsys, "publish", runs, store, "--version-from-step")
    assert (code, lines[0]["version"], lines[0]["source"]) == (0, 20, str(newest))
    training.step()
    training.save(runs / layout.format(100))
    code, lines, _ = run(capsys, "publish", runs, store, "--version-from-step")
    assert (code, lines[0]["version"]) == (0, 100)
    assert run(capsys, "follow", store, tmp_path / "copy")[1][0]["version"] == 100
    assert_same(load_file(tmp_path / "copy" / "model.safetensors"), training.state)


def test_a_lone_file_and_missing_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    file = training.save(tmp_path / "live") / "model.safetensors"
    assert run(capsys, "publish", file, tmp_path / "one")[1][0]["version"] == 0
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    names = {"embed.weight": "model-00001-of-00002.safetensors", "norm.weight": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"norm.weight": training.state["norm.weight"]}, sharded / names["norm.weight"])
    code, lines, err = run(capsys, "publish", sharded, tmp_path / "two")
    assert (code, lines[0]["exit_code"]) == (3, 3)
    assert "model-00001-of-00002.safetensors" in err
    save_file({"embed.weight": training.state["embed.weight"]}, sharded / names["embed.weight"])
    assert run(capsys, "publish", sharded, tmp_path / "two")[1][0]["version"] == 0


def test_signed_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = generate_key()
    key = tmp_path / "key.pem"
    key.write_bytes(private)
    key.chmod(0o600)
    live = Training().save(tmp_path / "live")
    assert run(capsys, "publish", live, tmp_path / "store", "--key", key)[0] == 0
    other = generate_key()[1]
    code, _, err = run(capsys, "follow", tmp_path / "store", tmp_path / "copy", "--trust", other)
    assert code == 3
    assert "signed by" in err
    assert not (tmp_path / "copy").exists()
    assert run(capsys, "follow", tmp_path / "store", tmp_path / "copy", "--trust", other, "--trust", public)[0] == 0


PYTHON = re.compile(r"signer|trust=|(?<!-)trust:|on_nonfinite|min_version|sign\(\)")


def test_errors_name_the_commands_own_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = generate_key()
    key, wrong, cut = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "cut.pem"
    key.write_bytes(private)
    key.chmod(0o644)
    wrong.write_bytes(b"-----BEGIN PUBLIC KEY-----\n")
    cut.write_bytes(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    training = Training()
    live = training.save(tmp_path / "live")
    plain, signed, copy = tmp_path / "plain", tmp_path / "signed", tmp_path / "copy"
    assert run(capsys, "publish", live, plain)[0] == 0
    code, _, err = run(capsys, "publish", live, signed, "--key", key)
    assert code == 0
    assert f"--key: everybody can read the private key file {str(key)!r}; chmod 600 it" in err
    assert "UserWarning" not in err
    training.state["norm.weight"][3] = float("nan")
    bad = training.save(tmp_path / "bad")
    for words, expected in [
        (("publish", live, signed), "Give its key with --key, or use another"),
        (("publish", live, plain, "--key", wrong), "--key: this PEM holds a public key"),
        (("publish", live, plain, "--key", cut), "convert it: openssl pkey -in KEY -out key.pem"),
        (("publish", live, plain, "--key", tmp_path / "none.pem"), "--key: the key file"),
        (("publish", bad, plain), "or allow such values with --on-nonfinite allow"),
        (("follow", plain, copy, "--trust", public), "Publish with --key, or leave --trust out to take unsigned"),
        (("follow", plain, copy, "--trust", "xy"), "--trust: the key file given as text cannot be read"),
        (("follow", plain, copy, "--trust", "00" * 32), "is a key under which anybody can sign"),
        (("follow", plain, copy, "--min-version", "7"), "version 0 is older than --min-version, 7"),
    ]:
        code, lines, err = run(capsys, *words)
        assert (code, expected in err, expected in lines[0]["error"]["message"]) == (3, True, True), err
        assert not PYTHON.search(err), err


def test_a_port_that_is_taken_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines, err = run(capsys, "publish", tmp_path, tmp_path / "store", "--metrics-port", port)
    assert (code, lines[0]["error"]["type"]) == (3, "PulseError")
    assert f"--metrics-port {port}: metrics cannot be served at 127.0.0.1:{port}: Address already in use; choose" in err


def test_a_command_runs_after_each_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = Training().save(tmp_path / "live")
    run(capsys, "publish", live, tmp_path / "store")
    script = tmp_path / "reload.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "folder = pathlib.Path(os.environ['PULSE_DIR'])\n"
        "assert (folder / 'model.safetensors').exists()\n"
        "(folder.parent / 'ran').write_text(os.environ['PULSE_VERSION'])\n"
        "sys.exit(len(sys.argv) - 1)\n"
    )
    reload = f"{sys.executable} {script}"
    assert run(capsys, "follow", tmp_path / "store", tmp_path / "copy", "--exec", reload)[0] == 0
    assert (tmp_path / "ran").read_text() == "0"
    code, _, err = run(capsys, "follow", tmp_path / "store", tmp_path / "copy2", "--exec", f"{reload} 'a b'")
    assert code == 1
    assert "ended with 1" in err
    with pytest.raises(SystemExit, match="2"):
        main(["follow", "store", "dir", "--exec", "no-such-command-here"])


def test_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    code, lines, err = run(capsys, "publish", tmp_path / "absent", tmp_path / "unused")
    assert (code, lines[0]["error"]["type"]) == (3, "CheckpointError")
    assert "No such file" in err
    live = training.save(tmp_path / "live")
    for store in ("none://such", tmp_path / "store"):  # the folder is not there
        assert run(capsys, "follow", store, tmp_path / "copy")[0] == 3
    assert main(["follow", "none://such", str(tmp_path / "copy")]) == 3  # which no waiting mends
    (tmp_path / "store").mkdir()
    code, _, err = run(capsys, "follow", tmp_path / "store", tmp_path / "copy")
    assert code == 3
    assert "no version yet" in err
    run(capsys, "publish", live, tmp_path / "store")
    save_file({"other": torch.ones(3)}, tmp_path / "live" / "model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"other": torch.ones(3)}, other / "model.safetensors")
    assert run(capsys, "follow", tmp_path / "store", other)[0] == 4
    assert load_file(other / "model.safetensors")["other"].tolist() == [1, 1, 1]
    training.state["norm.weight"][3] = float("nan")
    bad = training.save(tmp_path / "bad")
    code, lines, _ = run(capsys, "publish", bad, tmp_path / "third")
    assert (code, lines[0]["error"]["type"]) == (3, "NonFiniteError")
    assert run(capsys, "publish", bad, tmp_path / "third", "--on-nonfinite", "allow")[0] == 0


@pytest.mark.parametrize("command", ["publish", "follow"])
def test_a_store_out_of_reach_is_tried_again(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, store, copy = Training(), tmp_path / "store", tmp_path / "copy"
    live = training.save(tmp_path / "live")
    places = {"publish": (live, store), "follow": (store, copy)}
    if command == "follow":
        run(capsys, "publish", live, store)
    original, outages, pauses = Store.list, iter(["down"] * 3), []

    def list_(self: Store, prefix: str, after: str = "") -> object:
        if next(outages, None):
            raise StoreError("the store is down")
        return original(self, prefix, after)

    def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 3))
        if len(pauses) > 40 or (copy if command == "follow" else store / "manifests").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "list", list_)
    monkeypatch.setattr("pulse_kernels.cli.endless.time.sleep", sleep)
    settle = ("--settle", "0") if command == "publish" else ()
    arguments = [command, *map(str, places[command]), *settle, "--interval", "0.2"]
    assert main(arguments) == 130
    out, err = capsys.readouterr()
    assert out.startswith("version 0")
    assert pauses == [0.2, 0.4, 0.8, 0.2]
    assert err.count("the store is down; trying again in") == 3
    outages = iter(["down"])
    assert main([*arguments, "--once"]) == 3


# ---- real processes -------------------------------------------------------------------------------------------------


def _heed_interrupts() -> None:
    """Whoever started the tests in the background had SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def process(log: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """pulse-kernels beside this process; killed where it still runs at the end."""
    words = [sys.executable, "-m", "pulse_kernels", *map(str, arguments), "--interval", "0.05", "--json"]
    with log.open("w") as out, log.with_suffix(".err").open("w") as err:
        started = subprocess.Popen(
            words,
            stdout=out,
            stderr=err,
            text=True,
            env={**os.environ, "PULSE_DEBUG": "1"},
            preexec_fn=_heed_interrupts,
        )
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()
            started.wait()


def versions(log: Path) -> list[int]:
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line)["version"] for line in lines if line.endswith("\n")]


def eventually(condition: Callable[[], bool], what: Path, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what.with_suffix(".err").read_text()
        time.sleep(0.02)


def test_two_processes_and_a_killed_follower(tmp_path: Path) -> None:
    training, live, store, copy = Training(400_000), tmp_path / "live", tmp_path / "store", tmp_path / "copy"
    training.save(live)
    sent, got = tmp_path / "publish.log", tmp_path / "follow.log"
    follow = ("follow", store, copy)
    with process(sent, "publish", live, store, "--settle", "0.1", "--anchor-every", "5") as publisher:
        # Once it runs, a follower is killed wherever it is, and the copy is whole all the same.
        with process(got, *follow) as follower:
            eventually(lambda: versions(got) == [0], got)
            for version in range(1, 4):
                training.step()
                training.save(live)
                eventually(lambda version=version: versions(sent)[-1] == version, sent)  # type: ignore[misc]
            follower.kill()
        state = checkpoint_state(copy)
        assert state.version in range(4)
        load_file(copy / "model.safetensors")
        with process(got, *follow) as follower:
            training.step()
            training.save(live)
            eventually(lambda: versions(got)[-1:] == [4], got)
            first = json.loads(got.read_text().splitlines()[0])
            assert first["from_version"] == state.version  # it went on from what it had
            assert_same(load_file(copy / "model.safetensors"), training.state)
            follower.send_signal(signal.SIGINT)
            assert follower.wait(60) == 130
        assert "is at version 4" in got.with_suffix(".err").read_text()
        publisher.send_signal(signal.SIGINT)
        assert publisher.wait(60) == 130
        assert "version 4 is the last" in sent.with_suffix(".err").read_text()
    assert versions(sent) == [0, 1, 2, 3, 4]
    assert checkpoint_state(copy).interrupted is None


def test_metrics_are_served(tmp_path: Path) -> None:
    live, got = Training().save(tmp_path / "live"), tmp_path / "publish.log"
    with process(got, "publish", live, tmp_path / "store", "--settle", "0.1", "--metrics-port", "0") as publisher:
        eventually(lambda: versions(got) == [0], got)
        address = got.with_suffix(".err").read_text().split("metrics are at ")[1].split()[0]
        with urllib.request.urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
        assert "pulse_sync" in text
        publisher.send_signal(signal.SIGINT)
        assert publisher.wait(60) == 130


def test_a_follower_waits_for_the_first_version(tmp_path: Path) -> None:
    training, store, copy, got = Training(), tmp_path / "store", tmp_path / "copy", tmp_path / "follow.log"
    with process(got, "follow", store, copy) as follower:
        err = got.with_suffix(".err")
        eventually(lambda: "trying again" in err.read_text(), got)
        store.mkdir()
        eventually(lambda: "waiting for the first" in err.read_text(), got)
        live = training.save(tmp_path / "live")
        assert main(["publish", str(live), str(store), "--once", *FAST]) == 0
        eventually(lambda: versions(got) == [0], got)
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130


def test_a_checkpoint_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    training, runs, store = Training(), tmp_path / "runs", tmp_path / "store"
    sent = tmp_path / "publish.log"
    whole = (training.save(tmp_path / "whole") / "model.safetensors").read_bytes()
    with process(sent, "publish", runs, store, "--settle", "0.3", "--version-from-step") as publisher:
        err = sent.with_suffix(".err")
        eventually(lambda: "No such file" in err.read_text(), sent)
        (runs / "checkpoint-7").mkdir(parents=True)
        with (runs / "checkpoint-7" / "model.safetensors").open("wb") as file:
            for start in range(0, len(whole), 1000):
                file.write(whole[start : start + 1000])
                file.flush()
                time.sleep(0.05)
        eventually(lambda: versions(sent) == [7], sent)
        publisher.send_signal(signal.SIGINT)
        assert publisher.wait(60) == 130
    shutil.rmtree(tmp_path / "whole")
    assert main(["follow", str(store), str(tmp_path / "copy"), "--once"]) == 0
    assert_same(load_file(tmp_path / "copy" / "model.safetensors"), training.state)
