"""A file of a version on its way into the store."""

from __future__ import annotations

from pulse_kernels.codec.parallel import beside
from pulse_kernels.sync.manifest import Part
from pulse_kernels.sync.store import Store


def send_part(store: Store, key: str, data: bytes) -> Part:
    """Write ``data`` and take its BLAKE3 meanwhile. Raises what ``Store.put`` raises."""
    hashed, _ = beside(lambda: _blake3(data), lambda: store.put(key, data))
    return Part(key, len(data), hashed)


def _blake3(data: bytes) -> str:
    from blake3 import blake3

    return blake3(data, max_threads=blake3.AUTO).hexdigest()
