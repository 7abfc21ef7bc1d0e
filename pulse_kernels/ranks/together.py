"""Steps that the ranks of a group take together: where one fails, all raise, each with the rank and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pulse_kernels.errors import GroupError
from pulse_kernels.ranks.collectives import GATHER_LIMIT, Group, broadcast_bytes, gather_bytes

_MOST = 2000  # characters of an error that others are told


class Together:
    """The ranks of ``group``, None for all; every rank must take the same steps. Rows and answers are JSON-able."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = dist.get_rank(group)

    def gather(self, row: dict[str, Any], failure: Exception | None, what: str) -> list[dict[str, Any]]:
        """Every rank's ``row``, by rank. Where one has a ``failure``, it raises that, and the others GroupError."""
        if failure is not None:
            row = {}
        mine = {"step": what, "row": row, "error": _told(failure)}
        rows = [json.loads(data) for data in gather_bytes(json.dumps(mine).encode(), self.group)]
        for each in rows:
            self._check_step(each, what)
        if failure is not None:
            raise failure
        failures = {rank: each["error"] for rank, each in enumerate(rows) if each["error"]}
        if failures:
            told = "; ".join(f"rank {rank}: {error}" for rank, error in failures.items())
            raise GroupError(
                f"{len(failures)} of {len(rows)} ranks failed {what}; nothing was committed. {told}", failures
            )
        return [each["row"] for each in rows]

    def each(self, act: Callable[[], dict[str, Any]], what: str) -> list[dict[str, Any]]:
        """What ``act`` returns on every rank, by rank. One where it raises raises that, the others GroupError."""
        row: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            row = act()
        except Exception as error:
            failure = error
        return self.gather(row, failure, what)

    def first(self, act: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
        """On every rank what ``act`` returns on rank 0. What it raises there is raised there, GroupError elsewhere."""
        failure: Exception | None = None
        data: bytes | None = None
        if self.rank == 0:
            said: dict[str, Any] = {}
            try:
                said = act()
            except Exception as error:
                failure = error
            data = json.dumps({"step": what, "said": said, "error": _told(failure)}).encode()
        answer = json.loads(bytes(broadcast_bytes(data, 0, self.group, GATHER_LIMIT)))
        self._check_step(answer, what)
        if failure is not None:
            raise failure
        if answer["error"]:
            raise GroupError(f"rank 0 failed {what}: {answer['error']}", {0: answer["error"]})
        said = answer["said"]
        return said

    def _check_step(self, row: Any, what: str) -> None:
        found = row.get("step") if isinstance(row, dict) else row
        if found != what:
            raise GroupError(
                f"a rank takes the step {found!r:.100} where this one takes {what!r}: the ranks are out of step, as "
                "after an interrupt on one. Make a new process group, and anew what used this one"
            )


def _told(failure: Exception | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}"[:_MOST]
