"""Two writers on one checkpoint: one of them is told, and nothing it wrote is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pulse_kernels as pk
from pulse_kernels import checkpoint_patch
from pulse_kernels.checkpoint import replace_in_place

OLD = {"w": torch.zeros(1000), "v": torch.zeros(10)}
B = {"w": torch.ones(1000), "v": OLD["v"]}
C = {"w": OLD["w"], "v": torch.ones(10)}


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_checkpoint_replaced_between_opening_and_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    weights = tmp_path / "model.safetensors"
    save_file(OLD, weights)
    for name, state in (("b", B), ("c", C)):
        pk.Patch.diff(OLD, state).save(tmp_path / name)
    place = tmp_path if folder else weights

    def another_was_faster(*arguments, **options):
        monkeypatch.undo()
        checkpoint_patch.apply(place, tmp_path / "c", None)
        return replace_in_place(*arguments, **options)

    monkeypatch.setattr(checkpoint_patch, "replace_in_place", another_was_faster)
    with pytest.raises(pk.CheckpointError, match="another process replaced or wrote this checkpoint meanwhile"):
        checkpoint_patch.apply(place, tmp_path / "b", None)
    for name, tensor in load_file(weights).items():
        assert torch.equal(tensor, C[name])


def test_is_current(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(OLD, path)
    with pk.checkpoint.Checkpoint.open(tmp_path) as opened:
        assert opened.is_current()
        save_file(B, tmp_path / "other.safetensors")
        assert opened.is_current()  # not among the weights of a folder with a model.safetensors
        (tmp_path / "other.safetensors").replace(path)
        assert not opened.is_current()
        path.unlink()
        assert not opened.is_current()
