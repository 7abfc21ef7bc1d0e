"""Manifests: one small JSON object a version, whose existence is the commit (docs/sync-format.md has every byte)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pulse_kernels.codec.header import name_problem, parse_json
from pulse_kernels.errors import ChainError, PatchFormatError, TrustError
from pulse_kernels.state import StateDigest
from pulse_kernels.sync.signing import short, signer_from, trusted_keys, verifies

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_VERSION = (1 << 53) - 1  # what every JSON reader takes exactly
MAX_PARTS = 100_000
MAX_FACTS = 64
MAX_FACT_CHARS = 256
MAX_KEY_CHARS = 512
SIGNED_PREFIX = b"pulse-kernels manifest v1\n"

_HEX32 = re.compile(r"[0-9a-f]{32}\Z")
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_HEX128 = re.compile(r"[0-9a-f]{128}\Z")
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_-]{0,63}\Z")
# Control characters, lone surrogates, and marks that no one sees or that reorder text: `log` shows facts in terminals.
_UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
_STORE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")
_MANIFEST_KEY = re.compile(r"manifests/([0-9]{8,16})\.json\Z")
# In canonical bytes quotes inside strings are escaped, so this matches members of an object alone.
_SIGNATURE = re.compile(rb'"signature":\{"key":"([0-9a-f]{64})","value":"([0-9a-f]{128})"\},')

_FIELDS = {
    *("format", "chain", "version", "kind", "base_version", "base_digest", "digest", "tensor_digests"),
    *("anchor", "patch", "profile", "time", "facts"),
}
_DIGITS = "lower-case hexadecimal digits"
_FIX = "; fetch it again, or publish a new anchor if the store holds these bytes"


def manifest_key(version: int) -> str:
    """The key below the prefix of a version's manifest: "manifests/00000121.json"."""
    return f"manifests/{_padded(version)}.json"


def version_of(key: str) -> int | None:
    """The version whose ``manifest_key`` is ``key``; None for every other key, "manifests/0007.json" too."""
    match = _MANIFEST_KEY.match(key)
    version = int(match[1]) if match else -1
    return version if 0 <= version <= MAX_VERSION and manifest_key(version) == key else None


def anchor_folder(version: int) -> str:
    """Where the files of an anchor lie: "anchors/00000120"."""
    return f"anchors/{_padded(version)}"


def patch_folder(version: int) -> str:
    """Where the files of the patch to a version lie: "patches/00000121"."""
    return f"patches/{_padded(version)}"


def version_in(key: str) -> int | None:
    """The version in whose anchor or patch folder an object lies; None for every other key."""
    folder, _, rest = key.partition("/")
    number, slash, _ = rest.partition("/")
    if folder not in ("anchors", "patches") or not slash or not number.isascii() or not number.isdigit():
        return None
    version = int(number) if len(number) <= 16 else -1
    return version if 0 <= version <= MAX_VERSION and _padded(version) == number else None


def _padded(version: int) -> str:
    if not _is_int(version, 0, MAX_VERSION):
        raise ValueError(f"version {version!r:.60}, expected an integer from 0 to 2^53 - 1")
    # Eight digits or more: sort versions as numbers, their names are in order below 10^8 only.
    return f"{version:08d}"


@dataclass(frozen=True)
class Part:
    """One object of a version: key below the store's prefix, size in bytes, BLAKE3 as 64 hexadecimal digits."""

    key: str
    bytes: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    """What one version is made of. Checked when made: ValueError names the field, what was found and expected.

    ``chain``: 32 hexadecimal digits, drawn when the chain was started. ``base_version`` and ``base_digest``: what the
    patch is applied to, None without one. ``digest``: of the whole state, the sum of ``tensor_digests`` (tensor name ->
    StateDigest of that tensor alone). ``anchor``: files of a whole checkpoint. ``patch``: one file a publishing rank.
    ``kind`` is "anchor" exactly where there are anchor files. ``time`` (seconds since 1970) and ``facts`` are for
    people: nothing is decided by them.
    """

    chain: str
    version: int
    kind: str
    base_version: int | None
    base_digest: str | None
    digest: str
    tensor_digests: dict[str, str]
    anchor: tuple[Part, ...]
    patch: tuple[Part, ...]
    profile: str
    time: int
    facts: dict[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def to_bytes(self, signer: Any = None) -> bytes:
        """The canonical bytes, signed where ``signer`` (see ``signing.signer_from``) is given.

        ValueError where a field was made bad or the result is over MAX_MANIFEST_BYTES; PulseError of the signer.
        """
        _check(self)
        content = _to_json(self)
        data = _encode(content)
        if signer is not None:
            signer = signer_from(signer)
            value = signer.sign(SIGNED_PREFIX + data)
            data = _encode({**content, "signature": {"key": signer.public_key.hex(), "value": value.hex()}})
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the manifest of version {self.version} takes {len(data)} bytes for {len(self.tensor_digests)} tensors"
                f" and {len(self.anchor) + len(self.patch)} parts, expected up to {MAX_MANIFEST_BYTES}"
            )
        return data

    @classmethod
    def from_bytes(
        cls,
        buffer: bytes | bytearray | memoryview,
        *,
        version: int | None = None,
        chain: str | None = None,
        trust: Iterable[Any] | None = None,
    ) -> Manifest:
        """Out of untrusted bytes. ChainError where they are no manifest in canonical form, or not the one meant.

        ``version``: the one its key names. ``chain``: the one it must belong to. ``trust``: public keys (see
        ``signing.trusted_keys``); unless one of them signed, TrustError, before anything is parsed. With None a
        signature is not verified.
        """
        what = "the manifest" if version is None else f"the manifest {manifest_key(version)}"
        size = memoryview(buffer).nbytes
        if size > MAX_MANIFEST_BYTES:
            raise ChainError(f"{what} has {size} bytes, expected up to {MAX_MANIFEST_BYTES}{_FIX}")
        data = bytes(buffer)
        verified = None if trust is None else _verified(data, trusted_keys(trust), what)
        try:
            content = parse_json(data, what)
            _check_form(content, data)
            signature = content.pop("signature", None)
            if verified is not None and signature != verified:
                raise ValueError("the signature is not a field of its own")
            manifest = cls(**_from_json(content))
        except PatchFormatError as error:  # which names what already
            raise ChainError(f"{error}{_FIX}") from None
        except (ValueError, RecursionError) as error:
            raise ChainError(f"{what}: {error}{_FIX}") from None
        if version is not None and manifest.version != version:
            raise ChainError(
                f"{what} is that of version {manifest.version}: it was copied under another name, or replayed. Nothing"
                f" of it was used; remove it, or publish an anchor of a version after {max(version, manifest.version)}"
            )
        if chain is not None and manifest.chain != chain:
            raise ChainError(
                f"{what} (version {manifest.version}) belongs to chain {manifest.chain}, expected {chain!r:.60}:"
                " another run published into this prefix. Give each run a prefix of its own, or start anew on this one"
            )
        return manifest


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _encode(content: Any) -> bytes:
    """The canonical bytes: keys sorted by code points, no white space, no escapes but those JSON demands, UTF-8."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _verified(data: bytes, trust: frozenset[bytes], what: str) -> dict[str, str]:
    """The signature in ``data``, made by a key of ``trust``; TrustError otherwise. Nothing else of it is looked at."""
    expected = ", ".join(sorted(short(key) for key in trust)[:8])
    matches = list(_SIGNATURE.finditer(data))[:2]
    if len(matches) != 1:
        raise TrustError(
            f"{what} is not signed, or damaged: {len(matches)} signatures found, expected one of {expected}. Publish"
            " with signer=, or pass trust=None to take unsigned manifests"
        )
    match = matches[0]
    key, value = bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode())
    if key not in trust:
        raise TrustError(
            f"{what} is signed by {short(key)}, expected one of {expected}. Add the key to trust if it is the"
            " publisher's"
        )
    if not verifies(key, value, SIGNED_PREFIX + data[: match.start()] + data[match.end() :]):
        raise TrustError(f"{what}: the signature by {short(key)} is wrong: it was altered after it was signed{_FIX}")
    return {"key": key.hex(), "value": value.hex()}


def _check_form(content: Any, data: bytes) -> None:
    """That ``content``, parsed out of ``data``, has our fields and was spelled the one way there is."""
    if not isinstance(content, dict):
        raise ValueError(f"{content!r:.60}, expected an object")
    found = content.get("format")
    if type(found) is not int or found != FORMAT_VERSION:
        raise ValueError(f"format {found!r:.60}, expected {FORMAT_VERSION}; a newer pulse_kernels may read it")
    if unknown := set(content) - _FIELDS - {"signature"}:
        raise ValueError(f"unknown fields {sorted(unknown)!r:.200}; a newer pulse_kernels may read it")
    if missing := _FIELDS - set(content):
        raise ValueError(f"the fields {sorted(missing)} are missing")
    try:
        canonical = _encode(content)
    except UnicodeEncodeError:
        raise ValueError("text that is not Unicode") from None
    if canonical != data:
        raise ValueError(
            "not in canonical form: expected keys in order, no white space, no needless escapes, each number in its"
            " shortest form"
        )
    if "signature" in content:
        signature = content["signature"]
        if not isinstance(signature, dict) or set(signature) != {"key", "value"}:
            raise ValueError(f"signature is {signature!r:.80}, expected an object with key and value")
        for name, pattern, digits in (("key", _HEX64, 64), ("value", _HEX128, 128)):
            if not _matches(pattern, signature[name]):
                raise ValueError(f"the signature's {name} is {signature[name]!r:.80}, expected {digits} {_DIGITS}")


def _to_json(manifest: Manifest) -> dict[str, Any]:
    content = {name: getattr(manifest, name) for name in _FIELDS - {"format", "anchor", "patch"}}
    for name in ("anchor", "patch"):
        parts = getattr(manifest, name)
        content[name] = [{"blake3": part.blake3, "bytes": part.bytes, "key": part.key} for part in parts]
    return {"format": FORMAT_VERSION, **content}


def _from_json(content: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in content.items() if name != "format"}
    for name in ("anchor", "patch"):
        parts = fields[name]
        if not isinstance(parts, list):
            raise ValueError(f"{name} is {parts!r:.60}, expected a list of parts")
        for part in parts:
            if not isinstance(part, dict) or set(part) != {"blake3", "bytes", "key"}:
                raise ValueError(f"{name}: the part {part!r:.120}, expected an object with blake3, bytes and key")
        fields[name] = tuple(Part(part["key"], part["bytes"], part["blake3"]) for part in parts)
    return fields


def _check(manifest: Manifest) -> None:
    """ValueError unless every field is of its type and range, and they fit each other."""
    for problem in _problems(manifest):
        raise ValueError(problem)


def _problems(manifest: Manifest) -> Iterator[str]:
    m = manifest
    for name in ("chain", "digest", "base_digest"):
        value = getattr(m, name)
        if (value is not None or name != "base_digest") and not _matches(_HEX32, value):
            yield f"{name} is {value!r:.60}, expected 32 {_DIGITS}"
    if not _is_int(m.version, 0, MAX_VERSION):
        yield f"version is {m.version!r:.60}, expected an integer from 0 to 2^53 - 1"
    if m.base_version is not None and not _is_int(m.base_version, 0, m.version - 1):
        yield f"base_version is {m.base_version!r:.60}, expected an integer from 0 on and below version {m.version}"
    if not _is_int(m.time, 0, MAX_VERSION):
        yield f"time is {m.time!r:.60}, expected whole seconds since 1970"
    if not _matches(_IDENTIFIER, m.profile):
        yield f"profile is {m.profile!r:.80}, expected the short name of one"
    yield from _part_problems(m)
    if m.kind not in ("anchor", "patch"):
        yield f"kind is {m.kind!r:.60}, expected 'anchor' or 'patch'"
    if (m.kind == "anchor") != bool(m.anchor):
        yield f"kind is {m.kind!r}, but there are {len(m.anchor)} anchor parts"
    if m.kind == "patch" and not m.patch:
        yield "kind is 'patch', but there are no patch parts"
    for name in ("base_version", "base_digest"):
        if (getattr(m, name) is not None) != bool(m.patch):
            yield f"{name} is {getattr(m, name)!r}, but there are {len(m.patch)} patch parts: both or neither"
    yield from _digest_problems(m)
    yield from _fact_problems(m.facts)


def _part_problems(manifest: Manifest) -> Iterator[str]:
    lists = {"anchor": anchor_folder(manifest.version), "patch": patch_folder(manifest.version)}
    count = 0
    keys: set[str] = set()
    for name, folder in lists.items():
        parts = getattr(manifest, name)
        if not isinstance(parts, tuple) or not all(isinstance(part, Part) for part in parts):
            yield f"{name} is {parts!r:.60}, expected a tuple of Part"
        count += len(parts)
        if count > MAX_PARTS:
            yield f"over {MAX_PARTS} parts; publish larger files"
        for part in parts:
            if problem := _key_problem(part.key, folder):
                yield f"{name}: the part key {part.key!r:.80} {problem}"
            if part.key in keys:
                yield f"{name}: the part key {part.key!r} occurs twice"
            keys.add(part.key)
            if not _is_int(part.bytes, 1, MAX_VERSION):
                yield f"{name}: bytes of {part.key!r} is {part.bytes!r:.60}, expected an integer from 1 to 2^53 - 1"
            if not _matches(_HEX64, part.blake3):
                yield f"{name}: blake3 of {part.key!r} is {part.blake3!r:.80}, expected 64 {_DIGITS}"
    for key in keys:
        # A folder store can not hold both.
        for parent in (key[: match.start()] for match in re.finditer("/", key)):
            if parent in keys:
                yield f"the part key {parent!r} is also a folder of {key!r}"


def _key_problem(key: Any, folder: str) -> str | None:
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARS or ".." in key or not _STORE_KEY.match(key):
        return f"is refused, expected up to {MAX_KEY_CHARS} of letters, digits, '._-' and slashes, without '..'"
    return None if key.startswith(f"{folder}/") else f"is not in {folder}/"


def _digest_problems(manifest: Manifest) -> Iterator[str]:
    if not isinstance(manifest.tensor_digests, dict):
        yield f"tensor_digests is {manifest.tensor_digests!r:.60}, expected name -> digest"
    total = StateDigest()
    for name, digest in manifest.tensor_digests.items():
        problem = name_problem(name) if isinstance(name, str) else "not text"
        if problem:
            yield f"tensor name {name!r:.80} is refused: {problem}"
        if not _matches(_HEX32, digest):
            yield f"the digest of tensor {name!r:.200} is {digest!r:.60}, expected 32 {_DIGITS}"
        total.merge(StateDigest.fromhex(digest))
    if total.hexdigest() != manifest.digest:
        yield f"digest is {manifest.digest}, but tensor_digests add up to {total.hexdigest()}"


def _fact_problems(facts: Any) -> Iterator[str]:
    if not isinstance(facts, dict) or len(facts) > MAX_FACTS:
        yield f"facts is {facts!r:.80}, expected up to {MAX_FACTS} named values"
    for name, value in facts.items():
        if not _matches(_IDENTIFIER, name):
            yield f"facts: the name {name!r:.80}, expected a short identifier"
        number = _is_int(value, -MAX_VERSION, MAX_VERSION)
        text = isinstance(value, str) and len(value) <= MAX_FACT_CHARS and not _UNSHOWN.search(value)
        if not number and not text:
            yield f"facts: {name} is {value!r:.80}, expected an integer or up to {MAX_FACT_CHARS} visible characters"
