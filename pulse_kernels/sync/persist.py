"""A subscriber's state on disk: an ordinary safetensors checkpoint that knows its version, whole at every moment.

Digest, version and chain are in the checkpoint's own metadata (``pulse_digest``, ``pulse_version``, ``pulse_chain``):
one rename changes the weights and what is said of them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pulse_kernels import checks
from pulse_kernels.checkpoint import Checkpoint, CheckpointWriter, TensorInfo, TensorSink, replace_in_place
from pulse_kernels.checkpoint.layout import DIGEST_KEY, INDEX_FILE, SINGLE_FILE, VERSION_KEY, FileLayout, Layout
from pulse_kernels.errors import BaseMismatchError, ChainError, CheckpointError, VerificationError
from pulse_kernels.state import StateDigest
from pulse_kernels.sync.anchor import shards

CHAIN_KEY = "pulse_chain"

_SLICE = 1 << 24  # elements read or written at once
_SHARD_BYTES = 4 << 30
_HEX32 = re.compile(r"[0-9a-f]{32}\Z")
_OWN_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors\Z")


@dataclass(frozen=True)
class Saved:
    """What a folder had. version, chain: None where the checkpoint says nothing of them (somebody else made it)."""

    tensors: dict[str, Tensor]
    digest: str
    version: int | None
    chain: str | None


class StateFolder:
    """The folder that keeps one subscriber's state; other files in it are left alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"state_dir is {self.path}, which is no folder; give a folder, made if absent")
        self._damaged = False

    def occupied(self) -> bool:
        """Whether there are weights in the folder."""
        if not self.path.is_dir():
            return False
        names = [name for name in os.listdir(self.path) if not name.startswith(".")]
        return INDEX_FILE in names or any(name.endswith(".safetensors") for name in names)

    def load(self, into: Mapping[str, Tensor] | None = None, *, chain: str | None = None) -> Saved | None:
        """Read the state; into: tensors to read it into, else CPU tensors are made.

        None where there is none, and, with a warning, where it is damaged: ``save`` then replaces it. All of it is
        checked before anything is written into ``into``.

        Raises BaseMismatchError (``into`` has other tensors), ChainError (it belongs to another chain than ``chain``),
        CheckpointError (it cannot be read, or changed while it was).
        """
        if not self.occupied():
            return None
        try:
            checkpoint = Checkpoint.open(self.path)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # a reason that may pass is no damage
                raise
            self._ignore(str(error))
            return None
        with checkpoint:
            digest, version, recorded_chain = _recorded(checkpoint.recorded)
            if into is not None:
                _check_fits(self.path, checkpoint, into)
            if chain is not None and recorded_chain is not None and recorded_chain != chain:
                raise ChainError(
                    f"{self.path}: the state is of chain {recorded_chain}, expected {chain}; give each run a folder of "
                    "its own, or remove this one"
                )
            found = StateDigest()
            for info in checkpoint.tensors.values():
                found.add_presence(info.name, info)
                for start in range(0, info.numel, _SLICE):
                    part = checkpoint.read(info.name, start, min(start + _SLICE, info.numel))
                    found.add_slice(info.name, info, start, part)
            if digest is not None and found.hexdigest() != digest:
                self._ignore(f"its weights have digest {found.hexdigest()}, {digest} is recorded")
                return None
            tensors = {}
            for info in checkpoint.tensors.values():
                tensors[info.name] = _read(checkpoint, info, None if into is None else into[info.name])
        if StateDigest.of(tensors) != found:
            raise CheckpointError(f"{self.path}: changed while it was read; nothing else may write this folder")
        known = digest is not None and recorded_chain is not None
        return Saved(tensors, found.hexdigest(), version if known else None, recorded_chain if known else None)

    def save(self, named: Mapping[str, Tensor], version: int, digest: str, chain: str) -> None:
        """Replace the state by ``named``; at every moment the old or the new one is there, whole, kill -9 included.

        Needs the space of both for a while. Raises CheckpointError (no space, or another process at work here) and
        VerificationError (the tensors do not have ``digest``); the old state then stays.
        """
        files = shards(named, _SHARD_BYTES)
        record = {CHAIN_KEY: chain}
        if len(files) == 1:
            layout = Layout((FileLayout(SINGLE_FILE, {"format": "pt", **record}, tuple(files[0])),), None, folder=True)
        else:
            names = [f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, len(files) + 1)]
            each = tuple(FileLayout(n, {"format": "pt"}, tuple(f)) for n, f in zip(names, files, strict=True))
            layout = Layout(each, dict(record), folder=True)

        def write(sink: TensorSink) -> None:
            found = StateDigest()
            for name, tensor in named.items():
                writer = sink.open_tensor(name)
                found.add_presence(name, tensor)
                for start, part in _slices(tensor):
                    found.add_slice(name, tensor, start, part)
                    writer.append(part)
            if found.hexdigest() != digest:
                raise VerificationError(
                    f"the weights have digest {found.hexdigest()}, version {version} has {digest}: something else "
                    f"wrote them. They were not saved; {self.path} is as it was"
                )

        if self.occupied() and not self._damaged:
            old = self._recorded_digest()
            replace_in_place(self.path, layout.to_json(), write, old_digest=old, new_digest=digest, version=version)
            return
        if self._damaged:
            self._clear()
        with CheckpointWriter(self.path, layout.to_json(), overwrite=True, digest=digest, version=version) as writer:
            write(writer)
        self._damaged = False

    def _recorded_digest(self) -> str:
        with Checkpoint.open(self.path) as checkpoint:
            return _recorded(checkpoint.recorded)[0] or "unrecorded"

    def _ignore(self, why: str) -> None:
        self._damaged = True
        warnings.warn(
            f"{self.path}: the saved state is not used: {why}. The weights are fetched anew, the next save replaces it",
            RuntimeWarning,
            stacklevel=4,  # whoever makes the Subscriber
        )

    def _clear(self) -> None:
        """Remove what is left of a damaged state: where an index is unreadable, no writer would touch the folder."""
        for name in os.listdir(self.path):
            if name in (SINGLE_FILE, INDEX_FILE) or _OWN_SHARD.match(name):
                os.unlink(self.path / name)


def _recorded(metadata: Mapping[str, Any]) -> tuple[str | None, int | None, str | None]:
    """Digest, version and chain, None for each that is absent or nonsense."""
    digest, chain = metadata.get(DIGEST_KEY), metadata.get(CHAIN_KEY)
    try:
        version = int(metadata[VERSION_KEY])
    except (KeyError, TypeError, ValueError):
        version = None
    return (
        digest if isinstance(digest, str) and _HEX32.match(digest) else None,
        version if version is not None and 0 <= version < 1 << 53 else None,
        chain if isinstance(chain, str) and _HEX32.match(chain) else None,
    )


def _check_fits(path: Path, checkpoint: Checkpoint, into: Mapping[str, Tensor]) -> None:
    if checkpoint.tensors.keys() != into.keys():
        lone = min(checkpoint.tensors.keys() ^ into.keys())
        which = "the weights lack" if lone in checkpoint.tensors else "the folder lacks"
        raise BaseMismatchError(f"{path}: {lone!r:.200} is a tensor that {which}; give each model a folder of its own")
    for name, info in checkpoint.tensors.items():
        weight = into[name]
        if (info.dtype, tuple(info.shape)) != (weight.dtype, tuple(weight.shape)):
            raise BaseMismatchError(
                f"{path}: {name!r:.200} is {checks.short(info.dtype)} {list(info.shape)} in the folder and "
                f"{checks.short(weight.dtype)} {list(weight.shape)} in the weights; give each model a folder of its own"
            )
        checks.writable(f"state_dir: {name!r:.200}", "weight", weight)


def _read(checkpoint: Checkpoint, info: TensorInfo, into: Tensor | None) -> Tensor:
    out = torch.empty(info.shape, dtype=info.dtype, device="cpu") if into is None else into.detach()
    if out.device.type == "cpu" and out.is_contiguous():
        checkpoint.read_into(info.name, 0, out)
    elif out.is_contiguous():
        flat = out.view(-1)
        for start in range(0, info.numel, _SLICE):
            stop = min(start + _SLICE, info.numel)
            flat[start:stop].copy_(checkpoint.read(info.name, start, stop))
    else:
        out.copy_(checkpoint.read(info.name).view(info.shape))
    return out


def _slices(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A tensor's elements in row-major order, as (first position, flat CPU tensor)."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        yield start, flat[start : start + _SLICE].resolve_conj().resolve_neg().cpu().contiguous()
