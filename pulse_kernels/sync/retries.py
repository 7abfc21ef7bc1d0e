"""When to try again: which failures pass, how long to wait, when to give up."""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pulse_kernels.errors import PulseError

T = TypeVar("T")

PERMANENT = (
    PulseError, ValueError, TypeError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError,
    ImportError, BufferError, MemoryError, NotImplementedError, RecursionError, PermissionError, IsADirectoryError,
    NotADirectoryError,
)  # fmt: skip
# By name, since obstore is not imported here.
PERMANENT_OBSTORE = {
    "AlreadyExistsError", "InvalidPathError", "NotFoundError", "NotSupportedError", "PermissionDeniedError",
    "UnauthenticatedError", "UnknownConfigurationKeyError",
}  # fmt: skip
FULL = {errno.ENOSPC, errno.EDQUOT}
PERMANENT_ERRNO = {
    *FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EFBIG,
}  # fmt: skip
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_STATUS = re.compile(r"status code: (4\d\d)")
# Time-out, conflict with another request, locked, too early, too many requests.
TRANSIENT_STATUS = {"408", "409", "423", "425", "429"}


def os_error(error: BaseException) -> int | None:
    """The errno of an error, also of one that obstore has turned into text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    if found:
        return int(found.group(1))
    return errno.ENOSPC if "No space left on device" in str(error) else None


def is_full(error: BaseException) -> bool:
    """No space is left, or the quota is used up."""
    return os_error(error) in FULL


def is_transient(error: BaseException) -> bool:
    """Trying again may help: anything that is not known to be of no use."""
    if isinstance(error, PERMANENT) or not isinstance(error, Exception):
        return False
    if any(kind.__name__ in PERMANENT_OBSTORE and kind.__module__.startswith("obstore") for kind in type(error).mro()):
        return False
    if os_error(error) in PERMANENT_ERRNO:
        return False
    status = _STATUS.search(str(error))
    return status is None or status.group(1) in TRANSIENT_STATUS


class Exhausted(Exception):
    """All attempts failed; never leaves this package."""

    def __init__(self, cause: Exception, attempts: int, seconds: float) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.attempts = attempts
        self.seconds = seconds


@dataclass(frozen=True)
class Retries:
    """Exponential backoff with full jitter.

    attempts: tries in all. deadline_s: no try starts later than this after the first failure, so that the size of an
    object does not count. The k-th wait is uniform in [0, min(max_wait_s, first_wait_s * 2^k)].
    """

    attempts: int = 5
    deadline_s: float = 300.0
    first_wait_s: float = 0.2
    max_wait_s: float = 10.0
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts!r}; it must be an integer of at least 1")
        if not self.deadline_s >= 0:
            raise ValueError(f"deadline_s is {self.deadline_s!r}; it must be a number of seconds, 0 or more")

    def run(self, call: Callable[[], T], stop: Callable[[], bool] = lambda: False) -> T:
        """The result of `call`; errors of no use to retry as they are, Exhausted after the last attempt.

        stop: asked before every further attempt; True gives up.
        """
        jitter = random.SystemRandom()  # children of one process must not wait alike; the user's seed is not touched
        first_failure: float | None = None
        attempt = 0
        while True:
            attempt += 1
            began = self.clock()
            try:
                return call()
            except Exception as error:
                if not is_transient(error):
                    raise
                cause = error
            now = self.clock()
            if first_failure is None:
                first_failure = now
            wait = jitter.uniform(0, min(self.max_wait_s, self.first_wait_s * 2.0 ** min(attempt - 1, 30)))
            if attempt >= self.attempts or now + wait > first_failure + self.deadline_s or stop():
                break
            self.sleep(wait)
        raise Exhausted(cause, attempt, now - first_failure + (now - began if attempt == 1 else 0))
