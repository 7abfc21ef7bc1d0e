"""Tensors of a device copied into pinned host memory while the device goes on computing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # of where a range begins, so that views of any dtype fit it
_GAP = 512  # bytes between neighbours in one storage that are cheaper to copy than to leave out
_PIECE = 32 << 20  # bytes from which on a range is cut, so that early tensors need not wait for late ones


def is_away(tensor: Tensor) -> bool:
    """Whether a copy of ``tensor`` to the host can run beside other work."""
    return tensor.is_cuda


class HostCopy:
    """A tensor's copy on the host, there or on its way."""

    def __init__(self, tensor: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._tensor, self._wait = tensor, wait
        self.travelling = 0 if wait is None else tensor.nbytes

    def get(self) -> Tensor:
        """The copy, as soon as it is there; callable from any thread. Later copies are not waited for."""
        if (wait := self._wait) is not None:
            wait()
            self._wait = None
        return self._tensor


class Lane:
    """The stream of a device on which copies to the host run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def follow(self) -> None:
        """Let what comes wait for the work that is queued on the device's current stream now."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, source: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """(pinned copy of ``source``, what waits for it)."""
        target = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # freed early, its memory is not given away before the copy is over
        event = torch.cuda.Event(blocking=True)  # threads that wait leave the cores to those that encode
        event.record(self.stream)
        return target, event.synchronize


@functools.cache
def lane(device: torch.device) -> Lane:
    return Lane(device)


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:  # whose copies keep no byte but 0 and 1
        return tensor.view(torch.uint8).contiguous().view(torch.bool)
    return tensor.resolve_conj().resolve_neg().contiguous()


def to_host(tensors: Sequence[Tensor]) -> list[HostCopy]:
    """Begin to copy ``tensors`` to the host, in order; returns at once.

    CUDA tensors go into pinned memory on a stream of their own, which first waits for the current one: until a copy is
    there, its tensor must not be written in place. Parts of one allocation travel together. CPU tensors are passed
    through as they are, those of other devices are copied here and now.
    """
    copies = [HostCopy(tensor if is_away(tensor) else tensor.cpu()) for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for k, tensor in enumerate(tensors):
        if is_away(tensor):
            places.setdefault(tensor.device, []).append(k)
    for device, rows in places.items():
        sources = {k: _contiguous(tensors[k].detach()) for k in rows}
        lane(device).follow()
        for piece in _pieces(sources):
            target, wait = lane(device).copy(piece.range)
            for k in piece.members:
                source = sources[k]
                at = _first_byte(source) - piece.begin
                flat = target[at : at + source.nbytes].view(source.dtype)
                copies[k] = HostCopy(flat.view(source.shape), wait)
    return copies


@dataclass
class _Piece:
    """Bytes of a storage that are copied at once, and the tensors among them."""

    storage: torch.UntypedStorage
    begin: int
    end: int
    members: list[int]

    @property
    def range(self) -> Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.begin, (self.end - self.begin,), (1,))


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _pieces(sources: dict[int, Tensor]) -> list[_Piece]:
    """What to copy, in the order in which the first of its tensors is wanted."""
    pieces: list[_Piece] = []
    for _, begin, k in sorted((t.untyped_storage().data_ptr(), _first_byte(t), k) for k, t in sources.items()):
        storage, end = sources[k].untyped_storage(), begin + sources[k].nbytes
        last = pieces[-1] if pieces else None
        near = last is not None and last.storage.data_ptr() == storage.data_ptr() and begin <= last.end + _GAP
        if last is not None and near and last.end - last.begin < _PIECE:
            last.end = max(last.end, end)
            last.members.append(k)
        else:
            pieces.append(_Piece(storage, begin // _ALIGNMENT * _ALIGNMENT, end, [k]))
    return sorted(pieces, key=lambda piece: min(piece.members))


__all__ = ["HostCopy", "Lane", "is_away", "lane", "to_host"]
