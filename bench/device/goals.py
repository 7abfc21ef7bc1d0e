"""What the kernels are to reach on an H200, each goal computed from the rows of one run; shown, never asserted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.device.cases import COMPILED, EAGER
from bench.device.data import QWEN_7B_PARAMETERS

Rows = dict[str, dict[str, Any]]
GATE, MODEL = "gate/1e9/1%/update", "model/1%/update"


@dataclass(frozen=True)
class Goal:
    """figure: the measured value, None where a row or contender of it is missing. Exactly one bound is set."""

    what: str
    figure: Callable[[Rows], float | None]
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def judged(self, rows: Rows) -> dict[str, Any]:
        value = self.figure(rows)
        bound = f"≥ {self.at_least:g}" if self.at_most is None else f"≤ {self.at_most:g}"
        met = None
        if value is not None:
            low, high = self.at_least, self.at_most
            met = (low is None or value >= low) and (high is None or value <= high)
        return {"what": self.what, "bound": f"{bound}{self.unit}", "value": value, "unit": self.unit, "met": met}


def seconds(rows: Rows, key: str, contender: str | None = None) -> float | None:
    """A contender's median, ours unless named."""
    row = rows.get(key, {})
    found = row.get("contenders", {}).get(contender or row.get("ours"), {})
    value: float | None = found.get("seconds")
    return value


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def copy_rate(rows: Rows) -> float | None:
    """Bytes a second of the device's own copy, read and written ones."""
    return ratio(rows.get("copy", {}).get("num_bytes"), seconds(rows, "copy"))


def share_of_copy(rows: Rows, key: str) -> float | None:
    rate = ratio(rows.get(key, {}).get("num_bytes"), seconds(rows, key))
    return ratio(rate, copy_rate(rows))


def _of_whole_model(milliseconds: float | None, rows: Rows, key: str) -> float | None:
    """Only where the whole model was measured."""
    whole = rows.get(key, {}).get("facts", {}).get("numel") == QWEN_7B_PARAMETERS
    return milliseconds if whole else None


def _ms(rows: Rows, key: str) -> float | None:
    value = seconds(rows, key)
    return _of_whole_model(None if value is None else 1e3 * value, rows, key)


def _to_host(rows: Rows) -> float | None:
    return ratio(seconds(rows, "host/model"), seconds(rows, "host/model", "gate alone"))


def _times(contender: str) -> Callable[[Rows], float | None]:
    return lambda rows: ratio(seconds(rows, GATE, contender), seconds(rows, GATE))


GOALS = (
    Goal("gate, 1e9, 1%: share of copy bandwidth", lambda rows: share_of_copy(rows, GATE), at_least=0.85),
    Goal("gate of 7.6e9 parameters, 1%", lambda rows: _ms(rows, MODEL), " ms", at_most=13),
    Goal(
        "339 tensors: of one flat tensor",
        lambda rows: ratio(seconds(rows, MODEL), seconds(rows, MODEL, "one flat tensor")),
        "x",
        at_most=1.05,
    ),
    Goal("apply of 76 M changes", lambda rows: _ms(rows, "apply/model"), " ms", at_most=2),
    Goal("masters to packed host bytes: of the gate alone", _to_host, "x", at_most=1.5),
    Goal("gate, 1e9, 1%: eager takes", _times(EAGER), "x", at_least=2),
    Goal("gate, 1e9, 1%: torch.compile takes", _times(COMPILED), "x", at_least=1.3),
)
