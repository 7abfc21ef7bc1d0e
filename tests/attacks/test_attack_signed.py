"""S1 to S4 of docs/security.md: whose versions they are, of which chain, in which order, and where the key is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import obstore
import pytest
from cryptography.hazmat.primitives import serialization
from hostile import KEY, OTHER, PUBLIC, Run, attacked, goes_on, refuses
from sync_models import assert_same_bits

from pulse_kernels import ChainError, TrustError
from pulse_kernels.sync import Publisher, Subscriber
from pulse_kernels.sync.manifest import manifest_key

# ---- S1: only versions that a trusted key signed ---------------------------------------------------------------------


@pytest.mark.parametrize(("key", "match"), [(None, "is not signed"), (OTHER, "is signed by .*, expected one of")])
@pytest.mark.parametrize("version", [2, 3])
def test_attack_manifest_without_the_key(key: Any, match: str, version: int) -> None:
    run, subscriber, honest = attacked(signed=True)
    run.plant(version, {**run.manifest(2), "version": version}, key=key)
    refuses(subscriber, TrustError, match)
    run.restore(honest)
    goes_on(subscriber, run)


ALTERED: dict[str, Any] = {
    "anchor": [],
    "base_digest": "00" * 16,
    "base_version": 0,
    "chain": "00" * 16,
    "digest": "00" * 16,
    "facts": {},
    "format": 2,
    "kind": "anchor",
    "patch": [],
    "profile": "fast",
    "tensor_digests": {},
    "time": 0,
    "version": 1,
}


@pytest.mark.parametrize("name", ALTERED)
def test_attack_field_altered_under_its_signature(name: str) -> None:
    run, subscriber, honest = attacked(signed=True)
    key = manifest_key(2)
    signed = json.loads(run.read(key))
    assert ALTERED.keys() == signed.keys() - {"signature"}
    signed[name] = ALTERED[name] if name != "anchor" else signed["patch"]
    run.write(key, json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    refuses(subscriber, TrustError, "was altered after it was signed")
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_unsigned_manifest_among_signed_ones_is_not_a_base() -> None:
    """A forged version between two true ones: the way through it is not taken."""
    run, subscriber, honest = attacked(signed=True)
    run.publish()
    honest = run.everything()
    run.plant(2, run.manifest(2))
    refuses(subscriber, TrustError, "00000002.json is not signed")
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_publisher_does_not_join_what_another_key_signed() -> None:
    run = Run(key=OTHER)
    run.publish(2)
    before = run.everything()
    for signer in (KEY, KEY.private_bytes_raw()):
        with pytest.raises(TrustError, match=r"is signed by .*, expected one of 03a107bf"):
            Publisher(run.store, run.trainer.weights, masters=run.trainer.masters, signer=signer)
    assert run.everything() == before


# ---- S2: one chain, each version under its own number ----------------------------------------------------------------


@pytest.mark.parametrize("old", [0, 1, 2])
def test_attack_signed_version_replayed_under_a_new_number(old: int) -> None:
    run, subscriber, honest = attacked(signed=True)
    run.write(manifest_key(9), run.read(manifest_key(old)))
    refuses(subscriber, ChainError, f"00000009.json is that of version {old}: it was copied")
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_version_of_another_chain_by_the_same_key() -> None:
    run, subscriber, honest = attacked(signed=True)
    other = Run()
    other.publish(6)
    for key, data in other.everything().items():
        run.write(key, data)
    refuses(subscriber, ChainError, f"belongs to chain {other.publisher.chain.id}, expected")
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_chain_of_which_nothing_held_is_not_kept() -> None:
    """A newcomer that saw a foreign manifest first, with nothing behind it, still follows the sound chain later."""
    run = Run()
    run.publish(2)
    honest = run.everything()
    other = Run()
    other.publish(8)
    subscriber = run.subscriber()
    run.write(manifest_key(7), other.read(manifest_key(7)))
    with pytest.raises(ChainError):
        subscriber.poll()
    assert subscriber.chain.id is None
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_two_histories_are_not_mixed() -> None:
    """A trainer began anew from version 1; old signed manifests of the same numbers are put back."""
    run = Run()
    run.publish(2)
    subscriber = run.subscriber()
    subscriber.poll()
    before = run.everything()
    run.publish(2)
    old = run.everything()
    run.restore(before)
    del run.states[2:]
    run.publisher = run.new_publisher()
    run.publish(2)
    honest = run.everything()
    run.write(manifest_key(2), old[manifest_key(2)])
    refuses(subscriber, ChainError, "version 3 begins at version 2 with digest .*, but version 2 has")
    run.restore(honest)
    goes_on(subscriber, run)


# ---- S3: versions do not go back -------------------------------------------------------------------------------------


def test_attack_rolled_back_store_under_a_running_subscriber() -> None:
    run = Run()
    run.publish(2)
    old = run.everything()
    run.publish(2)
    subscriber = run.subscriber()
    subscriber.poll()
    honest = run.everything()
    run.restore(old)
    refuses(subscriber, ChainError, "the newest version in .* is 1, but version 3 was seen")
    run.restore({})
    refuses(subscriber, ChainError, "is None, but version 3 was seen")
    run.restore(honest)
    run.publish()
    goes_on(subscriber, run)


def test_attack_rolled_back_store_under_one_that_had_nothing_to_fetch() -> None:
    """Its weights were the newest version's at once: that counts as seen, too."""
    run = Run()
    run.publish(2)
    honest = run.everything()
    subscriber = Subscriber(run.store, {k: v.clone() for k, v in run.states[-1].items()}, trust=[PUBLIC])
    assert subscriber.poll() is None
    assert subscriber.version == 1
    run.restore({})
    refuses(subscriber, ChainError, "is None, but version 1 was seen")
    run.restore(honest)
    run.publish()
    goes_on(subscriber, run)


def test_attack_rolled_back_store_under_a_resumed_subscriber(tmp_path: Path) -> None:
    run = Run()
    run.publish(2)
    old = run.everything()
    run.publish(2)
    first = run.subscriber(state_dir=tmp_path)
    first.poll()
    first.save()
    honest = run.everything()
    run.restore(old)
    resumed = run.subscriber(state_dir=tmp_path)
    assert resumed.version == 3
    refuses(resumed, ChainError, "the newest version in .* is 1, but version 3 was seen")
    run.restore(honest)
    run.publish()
    goes_on(resumed, run)


def test_attack_rolled_back_store_under_a_newcomer_that_knows_a_version() -> None:
    run = Run()
    run.publish(2)
    old = run.everything()
    run.publish(2)
    honest = run.everything()
    run.restore(old)
    refuses(run.subscriber(min_version=3), ChainError, "version 1 is older than min_version, 3")
    with pytest.raises(ChainError, match="version 1 is older than min_version, 3"):
        Subscriber(run.store, trust=[PUBLIC], min_version=3)
    at_one = Subscriber(run.store, {k: v.clone() for k, v in run.states[1].items()}, trust=[PUBLIC], min_version=3)
    with pytest.raises(ChainError, match="min_version"):  # even where these are its weights already
        at_one.poll()
    assert_same_bits(at_one.params, run.states[1])  # type: ignore[arg-type]
    run.restore(honest)
    goes_on(at_one, run)
    goes_on(run.subscriber(min_version=3), run)


# ---- S4: the private key stays where it is ---------------------------------------------------------------------------


def test_attack_nothing_that_is_shown_or_stored_holds_the_private_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    run = Run()
    shown: list[str] = []
    run.publish(3)
    publisher = run.publisher
    run.trainer.step()
    shown += [str(publisher.publish().to_dict()), repr(publisher), str(vars(publisher)), repr(publisher._signer)]
    run.write(manifest_key(9), b"{}")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        publisher.publish()
    shown += [str(caught.value), caplog.text]
    pem = KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    raw = KEY.private_bytes_raw()
    secrets = [raw, raw.hex().encode(), pem.split(b"\n")[1], repr(raw).encode()]
    for data in [*run.everything().values(), *(text.encode() for text in shown)]:
        for secret in secrets:
            assert secret not in data


# ---- not protected: stated in docs/security.md, held here so that the page stays true --------------------------------


def test_newcomers_without_a_version_take_an_old_signed_one() -> None:
    run = Run()
    run.publish(2)
    old = run.everything()
    run.publish(2)
    run.restore(old)
    subscriber = run.subscriber()
    subscriber.poll()
    assert subscriber.version == 1


def test_a_store_that_is_frozen_is_not_noticed() -> None:
    run = Run()
    run.publish(2)
    subscriber = run.subscriber()
    subscriber.poll()
    frozen = run.everything()
    run.publish()
    run.restore(frozen)
    assert subscriber.poll() is None


def test_deleted_objects_stop_subscribers_and_nothing_else() -> None:
    run, subscriber, honest = attacked(signed=True)
    obstore.delete(run.store, run.part(2))
    weights = subscriber.params
    assert isinstance(weights, dict)
    with pytest.raises(Exception, match=r"there is no 'patches/00000002"):
        subscriber.poll()
    assert_same_bits(weights, run.states[1])
    run.restore(honest)
    goes_on(subscriber, run)
