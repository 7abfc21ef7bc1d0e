"""A file of a version on its way into the store."""

from __future__ import annotations

from pulse_kernels.sync.manifest import Part
from pulse_kernels.sync.store import Store


def send_part(store: Store, key: str, data: bytes) -> Part:
    """Hash and write ``data``. Raises what ``Store.put`` raises."""
    from blake3 import blake3

    hashed = blake3(data, max_threads=blake3.AUTO).hexdigest()
    store.put(key, data)
    return Part(key, len(data), hashed)
