"""Named tensors and the digest of their state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from pulse_kernels import checks, ops
from pulse_kernels.backends import for_device
from pulse_kernels.dtypes import dtype_name

Params: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"

_MASK64 = (1 << 64) - 1


class Kind(Protocol):
    """What has a tensor's dtype and shape: a tensor, or a description of one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


def named_tensors(params: Params, what: str = "params") -> dict[str, Tensor]:
    """``params`` as name -> tensor: an nn.Module's state_dict (the tensors themselves), a mapping, or pairs.

    what: the argument's name, for messages. TypeError for anything else, which shows types and no contents.
    """
    if isinstance(params, nn.Module):
        named = params.state_dict(keep_vars=True)
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{what} is {_article(params)}, expected {_EXPECTED}")
    pairs = list(params.items()) if isinstance(params, Mapping) else list(params)
    for k, pair in enumerate(pairs):
        if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor):
            continue
        if isinstance(params, Mapping):
            name, value = pair
            place = f"{what}[{name!r:.200}]" if isinstance(name, str) else f"a name in {what}"
            wrong, kind = (value, "a tensor") if isinstance(name, str) else (name, "a str")
            raise TypeError(f"{place} is {_article(wrong)}, expected {kind}")
        found = _article(pair)
        if isinstance(pair, tuple):
            found = f"a tuple of ({', '.join(type(each).__name__ for each in pair[:4])}{', ...' * (len(pair) > 4)})"
        raise TypeError(f"{what}[{k}] is {found}, which has no name; expected {_EXPECTED}")
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError(f"{what}: {len(pairs) - len(named)} names occur twice; names must be unique")
    return named


_EXPECTED = "an nn.Module, a dict of tensors or (name, tensor) pairs, as model.named_parameters() gives them"


def _article(found: object) -> str:
    name = type(found).__name__
    return "None" if found is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def tensor_key(name: str, dtype: torch.dtype, shape: Iterable[int]) -> int:
    """The digest key of a tensor: 64 bits of BLAKE2b over its name, dtype and shape, as a signed integer."""
    text = f"{name}\0{dtype_name(dtype)}\0{','.join(map(str, shape))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _mix64(z: int) -> int:
    """SplitMix64's finaliser of one Python integer; ``reference.mix64`` is that of a tensor."""
    z &= _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31


def on_host(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Tensors of int64, all of one length, as lists; one synchronisation a device."""
    results: list[list[int]] = [[]] * len(tensors)
    for rows in checks.rows_by_device(tensors).values():
        for k, numbers in zip(rows, torch.stack([tensors[k] for k in rows]).tolist(), strict=True):
            results[k] = numbers
    return results


def unsigned(lanes: Iterable[int]) -> tuple[int, int]:
    """Two lanes, or what they moved by, mod 2^64."""
    first, second = lanes
    return first & _MASK64, second & _MASK64


def _presence(key: int) -> tuple[int, int]:
    """What a tensor adds to both lanes by being there, so that one of zeros counts as well."""
    return _mix64(key), _mix64(~key)


class StateDigest:
    """The 128-bit digest of a whole state: the sum of its tensors' digests, each under its own key.

    It is kept current in O(changed) with ``update``. Not cryptographic: it finds damage and mix-ups, not attackers.
    """

    def __init__(self, lanes: tuple[int, int] = (0, 0)) -> None:
        self._lanes = lanes

    @classmethod
    def of(cls, params: Params) -> StateDigest:
        """The digest of all tensors of ``params``; one pass over them."""
        return cls.sum(cls.of_each(params).values())

    @classmethod
    def of_each(cls, params: Params) -> dict[str, StateDigest]:
        """What each tensor of ``params`` adds to their digest, by name; one pass over them."""
        named = named_tensors(params)
        keys = [tensor_key(name, tensor.dtype, tensor.shape) for name, tensor in named.items()]
        each = {}
        rows = zip(named, keys, on_host(ops.digest_many(list(named.values()), keys)), strict=True)
        for name, key, lanes in rows:
            each[name] = digest = cls()
            digest._shift(_presence(key))
            digest._shift(lanes)
        return each

    @classmethod
    def sum(cls, digests: Iterable[StateDigest]) -> StateDigest:
        """The digest of all that ``digests`` count."""
        total = cls()
        for digest in digests:
            total.merge(digest)
        return total

    @classmethod
    def fromhex(cls, text: str) -> StateDigest:
        """The digest that ``hexdigest`` printed; ValueError if it is not 32 hexadecimal digits."""
        if not re.fullmatch("[0-9a-fA-F]{32}", text):
            raise ValueError(f"digest {text!r:.50} ({len(text)} characters), expected 32 hexadecimal digits")
        return cls((int(text[:16], 16), int(text[16:], 16)))

    def copy(self) -> StateDigest:
        return StateDigest(self._lanes)

    def hexdigest(self) -> str:
        return "".join(f"{lane:016x}" for lane in self._lanes)

    def _shift(self, lanes: Iterable[int], sign: int = 1) -> None:
        first, second = lanes
        self._lanes = unsigned((self._lanes[0] + sign * first, self._lanes[1] + sign * second))

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Count a tensor in."""
        self.add_presence(name, tensor)
        self.add_slice(name, tensor, 0, tensor)

    def remove_tensor(self, name: str, tensor: Tensor) -> None:
        """Count a tensor out that was in with these very values."""
        key = tensor_key(name, tensor.dtype, tensor.shape)
        self._shift(_presence(key), -1)
        self._shift(ops.digest(tensor, key).tolist(), -1)

    def add_presence(self, name: str, like: Kind) -> None:
        """Count in that a tensor is there; its values follow with ``add_slice``."""
        self._shift(_presence(tensor_key(name, like.dtype, like.shape)))

    def add_lanes(self, lanes: Iterable[int]) -> None:
        """Count in what ``digest`` gave for a tensor under its ``tensor_key``."""
        self._shift(lanes)

    def add_slice(self, name: str, like: Kind, start: int, flat: Tensor) -> None:
        """Count in the values of a tensor from flat position ``start`` on."""
        self._shift(ops.digest(flat, tensor_key(name, like.dtype, like.shape), start).tolist())

    def merge(self, other: StateDigest) -> None:
        """Count in what ``other`` counts."""
        self._shift(other._lanes)

    def subtract(self, other: StateDigest) -> None:
        """Count out what ``other`` counts."""
        self._shift(other._lanes, -1)

    def update(self, name: str, like: Kind, indices: Tensor, old: Tensor, new: Tensor) -> None:
        """``old`` became ``new`` at ``indices`` of the tensor ``name``, whose shape and dtype ``like`` has."""
        zero = torch.zeros(2, dtype=torch.int64, device=indices.device)
        key = tensor_key(name, like.dtype, like.shape)
        self._shift(ops.digest_update(zero, indices, old, new, key).tolist())

    def add_changes(self, rows: Sequence[tuple[int, Tensor, Tensor, Tensor]]) -> list[tuple[int, int]]:
        """``update`` of many tensors, each as (tensor_key, indices in order, old, new): one call and one
        synchronisation a device. Returns the lanes, mod 2^64, by which each row moved the digest."""
        moved: list[tuple[int, int]] = [(0, 0)] * len(rows)
        for device, here in checks.rows_by_device(indices for _, indices, _, _ in rows).items():
            keys, *columns = ([rows[k][column] for k in here] for column in range(4))
            zero = torch.zeros(2, dtype=torch.int64, device=device)
            update = for_device(device.type).digest_update_many
            for k, lanes in zip(here, on_host(update([zero] * len(here), *columns, keys)), strict=True):
                moved[k] = unsigned(lanes)
                self._shift(lanes)
        return moved

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateDigest) and self._lanes == other._lanes

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"StateDigest({self.hexdigest()})"
