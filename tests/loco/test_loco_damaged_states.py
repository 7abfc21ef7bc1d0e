"""States that are damaged, in memory and on disk: nothing changes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loco_models import model, moved
from ranks_pool import Ranks
from torch import Tensor

from pulse_kernels.errors import CheckpointError, GroupError
from pulse_kernels.loco import PulseLoCo


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def trained_alone() -> tuple[dict[str, Tensor], PulseLoCo]:
    local = model()
    loco = PulseLoCo(local, sync_every=2, fragments=2)
    for k in range(5):
        moved(list(local.values()), seed=k)
        loco.step()
    return local, loco


def test_a_loaded_state_is_not_shared() -> None:
    _, loco = trained_alone()
    kept = copy.deepcopy(loco.state_dict())
    before = copy.deepcopy(kept)
    local = model()
    again = PulseLoCo(local, sync_every=2, fragments=2)
    again.load_state_dict(kept)
    for k in range(4):
        moved(list(local.values()), seed=k)
        again.step()
    for own, old in zip(kept["outer"], before["outer"], strict=True):
        assert own["state"].keys() == old["state"].keys()
        for k, values in own["state"].items():
            assert torch.equal(values["momentum_buffer"], old["state"][k]["momentum_buffer"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in ("format", "world", "gated", "fragments", "rounds", "steps", "due", "density")),
        ("rounds", [1]),
        ("rounds", [1, "2"]),
        ("steps", -1),
        ("due", [2]),
        ("density", float("nan")),
        ("outer", []),
        ("theta", 3),
        ("residual", {"a": 1}),
        *((key, ...) for key in ("rounds", "due", "density", "outer", "theta", "residual")),
    ],
    ids=str,
)
def test_a_damaged_state_changes_nothing(key: str, value: Any) -> None:
    _, loco = trained_alone()
    other = PulseLoCo(model(seed=1), sync_every=2, fragments=2)
    state = copy.deepcopy(other.state_dict())
    if value is ...:
        del state[key]
    else:
        state[key] = value
    before = copy.deepcopy(loco.state_dict())
    with pytest.raises(ValueError, match=r"the state is|does not fit|a PulseLoCo state"):
        loco.load_state_dict(state)
    after = loco.state_dict()
    assert all(after[k] == before[k] for k in ("rounds", "steps", "due", "density"))
    for kind in ("theta", "residual"):
        assert all(torch.equal(after[kind][name], tensor) for name, tensor in before[kind].items())
    for own, old in zip(after["outer"], before["outer"], strict=True):
        assert all(
            torch.equal(own["state"][k]["momentum_buffer"], each["momentum_buffer"]) for k, each in old["state"].items()
        )


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The tensors of a checkpoint, changed, as a checkpoint in the same folder."""
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in found.items()  # type: ignore[union-attr]
    }  # fmt: skip
    load(tensors, checkpoint_id=folder, no_dist=True)
    change(tensors)
    shutil.rmtree(folder)
    save(tensors, checkpoint_id=folder, no_dist=True)


def with_facts(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        facts = json.loads(bytes(tensors["facts"].numpy()))
        facts.update(changes)
        tensors["facts"] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)

    return change


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update(facts=torch.tensor([1, 2], dtype=torch.uint8)), "'facts' are damaged"),
        (lambda t: t.update(facts=torch.tensor(list(b"[1]"), dtype=torch.uint8)), "expected an object"),
        (lambda t: t.update(facts=torch.zeros(3)), "has no 'facts'"),
        (with_facts(world=1 << 40), "its world is"),
        (with_facts(outer=[{}, {}]), "outer optimizers' state is damaged"),
        (with_facts(outer=[{"state": {"0": {"m": {"dtype": "float32", "shape": [1 << 50]}}}, "param_groups": []}] * 2),
         "outer optimizers' state is damaged"),
        (lambda t: t.pop("outer.0.0"), "outer optimizers' state is damaged"),
        (lambda t: t.update({"theta.b": t["theta.b"].double()}), "theta of 'b' does not fit"),
        (lambda t: t.update({"residual.00000.b": t["residual.00000.b"].half()}), "residual of 'b' of rank 0 does not"),
        (lambda t: t.pop("residual.00000.b"), "residual of 'b' of rank 0 does not fit"),
        (None, "could not be read"),
    ],
)  # fmt: skip
def test_a_damaged_folder_changes_nothing(tmp_path: Path, change: Any, told: str) -> None:
    _, loco = trained_alone()
    loco.save(tmp_path / "state")
    if change is None:
        for path in (tmp_path / "state").glob("*.distcp"):
            path.write_bytes(path.read_bytes()[:100])
    else:
        rewritten(tmp_path / "state", change)
    other = PulseLoCo(model(seed=3), sync_every=2, fragments=2)
    with pytest.raises((CheckpointError, ValueError), match=told):
        other.load(tmp_path / "state")
    assert (other.steps, other.rounds) == (0, 0)
    assert all(torch.equal(tensor, model(seed=3)[name]) for name, tensor in other.theta.items())


def sees_another_folder(rank: int, folder: str) -> list[str]:
    loco = PulseLoCo(model())
    loco.save(folder)
    told = []
    for place in (folder + "/none" if rank else folder, folder):
        try:
            loco.load(place)
            told.append("")
        except (CheckpointError, GroupError) as error:
            told.append(str(error))
    return told


def test_a_rank_does_not_see_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(sees_another_folder, str(tmp_path / "state"), world=2, seconds=15):
        assert "no checkpoint that can be read" in told[0]
        assert told[1] == ""
