"""What a rollout has: weights at a known version, and the one short step that takes them to the next or back.

``Receiver`` knows nothing of stores or networks. Whoever receives makes a ``Staged`` beside the weights and hands it to
``apply``; after any failure the weights are, bit for bit, what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pulse_kernels import checks, ops
from pulse_kernels.backends import for_device
from pulse_kernels.errors import BaseMismatchError, PulseError, VerificationError
from pulse_kernels.patch import Patch, TensorPatch
from pulse_kernels.report import Phases
from pulse_kernels.state import Params, StateDigest, named_tensors

_DENSE = 1 / 4  # share of changed elements from which a whole tensor takes less memory than its changes


@dataclass
class Staged:
    """A version ready to apply: ``patch`` from the version held, or, where that was no way, the tensors that differ.

    digest: of the state; tensor_digests: of each of its tensors, {} where unknown. whole: tensors to copy as they are.
    """

    version: int | None
    digest: str
    patch: Patch
    whole: dict[str, Tensor] = field(default_factory=dict)
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    from_anchor: bool = False

    @property
    def num_changed(self) -> int:
        """Elements to write."""
        return self.patch.num_changed + sum(tensor.numel() for tensor in self.whole.values())


@dataclass
class _Undo:
    """What the last apply overwrote, as (weight, positions or None for all, old bits)."""

    version: int | None
    digest: str | None
    rows: list[tuple[Tensor, Tensor | None, Tensor]]
    patch: Patch | None = None
    after: str = ""  # the digest it leads back from


class Receiver:
    """Weights and the version they are at.

    params: nn.Module, dict or (name, tensor) pairs, on any device; written in place. version, digest: of the weights,
    None where not known.
    """

    def __init__(self, params: Params) -> None:
        self._params = params if isinstance(params, nn.Module | Mapping) else named_tensors(params)
        self.version: int | None = None
        self.digest: str | None = None
        self._undo: _Undo | None = None

    def weights(self) -> dict[str, Tensor]:
        """The weights by name."""
        return {name: tensor.detach() for name, tensor in named_tensors(self._params).items()}

    def measure(self) -> str:
        """The digest of the weights, by a pass over them."""
        self.digest = StateDigest.of(self.weights()).hexdigest()
        return self.digest

    def distrust(self) -> None:
        """The weights are no known version any more."""
        self.version = self.digest = None

    # ---- staging --------------------------------------------------------------------------------------------------

    def stage_patch(self, patch: Patch, version: int | None, tensor_digests: Mapping[str, str]) -> Staged:
        """Bring a patch from the version held to the weights' devices. BaseMismatchError where it does not fit them."""
        named = self.weights()
        if patch.added or patch.removed:
            name = min((*patch.added, *patch.removed))
            raise BaseMismatchError(
                f"the patch adds, replaces or removes {name!r:.200}; a chain keeps its tensors, so it was made for "
                "another model"
            )
        for name, item in patch.tensors.items():
            _check_same(name, named, item)
        tensors = {name: _moved(item, named[name].device) for name, item in patch.tensors.items()}
        moved = Patch(patch.base_version, version, tensors, base_digest=patch.base_digest, digest=patch.digest)
        return Staged(version, patch.digest, moved, tensor_digests=tensor_digests)

    def stage_state(
        self, state: Mapping[str, Tensor], version: int | None, digest: str, tensor_digests: Mapping[str, str]
    ) -> Staged:
        """What of a whole ``state`` (CPU tensors) differs from the weights. BaseMismatchError where its tensors do."""
        named = self.weights()
        check_names(named, state)
        tensors: dict[str, TensorPatch] = {}
        whole: dict[str, Tensor] = {}
        for name, new in state.items():
            weight = named[name]
            _check_same(name, named, new)
            at_hand = new.to(weight.device)
            indices, values, old_values = ops.diff_compact(at_hand, weight, return_old=True)
            if indices.numel() > _DENSE * weight.numel():
                whole[name] = at_hand
            elif indices.numel():
                tensors[name] = TensorPatch(name, tuple(weight.shape), weight.dtype, indices, values, old_values)
        patch = Patch(self.version, version, tensors, digest=digest)
        return Staged(version, digest, patch, whole, tensor_digests, from_anchor=True)

    # ---- the short step -------------------------------------------------------------------------------------------

    def apply(self, staged: Staged, phases: Phases | None = None, *, sweep: bool = False) -> None:
        """Turn the weights into ``staged``. sweep: compare the digest of all weights after it, not of what changed.

        Raises VerificationError, naming tensors where it can: the weights were not what they should have been. They
        are as they were before the call then, and their version counts as unknown.
        """
        before = self.version, self.digest
        undo = _Undo(*before, [], after=staged.digest)
        self.distrust()  # until it is done: an interrupt may come between any two steps
        try:
            if staged.from_anchor:
                self._write_state(staged, undo)
            else:
                undo.patch = staged.patch.exchange_(self.weights(), current_digest=before[1])
            if phases is not None:
                phases.end("apply")
            if sweep or staged.from_anchor:
                self.check(staged.version, staged.digest, staged.tensor_digests)
                if phases is not None:
                    phases.end("verify")
        except Exception as error:
            self._take_back(undo)
            if not isinstance(error, VerificationError):
                self.version, self.digest = before
            raise
        except BaseException:
            self._take_back(undo)  # may have come just before the log was ours: the weights are old or new, whole
            raise
        self._undo = undo
        self.version, self.digest = staged.version, staged.digest

    def rollback(self) -> None:
        """Go back to what ``apply`` replaced last. PulseError where there is nothing to go back to, VerificationError
        where something else wrote the weights since, as far as that is known; they stay as they are then."""
        if self._undo is None:
            raise PulseError("there is no version to go back to: nothing was applied since the last rollback")
        undo, known = self._undo, self.digest
        if known is None:  # an apply failed: the weights may be others than those the log belongs to
            known = StateDigest.of(self.weights()).hexdigest()
        if known != undo.after:
            self._undo = None
            raise VerificationError(
                f"the weights have digest {known}, what was applied last has {undo.after}: something else wrote them, "
                "and the version before cannot be made of them. Call poll()"
            )
        self._undo = None
        self.distrust()
        try:
            self._take_back(undo)
        except BaseException:
            self._take_back(undo)  # half of it is no version; what is back already stays so
            self.version, self.digest = undo.version, undo.digest
            raise
        self.version, self.digest = undo.version, undo.digest

    def forget(self) -> None:
        """Give the memory of the undo log free."""
        self._undo = None

    def _write_state(self, staged: Staged, undo: _Undo) -> None:
        named = self.weights()
        for name, new in staged.whole.items():
            undo.rows.append((named[name], None, named[name].clone()))
            named[name].copy_(new)
        for name, item in staged.patch.tensors.items():
            weight = named[name]
            old = for_device(weight.device.type).gather(weight.reshape(-1), item.indices)
            undo.rows.append((weight, item.indices, old))
            ops.apply_patch_(weight, item.indices, item.values, check=False)

    def _take_back(self, undo: _Undo) -> None:
        for weight, indices, old in reversed(undo.rows):
            if indices is None:
                weight.copy_(old)
            else:
                ops.apply_patch_(weight, indices, old, check=False)
        if undo.patch is not None:
            undo.patch.apply_(self.weights(), verify=False)

    def check(self, version: int | None, digest: str, tensor_digests: Mapping[str, str]) -> None:
        """VerificationError, naming tensors, unless a sweep of all weights finds ``digest``."""
        found = StateDigest.of_each(self.weights())
        total = StateDigest.sum(found.values()).hexdigest()
        if total == digest:
            return
        odd = [name for name, each in tensor_digests.items() if name not in found or found[name].hexdigest() != each]
        named = f" ({len(odd)} tensors differ, {odd[0]!r:.200} among them)" if odd else ""
        self.distrust()
        raise VerificationError(
            f"the weights have digest {total}, version {version} has {digest}{named}: something else wrote them. The "
            "next sync begins from an anchor"
        )


def check_names(named: Mapping[str, Tensor], version: Mapping[str, object]) -> None:
    """BaseMismatchError unless weights and version have the same names."""
    if version.keys() != named.keys():
        lone = min(version.keys() ^ named.keys())
        which = "the version has and the weights lack" if lone in version else "the weights have and the version lacks"
        raise BaseMismatchError(f"{lone!r:.200} is a tensor that {which}; give the weights of the same model")


def _check_same(name: str, named: Mapping[str, Tensor], like: Tensor | TensorPatch) -> None:
    if name not in named:
        raise BaseMismatchError(f"{name!r:.200} is not among the weights; give the weights of the same model")
    weight = named[name]
    if weight.dtype != like.dtype or tuple(weight.shape) != tuple(like.shape):
        raise BaseMismatchError(
            f"{name!r:.200} is {checks.short(weight.dtype)} {list(weight.shape)}, the version has "
            f"{checks.short(like.dtype)} {list(like.shape)}; give the weights of the same model"
        )
    checks.writable(f"sync of {name!r:.200}", "weight", weight)


def _moved(item: TensorPatch, device: torch.device) -> TensorPatch:
    if item.indices.device == device:
        return item
    return TensorPatch(item.name, item.shape, item.dtype, item.indices.to(device), item.values.to(device))
