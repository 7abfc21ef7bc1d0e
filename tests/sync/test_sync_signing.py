"""Keys and signatures: RFC 8032's own example, every form a key comes in, and what is refused without telling keys."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

from pulse_kernels.errors import PulseError
from pulse_kernels.sync.signing import Signer, generate_key, short, signer_from, trusted_keys, verifies

# RFC 8032, section 7.1, test 1: the signature of no bytes at all.
SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
    "655141438e7a100b"
)
ORDER = 2**252 + 27742317777372353535851937790883648493

PEM, PKCS8, PLAIN = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


def private_pem(key: Any, encryption: Any = PLAIN, form: Any = PKCS8) -> bytes:
    return key.private_bytes(PEM, form, encryption)


KEY = ed25519.Ed25519PrivateKey.from_private_bytes(SECRET)
SECRET_PEM = private_pem(KEY)
PUBLIC_PEM = KEY.public_key().public_bytes(PEM, SPKI)


class Hsm:
    """A signer that keeps its key to itself."""

    def __init__(self, public_key: Any = PUBLIC, answer: Any = None) -> None:
        self.public_key = public_key
        self.answer = answer
        self.seen: list[bytes] = []

    def sign(self, message: bytes) -> Any:
        self.seen.append(message)
        return KEY.sign(message) if self.answer is None else self.answer


def key_file(folder: Path, content: bytes, name: str = "key.pem", mode: int = 0o600) -> Path:
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


PRIVATE_FORMS = {
    "object": KEY,
    "raw": SECRET,
    "bytearray": bytearray(SECRET),
    "pem bytes": SECRET_PEM,
    "pem text": "\n" + SECRET_PEM.decode(),
    "hsm": Hsm(),
    "signer": signer_from(SECRET),
}


@pytest.mark.parametrize("form", PRIVATE_FORMS)
def test_signs_as_the_rfc_says(form: str) -> None:
    signer = signer_from(PRIVATE_FORMS[form])
    assert signer.public_key == PUBLIC
    assert signer.sign(b"") == SIGNATURE


@pytest.mark.parametrize("as_text", [False, True])
def test_signs_with_a_key_file(tmp_path: Path, as_text: bool, recwarn: pytest.WarningsRecorder) -> None:
    path = key_file(tmp_path, SECRET_PEM)
    assert signer_from(str(path) if as_text else path).sign(b"") == SIGNATURE
    assert not recwarn.list


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_warns_of_a_key_file_that_everybody_may_read(tmp_path: Path) -> None:
    path = key_file(tmp_path, SECRET_PEM, mode=0o644)
    with pytest.warns(UserWarning, match=r"everybody can read the private key file .*key\.pem.*chmod 600"):
        signer_from(path)


def test_verifies_strictly() -> None:
    assert verifies(PUBLIC, SIGNATURE, b"")
    assert not verifies(PUBLIC, SIGNATURE, b"x")
    assert not verifies(PUBLIC, SIGNATURE[:-1], b"")
    assert not verifies(b"\xff" * 32, SIGNATURE, b"")  # no point of the curve
    assert not verifies(PUBLIC[:-1], SIGNATURE, b"")
    for bit in range(512):
        wrong = bytearray(SIGNATURE)
        wrong[bit // 8] ^= 1 << bit % 8
        assert not verifies(PUBLIC, bytes(wrong), b"")
    # The same scalar plus the group's order: equal in the curve's arithmetic, another spelling of the signature.
    scalar = int.from_bytes(SIGNATURE[32:], "little") + ORDER
    assert not verifies(PUBLIC, SIGNATURE[:32] + scalar.to_bytes(32, "little"), b"")


PLACEHOLDERS = ["00" * 32, "00" * 31 + "80", "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "ed" + "ff" * 31]


@pytest.mark.parametrize("key", PLACEHOLDERS)
def test_keys_under_which_anybody_signs_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="anybody can sign"):
        trusted_keys([PUBLIC, key])
    forged = b"\x01" + bytes(63)
    assert not verifies(bytes.fromhex(key), forged, b"whatever")


def test_why_they_are_refused() -> None:
    """The library itself takes a signature that needs no private key under the identity point."""
    identity = ed25519.Ed25519PublicKey.from_public_bytes(b"\x01" + bytes(31))
    identity.verify(b"\x01" + bytes(63), b"whatever")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(PUBLIC, id="raw"),
        pytest.param(bytearray(PUBLIC), id="bytearray"),
        pytest.param(PUBLIC.hex(), id="hex"),
        pytest.param(PUBLIC.hex().upper() + "\n", id="upper-case hex"),
        pytest.param(PUBLIC_PEM, id="pem bytes"),
        pytest.param(PUBLIC_PEM.decode(), id="pem text"),
        pytest.param(KEY.public_key(), id="object"),
    ],
)
def test_trusted_keys_in_all_forms(form: Any) -> None:
    assert trusted_keys([form]) == {PUBLIC}


def test_trusted_keys_from_files_and_of_several(tmp_path: Path) -> None:
    path = key_file(tmp_path, PUBLIC_PEM, mode=0o644)
    other = generate_key()[1]
    assert trusted_keys([path, str(path), other]) == {PUBLIC, bytes.fromhex(other)}
    assert trusted_keys(trusted_keys((PUBLIC,))) == {PUBLIC}


def test_generated_keys(tmp_path: Path) -> None:
    private, public = generate_key()
    assert private.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert signer_from(key_file(tmp_path, private)).public_key.hex() == public
    assert verifies(bytes.fromhex(public), signer_from(private).sign(b"abc"), b"abc")
    assert generate_key()[1] != public


OTHER_PRIVATE = {
    "ed448": private_pem(ed448.Ed448PrivateKey.generate()),
    "ec": private_pem(ec.generate_private_key(ec.SECP256R1())),
}
SIGNERS_REFUSED = [
    (None, TypeError, "NoneType is no private key"),
    (7, TypeError, "int is no private key"),
    (KEY.public_key(), TypeError, "no private key"),
    (ed448.Ed448PrivateKey.generate(), TypeError, "no private key"),
    (SECRET[:-1], ValueError, "31 bytes are no private key, expected 32"),
    (SECRET + PUBLIC, ValueError, "64 bytes are no private key"),
    (PUBLIC_PEM, ValueError, "public key; signing needs the private one"),
    (private_pem(KEY, serialization.BestAvailableEncryption(b"pw")), ValueError, "not an unencrypted PKCS #8 key"),
    (private_pem(KEY, PLAIN, serialization.PrivateFormat.OpenSSH), ValueError, "not an unencrypted PKCS #8 key"),
    (OTHER_PRIVATE["ed448"], ValueError, "expected an Ed25519 key"),
    (OTHER_PRIVATE["ec"], ValueError, "expected an Ed25519 key"),
    (SECRET_PEM[:-40], ValueError, "PEM text is damaged"),
    (Hsm(public_key=PUBLIC.hex()), TypeError, "needs a public_key of 32 raw bytes"),
    (Hsm(public_key=None), TypeError, "needs a public_key of 32 raw bytes"),
    (SECRET.hex()[:-1], OSError, "given as text cannot be read"),
    (SECRET.hex() + "0.", OSError, "given as text cannot be read"),
    ("\0.pem", OSError, "no path"),
    ("absent.pem", OSError, r"'absent\.pem' cannot be read: No such file"),
    (Path("absent"), OSError, "'absent' cannot be read: No such file"),
]


@pytest.mark.parametrize(("key", "error", "message"), SIGNERS_REFUSED)
def test_signers_refused(key: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        signer_from(key)
    text = "".join(traceback.format_exception(caught.value))
    assert SECRET.hex()[:20] not in text
    assert repr(SECRET)[2:20] not in text
    assert caught.value.__context__ is None  # whose text we would not have chosen


@pytest.mark.parametrize("text", [PUBLIC.hex(), SECRET.hex(), SECRET.hex().upper() + "\n"])
def test_a_public_key_does_not_sign(text: str) -> None:
    """Everybody who trusts it could sign with it."""
    with pytest.raises(ValueError, match="how public keys are written"):
        signer_from(text)


def test_key_files_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no PEM text"):
        signer_from(key_file(tmp_path, SECRET.hex().encode()))
    with pytest.raises(ValueError, match="over 65536 bytes"):
        signer_from(key_file(tmp_path, SECRET_PEM + b"\n" * 65536))
    with pytest.raises(OSError, match="cannot be read: Is a directory"):
        signer_from(tmp_path)


RSA_PEM = rsa.generate_private_key(65537, 2048).public_key().public_bytes(PEM, SPKI)
TRUST_REFUSED = [
    ([], ValueError, r"trust=\[\] would refuse everything; pass None for no check"),
    (PUBLIC, TypeError, r"trust is bytes, expected a list of public keys: trust=\[key\]"),
    (PUBLIC.hex(), TypeError, "trust is str"),
    (Path("key.pem"), TypeError, "expected a list"),
    (None, TypeError, "trust is NoneType"),
    (7, TypeError, "trust is int"),
    ([None], TypeError, "NoneType is no public key"),
    ([KEY], TypeError, "no public key"),
    ([ed448.Ed448PrivateKey.generate().public_key()], TypeError, "expected an Ed25519PublicKey"),
    ([PUBLIC[:-1]], ValueError, "a key of 31 bytes, expected 32"),
    ([SECRET_PEM], ValueError, "a subscriber needs that one alone"),
    ([SECRET_PEM.decode()], ValueError, "is no public key"),
    ([RSA_PEM], ValueError, "expected an Ed25519 key"),
    ([PUBLIC_PEM[:-40]], ValueError, "PEM text is damaged"),
    (["absent.pem"], OSError, "cannot be read"),
]


@pytest.mark.parametrize(("trust", "error", "message"), TRUST_REFUSED)
def test_trust_refused(trust: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        trusted_keys(trust)
    assert SECRET.hex()[:20] not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (SIGNATURE[:-1], "63 bytes for a signature, expected 64"),
        (SIGNATURE.hex(), "str for a signature"),
        (SIGNATURE, "does not verify under its own public key"),
    ],
)
def test_a_signer_that_errs_is_found_before_anything_is_published(answer: Any, message: str) -> None:
    with pytest.raises(PulseError, match=message):
        signer_from(Hsm(answer=answer)).sign(b"another message")


def test_signer_of_another_key_is_found() -> None:
    with pytest.raises(PulseError, match="does not verify under its own public key"):
        signer_from(Hsm(public_key=bytes.fromhex(generate_key()[1]))).sign(b"abc")


def test_an_hsm_gets_the_very_message() -> None:
    hsm = Hsm()
    signer_from(hsm).sign(b"abc")
    assert hsm.seen == [b"abc"]


def test_reprs_show_public_keys_alone() -> None:
    for form in PRIVATE_FORMS.values():
        assert repr(signer_from(form)) == f"Signer(public_key='{PUBLIC.hex()}')"
    assert not hasattr(signer_from(SECRET), "__dict__")
    assert isinstance(signer_from(SECRET), Signer)
    assert short(PUBLIC) == "d75a9801...511a"


ABSENT = """
import sys
sys.modules["cryptography"] = None
from pulse_kernels.errors import PulseError
from pulse_kernels.sync import manifest, signing
assert signing.trusted_keys(["d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"])
for call in (signing.generate_key, lambda: signing.signer_from(bytes(32)), lambda: signing.verifies(b"", b"", b"")):
    try:
        call()
    except PulseError as error:
        assert "pip install 'pulse_kernels[sign]'" in str(error), error
    else:
        raise AssertionError("no error")
print("fine")
"""
LAZY = """
import sys
from pulse_kernels.sync import manifest, signing
assert not any(name.split(".")[0] == "cryptography" for name in sys.modules)
print("fine")
"""


@pytest.mark.parametrize("script", [ABSENT, LAZY], ids=["absent", "not imported before use"])
def test_without_cryptography(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
