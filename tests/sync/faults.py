"""A store's back end in which what is planned goes wrong, at the call it is planned for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulse_kernels.sync.backend import Backend, Entry


class Outage(Exception):
    """What a store that cannot be reached raises; tried again."""


@dataclass
class Fault:
    """What goes wrong in one call.

    before, after: raised ahead of the call, or once it has taken effect, so that its answer is lost. change: turns what
    a read returns into something else. run: called ahead of the call.
    """

    before: BaseException | None = None
    after: BaseException | None = None
    change: Callable[[bytes], bytes] | None = None
    run: Callable[[], None] | None = None


Plan = Callable[[int, str, str], "Fault | None"]  # number of the call, its name, its key


@dataclass
class FaultyBackend:
    """``inner`` with the faults of ``plan``, which is asked at every call. calls: (name, key) of all so far."""

    inner: Backend
    plan: Plan = lambda number, name, key: None
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def _call(self, name: str, key: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            number = len(self.calls)
            self.calls.append((name, key))
        fault = self.plan(number, name, key) or Fault()
        if fault.run is not None:
            fault.run()
        if fault.before is not None:
            raise fault.before
        result = call()
        if fault.after is not None:
            raise fault.after
        return result if fault.change is None else fault.change(bytes(result))

    def put(self, key: str, data: Any, *, create: bool) -> None:
        self._call("create" if create else "put", key, lambda: self.inner.put(key, data, create=create))

    def get(self, key: str, start: int, end: int) -> Any:
        return self._call("get", key, lambda: self.inner.get(key, start, end))

    def size(self, key: str) -> int:
        return int(self._call("size", key, lambda: self.inner.size(key)))

    def list(self, prefix: str, after: str = "") -> Iterable[Entry]:
        return list(self._call("list", prefix, lambda: list(self.inner.list(prefix, after))))

    def delete(self, keys: Sequence[str]) -> None:
        self._call("delete", keys[0] if keys else "", lambda: self.inner.delete(keys))


def at(number: int, fault: Fault) -> Plan:
    """``fault`` at one call."""
    return lambda call, name, key: fault if call == number else None


def from_on(number: int, error: Callable[[], BaseException]) -> Plan:
    """An outage that does not end: every call from ``number`` on raises."""
    return lambda call, name, key: Fault(before=error()) if call >= number else None
