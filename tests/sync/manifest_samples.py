"""Manifests that several tests share, and writing them from docs/sync-format.md without the package."""

from __future__ import annotations

import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from pulse_kernels.sync.manifest import Manifest, Part

CHAIN = "0123456789abcdef" * 2
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8")
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
FIELDS: dict[str, Any] = {
    "chain": CHAIN,
    "version": 121,
    "kind": "patch",
    "base_version": 120,
    "base_digest": "00112233445566778899aabbccddeeff",
    # Each half is a sum of its own, modulo 2^64.
    "digest": "00000000000000030000000000000001",
    "tensor_digests": {
        "model.norm.weight": "0000000000000001ffffffffffffffff",
        "lm_head.weight": "00000000000000020000000000000002",
    },
    "anchor": (),
    "patch": (Part("patches/00000121/00000.safetensors", 4711, "ab" * 32),),
    "profile": "balanced",
    "time": 1764685517,
    "facts": {"num_changed": 12, "note": 'a "grün" run\\'},
}
PATCH = Manifest(**FIELDS)
ANCHOR_FIELDS = {
    **FIELDS,
    "kind": "anchor",
    "anchor": tuple(Part(f"anchors/00000121/model-{k}.safetensors", 10**9 + k, "cd" * 32) for k in (1, 2)),
}
ANCHOR = Manifest(**ANCHOR_FIELDS)
ONLY_ANCHOR = Manifest(**{**ANCHOR_FIELDS, "patch": (), "base_version": None, "base_digest": None})

FRONT = (
    '{"anchor":[],"base_digest":"00112233445566778899aabbccddeeff","base_version":120,"chain":"0123456789abcdef01234567'
    '89abcdef","digest":"00000000000000030000000000000001","facts":{"note":"a \\"grün\\" run\\\\","num_changed":12},'
    '"format":1,"kind":"patch","patch":[{"blake3":"abababababababababababababababababababababababababababababababab","bytes'
    '":4711,"key":"patches/00000121/00000.safetensors"}],"profile":"balanced",'
)
SIGNATURE = (
    '"signature":{"key":"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8","value":"0ef79bf3b3a2063243b'
    'c3589324a98f40d4ce2010e6cd3d8606be27092d34f7ef21847bc5c08f9127f7e361eba14289273f69a4ad655d7b7834d6ee08b197709"},'
)
BACK = (
    '"tensor_digests":{"lm_head.weight":"00000000000000020000000000000002","model.norm.weight":"0000000000000001fffffff'
    'fffffffff"},"time":1764685517,"version":121}'
)
PLAIN_BYTES = (FRONT + BACK).encode()
SIGNED_BYTES = (FRONT + SIGNATURE + BACK).encode()


def content_of(data: bytes = PLAIN_BYTES) -> dict[str, Any]:
    return json.loads(data)


def encode(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def sign(content: dict[str, Any], key: Any = KEY) -> bytes:
    """Signed bytes of any object, written from docs/sync-format.md and not with the package."""
    value = key.sign(b"pulse-kernels manifest v1\n" + encode(content)).hex()
    public = key.public_key().public_bytes_raw().hex()
    return encode({**content, "signature": {"key": public, "value": value}})


def spelled(old: str, new: str) -> bytes:
    text = PLAIN_BYTES.decode()
    assert text.count(old) == 1
    return text.replace(old, new).encode()
