"""What a trainer has to send: its weights, the version that receivers have, and what changed in between.

``Source`` knows nothing of stores or networks. Whoever sends takes ``change()``, and says ``commit(...)`` once
receivers can have it; what was never committed stays and goes with the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pulse_kernels import checks, ops
from pulse_kernels.errors import NonFiniteError
from pulse_kernels.patch import Patch
from pulse_kernels.state import Params, StateDigest, named_tensors

_SLICE = 1 << 24  # elements looked at together for non-finite values


@dataclass(frozen=True)
class Change:
    """patch: from the receivers' version to the weights as they are, None where that version is not known for sure.

    upto: what ``commit`` takes. note: why there is no patch.
    """

    patch: Patch | None
    upto: int
    note: str = ""
    folded: int = 1


class Source:
    """The trainer's side of a chain of versions.

    params: the weights, an nn.Module, a dict or (name, tensor) pairs. masters: FP32 masters of some or all of them
    under the same names; these weights are cast from them in the pass that finds the changes, and no copy of them is
    kept. Weights without a master (buffers, frozen or FP32 parameters) are compared with a copy at their own width, on
    their device.

    Raises ValueError (names, shapes) and TypeError (dtypes) where masters and params do not fit.
    """

    def __init__(
        self,
        params: Params,
        masters: Params | None = None,
        *,
        profile: str | None = "balanced",
        on_nonfinite: str = "error",
    ) -> None:
        if on_nonfinite not in ("error", "allow"):
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}, expected 'error' or 'allow'")
        self._params = _kept(params, "params")
        self._masters = None if masters is None else _kept(masters, "masters")
        self._profile = profile
        self._finite = on_nonfinite == "error"
        named = self.weights()
        if not named:
            raise ValueError("params has no tensors; there is nothing to send")
        self._kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}
        self._gated = [] if self._masters is None else self._check_masters(named)
        self._compared = [name for name in named if name not in set(self._gated)]
        self._snapshot: dict[str, Tensor] | None = None  # of the compared ones, as receivers have them
        self._pending: list[Patch] = []  # gated, not committed; the weights have them
        self._found: Patch | None = None  # what ``cast`` found of the compared ones, for the ``change`` after it
        self._digests: dict[str, StateDigest] = {}  # of the weights as gated last, and of the snapshot
        self._places: dict[str, tuple[int, int]] = {}
        self._sure = False
        self._why = "nothing was sent before"

    # ---- figures --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, as they are now."""
        return {name: tensor.detach() for name, tensor in named_tensors(self._params).items()}

    @property
    def names(self) -> set[str]:
        """The names of the weights."""
        return set(self._kinds)

    @property
    def numel(self) -> int:
        return sum(_numel(shape) for _, shape in self._kinds.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(_numel(shape) * dtype.itemsize for dtype, shape in self._kinds.values())

    # ---- what changed ---------------------------------------------------------------------------------------------

    def resume(self, digest: str) -> bool:
        """Whether the weights have this digest, that of the version receivers have; the next change then is a patch."""
        digests = StateDigest.of_each(self.weights())
        if StateDigest.sum(digests.values()).hexdigest() != digest:
            self.distrust("the weights are not those of the newest version")
            return False
        self._settle(digests)
        return True

    def distrust(self, why: str) -> None:
        """The version that receivers have is not known any more: the next change is the whole state."""
        self._sure, self._why = False, why
        self._pending.clear()
        self._found = None

    def cast(self, version: int | None = None) -> None:
        """Make the weights their masters, cast, and keep what that changed; nothing without masters.

        Raises NonFiniteError, the weights being as they were before the call.
        """
        if not self._gated:
            return
        self._found = None
        named = self._checked()
        gated = {name: named[name] for name in self._gated}
        if self._sure and not self._untouched(gated):
            self.distrust("the weights were changed by others than the publisher")
        if not self._sure:
            self._cast_whole(named)
            return
        found = self._diff(named, version) if self._compared else None  # first: it may refuse
        self._pending.append(self._gate(gated, version))
        if found is not None and not checks.share_memory(list(named.values())):  # else the cast may have changed it
            self._found = found

    def change(self, version: int | None = None, *, cast: bool = True) -> Change:
        """What turned the version receivers have into the weights as they are; with masters these are cast first,
        unless ``cast`` is False because they were.

        Raises NonFiniteError, the weights being as they were before the call.
        """
        if self._gated and (cast or (self._sure and not self._pending)):
            self.cast(version)
        if not self._sure:
            if not self._gated and self._finite:
                for name, tensor in self._checked().items():
                    _check_finite(name, tensor)
            return Change(None, 0, self._why)
        found, self._found = self._found, None
        if found is None and self._compared:
            found = self._diff(self._checked(), version)
        if not self._gated:
            return Change(found, 1)
        patches = self._pending
        patch = patches[0] if len(patches) == 1 else Patch.fold(patches)
        if found is not None:
            patch = self._joined(patch, found, version)
        return Change(patch, len(patches), folded=len(patches))

    def commit(self, change: Change, digests: Mapping[str, StateDigest] | None = None) -> None:
        """Receivers can have ``change`` now. digests: those of the whole state, where it was sent as such."""
        self._found = None
        if change.patch is None:
            self._settle(dict(digests) if digests is not None else StateDigest.of_each(self.weights()))
            return
        if self._compared:
            assert self._snapshot is not None
            sure, why = self._sure or not self._gated, self._why
            self._sure, self._why = False, "the publisher was interrupted while it recorded what was sent"
            part = self._compared_part(change.patch)
            part.apply_(self._snapshot, verify=False)
            self._digests = _moved(self._digests, part)
            self._sure, self._why = sure, why
        if self._gated:
            del self._pending[: change.upto]

    def tensor_digests(self, change: Change) -> dict[str, StateDigest]:
        """The digest of each tensor of the state that ``change`` leads to."""
        if change.patch is None:
            return StateDigest.of_each(self.weights())
        return _moved(self._digests, self._compared_part(change.patch))

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _checked(self) -> dict[str, Tensor]:
        named = self.weights()
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}
        if kinds != self._kinds:
            odd = min(name for name in kinds.keys() | self._kinds.keys() if kinds.get(name) != self._kinds.get(name))
            raise ValueError(
                f"{odd!r} is {_kind(kinds.get(odd))} now and was {_kind(self._kinds.get(odd))} when publishing began; "
                "a chain keeps its tensors: begin another one for another model"
            )
        return named

    def _masters_now(self) -> dict[str, Tensor]:
        assert self._masters is not None
        masters = {name: tensor.detach() for name, tensor in named_tensors(self._masters, "masters").items()}
        if odd := masters.keys() ^ set(self._gated):
            which = "new" if min(odd) in masters else "gone"
            raise ValueError(
                f"masters: {min(odd)!r:.200} is {which} since publishing began; a publisher keeps its masters: make "
                "a new one where they change"
            )
        return {name: masters[name] for name in self._gated}

    def _check_masters(self, named: Mapping[str, Tensor]) -> list[str]:
        """The names of ``named`` that have a master, which fits."""
        assert self._masters is not None
        masters = named_tensors(self._masters, "masters")
        if lone := masters.keys() - named.keys():
            raise ValueError(
                f"masters: {min(lone)!r:.200} has a master and no weight; masters go by their weights' names in "
                "params, of which some or all may have one"
            )
        gated = [name for name in named if name in masters]
        for name in gated:
            checks.gate(f"masters: {name!r:.200}", masters[name].detach(), named[name])
        return gated

    def _untouched(self, named: Mapping[str, Tensor]) -> bool:
        """Whether nobody else wrote the gated weights ``named``. PyTorch counts most writes; where it counted one, the
        digest tells."""
        if _places(named) == self._places:
            return True
        if any(digest != self._digests[name] for name, digest in StateDigest.of_each(named).items()):
            return False
        self._places = _places(named)
        return True

    def _gate(self, named: dict[str, Tensor], version: int | None) -> Patch:
        masters = self._masters_now()
        base = self._digest_of(named)
        self._sure = False  # until it is done: there is no undo log, the masters make the weights right anyway
        self._why = "the publisher was interrupted while it cast the weights"
        patch = Patch.gate(masters, named, version=version, base_digest=base, profile=self._profile, undo=False)
        found = _nonfinite_change(patch) if self._finite else ""
        if found:
            for name, item in patch.tensors.items():
                assert item.old_values is not None
                ops.apply_patch_(named[name], item.indices, item.old_values, check=False)
        else:
            self._digests = _moved(self._digests, patch)
        self._places = _places(named)
        self._sure = True
        if found:
            raise NonFiniteError(found)
        return patch

    def _diff(self, named: dict[str, Tensor], version: int | None) -> Patch:
        """What the compared ones of ``named`` have become since receivers got them."""
        assert self._snapshot is not None
        now = {name: named[name] for name in self._compared}
        patch = Patch.diff(self._snapshot, now, version=version, base_digest=self._digest_of(now))
        if self._finite and (found := _nonfinite_change(patch)):
            raise NonFiniteError(found)
        return patch

    def _digest_of(self, names: Iterable[str]) -> str:
        return StateDigest.sum(self._digests[name] for name in names).hexdigest()

    def _joined(self, gated: Patch, compared: Patch, version: int | None) -> Patch:
        """Changes of both kinds of weights as one patch; each has the digest of its own kind."""
        tensors = {**gated.tensors, **compared.tensors}
        patch = Patch(
            version=version,
            tensors={name: tensors[name] for name in self._kinds if name in tensors},
            base_digest=_sum(gated.base_digest, compared.base_digest),
            digest=_sum(gated.digest, compared.digest),
        )
        patch.digest_changes = {**gated.digest_changes, **compared.digest_changes}
        patch.sent = gated.sent
        return patch

    def _compared_part(self, patch: Patch) -> Patch:
        """``patch`` of the compared weights alone, without digests of their state."""
        part = Patch(tensors={name: patch.tensors[name] for name in self._compared if name in patch.tensors})
        part.digest_changes = {name: lanes for name, lanes in patch.digest_changes.items() if name in part.tensors}
        return part

    def _cast_whole(self, named: dict[str, Tensor]) -> None:
        """Cast where it does not matter what that changes."""
        self._pending.clear()
        masters = self._masters_now()
        if self._finite:
            for name, weight in named.items():
                if name in masters:
                    _check_finite(name, masters[name], weight.dtype)
                else:
                    _check_finite(name, weight)
        for name, master in masters.items():
            ops.gate_compact(master, named[name], update=True)

    def _settle(self, digests: dict[str, StateDigest]) -> None:
        """The weights as they are now are what receivers have."""
        self._sure, self._why = False, "the publisher was interrupted while it recorded what was sent"
        named = self.weights()
        if self._snapshot is None:
            self._snapshot = {name: checks.copied(named[name]) for name in self._compared}
        else:
            for name, kept in self._snapshot.items():
                kept.copy_(named[name])
        self._pending.clear()
        self._digests = digests
        self._places = _places({name: named[name] for name in self._gated})
        self._sure = True


def _kept(params: Params, what: str) -> Params:
    """``params``, pairs that can be walked once as a dict."""
    return params if isinstance(params, nn.Module | Mapping) else named_tensors(params, what)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _kind(kind: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if kind is None else f"{checks.short(kind[0])} {list(kind[1])}"


def _places(named: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {
        name: (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for name, tensor in named.items()
    }


def _sum(*digests: str) -> str:
    return StateDigest.sum(map(StateDigest.fromhex, digests)).hexdigest()


def _moved(digests: Mapping[str, StateDigest], patch: Patch) -> dict[str, StateDigest]:
    """``digests`` of each tensor after ``patch``, whose old values are known."""
    after = dict(digests)
    for name, item in patch.tensors.items():
        after[name] = after[name].copy()
        if name in patch.digest_changes:
            after[name].add_lanes(patch.digest_changes[name])
        else:
            assert item.old_values is not None
            after[name].update(name, item, item.indices, item.old_values, item.values)
    return after


def _nonfinite_change(patch: Patch) -> str:
    """What to say of the first non-finite value of a patch, "" where all are finite."""
    for name, item in patch.tensors.items():
        bad = _first_nonfinite(item.values)
        if bad >= 0:
            return _nonfinite_message(name, int(item.indices[bad]), item.values[bad])
    return ""


def _check_finite(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """NonFiniteError where a tensor, cast to ``dtype``, is not finite."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        part = flat[start : start + _SLICE]
        bad = _first_nonfinite(part if dtype is None else part.to(dtype))
        if bad >= 0:
            raise NonFiniteError(_nonfinite_message(name, start + bad, part[bad]))


def _first_nonfinite(values: Tensor) -> int:
    if not (values.is_floating_point() or values.is_complex()):
        return -1
    wide = values if values.dtype.itemsize > 1 else values.float()  # 8-bit floats have few operators
    if checks.all_finite(wide):
        return -1
    return int((~torch.isfinite(wide)).nonzero()[0, 0])


def _nonfinite_message(name: str, position: int, value: Tensor) -> str:
    return (
        f"{name!r:.200} is {value.float().item() if not value.is_complex() else value.item()} at flat position "
        f"{position}; nothing was sent and the weights are as they were. Mend the training step, or allow such values "
        "with on_nonfinite='allow'"
    )
