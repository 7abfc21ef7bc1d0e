"""Anchors: whole states as ordinary Hugging Face safetensors checkpoints in a store, streamed out and read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pulse_kernels.checkpoint.in_memory import tensors_in
from pulse_kernels.checkpoint.layout import (
    DIGEST_KEY,
    INDEX_FILE,
    VERSION_KEY,
    FileLayout,
    Layout,
    TensorSpec,
    encode_header,
    encode_index,
)
from pulse_kernels.dtypes import dtype_name
from pulse_kernels.errors import ChainError, CheckpointError
from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.manifest import Manifest, Part, anchor_folder
from pulse_kernels.sync.store import Store

_CHUNK = 16 << 20  # bytes of a tensor that are on their way at once


@dataclass(frozen=True)
class AnchorFiles:
    """The files of an anchor. late: (key, bytes) of what makes them a checkpoint, the index, to be put once the version
    is committed."""

    parts: tuple[Part, ...]
    late: tuple[tuple[str, bytes], ...]


def shards(named: Mapping[str, Tensor], shard_bytes: int) -> list[list[TensorSpec]]:
    """The tensors in order, cut into files of at most about ``shard_bytes``; one tensor is never cut."""
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for name, tensor in named.items():
        spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        if files[-1] and size + spec.nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.nbytes
    return files


def send_anchor(
    store: Store, named: Mapping[str, Tensor], version: int, digest: str, *, token: str, shard_bytes: int
) -> AnchorFiles:
    """Upload the tensors' files; the index, which makes them a checkpoint, is for the caller to put once it may.

    token: sets the file names apart from those of any other attempt at this version. Peak memory: one chunk.
    """
    from blake3 import blake3

    cut = shards(named, shard_bytes)
    names = [f"model-{token}-{k:05d}-of-{len(cut):05d}.safetensors" for k in range(1, len(cut) + 1)]
    files = tuple(FileLayout(name, {"format": "pt"}, tuple(specs)) for name, specs in zip(names, cut, strict=True))
    folder = anchor_folder(version)
    parts = []
    for file in files:
        key = f"{folder}/{file.name}"
        header = encode_header(file)
        hasher = blake3(max_threads=blake3.AUTO)

        def chunks(file: FileLayout = file, header: bytes = header) -> Iterator[Any]:
            nonlocal hasher
            hasher = blake3(max_threads=blake3.AUTO)  # a retry begins anew
            hasher.update(header)
            yield header
            for spec in file.tensors:
                for chunk in _bytes_of(named[spec.name]):
                    hasher.update(chunk)
                    yield chunk

        store.put_stream(key, chunks)
        parts.append(Part(key, len(header) + file.nbytes, hasher.hexdigest()))
    layout = Layout(files, {}, folder=True)
    index = encode_index(layout, names, {DIGEST_KEY: digest, VERSION_KEY: str(version)})
    return AnchorFiles(tuple(parts), ((f"{folder}/{INDEX_FILE}", index),))


def _bytes_of(tensor: Tensor) -> Iterator[Any]:
    """A tensor's bytes in row-major order, chunk by chunk, wherever it is."""
    flat = tensor.detach().reshape(-1)
    step = max(1, _CHUNK // tensor.element_size())
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].resolve_conj().resolve_neg().cpu().contiguous()
        yield part.view(torch.uint8).numpy().data


def fetch_anchor(chain: Chain, manifest: Manifest) -> dict[str, Tensor]:
    """The state that an anchor holds, in host memory. ChainError where its files are not what the manifest says."""
    state: dict[str, Tensor] = {}
    for part in manifest.anchor:
        try:
            tensors = tensors_in(chain.fetch(part), part.key)
        except CheckpointError as error:
            raise ChainError(f"anchor of version {manifest.version}: {error}") from error
        if both := state.keys() & tensors.keys():
            raise ChainError(f"anchor of version {manifest.version}: {min(both)!r:.200} is in two of its files")
        if lone := tensors.keys() - manifest.tensor_digests.keys():
            raise ChainError(
                f"anchor of version {manifest.version}: {part.key} has the tensor {min(lone)!r:.200}, which the "
                "manifest does not know; run `pulse-kernels fsck`"
            )
        state.update(tensors)
    if lone := manifest.tensor_digests.keys() - state.keys():
        raise ChainError(
            f"anchor of version {manifest.version}: the tensor {min(lone)!r:.200} is in none of its files; run "
            "`pulse-kernels fsck`"
        )
    return state
