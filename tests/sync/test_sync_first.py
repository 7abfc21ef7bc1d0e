"""Publisher to subscriber over a store: the bits, the routes, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore
from sync_models import Trainer, assert_same_bits, blank

from pulse_kernels import BaseMismatchError, NonFiniteError, StateDigest, VerificationError
from pulse_kernels.checkpoint import Checkpoint
from pulse_kernels.sync import Chain, Publisher, Subscriber, open_store


@pytest.fixture(params=["masters", "snapshot"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return Trainer(masters=request.param == "masters", seed=1)


def test_a_subscriber_has_the_trainers_bits_at_every_version(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=4)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    assert subscriber.poll() is None
    for version in range(10):
        report = publisher.publish()
        assert (report.version, report.committed) == (version, True)
        assert report.kind == ("anchor" if version % 4 == 0 else "patch")
        applied = subscriber.poll()
        assert applied is not None
        assert applied.version == version == subscriber.version
        assert_same_bits(weights, trainer.weights)
        assert applied.digest == report.digest == StateDigest.of(weights).hexdigest()
        assert subscriber.poll() is None
        trainer.step()


def test_followers_fetch_patches_where_an_anchor_is_due(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=2)
    subscriber = Subscriber(store, blank(trainer.weights))
    publisher.publish()
    subscriber.poll()
    for _ in range(4):
        trainer.step()
        report = publisher.publish()
        staged = subscriber.stage()
        assert staged is not None
        assert not staged.from_anchor
        assert staged.fetched_bytes == report.payload_bytes < report.dense_bytes / 4
        subscriber.apply()


@pytest.mark.parametrize("behind", [1, 3, 7])
def test_a_laggard_folds_patches(trainer: Trainer, behind: int) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=100)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    publisher.publish()
    subscriber.poll()
    for _ in range(behind):
        trainer.step()
        publisher.publish()
    staged = subscriber.stage()
    assert staged is not None
    assert (staged.patches, staged.from_anchor) == (behind, False)
    assert subscriber.apply().version == behind
    assert_same_bits(weights, trainer.weights)


def test_rollback_restores_the_version_before(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    publisher.publish()
    subscriber.poll()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    trainer.step()
    publisher.publish()
    subscriber.poll()
    assert subscriber.rollback() == 0
    assert_same_bits(weights, before)
    report = subscriber.poll()
    assert report is not None
    assert report.version == 1
    assert_same_bits(weights, trainer.weights)


def test_a_touched_weight_written_by_others_is_found_at_once_and_mended_from_an_anchor(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, anchor_every=2)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    publisher.publish()
    subscriber.poll()
    before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    trainer.step()
    publisher.publish()
    name, position = trainer.first_change(before)
    flat = weights[name].view(-1).view(torch.int16)
    flat[position] ^= 64
    damaged = {name: tensor.clone() for name, tensor in weights.items()}
    with pytest.raises(VerificationError):
        subscriber.poll()
    assert_same_bits(weights, damaged)
    assert subscriber.version is None
    trainer.step()
    publisher.publish()  # an anchor
    report = subscriber.poll()
    assert report is not None
    assert report.version == 2
    assert_same_bits(weights, trainer.weights)


def test_an_untouched_weight_written_by_others_is_found_by_the_sweep(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights, verify="full")
    publisher.publish()
    subscriber.poll()
    before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    trainer.step()
    publisher.publish()
    name, position = trainer.first_silent(before)
    weights[name].view(-1).view(torch.int16)[position] ^= 1
    damaged = {name: tensor.clone() for name, tensor in weights.items()}
    with pytest.raises(VerificationError, match=name):
        subscriber.poll()
    assert_same_bits(weights, damaged)
    report = subscriber.poll()
    assert report is not None
    assert_same_bits(weights, trainer.weights)


def test_the_anchor_is_an_ordinary_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "run", trainer.weights, masters=trainer.masters, shard_bytes=8_000)
    report = publisher.publish()
    with Checkpoint.open(tmp_path / "run" / "anchors" / "00000000") as checkpoint:
        found = {
            name: checkpoint.read(name, 0, info.numel).view(info.shape) for name, info in checkpoint.tensors.items()
        }
        assert len({info.file for info in checkpoint.tensors.values()}) > 1
    assert_same_bits(found, trainer.weights)
    assert report.anchor_bytes >= report.dense_bytes


def test_params_can_be_made_from_the_chain(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    trainer.step()
    publisher.publish()
    subscriber = Subscriber(store)
    assert_same_bits(subscriber.params, trainer.weights)
    assert subscriber.version == 1
    assert subscriber.poll() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_refused_and_nothing_moves(trainer: Trainer, bad: float) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    trainer.step()
    name = next(iter(trainer.weights))
    sound = trainer.latest[name].view(-1)[5].clone()
    trainer.latest[name].view(-1)[5] = bad
    before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    with pytest.raises(NonFiniteError, match=f"{name}.*position 5"):
        publisher.publish()
    assert publisher.version == 0
    assert_same_bits(trainer.weights, before)
    trainer.latest[name].view(-1)[5] = sound
    assert publisher.publish().version == 1
    weights = blank(trainer.weights)
    Subscriber(store, weights).poll()
    assert_same_bits(weights, trainer.weights)


def test_a_restarted_publisher_goes_on_with_patches(trainer: Trainer) -> None:
    store = MemoryStore()
    Publisher(store, trainer.weights, masters=trainer.masters).publish()
    again = Publisher(store, trainer.weights, masters=trainer.masters)
    trainer.step()
    report = again.publish()
    assert (report.version, report.kind, report.base_version) == (1, "patch", 0)


def test_a_publisher_restarted_from_older_weights_begins_with_an_anchor(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    publisher.publish()
    older = trainer.saved()
    trainer.step()
    publisher.publish()
    subscriber.poll()
    trainer.restore(older)
    again = Publisher(store, trainer.weights, masters=trainer.masters)
    report = again.publish()
    assert (report.version, report.kind, report.base_version) == (2, "anchor", None)
    assert report.note
    subscriber.poll()
    assert_same_bits(weights, trainer.weights)


def test_dense_is_sent_where_it_is_cheaper(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    for tensor in trainer.latest.values():  # bits that codes can hardly shorten
        finite = torch.randint(0x1000, 0x6000, tensor.shape, dtype=torch.int16, generator=trainer.generator)
        sign = torch.randint(0, 2, tensor.shape, dtype=torch.int16, generator=trainer.generator) << 15
        tensor.copy_((finite | sign).view(torch.bfloat16))
    report = publisher.publish()
    assert report.kind == "anchor"
    assert "dense was cheaper" in report.note
    weights = blank(trainer.weights)
    Subscriber(store, weights).poll()
    assert_same_bits(weights, trainer.weights)
    trainer.step()
    assert publisher.publish().kind == "patch"


def test_asynchronous_publishing_takes_what_the_weights_were(trainer: Trainer) -> None:
    store = MemoryStore()
    reports: list[int] = []
    note: Callable[[object], None] = lambda report: reports.append(report.version)  # type: ignore[attr-defined]  # noqa: E731
    publisher = Publisher(store, trainer.weights, masters=trainer.masters, asynchronous=True, on_report=note)
    weights = blank(trainer.weights)
    subscriber = Subscriber(store, weights)
    publisher.publish()
    for version in range(1, 6):
        trainer.step()
        report = publisher.publish()
        assert not report.committed
        expected = trainer.saved_weights()
        trainer.step()  # while the upload runs
        publisher.wait()
        applied = subscriber.poll()
        assert applied is not None
        assert applied.version == version
        assert_same_bits(weights, expected)
    assert reports == [0, 1, 2, 3, 4, 5]
    publisher.close()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
     torch.complex64],
)  # fmt: skip
def test_non_finite_values_are_found_in_every_dtype(dtype: torch.dtype) -> None:
    weights = {"w": torch.ones(7).to(dtype)}
    publisher = Publisher(MemoryStore(), weights)
    publisher.publish()
    bad = ["nan"] if dtype == torch.float8_e4m3fn else ["nan", "inf", "-inf"]
    for value in bad:
        changed = torch.ones(7)
        changed[4] = float(value)
        weights["w"] = changed.to(dtype)
        with pytest.raises(NonFiniteError, match="position 4"):
            publisher.publish()
    weights["w"] = torch.full((7,), 2.0).to(dtype)
    assert publisher.publish().num_changed == 7


def test_non_finite_weights_can_be_allowed() -> None:
    store = MemoryStore()
    weights = {"w": torch.tensor([1.0, float("nan"), -float("inf")]).bfloat16()}
    publisher = Publisher(store, weights, on_nonfinite="allow")
    publisher.publish()
    weights["w"][0] = float("inf")
    publisher.publish()
    assert_same_bits(Subscriber(store).params, weights)


def test_a_publisher_of_another_model_is_refused(trainer: Trainer) -> None:
    """It would end the run of the rightful one and leave its followers without a version they can use."""
    store = MemoryStore()
    publisher = Publisher(store, trainer.weights, masters=trainer.masters)
    publisher.publish()
    with pytest.raises(BaseMismatchError, match="versions of another model"):
        Publisher(store, {"other": torch.zeros(3).bfloat16()})
    trainer.step()
    assert publisher.publish().version == 1


def test_what_the_usual_mistakes_are_told(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    Publisher(store, trainer.weights, masters=trainer.masters).publish()
    with pytest.raises(TypeError, match="expected a list of public keys"):
        Subscriber(store, blank(trainer.weights), trust="ab" * 32)
    for chain in ("abc", Chain(open_store(store))):
        with pytest.raises(ValueError, match=r"publisher\.chain\.id"):
            Subscriber(store, blank(trainer.weights), chain=chain)  # type: ignore[arg-type]


def test_a_home_folder_is_no_folder_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Publisher("~/run", {"w": torch.zeros(3).bfloat16()}).publish()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
