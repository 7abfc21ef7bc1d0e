"""Ed25519 keys of manifests: who signs, and whom a subscriber trusts. `cryptography` is imported at the first use."""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from pulse_kernels.errors import PulseError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 1 << 16
_HEX = re.compile(r"[0-9a-fA-F]{64}\Z")
_PEM = b"-----BEGIN "
_PRIVATE_PEM = b"-----BEGIN PRIVATE KEY-----"
_PUBLIC_PEM = b"-----BEGIN PUBLIC KEY-----"

# The y coordinates of the points of order 1, 2, 4 and 8 in all spellings. Under such a key anybody can make signatures
# that verify: R = identity, S = 0. One of them is 32 zeros, which placeholders are made of.
_SMALL_ORDER = frozenset(
    int.from_bytes(bytes.fromhex(text), "little")
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


class Signer:
    """Signs bytes; ``public_key`` is the raw public key, 32 bytes. Its text shows the public key alone."""

    __slots__ = ("_sign", "public_key")

    def __init__(self, sign: Callable[[bytes], bytes], public_key: bytes) -> None:
        self._sign = sign
        self.public_key = public_key

    def sign(self, message: bytes) -> bytes:
        """The signature of ``message``, 64 bytes, which has been verified: PulseError where it is no good."""
        signature = self._sign(message)
        if not isinstance(signature, bytes) or len(signature) != SIGNATURE_BYTES:
            found = f"{len(signature)} bytes" if isinstance(signature, bytes) else type(signature).__name__
            raise PulseError(f"the signer gave {found} for a signature, expected {SIGNATURE_BYTES} bytes of Ed25519")
        if not verifies(self.public_key, signature, message):
            raise PulseError(
                f"the signer's signature does not verify under its own public key {self.public_key.hex()}; every"
                " subscriber would refuse it: does sign() make pure Ed25519 signatures, with that key?"
            )
        return signature

    def __repr__(self) -> str:
        return f"Signer(public_key={self.public_key.hex()!r})"


def signer_from(key: Any) -> Signer:
    """A signer out of an Ed25519 private key, in any of the forms that keys come in.

    ``key``: an ``Ed25519PrivateKey``; its 32 raw bytes; PEM text (PKCS #8, not encrypted), or the path of a file with
    it; or any object with ``sign(bytes) -> bytes`` and a ``public_key`` of 32 bytes, such as a wrapper of an HSM or a
    key service. Raises ValueError or TypeError where it is none of these, OSError where the file cannot be read,
    PulseError without `cryptography`. Warns where everybody on the machine may read the file. No message holds any of
    the key.
    """
    if isinstance(key, Signer):
        return key
    if callable(getattr(key, "sign", None)) and not callable(getattr(key, "public_key", None)):
        public = getattr(key, "public_key", None)
        if not isinstance(public, (bytes, bytearray)) or len(public) != KEY_BYTES:
            raise TypeError(f"signer: an object with sign() needs a public_key of {KEY_BYTES} raw bytes")
        return Signer(key.sign, bytes(public))
    ed25519, serialization = _cryptography()
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        content = _content(key, "signer", private=True)
        if content.startswith(_PEM):
            key = _private_from_pem(content)
        elif len(content) == KEY_BYTES:
            key = ed25519.Ed25519PrivateKey.from_private_bytes(content)
        else:
            raise ValueError(f"signer: {len(content)} bytes are no private key, expected {KEY_BYTES}, or PEM text")
    raw, plain = serialization.Encoding.Raw, serialization.PublicFormat.Raw
    return Signer(key.sign, key.public_key().public_bytes(raw, plain))


def trusted_keys(keys: Iterable[Any]) -> frozenset[bytes]:
    """The raw public keys, 32 bytes each, whose signatures a subscriber takes.

    Each of ``keys`` is an ``Ed25519PublicKey``, its 32 raw bytes or 64 hexadecimal digits, PEM text, or the path of a
    file with it. Raises ValueError for an empty list and for what is no such key, TypeError for other types, OSError
    where a file cannot be read. Raw and hexadecimal keys need no `cryptography`.
    """
    if isinstance(keys, (str, bytes, bytearray, os.PathLike)) or not isinstance(keys, Iterable):
        raise TypeError(f"trust is {type(keys).__name__}, expected a list of public keys: trust=[key]")
    found = frozenset(_public_key(key) for key in keys)
    if not found:
        raise ValueError("trust=[] would refuse everything; pass None for no check, or the publisher's public key")
    return found


def generate_key() -> tuple[bytes, str]:
    """A new key pair: the private key as PEM (PKCS #8, not encrypted), the public key as 64 hexadecimal digits."""
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, signer_from(key).public_key.hex()


def verifies(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` (64 bytes) of ``message`` is by the owner of ``public_key`` (32 raw bytes)."""
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    if _small_order(public_key):
        return False
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def short(public_key: bytes) -> str:
    """A public key for messages: its first and last hexadecimal digits."""
    return f"{public_key.hex()[:8]}...{public_key.hex()[-4:]}"


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise PulseError(
            f"signatures of manifests need the package cryptography, which does not import ({error}): "
            "pip install 'pulse_kernels[sign]'"
        ) from None
    return ed25519, serialization


def _small_order(public_key: bytes) -> bool:
    return int.from_bytes(public_key, "little") & ((1 << 255) - 1) in _SMALL_ORDER


def _content(key: Any, what: str, *, private: bool) -> bytes:
    """Raw bytes or PEM text of a key given as bytes, hexadecimal digits, PEM text or a path."""
    if isinstance(key, (bytes, bytearray)):
        return bytes(key)
    if isinstance(key, str) and _HEX.match(key.strip()):
        if private:  # a public key is written so, and would sign as a secret that everybody knows
            raise ValueError(
                f"{what}: 64 hexadecimal digits are how public keys are written, and no private key; give the path of "
                "the private key's PEM file, as `pulse-kernels keygen` writes it"
            )
        return bytes.fromhex(key.strip())
    if isinstance(key, str) and key.lstrip().startswith(_PEM.decode()):
        return key.lstrip().encode(errors="replace")
    if not isinstance(key, (str, os.PathLike)):
        kind = "private" if private else "public"
        raise TypeError(
            f"{what}: a {type(key).__name__} is no {kind} key, expected an Ed25519 {kind} key object, {KEY_BYTES} raw"
            f" bytes, {'' if private else '64 hexadecimal digits, '}PEM text or the path of a PEM file"
        )
    content = _read(key, what, private=private).lstrip()
    if not content.startswith(_PEM):
        raise ValueError(f"{what}: the key file {_name(key)} holds no PEM text, expected '-----BEGIN ...'")
    return content


def _read(path: str | os.PathLike[str], what: str, *, private: bool) -> bytes:
    problem = None
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        # Not the error itself: it would print the argument, which may be a mistyped private key.
        problem = error.strerror if isinstance(error, OSError) else "no path"
    if problem is not None:
        raise OSError(f"{what}: the key file {_name(path)} cannot be read: {problem}")
    if len(content) > MAX_KEY_FILE_BYTES:
        raise ValueError(f"{what}: {_name(path)} has over {MAX_KEY_FILE_BYTES} bytes; that is no key file")
    if private and os.name == "posix" and mode & stat.S_IROTH:
        warnings.warn(f"{what}: everybody can read the private key file {_name(path)}; chmod 600 it", stacklevel=4)
    return content


def _name(path: str | os.PathLike[str]) -> str:
    """A path for messages, if it surely is one and no mistyped key."""
    text = os.fspath(path)
    return repr(text) if isinstance(path, os.PathLike) or text.endswith((".pem", ".key")) else "given as text"


def _private_from_pem(content: bytes) -> Any:
    ed25519, serialization = _cryptography()
    if not content.startswith(_PRIVATE_PEM):
        if content.startswith(_PUBLIC_PEM):
            raise ValueError("signer: this PEM holds a public key; signing needs the private one")
        raise ValueError(
            "signer: the PEM is not an unencrypted PKCS #8 key ('-----BEGIN PRIVATE KEY-----'); convert it: openssl"
            " pkey -in KEY -out key.pem, or pass an object with sign() and public_key"
        )
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except Exception:  # whatever it is: its text stays out of ours
        key = None
    if key is None:
        raise ValueError("signer: the PEM text is damaged; make a new key or fetch it again")
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"signer: the PEM holds a {type(key).__name__}, expected an Ed25519 key")
    return key


def _public_key(key: Any) -> bytes:
    if not isinstance(key, (str, bytes, bytearray, os.PathLike)) and hasattr(key, "public_bytes"):
        ed25519, serialization = _cryptography()
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise TypeError(f"trust: a {type(key).__name__}, expected an Ed25519PublicKey")
        content = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    else:
        content = _content(key, "trust", private=False)
    if content.startswith(_PEM):
        content = _public_from_pem(content)
    if len(content) != KEY_BYTES:
        raise ValueError(f"trust: a key of {len(content)} bytes, expected {KEY_BYTES} raw bytes of Ed25519")
    if _small_order(content):
        raise ValueError(f"trust: {content.hex()} is a key under which anybody can sign; is it a placeholder?")
    return content


def _public_from_pem(content: bytes) -> bytes:
    ed25519, serialization = _cryptography()
    if not content.startswith(_PUBLIC_PEM):
        raise ValueError(
            "trust: the PEM is no public key ('-----BEGIN PUBLIC KEY-----'); a subscriber needs that one alone: openssl"
            " pkey -in key.pem -pubout"
        )
    try:
        key = serialization.load_pem_public_key(content)
    except Exception:
        key = None
    if key is None:
        raise ValueError("trust: the PEM text is damaged; fetch the public key again")
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(f"trust: the PEM holds a {type(key).__name__}, expected an Ed25519 key")
    return bytes(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))
