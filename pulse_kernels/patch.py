"""TensorPatch and Patch: what changed between two states, in memory. Values are always absolute here."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pulse_kernels import checks, ops, patch_fold, transfer
from pulse_kernels.backends import for_device, reference
from pulse_kernels.errors import BaseMismatchError, VerificationError, naming
from pulse_kernels.state import Params, StateDigest, named_tensors, on_host, tensor_key, unsigned


@dataclass(frozen=True, eq=False, repr=False)
class TensorPatch:
    """The changes of one tensor.

    shape, dtype: of the whole tensor. indices: sorted unique flat positions, int32 or int64 [n]. values: the new
    values, [n]. old_values: the values before, [n], where they are known: base-coded profiles then need no base.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: Tensor
    values: Tensor
    old_values: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        op = f"TensorPatch {self.name!r}"
        checks.indices(op, self.indices)
        for label, values in (("values", self.values), ("old_values", self.old_values)):
            if values is not None:
                checks.vector(op, label, values, ("indices", self.indices))
                checks.has_dtype(op, label, values, (self.dtype,))

    def __repr__(self) -> str:
        kind = f"{checks.short(self.dtype)} {list(self.shape)}"
        return f"TensorPatch({self.name!r}, {kind}, {self.num_changed} of {self.numel} changed)"

    @property
    def num_changed(self) -> int:
        return self.indices.numel()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Codec(Protocol):
    """What turns patches into bytes; the codec package installs one (it builds on this module, not the reverse)."""

    def encode(self, patch: Patch, profile: str, base: Mapping[str, Tensor] | None) -> bytes: ...

    def decode(
        self,
        buffer: Any,
        base: Mapping[str, Tensor] | None,
        current_digest: str | None,
        max_decoded_bytes: int | None,
        pending: Patch | None,
    ) -> Patch: ...

    def peek(self, buffer: Any) -> Any: ...

    def save(self, patch: Patch, path: Any, profile: str, base: Mapping[str, Tensor] | None) -> int: ...

    def read_file(self, path: Any) -> bytes: ...

    def send(self, items: Sequence[TensorPatch], profile: str) -> list[Any]: ...


_codec: Codec | None = None


def install_codec(codec: Codec) -> None:
    """Make ``codec`` the one behind ``Patch.to_bytes`` and its kin."""
    global _codec
    _codec = codec


def _installed_codec() -> Codec:
    if _codec is None:
        raise RuntimeError("no codec is installed; import pulse_kernels (or pulse_kernels.codec) first")
    return _codec


@dataclass(eq=False, repr=False)
class Patch:
    """What turns one version of a state into the next.

    tensors: name -> TensorPatch of every tensor that changed. added: whole new tensors, also those whose shape or dtype
    changed. removed: names that are gone. base_digest, digest: ``StateDigest`` of the state before and after, "" where
    unknown. layout: the target checkpoint's files, where the patch was made from one (JSON-able).
    """

    base_version: int | None = None
    version: int | None = None
    tensors: dict[str, TensorPatch] = field(default_factory=dict)
    added: dict[str, Tensor] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    base_digest: str = ""
    digest: str = ""
    layout: dict[str, Any] | None = None
    # By name the lanes, mod 2^64, by which each of ``tensors`` moves the digest (``StateDigest.add_lanes``), for
    # who keeps a digest a tensor. Empty where unknown.
    digest_changes: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)
    # ``digest_of_values()`` where the file is to carry it, for readers who know their base's digest without looking at
    # it: a difference added to a damaged value moves the digest as it would move the right one.
    values_digest: str = field(default="", init=False, compare=False)
    # By name what ``gate`` has sent to the host for the codec, which uses it while it is what ``tensors`` holds.
    sent: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.removed = tuple(self.removed)
        for name, tensor_patch in self.tensors.items():
            if tensor_patch.name != name:
                raise ValueError(f"Patch: tensors[{name!r}] is named {tensor_patch.name!r}; both must be the same")
        for kind, names in (("added", set(self.added)), ("removed", set(self.removed))):
            if both := names & set(self.tensors):
                raise ValueError(f"Patch: {min(both)!r} is both changed and {kind}; a tensor can only be one of them")
        if both := set(self.added) & set(self.removed):
            raise ValueError(f"Patch: {min(both)!r} is both added and removed; list a replaced tensor as added only")

    def __repr__(self) -> str:
        versions = "" if self.version is None else f"version {self.base_version} to {self.version}, "
        resized = f", {len(self.added)} added, {len(self.removed)} removed" * bool(self.added or self.removed)
        digest = f", digest {self.digest[:8]}..." * bool(self.digest)
        changed = f"{self.num_changed} of {self.numel} elements changed, tensors: {len(self.tensors)} changed"
        return f"Patch({versions}{changed}{resized}{digest})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sent": {}}  # belongs to these very tensors, and to this process

    # ---- making one -----------------------------------------------------------------------------------------------

    @classmethod
    def diff(
        cls,
        old: Params,
        new: Params,
        *,
        base_version: int | None = None,
        version: int | None = None,
        base_digest: str | None = None,
    ) -> Patch:
        """The patch that turns ``old`` into ``new``, compared bit by bit; reads both once.

        old, new: nn.Module, dict or (name, tensor) pairs. Tensors with another shape or dtype are replaced as a whole.
        base_digest: the digest the caller knows ``old`` to have (the ``digest`` of the patch before this one); without
        it, it is taken in the same pass, which on a CPU costs about as much as the comparison.
        """
        before, after = named_tensors(old, "old"), named_tensors(new, "new")
        replaced = {name for name in after if name in before and not _same_kind(before[name], after[name])}
        common = [name for name in after if name in before and name not in replaced]
        known = base_digest is not None
        kept = _diff_by_device(common, before, after, digest_before=not known)
        state = StateDigest() if base_digest is None else StateDigest.fromhex(base_digest)
        change, tensors, moved = StateDigest(), {}, {}
        all_lanes = on_host([row[3] for row in kept])
        for name, (index, value, overwritten, _), lanes in zip(common, kept, all_lanes, strict=True):
            like = after[name]
            if not known:
                state.add_presence(name, like)
                state.add_lanes(lanes[:2])
            if index.numel():
                tensors[name] = TensorPatch(name, tuple(like.shape), like.dtype, index, value, overwritten)
                moved[name] = unsigned(lanes[2:])
                change.add_lanes(moved[name])
        gone = StateDigest.of({name: before[name] for name in before if name not in after or name in replaced})
        if not known:
            state.merge(gone)
        base_digest = state.hexdigest()
        state.merge(change)
        state.subtract(gone)
        added = {name: checks.copied(after[name]) for name in after if name not in before or name in replaced}
        removed = tuple(name for name in before if name not in after)
        state.merge(StateDigest.of(added))
        patch = cls(base_version, version, tensors, added, removed, base_digest, state.hexdigest())
        patch.digest_changes = moved
        return patch

    @classmethod
    def gate(
        cls,
        masters: Params,
        weights: Params,
        *,
        update: bool = True,
        base_version: int | None = None,
        version: int | None = None,
        base_digest: str | None = None,
        profile: str | None = "balanced",
        group_bytes: int = 1 << 30,
        undo: bool = True,
    ) -> Patch:
        """The patch that turns ``weights`` into ``masters`` rounded to their dtype: ``gate_compact_many`` of a model,
        whose cast it replaces. The same patch as ``diff(weights before, weights after)``.

        masters: FP32 tensors. weights: BF16 or FP16, the same names and shapes, written unless ``update=False``; both
        nn.Module, dict or (name, tensor) pairs. base_digest: the digest the caller knows ``weights`` to have; without
        it, it is taken by a pass over them. Tensors are gated group by group, about ``group_bytes`` of weights each.

        On CUDA the patch keeps its tensors there. What ``to_bytes(profile)`` needs of a group travels to pinned memory
        while the next is gated, and stays there as long as the patch; ``profile=None`` sends nothing ahead.

        Raises TypeError (dtypes), ValueError (names, shapes, devices, weights that share memory but not their master)
        before anything is written; on any later error, as for want of memory, the weights are as they were.
        ``undo=False`` writes in the pass that compares, which is faster: after such an error some weights are new.
        """
        sources, targets = named_tensors(masters, "masters"), named_tensors(weights, "weights")
        _check_gate(sources, targets, update)
        if group_bytes <= 0:
            raise ValueError(f"Patch.gate: group_bytes is {group_bytes}, expected at least 1")
        if profile is not None:
            _installed_codec().send([], profile)  # ValueError unless there is such a profile
        leaders = _gate_leaders(sources, targets) if update else {name: name for name in targets}
        state = StateDigest.of(targets) if base_digest is None else StateDigest.fromhex(base_digest)
        base_digest = state.hexdigest()
        found: dict[str, TensorPatch] = {}
        sent: dict[str, Any] = {}
        log: list[tuple[list[str], Sequence[list[Tensor]]]] = []
        try:
            for group in _gate_groups(
                [name for name in targets if leaders[name] == name], sources, targets, group_bytes
            ):
                columns = ops.gate_compact_many(
                    [sources[name] for name in group],
                    [targets[name] for name in group],
                    update=update and not undo,
                    return_old=True,
                )
                if update and undo:  # apart from the gate: an interrupt may come before its result is ours
                    log.append((group, columns))
                    ops.apply_patch_many_([targets[name] for name in group], *columns[:2], check=False)
                made = {
                    name: TensorPatch(name, tuple(targets[name].shape), targets[name].dtype, *row)
                    for name, *row in zip(group, *columns, strict=True)
                    if row[0].numel()
                }
                found.update(made)
                if profile is not None:
                    away = {name: item for name, item in made.items() if transfer.is_away(item.values)}
                    sent.update(zip(away, _installed_codec().send(list(away.values()), profile), strict=True))
            tensors = {name: _renamed(found[leader], name) for name, leader in leaders.items() if leader in found}
            moved = _add_changes(state, tensors)
        except BaseException:
            for group, (indices, _, old_values) in log:
                ops.apply_patch_many_([targets[name] for name in group], indices, old_values, check=False)
            raise
        patch = cls(base_version, version, tensors, base_digest=base_digest, digest=state.hexdigest())
        patch.digest_changes, patch.sent = moved, sent
        return patch

    @classmethod
    def fold(cls, patches: Sequence[Patch]) -> Patch:
        """Consecutive patches, in order, as one that does what applying them one by one does: the last writer wins.

        What is known of old values is kept where all patches that change a tensor know theirs; elements that have their
        old bits again are then left out. Layout and target are the last patch's. Memory may be shared with the patches.
        A tensor that is added first and removed later is taken to be new, not a replaced one of the base's: one patch
        cannot tell them apart, and applying the result to the other finds it by the digest.

        Raises BaseMismatchError (versions, digests, shapes or dtypes that do not follow each other), IndexError
        (positions out of order or range), ValueError (no patches, or a tensor that comes and goes where no digest would
        tell).
        """
        patches = list(patches)
        if not patches:
            raise ValueError("Patch.fold: no patches; pass at least one")
        patch_fold.check_chain(patches)
        fates = patch_fold.fates(patches)
        for patch in patches:
            check_order(patch.tensors)
        tensors: dict[str, TensorPatch] = {}
        added: dict[str, Tensor] = {}
        removed: list[str] = []
        for name, fate in fates.items():
            if fate.added is not None:
                added[name] = patch_fold.changed(fate.added, fate.changes)
            elif fate.removed and fate.in_base:
                removed.append(name)
            elif fate.removed:
                if not (patches[0].base_digest and patches[-1].digest):
                    raise ValueError(
                        f"Patch.fold: {name!r} is added and then removed, whether the base has one cannot be told, and "
                        "the patches have no digests that would; apply them one by one"
                    )
            else:
                like = fate.changes[-1]
                folded = patch_fold.fold_changes(fate.changes, math.prod(like.shape))
                if folded[0].numel():
                    tensors[name] = TensorPatch(name, like.shape, like.dtype, *folded)
        first, last = patches[0], patches[-1]
        result = cls(
            *(first.base_version, last.version, tensors, added, tuple(removed)),
            *(first.base_digest, last.digest, last.layout),
        )
        if all(patch.digest_changes.keys() >= patch.tensors.keys() for patch in patches):
            for name in tensors:
                lanes = [patch.digest_changes[name] for patch in patches if name in patch.tensors]
                result.digest_changes[name] = unsigned(map(sum, zip(*lanes, strict=True)))
        return result

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def num_changed(self) -> int:
        """Changed elements, without added tensors."""
        return sum(tensor.num_changed for tensor in self.tensors.values())

    @property
    def numel(self) -> int:
        """Elements of the tensors that changed."""
        return sum(tensor.numel for tensor in self.tensors.values())

    @property
    def density(self) -> float:
        """num_changed / numel, over the tensors that changed; 0.0 where none did."""
        return self.num_changed / self.numel if self.numel else 0.0

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def to_bytes(self, profile: str = "balanced", base: Params | None = None) -> bytes:
        """The patch as a safetensors file (docs/format.md).

        profile: "fast" or "balanced". base: the old tensors, needed where the profile codes values against them and
        the patch does not know ``old_values``; ValueError says so.
        """
        return _installed_codec().encode(self, profile, None if base is None else named_tensors(base, "base"))

    @classmethod
    def from_bytes(
        cls,
        buffer: Any,
        base: Params | None = None,
        *,
        current_digest: str | None = None,
        max_decoded_bytes: int | None = None,
        pending: Patch | None = None,
    ) -> Patch:
        """Read a patch, trusting nothing.

        buffer: bytes-like. base: the old tensors, needed where values are coded against them; they are checked to be
        the patch's base first, by ``current_digest`` where the caller keeps one, else by a pass over them.
        max_decoded_bytes: refuse a patch that would take more memory; by default it follows from the base, or from
        the buffer's size. pending: a patch from ``base`` to the state this one follows, imagined on top of ``base``,
        which is only read: so the next patches are decoded while the weights stay (``Patch.fold`` joins several).
        ``current_digest`` remains that of ``base``. Raises PatchFormatError (no patch, damaged, oversized),
        BaseMismatchError (another base), ValueError (base needed, or a pending patch without a digest), IndexError (a
        pending patch with positions out of order or range).
        """
        named = None if base is None else named_tensors(base, "base")
        return _installed_codec().decode(buffer, named, current_digest, max_decoded_bytes, pending)

    def digest_of_values(self) -> str:
        """The first 128 bits of the BLAKE3 of all new values, tensor after tensor, as 32 hexadecimal digits."""
        from blake3 import blake3

        hasher = blake3(max_threads=blake3.AUTO)
        for item in self.tensors.values():
            values = item.values.resolve_conj().resolve_neg().cpu().contiguous()
            hasher.update(values.view(torch.uint8).numpy().data)
        return hasher.hexdigest()[:32]

    @staticmethod
    def peek(buffer: Any) -> Any:
        """The ``PatchHeader`` of a patch's bytes: versions, digests, profile, shapes, counts; no stream is decoded."""
        return _installed_codec().peek(buffer)

    def save(self, path: str | os.PathLike[str], profile: str = "balanced", base: Params | None = None) -> int:
        """Write ``to_bytes`` to ``path`` under a temporary name, then rename; returns the bytes written."""
        return _installed_codec().save(self, path, profile, None if base is None else named_tensors(base, "base"))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        base: Params | None = None,
        *,
        current_digest: str | None = None,
        max_decoded_bytes: int | None = None,
        pending: Patch | None = None,
    ) -> Patch:
        """``from_bytes`` of a file."""
        buffer = _installed_codec().read_file(path)
        with naming(path):
            return cls.from_bytes(
                buffer, base, current_digest=current_digest, max_decoded_bytes=max_decoded_bytes, pending=pending
            )

    # ---- applying one ---------------------------------------------------------------------------------------------

    def apply_(self, weights: Params, *, current_digest: str | None = None, verify: bool = True) -> str:
        """Turn ``weights``, which must be the patch's base, into the new state in place; returns the new digest.

        The base is checked by ``current_digest`` (the digest the caller knows ``weights`` to have) where given, else
        by a pass over all weights; ``verify=False`` skips that and the digest of the result. The rest takes time in
        proportion to the changes. On any error the weights are as they were: BaseMismatchError (other tensors or
        another digest), IndexError (positions out of order or range), VerificationError (the result is not what the
        patch's digest says), ValueError (tied weights that the patch would set differently).
        """
        return self._write(weights, current_digest, verify, undo=False)[0]

    def exchange_(self, weights: Params, *, current_digest: str | None = None, verify: bool = True) -> Patch:
        """``apply_``, but returns the patch that takes it back: applied to ``weights`` it restores every bit.

        Its versions and digests are this patch's, swapped ("" where ``verify=False`` leaves them unknown), its old
        values this one's values; its tensors lie where the weights do, and may share memory with this patch's. It has
        copies of the tensors that were removed or replaced. Raises what ``apply_`` raises, as well before anything is
        changed.
        """
        back = self._write(weights, current_digest, verify, undo=True)[1]
        assert back is not None
        return back

    def _write(self, weights: Params, current_digest: str | None, verify: bool, undo: bool) -> tuple[str, Patch | None]:
        """(digest of the result, the patch that takes it back if ``undo``)."""
        named = named_tensors(weights, "weights")
        _check_can_resize(self, weights)
        for name in (*self.tensors, *self.removed):
            if name not in named:
                raise BaseMismatchError(f"the patch changes {name!r}, which the weights lack; expected its base")
        for name, tensor_patch in self.tensors.items():
            _check_fits(tensor_patch, named[name])
        check_order(self.tensors)
        state = self._check_base(named, current_digest, verify)
        before = self.base_digest if state is None else state.hexdigest()
        changed = {name: item for name, item in self.tensors.items() if item.num_changed}
        changed = _apart(changed, list(named.values()))
        gone = [*self.removed, *(name for name in self.added if name in named)]
        leaders = _tied_leaders({name: named[name] for name in named if name not in set(gone)}, changed)
        # Before anything is written: what goes may share memory with what changes.
        if state is not None:
            for name in gone:
                state.remove_tensor(name, named[name])
            for name, tensor in self.added.items():
                state.add_tensor(name, tensor)
        departed = {name: checks.copied(named[name]) for name in gone} if undo else {}
        arrivals = self._arrivals(named)
        log: dict[str, _Written] = {}
        try:
            for names in _at_once(named, changed, dict.fromkeys(leaders.values())):
                columns = zip(
                    *((named[name], *_on_device(changed[name], named[name].device)) for name in names), strict=True
                )
                ours, where, new = (list(column) for column in columns)
                replaced = for_device(ours[0].device.type).gather_many(ours, where)
                # Logged before it is written: an interrupt may come before a writing call's result is ours.
                log.update(zip(names, map(_Written, ours, where, replaced, new), strict=True))
                ops.apply_patch_many_(ours, where, new, check=False)
            written = {name: log[leaders[name]] for name in changed}
            result, moved = self.digest, {}
            if state is not None:
                rows = [
                    (tensor_key(name, row.weight.dtype, row.weight.shape), row.indices, row.old_values, row.values)
                    for name, row in written.items()
                ]
                moved = dict(zip(written, state.add_changes(rows), strict=True))
                result = state.hexdigest()
                if self.digest and result != self.digest:
                    raise VerificationError(
                        f"after the patch the weights have digest {result}, expected {self.digest}; they were rolled "
                        "back. The patch or the weights were damaged in memory: load both again"
                    )
            back = None
            if undo:
                back = Patch(
                    *(self.version, self.base_version),
                    {name: row.taken_back(name) for name, row in written.items()},
                    departed,
                    tuple(name for name in self.added if name not in named),
                    *(result, before),
                )
                back.digest_changes = {name: unsigned((-lanes[0], -lanes[1])) for name, lanes in moved.items()}
            if isinstance(weights, MutableMapping):
                for name, tensor in arrivals.items():
                    weights[name] = tensor
                for name in self.removed:
                    del weights[name]
            return result, back
        except BaseException:
            for row in log.values():
                ops.apply_patch_(row.weight, row.indices, row.old_values, check=False)
            if isinstance(weights, MutableMapping):
                _restore_entries(weights, named, (*self.removed, *self.added))
            raise

    def _check_base(self, named: dict[str, Tensor], current_digest: str | None, verify: bool) -> StateDigest | None:
        if current_digest is None and not verify:
            return None
        state = StateDigest.of(named) if current_digest is None else StateDigest.fromhex(current_digest)
        if self.base_digest and state.hexdigest() != self.base_digest:
            raise BaseMismatchError(
                f"the weights have digest {state.hexdigest()}, the patch's base has {self.base_digest}"
                f"{'' if self.base_version is None else f' (version {self.base_version})'}; apply it to its base, or "
                "fetch the patch that follows these weights"
            )
        return state

    def _arrivals(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the added tensors, each where the one it replaces, or all the others, are."""
        return {
            name: checks.copied(tensor).to(named[name].device if name in named else _only_device(named, tensor))
            for name, tensor in self.added.items()
        }


@dataclass(frozen=True, eq=False)
class _Written:
    """An entry of the undo log: what is written to a weight, and what that overwrites; all on its device."""

    weight: Tensor
    indices: Tensor
    old_values: Tensor
    values: Tensor

    def taken_back(self, name: str) -> TensorPatch:
        weight = self.weight
        return TensorPatch(name, tuple(weight.shape), weight.dtype, self.indices, self.old_values, self.values)


def _at_once(
    named: Mapping[str, Tensor], changed: Mapping[str, TensorPatch], names: Iterable[str]
) -> Iterator[list[str]]:
    """Tensors that one launch writes; on the CPU each alone."""
    launches: dict[Any, list[str]] = {}
    for name in names:
        weight = named[name]
        together = weight.device.type != "cpu" and weight.is_contiguous()
        key = (weight.device, weight.dtype, changed[name].indices.dtype)
        launches.setdefault(key if together else name, []).append(name)
    for group in launches.values():
        read = [tensor for name in group for tensor in (changed[name].indices, changed[name].values)]
        if len(group) > 1 and checks.share_memory(
            [*(named[name] for name in group), *read]
        ):  # worked through one by one then
            yield from ([name] for name in group)
        else:
            yield group


def _apart(changed: Mapping[str, TensorPatch], weights: Sequence[Tensor]) -> dict[str, TensorPatch]:
    """The patches, copied where they may lie in a weight: writing one must not change what another becomes."""
    indices = checks.apart(weights, [item.indices for item in changed.values()])
    values = checks.apart(weights, [item.values for item in changed.values()])
    rows = zip(changed.items(), indices, values, strict=True)
    return {
        name: item if where is item.indices and new is item.values else replace(item, indices=where, values=new)
        for (name, item), where, new in rows
    }


def _on_device(item: TensorPatch, device: torch.device) -> tuple[Tensor, Tensor]:
    return item.indices.to(device), item.values.to(device)


def _restore_entries(weights: MutableMapping[str, Tensor], named: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Make ``weights`` hold under ``names`` what ``named`` holds, or nothing."""
    for name in names:
        if name not in named:
            weights.pop(name, None)
        elif weights.get(name) is not named[name]:
            weights[name] = named[name]


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _only_device(named: dict[str, Tensor], tensor: Tensor) -> torch.device:
    devices = {weight.device for weight in named.values()}
    return devices.pop() if len(devices) == 1 else tensor.device


def _diff_by_device(
    names: Sequence[str], before: dict[str, Tensor], after: dict[str, Tensor], *, digest_before: bool
) -> list[tuple[Tensor, ...]]:
    """(indices, values, old values, digest and its change: int64 [4]) of each name; one launch a device."""
    rows: dict[str, tuple[Tensor, ...]] = {}
    for name in names:
        checks.diff(f"diff of {name!r}", after[name], before[name])
    for device in dict.fromkeys(after[name].device for name in names):
        here = [name for name in names if after[name].device == device]
        keys = [tensor_key(name, after[name].dtype, after[name].shape) for name in here]
        columns = for_device(device.type).diff_digest_many(
            [after[name] for name in here],
            [before[name] for name in here],
            keys,
            [checks.index_dtype("diff", after[name].numel(), None) for name in here],
            digest_before,
        )
        rows.update(zip(here, zip(*columns, strict=True), strict=True))
    return [rows[name] for name in names]


def _check_gate(masters: dict[str, Tensor], weights: dict[str, Tensor], update: bool) -> None:
    if masters.keys() != weights.keys():
        lone = min(masters.keys() ^ weights.keys())
        which = "a master and no weight" if lone in masters else "a weight and no master"
        raise ValueError(f"Patch.gate: {lone!r} has {which}; pass the same names in both")
    for name, weight in weights.items():
        checks.gate(f"Patch.gate of {name!r:.200}", masters[name], weight)
        if update:
            checks.writable(f"Patch.gate of {name!r:.200}", "weight", weight)


def _gate_leaders(masters: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, str]:
    """Of each weight the one to gate for it: of tied ones the first. ValueError where a write would change others."""
    leaders = {name: name for name in weights}
    kinds = {(0, name): tensor for name, tensor in weights.items()} | {(1, name): t for name, t in masters.items()}
    labels = {f"{kind} {name}": (kind, name) for kind, name in kinds}
    for group in _spans({label: kinds[key] for label, key in labels.items()}):
        members = [labels[label] for label in group]
        for (kind, name), (other_kind, other) in itertools.combinations(members, 2):
            if (kind and other_kind) or not _share_elements(kinds[kind, name], kinds[other_kind, other]):
                continue
            if kind != other_kind:
                raise ValueError(
                    f"Patch.gate: the weight and the master of {name!r} and {other!r} share memory; keep them apart"
                )
            if not _same_place(weights[name], weights[other]) or not _same_place(masters[name], masters[other]):
                raise ValueError(
                    f"Patch.gate: the weights {name!r} and {other!r} share memory but are different views or have "
                    "different masters; untie them (clone one) or tie the masters as well"
                )
    first: dict[tuple[Any, ...], str] = {}
    for name, weight in weights.items():
        if weight.numel():
            place = (weight.device, weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype)
            leaders[name] = first.setdefault(place, name)
    return leaders


def _gate_groups(
    names: Sequence[str], masters: dict[str, Tensor], weights: dict[str, Tensor], group_bytes: int
) -> Iterator[list[str]]:
    """Names to gate at once, with one launch a pass: what a back end works through tensor by tensor (strided weights,
    address ranges that interleave) is a group of its own."""
    kinds: dict[Any, list[str]] = {}
    for name in names:
        wide = weights[name].numel() > checks.INT32_NUMEL
        kinds.setdefault((weights[name].device, weights[name].dtype, wide), []).append(name)
    for here in kinds.values():
        together = [name for name in here if weights[name].is_contiguous()]
        apart = [name for name in here if not weights[name].is_contiguous()]
        if checks.share_memory([tensor for name in together for tensor in (masters[name], weights[name])]):
            together, apart = [], here
        yield from ([name] for name in apart)
        group: list[str] = []
        size = 0
        for name in together:
            group.append(name)
            size += weights[name].nbytes
            if size >= group_bytes:
                yield group
                group, size = [], 0
        if group:
            yield group


def _renamed(item: TensorPatch, name: str) -> TensorPatch:
    return item if item.name == name else replace(item, name=name)


def _add_changes(state: StateDigest, tensors: Mapping[str, TensorPatch]) -> dict[str, tuple[int, int]]:
    """Count in what the patches change, whose indices are in order and whose old values are known; returns by how much
    each moved the digest."""
    rows = []
    for item in tensors.values():
        assert item.old_values is not None
        rows.append((tensor_key(item.name, item.dtype, item.shape), item.indices, item.old_values, item.values))
    return dict(zip(tensors, state.add_changes(rows), strict=True))


def _check_can_resize(patch: Patch, weights: Params) -> None:
    if (patch.added or patch.removed) and (isinstance(weights, nn.Module) or not isinstance(weights, MutableMapping)):
        names = [*patch.added, *patch.removed]
        raise BaseMismatchError(
            f"the patch adds, replaces or removes {len(names)} tensors ({names[0]!r}, ...), which needs a dict of "
            f"tensors, found {type(weights).__name__}; apply it to a dict and rebuild the model from that"
        )


def _check_fits(tensor_patch: TensorPatch, weight: Tensor) -> None:
    name = tensor_patch.name
    if tuple(weight.shape) != tensor_patch.shape or weight.dtype != tensor_patch.dtype:
        raise BaseMismatchError(
            f"{name!r} is {checks.short(weight.dtype)} {list(weight.shape)}, the patch was made for "
            f"{checks.short(tensor_patch.dtype)} {list(tensor_patch.shape)}; apply it to its base"
        )
    checks.writable(f"patch of {name!r}", "weight", weight)


def check_order(tensors: Mapping[str, TensorPatch]) -> None:
    """IndexError where positions are out of order or range; one call and one synchronisation a device."""
    found: dict[str, int] = {}
    for device in dict.fromkeys(item.indices.device for item in tensors.values()):
        here = [item for item in tensors.values() if item.indices.device == device]
        first_bad = for_device(device.type).first_bad_index_many
        bad = first_bad([item.indices for item in here], [item.numel for item in here])
        found.update(zip((item.name for item in here), bad, strict=True))
    for name, item in tensors.items():
        checks.index_order(f"patch of {name!r}", item.indices, item.numel, found[name])


def _spans(named: dict[str, Tensor]) -> Iterator[list[str]]:
    """Groups of names whose tensors overlap in memory, each group sorted by address."""
    places = sorted((*checks.memory_span(tensor), name) for name, tensor in named.items() if tensor.numel())
    group: list[str] = []
    end = (-1, 0)  # device, address
    for device, start, stop, name in places:
        if group and (device, start) < end and device == end[0]:
            group.append(name)
            end = max(end, (device, stop))
        else:
            if group:
                yield group
            group, end = [name], (device, stop)
    if group:
        yield group


def _tied_leaders(named: dict[str, Tensor], patches: dict[str, TensorPatch]) -> dict[str, str]:
    """Of each name in ``patches`` the one to write for it: of tied tensors (one memory, several names) the first.

    ValueError where tensors share memory and the patch does not set them alike.
    """
    leaders = {}
    for group in _spans(named):
        for name in group:
            if name not in patches:
                continue
            sharing = [other for other in group if other == name or _share_elements(named[name], named[other])]
            for other in sharing:
                _check_tied(name, other, named, patches)
            leaders[name] = sharing[0]
    return leaders


def _check_tied(name: str, other: str, named: dict[str, Tensor], patches: dict[str, TensorPatch]) -> None:
    if name == other:
        return
    if not _same_place(named[name], named[other]):
        raise ValueError(
            f"{name!r} and {other!r} are different views of shared memory, so that the patch of one would change the "
            "other; untie them (clone one)"
        )
    if other not in patches or not _same_changes(patches[name], patches[other]):
        raise ValueError(
            f"{name!r} and {other!r} share memory, but the patch sets them differently; untie them (clone one) or make "
            "the patch from tied weights"
        )


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    )  # fmt: skip


class _Place:
    """A tensor's place in memory in numpy's terms. The memory itself is not touched, so any device will do."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose address ranges overlap have a byte in common; columns of one matrix do not."""
    if _same_place(a, b):
        return True
    try:
        return bool(np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b)), max_work=1 << 20))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _same_changes(a: TensorPatch, b: TensorPatch) -> bool:
    if a.indices.shape != b.indices.shape:
        return False
    same_values = torch.equal(reference.bits(a.values).cpu(), reference.bits(b.values).cpu())
    return same_values and torch.equal(a.indices.cpu().long(), b.indices.cpu().long())
