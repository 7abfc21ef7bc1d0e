"""log, fsck, prune, keygen on the command line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_kernels.cli import main
from pulse_kernels.cli.arguments import many
from pulse_kernels.sync import Publisher


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Seven versions in a folder; 0, 3 and 6 have anchors."""
    weights = {"w": torch.zeros(4000).bfloat16()}
    with Publisher(tmp_path / "run", weights, anchor_every=3) as publisher:
        for k in range(7):
            weights["w"][k : k + 20] = k + 1
            publisher.publish()
    return tmp_path / "run"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def data_of(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)


def test_log(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = data_of(capsys, "log", store)
    assert code == 0
    assert [row["version"] for row in data["versions"]] == list(range(7))
    assert [row["kind"] for row in data["versions"]] == ["anchor", "patch", "patch"] * 2 + ["anchor"]
    assert [row["base_version"] for row in data["versions"]] == [None, 0, 1, 2, 3, 4, 5]
    assert data["versions"][1]["density"] == 20 / 4000
    assert data["versions"][3]["patch_bytes"] > 0
    assert data["versions"][3]["anchor_bytes"] > 8000
    assert 0 <= data["versions"][6]["age_seconds"] < 600
    code, out, _ = run(capsys, "log", store, "--limit", 2)
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "7 versions" in out
    assert "0.500%" in out


def test_log_shows_damage_and_goes_on(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "manifests" / "00000002.json").write_bytes(b"{}")
    code, out, _ = run(capsys, "log", store)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list("0123456")
    assert "DAMAGED" in out.splitlines()[3]


def test_fsck(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fsck", store)
    assert code == 0
    assert "sound; 7 versions, 3 anchors and 6 patches verified" in out
    part = next((store / "patches" / "00000004").iterdir())
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    code, out, _ = run(capsys, "fsck", store)
    assert code == 1
    assert f"part-hash: version 4, patches/00000004/{part.name}" in out
    assert "DAMAGED" in out
    code, data_ = data_of(capsys, "fsck", store)
    assert (code, data_["damaged"], data_["problems"][0]["kind"]) == (1, True, "part-hash")
    assert run(capsys, "fsck", store, "--shallow")[0] == 0


def test_fsck_repairs_an_index(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = store / "anchors" / "00000003" / "model.safetensors.index.json"
    index.unlink()
    assert run(capsys, "fsck", store)[0] == 1
    _, out, _ = run(capsys, "fsck", store, "--repair")
    assert "repaired: anchors/00000003" in out
    assert index.exists()
    assert run(capsys, "fsck", store)[0] == 0


def test_prune(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = data_of(capsys, "prune", store, "--keep-anchors", 1, "--dry-run")
    assert (code, data["removed"], data["kept"]) == (0, [0, 1, 2, 3, 4, 5], [6])
    assert len(list((store / "manifests").iterdir())) == 7
    code, out, _ = run(capsys, "prune", store, "--keep-patches", 2)
    assert code == 0
    assert "1 versions" not in out
    assert "4 versions stay" in out
    assert sorted(path.name for path in (store / "manifests").iterdir()) == [f"{v:08d}.json" for v in (3, 4, 5, 6)]
    assert run(capsys, "fsck", store)[0] == 0


def test_one_of_a_kind_is_no_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Publisher(tmp_path / "run", {"w": torch.zeros(4000).bfloat16()}) as publisher:
        publisher.publish()
    assert f"{tmp_path / 'run'}: 1 version, chain" in run(capsys, "log", tmp_path / "run")[1]
    out = run(capsys, "fsck", tmp_path / "run")[1]
    assert "sound; 1 version, 1 anchor and 0 patches verified" in out
    out = run(capsys, "prune", tmp_path / "run")[1]
    assert out.rstrip().endswith(": 0 versions, 0 objects, 0 B removed; 1 version stays")
    next((tmp_path / "run" / "anchors").rglob("*.safetensors")).unlink()
    assert "could not be rebuilt: version 0" in run(capsys, "fsck", tmp_path / "run")[1]


@pytest.mark.parametrize("word", ["patch", "version"])
def test_plurals(word: str) -> None:
    assert many(1, word) == f"1 {word}"
    assert many(0, word) == {"patch": "0 patches", "version": "0 versions"}[word]


def test_keys_sign_and_are_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key.pem"
    code, data = data_of(capsys, "keygen", "-o", key)
    assert code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "PRIVATE" in key.read_text()
    weights = {"w": torch.zeros(100).bfloat16()}
    with Publisher(tmp_path / "run", weights, signer=key) as publisher:
        publisher.publish()
    assert run(capsys, "fsck", "--trust", "ab" * 32, "--trust", data["public_key"], tmp_path / "run")[0] == 0
    assert run(capsys, "fsck", tmp_path / "run", "--trust", "ab" * 32)[0] == 1
    before = key.read_bytes()
    code, _, err = run(capsys, "keygen", "-o", key)
    assert code == 3
    assert "exists already" in err
    assert key.read_bytes() == before


@pytest.mark.parametrize("words", [["log"], ["fsck"], ["prune", "--keep-anchors", "1"]])
def test_a_store_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, _, err = run(capsys, words[0], tmp_path / "none", *words[1:])
    assert code == 3
    assert "no such folder" in err
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    # Whoever checks a store by a wrong address must not be told that it is sound.
    assert run(capsys, words[0], tmp_path / "empty", *words[1:])[0] == (3 if words[0] == "fsck" else 0)


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_counts_that_are_none(store: Path, count: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prune", str(store), "--keep-anchors", count])
    assert ended.value.code == 2
