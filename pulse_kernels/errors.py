"""The errors this package raises, beside Python's own TypeError, ValueError and IndexError for bad arguments.

Every message says what was found, what was expected and what to do. Whoever raises one of these has left every
tensor and file as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class PulseError(Exception):
    """Base of every error that is this package's own."""


class PatchFormatError(PulseError, ValueError):
    """Bytes that are no patch, or a damaged one; names the tensor and the field. ``row``: which of a list of them."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


class BaseMismatchError(PulseError, ValueError):
    """A patch was offered to weights that are not its base; names both digests or the tensor that differs."""


class VerificationError(PulseError):
    """Weights are not what the patch's digest says they must be; they were rolled back."""


class CheckpointError(PulseError):
    """A checkpoint file or folder that cannot be read or written as asked."""


class StoreError(PulseError):
    """An object store that cannot be reached, or refuses; nothing was committed."""


class ConflictError(PulseError):
    """Another publisher committed this version; this one must stop."""


class ChainError(PulseError):
    """A chain of versions in a store that is damaged, is another chain, or went back."""


class TrustError(ChainError):
    """A manifest without a signature of a trusted key."""


class GroupError(PulseError):
    """A rank of a process group failed, or the ranks disagree; names the rank and the reason. All kept what they had.

    failures: reason by rank.
    """

    def __init__(self, message: str, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = {} if failures is None else failures


class NonFiniteError(PulseError, ValueError):
    """Weights to publish that are infinite or NaN; names the tensor and a position."""


class BackEndError(PulseError, RuntimeError):
    """PULSE_BACKEND asks for what does not exist, or for what is absent here; tells why."""


@contextmanager
def naming(patch: str | os.PathLike[str]) -> Iterator[None]:
    """A PatchFormatError from inside also says which file it is about and what to do."""
    try:
        yield
    except PatchFormatError as error:
        raise PatchFormatError(f"{os.fspath(patch)}: {error}. Fetch the patch again, or make a new one") from error
