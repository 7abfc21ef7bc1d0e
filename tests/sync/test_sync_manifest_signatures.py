"""Signed manifests: nothing passes that a trusted key did not sign in these very bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from manifest_samples import KEY, OTHER, PATCH, PLAIN_BYTES, PUBLIC, SIGNATURE, SIGNED_BYTES, content_of, encode, sign

from pulse_kernels.errors import ChainError, TrustError
from pulse_kernels.sync.manifest import (
    Manifest,
)

# -- signatures


def test_any_altered_byte_is_refused() -> None:
    for position in range(len(SIGNED_BYTES)):
        for mask in (0x01, 0x20, 0x80):
            data = bytearray(SIGNED_BYTES)
            data[position] ^= mask
            with pytest.raises(TrustError):
                Manifest.from_bytes(data, trust=[PUBLIC])


def test_any_lost_or_added_byte_is_refused() -> None:
    for position in range(len(SIGNED_BYTES)):
        for data in (
            SIGNED_BYTES[:position],
            SIGNED_BYTES[:position] + SIGNED_BYTES[position + 1 :],
            SIGNED_BYTES[:position] + b" " + SIGNED_BYTES[position:],
        ):
            with pytest.raises(TrustError):
                Manifest.from_bytes(data, trust=[PUBLIC])


def test_unsigned_ones_are_refused_where_keys_are_trusted() -> None:
    with pytest.raises(TrustError, match=r"is not signed.*expected one of 03a107bf\.\.\.31b8.*trust=None"):
        Manifest.from_bytes(PLAIN_BYTES, trust=[PUBLIC])


def test_foreign_signers_are_refused() -> None:
    foreign = OTHER.public_key().public_bytes_raw().hex()
    with pytest.raises(TrustError, match=rf"signed by {foreign[:8]}\.\.\..*expected one of 03a107bf\.\.\.31b8"):
        Manifest.from_bytes(PATCH.to_bytes(OTHER), trust=[PUBLIC])


def test_a_trusted_name_on_a_foreign_signature_is_refused() -> None:
    foreign = OTHER.public_key().public_bytes_raw().hex().encode()
    with pytest.raises(TrustError, match=r"the signature by 03a107bf\.\.\.31b8 is wrong"):
        Manifest.from_bytes(PATCH.to_bytes(OTHER).replace(foreign, PUBLIC.hex().encode()), trust=[PUBLIC])


def test_a_signature_of_another_version_is_refused() -> None:
    signature = content_of(dataclasses.replace(PATCH, time=0).to_bytes(KEY))["signature"]
    with pytest.raises(TrustError, match="altered after it was signed"):
        Manifest.from_bytes(encode({**content_of(), "signature": signature}), trust=[PUBLIC])


def test_signed_text_of_other_kinds_is_no_manifest() -> None:
    """Without the prefix the same key's signatures under other things could be passed off as a manifest's."""
    value = {"key": PUBLIC.hex(), "value": KEY.sign(PLAIN_BYTES).hex()}
    with pytest.raises(TrustError, match="is wrong"):
        Manifest.from_bytes(encode({**content_of(), "signature": value}), trust=[PUBLIC])


def test_a_signature_elsewhere_is_none() -> None:
    """Verified before parsing, so it must not matter where in the bytes something like a signature turns up."""
    content = content_of()
    value = KEY.sign(b"pulse-kernels manifest v1\n" + encode({**content, "facts": {"z": 1}})).hex()
    hidden = encode({**content, "facts": {"signature": {"key": PUBLIC.hex(), "value": value}, "z": 1}})
    with pytest.raises(ChainError, match="the signature is not a field of its own"):
        Manifest.from_bytes(hidden, trust=[PUBLIC])
    twice = encode({**content, "facts": {"signature": {"key": PUBLIC.hex(), "value": value}, "z": 1}, "signature": 1})
    with pytest.raises(ChainError):
        Manifest.from_bytes(twice, trust=[PUBLIC])
    both = sign({**content, "facts": {"signature": {"key": PUBLIC.hex(), "value": value}, "z": 1}})
    with pytest.raises(TrustError, match="2 signatures found"):
        Manifest.from_bytes(both, trust=[PUBLIC])
    quoted = dataclasses.replace(PATCH, facts={"note": SIGNATURE[:256]})
    assert Manifest.from_bytes(quoted.to_bytes(KEY), trust=[PUBLIC]) == quoted


GOOD = {"key": "03" * 32, "value": "04" * 64}
BAD_SIGNATURES = [
    None,
    1,
    "03" * 32,
    [],
    {},
    {"key": GOOD["key"]},
    {**GOOD, "more": 1},
    {**GOOD, "key": None},
    {**GOOD, "key": "03" * 31},
    {**GOOD, "key": "0A" * 32},
    {**GOOD, "value": 1},
    {**GOOD, "value": "04" * 63},
    {**GOOD, "value": "0A" * 64},
]


@pytest.mark.parametrize("value", BAD_SIGNATURES)
def test_signatures_must_be_well_formed(value: Any) -> None:
    data = encode({**content_of(), "signature": value})
    with pytest.raises(ChainError, match="signature") as caught:
        Manifest.from_bytes(data)
    assert type(caught.value) is ChainError
    with pytest.raises(TrustError, match="is not signed, or damaged"):
        Manifest.from_bytes(data, trust=[PUBLIC])


def test_without_trust_signatures_are_not_verified() -> None:
    assert Manifest.from_bytes(encode({**content_of(), "signature": GOOD})) == PATCH


@pytest.mark.parametrize(("trust", "error"), [([], ValueError), (PUBLIC, TypeError), (["x"], OSError)])
def test_trust_itself_is_checked(trust: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Manifest.from_bytes(SIGNED_BYTES, trust=trust)
