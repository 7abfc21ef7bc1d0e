"""diff, apply, verify and inspect as a user runs them, on checkpoints that real optimizer steps made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pulse_kernels import backends
from pulse_kernels.backends import native
from pulse_kernels.cli import main

State = dict[str, torch.Tensor]


def save(folder: Path, state: State, shards: int) -> Path:
    """A sharded Hugging Face folder."""
    folder.mkdir()
    names, weight_map = list(state), {}
    per_shard = -(-len(names) // shards)
    for k in range(shards):
        part = names[k * per_shard : (k + 1) * per_shard]
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def load(folder: Path) -> State:
    """What a loader that follows the index sees."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.fixture(scope="module")
def states() -> tuple[State, State]:
    """Before and after three Adam steps at an RL learning rate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 64), *(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-6)
    old = {name: value.detach().bfloat16().clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(50, (32,))).square().mean().backward()
        optimizer.step()
    return old, {name: value.detach().bfloat16().clone() for name, value in model.state_dict().items()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[State, State]) -> Path:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "A", states[0], 3)
    save(tmp_path / "B", states[1], 3)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    """(exit code, the --json object)."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_there_and_back(place: Path, states: tuple[State, State], capsys: pytest.CaptureFixture[str]) -> None:
    changed = sum(
        int((new.view(torch.int16) != old.view(torch.int16)).sum())
        for old, new in zip(states[0].values(), states[1].values(), strict=True)
    )
    assert changed > 0
    code, report = run(capsys, "diff", "A", "B", "-o", "p", "--base-version", "6", "--new-version", "7")
    assert (code, report["num_changed"]) == (0, changed)
    code, report = run(capsys, "inspect", "p")
    assert (code, report["base_version"], report["version"], report["num_changed"]) == (0, 6, 7, changed)
    assert run(capsys, "apply", "A", "p", "-o", "C")[0] == 0
    assert_same(load(place / "C"), states[1])
    for file in ("config.json", *(f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3))):
        assert (place / "C" / file).read_bytes() == (place / "B" / file).read_bytes(), file
    code, report = run(capsys, "verify", "A", "p", "B")
    assert (code, report["identical"]) == (0, True)


@pytest.mark.parametrize("profile", ["fast", "balanced"])
def test_every_kind_of_change(
    place: Path, states: tuple[State, State], capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    """Removed, added, retyped, reshaped, and in other shards."""
    new = dict(states[1])
    del new["1.bias"]
    new = {"extra": torch.randn(5, 3), **new}
    new["2.weight"] = new["2.weight"].float()
    new["3.weight"] = new["3.weight"].reshape(32, 128)
    save(place / "N", new, 2)
    code, report = run(capsys, "diff", "A", "N", "-o", "p", "--profile", profile)
    assert (code, report["tensors_added"], report["tensors_removed"]) == (0, 3, 1)
    assert run(capsys, "apply", "A", "p", "-o", "C")[0] == 0
    assert_same(load(place / "C"), new)
    assert run(capsys, "verify", "A", "p", "N")[0] == 0
    code, report = run(capsys, "verify", "A", "p", "B")
    assert (code, report["identical"]) == (1, False)
    assert any("extra" in line for line in report["differences"])  # type: ignore[attr-defined]


def test_in_place(place: Path, states: tuple[State, State], capsys: pytest.CaptureFixture[str]) -> None:
    _, report = run(capsys, "diff", "A", "B", "-o", "p", "--new-version", "7")
    assert run(capsys, "apply", "A", "p", "--in-place")[0] == 0
    assert_same(load(place / "A"), states[1])
    code, state = run(capsys, "inspect", "A")
    assert (code, state["version"], state["digest"], state["interrupted"]) == (0, 7, report["digest"], None)


def test_a_patch_for_another_base(place: Path, states: tuple[State, State], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 4, both digests named, nothing written."""
    _, report = run(capsys, "diff", "A", "B", "-o", "p")
    for target in (["-o", "C"], ["--in-place"]):
        code, answer = run(capsys, "apply", "B", "p", *target)
        message = answer["error"]["message"]  # type: ignore[index]
        assert code == 4
        assert str(report["base_digest"]) in message
        assert str(report["digest"]) in message  # what B has
    assert not (place / "C").exists()
    assert_same(load(place / "B"), states[1])


def test_what_cannot_be_read(place: Path, states: tuple[State, State], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, and the base as it was."""
    run(capsys, "diff", "A", "B", "-o", "p")
    damaged = bytearray((place / "p").read_bytes())
    damaged[-1] ^= 1
    (place / "damaged").write_bytes(damaged)
    code, answer = run(capsys, "apply", "A", "damaged", "--in-place")
    assert (code, answer["error"]["type"]) == (3, "PatchFormatError")  # type: ignore[index]
    assert_same(load(place / "A"), states[0])
    assert run(capsys, "apply", "A", "A/config.json", "-o", "C")[0] == 3
    assert run(capsys, "inspect", "missing")[0] == 3
    (place / "B" / "model-00002-of-00003.safetensors").unlink()
    code, answer = run(capsys, "diff", "A", "B", "-o", "q")
    assert (code, answer["error"]["type"]) == (3, "CheckpointError")  # type: ignore[index]
    assert not (place / "q").exists()
    assert not (place / "C").exists()


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["apply", "A", "p"])
    assert ended.value.code == 2


class TestErrorsOfTheEnvironment:
    """One line on stderr each, and nothing written."""

    @pytest.fixture(autouse=True)
    def anew(self, monkeypatch, tmp_path):
        for name, value in (("a", 0.0), ("b", 1.0)):
            save(tmp_path / name, {"w": torch.full((4000,), value)}, 1)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("PULSE_DEBUG", raising=False)
        backends.for_device.cache_clear()
        yield
        monkeypatch.undo()
        backends.for_device.cache_clear()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]

    @pytest.mark.parametrize("command", [["diff", "a", "b", "-o", "p"], ["inspect", "a"], ["doctor"]])
    def test_a_back_end_that_does_not_exist(self, command, capsys, monkeypatch):
        monkeypatch.setenv("PULSE_BACKEND", "nonsense")
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        wanted = "PULSE_BACKEND is 'nonsense', expected one of triton, cuda, cpu, reference; or unset it"
        assert line == f"pulse-kernels: error: {wanted}"
        assert run(capsys, *command) == (2, {"error": {"type": "BackEndError", "message": wanted}, "exit_code": 2})

    def test_a_back_end_that_is_absent(self, capsys, monkeypatch):
        monkeypatch.setenv("PULSE_BACKEND", "cpu")
        library = native.Library("cpu", None, False, "not built")
        monkeypatch.setattr(native, "cpu_library", lambda: library)
        assert main(["diff", "a", "b", "-o", "p"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "pulse-kernels: error: PULSE_BACKEND=cpu cannot compute cpu tensors: not built"

    def test_pytorch_fails(self, capsys, monkeypatch):
        def fails(device_type):
            raise RuntimeError("device lost\nframe #0: somewhere in C++")

        monkeypatch.setattr(backends, "order", fails)
        assert main(["diff", "a", "b", "-o", "p"]) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "pulse-kernels: error: RuntimeError: device lost (PULSE_DEBUG=1 shows where)"
        monkeypatch.setenv("PULSE_DEBUG", "1")
        with pytest.raises(RuntimeError, match="device lost"):
            main(["diff", "a", "b", "-o", "p"])


def test_verify_counts_what_it_does_not_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {f"layers.{k}": torch.full((40,), float(k)) for k in range(30)}
    new = {name: tensor + 1 for name, tensor in old.items()}
    other = {name: tensor + 2 for name, tensor in old.items()}
    a, b, c = (save(tmp_path / name, state, 2) for name, state in (("a", old), ("b", new), ("c", other)))
    patch = str(tmp_path / "p")
    assert main(["diff", str(a), str(b), "-o", patch]) == 0
    capsys.readouterr()
    assert main(["verify", str(a), patch, str(c)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NOT identical: 30 differences" in lines[0]
    assert "the first 20 of 30" in lines[-1]
    assert main(["verify", str(a), patch, str(c), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["num_differences"], len(report["differences"])) == (30, 20)


@pytest.mark.parametrize("command", ["apply", "verify", "inspect"])
def test_a_damaged_patch_is_named(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", {"w": torch.zeros(4000)}, 1)
    b = save(tmp_path / "b", {"w": torch.ones(4000)}, 1)
    patch = tmp_path / "the patch"
    assert main(["diff", str(a), str(b), "-o", str(patch)]) == 0
    patch.write_bytes(patch.read_bytes()[:-1])
    arguments = {"apply": [a, patch, "-o", tmp_path / "c"], "verify": [a, patch, b], "inspect": [patch]}[command]
    capsys.readouterr()
    assert main([command, *map(str, arguments)]) == 3
    error = capsys.readouterr().err
    assert f"{patch}: " in error
    assert "Fetch the patch again" in error
