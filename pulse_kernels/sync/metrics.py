"""Metrics of publishers and subscribers in Prometheus' text format, without its client library.

    metrics = Metrics()
    publisher = Publisher(store, model, on_report=metrics.observe)
    with metrics.serve(port=9400): ...          # GET http://127.0.0.1:9400/metrics

Reports are taken by their ``to_dict()`` alone, whose "report" says which kind it is; what a report lacks leaves its
metric as it was, and what this module does not know is passed over, so reports may grow.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pulse_kernels.sync.metrics_server import MetricsServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Report(Protocol):
    """What ``Metrics.observe`` takes."""

    def to_dict(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class _Family:
    name: str
    type: str  # "counter" or "gauge"
    labels: tuple[str, ...]
    help: str


_FAMILIES = (
    _Family("pulse_sync_versions_published_total", "counter", ("kind",), "Versions committed to the store."),
    _Family("pulse_sync_versions_staged_total", "counter", (), "Versions fetched, checked and decoded."),
    _Family("pulse_sync_versions_applied_total", "counter", (), "Versions that the weights were brought to."),
    _Family("pulse_sync_rollbacks_total", "counter", (), "Returns of the weights to the version before."),
    _Family("pulse_sync_published_bytes_total", "counter", ("part",), "Bytes uploaded, by patches and anchors."),
    _Family("pulse_sync_fetched_bytes_total", "counter", (), "Bytes downloaded."),
    _Family("pulse_sync_changed_weights_total", "counter", ("report",), "Weights whose bits changed."),
    _Family("pulse_sync_phase_seconds_total", "counter", ("report", "phase"), "Seconds spent, by phase."),
    _Family("pulse_sync_failures_total", "counter", ("kind", "error"), "Failed operations, by error class."),
    _Family("pulse_sync_version", "gauge", ("state",), "Newest version published, staged and applied."),
    _Family("pulse_sync_lag_versions", "gauge", (), "Newest version known less the version applied."),
    _Family("pulse_sync_density", "gauge", (), "Share of weights changed in the last version published."),
    _Family("pulse_sync_ratio", "gauge", (), "Dense bytes over payload bytes of the last version published."),
    _Family("pulse_sync_payload_bytes", "gauge", (), "Bytes a follower fetches of the last version published."),
    _Family("pulse_sync_dense_bytes", "gauge", (), "Bytes of the dense weights."),
    _Family("pulse_sync_last_phase_seconds", "gauge", ("report", "phase"), "Seconds of the last report, by phase."),
    _Family("pulse_sync_last_report_timestamp_seconds", "gauge", ("report",), "Unix time of the last report."),
)
_TYPES = {family.name: family.type for family in _FAMILIES}
_REPORTS = ("publish", "stage", "apply", "rollback")

_Samples = dict[tuple[str, tuple[str, ...]], float]


class Metrics:
    """Counts reports and failures of one publisher or subscriber. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: _Samples = {}
        self._newest: float | None = None
        self._applied: float | None = None

    def observe(self, report: Report) -> None:
        """Take in a report of publish, stage, apply or rollback; others are passed over.

        Raises TypeError where the object has no ``to_dict()`` that gives a mapping.
        """
        to_dict = getattr(report, "to_dict", None)
        fields = to_dict() if callable(to_dict) else None
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"report is a {type(report).__name__}, expected an object whose to_dict() gives a mapping; "
                "count errors with failure(kind, error)"
            )
        kind = fields.get("report")
        if kind not in _REPORTS or fields.get("committed") is False:
            return  # the report of an upload that still runs comes again when it is done
        sums, lasts = _samples_of(str(kind), fields)
        lasts["pulse_sync_last_report_timestamp_seconds", (str(kind),)] = time.time()
        version, latest = _number(fields.get("version")), _number(fields.get("latest"))
        with self._lock:
            for sample, value in sums.items():
                self._samples[sample] = self._samples.get(sample, 0) + value
            self._samples.update(lasts)
            if kind in ("apply", "rollback") and version is not None:
                self._applied = version
            self._see(version if kind in ("publish", "stage") else None, latest)

    def latest(self, version: int) -> None:
        """Tell the newest version in the store, which the lag counts from: what a subscriber's look at it found."""
        with self._lock:
            self._see(_number(version))

    def failure(self, kind: str, error: BaseException) -> None:
        """Count a failed operation, such as "publish" or "stage", under the class of its error."""
        sample = "pulse_sync_failures_total", (str(kind), type(error).__name__)
        with self._lock:
            self._samples[sample] = self._samples.get(sample, 0) + 1

    def render(self) -> str:
        """All metrics in Prometheus' text format 0.0.4 (UTF-8, content type ``CONTENT_TYPE``), in a fixed order."""
        with self._lock:
            samples = dict(self._samples)
        lines = []
        for family in _FAMILIES:
            found = sorted((labels, value) for (name, labels), value in samples.items() if name == family.name)
            if not found:
                continue
            lines.append(f"# HELP {family.name} {_escape(family.help)}")
            lines.append(f"# TYPE {family.name} {family.type}")
            for values, value in found:
                pairs = zip(family.labels, values, strict=True)
                labels = ",".join(f'{name}="{_escape(text, quote=True)}"' for name, text in pairs)
                lines.append(f"{family.name}{{{labels}}} {_text(value)}" if labels else f"{family.name} {_text(value)}")
        return "".join(line + "\n" for line in lines)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> MetricsServer:
        """Answer GET /metrics over HTTP from a daemon thread; port 0 takes a free one, see ``MetricsServer.port``.

        There is no encryption and no password: bind to an address that only the monitoring can reach. Raises OSError
        where the address is taken or is not this machine's, which names it.
        """
        from pulse_kernels.sync.metrics_server import MetricsServer  # http.server is for those who serve

        return MetricsServer(self.render, host, port)

    def _see(self, *versions: float | None) -> None:
        """Keep the newest version known and the lag behind it. The lock is held."""
        known = [version for version in (*versions, self._newest, self._applied) if version is not None]
        self._newest = max(known, default=None)
        if self._newest is not None and self._applied is not None:
            self._samples["pulse_sync_lag_versions", ()] = self._newest - self._applied


def _samples_of(report: str, fields: Mapping[str, Any]) -> tuple[_Samples, _Samples]:
    """What a report adds to counters, and what it sets gauges to."""
    sums: _Samples = {}
    lasts: _Samples = {}

    def take(key: str, name: str, *labels: str) -> None:
        value = _number(fields.get(key))
        if value is None:
            return
        if _TYPES[name] == "gauge":
            lasts[name, labels] = value
        elif value >= 0:  # a counter never falls, and NaN would stay
            sums[name, labels] = value

    if report == "publish":
        sums["pulse_sync_versions_published_total", (str(fields.get("kind", "")),)] = 1
        take("version", "pulse_sync_version", "published")
        if fields.get("kind") != "anchor" or fields.get("payload_bytes") != fields.get("anchor_bytes"):
            take("payload_bytes", "pulse_sync_published_bytes_total", "patch")  # else the payload is the anchor
        take("anchor_bytes", "pulse_sync_published_bytes_total", "anchor")
        take("num_changed", "pulse_sync_changed_weights_total", report)
        take("density", "pulse_sync_density")
        take("ratio", "pulse_sync_ratio")
        take("payload_bytes", "pulse_sync_payload_bytes")
        take("dense_bytes", "pulse_sync_dense_bytes")
    elif report == "stage":
        sums["pulse_sync_versions_staged_total", ()] = 1
        take("version", "pulse_sync_version", "staged")
        take("fetched_bytes", "pulse_sync_fetched_bytes_total")
    else:
        name = "pulse_sync_versions_applied_total" if report == "apply" else "pulse_sync_rollbacks_total"
        sums[name, ()] = 1
        take("version", "pulse_sync_version", "applied")
        take("num_changed", "pulse_sync_changed_weights_total", report)

    seconds = fields.get("seconds")
    if isinstance(seconds, Mapping):
        for phase, value in seconds.items():
            spent = _number(value)
            if spent is not None and spent >= 0:
                sums["pulse_sync_phase_seconds_total", (report, str(phase))] = spent
                lasts["pulse_sync_last_phase_seconds", (report, str(phase))] = spent
    return sums, lasts


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _text(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
