"""Metrics: the text format by a parser of its own, the counts, threads and the server."""

from __future__ import annotations

import http.client
import math
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_kernels.sync import Publisher, Subscriber
from pulse_kernels.sync.metrics import CONTENT_TYPE, Metrics

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
VALUE = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|Inf)|NaN")

Series = tuple[str, tuple[tuple[str, str], ...]]


def parse_labels(text: str, at: int) -> tuple[tuple[tuple[str, str], ...], int]:
    """The labels between braces, character by character; ``at`` is behind the opening one."""
    pairs, escapes = [], {"\\": "\\", "n": "\n", '"': '"'}
    while text[at] != "}":
        name = LABEL.match(text, at)
        assert name, text[at:]
        assert not name[0].startswith("__"), "reserved"
        at = name.end()
        assert text[at : at + 2] == '="', text[at:]
        at, value = at + 2, ""
        while text[at] != '"':
            if text[at] == "\\":
                value, at = value + escapes[text[at + 1]], at + 2
            else:
                value, at = value + text[at], at + 1
        pairs.append((name[0], value))
        at += 1
        if text[at] == ",":
            at += 1
    assert len({name for name, _ in pairs}) == len(pairs), "a label twice"
    return tuple(pairs), at + 1


def parse(text: str) -> dict[Series, float]:
    """Prometheus' text exposition format 0.0.4, strictly: each family once, HELP and TYPE ahead of its samples."""
    if not text:
        return {}
    assert text.endswith("\n"), "the last line must end in a line feed"
    helps: set[str] = set()
    types: dict[str, str] = {}
    samples: dict[Series, float] = {}
    families: list[str] = []
    for line in text[:-1].split("\n"):
        assert line == line.strip(), repr(line)
        if line.startswith("# HELP "):
            name, words = line.removeprefix("# HELP ").split(" ", 1)
            assert name not in helps, f"a second HELP of {name}"
            assert not re.search(r"\\(?![\\n])", words), words
            helps.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert name not in types, f"a second TYPE of {name}"
            assert not any(series[0] == name for series in samples), f"TYPE behind samples of {name}"
            assert kind in ("counter", "gauge", "histogram", "summary", "untyped")
            types[name] = kind
        else:
            matched = NAME.match(line)
            assert matched, line
            name, at = matched[0], matched.end()
            labels: tuple[tuple[str, str], ...] = ()
            if line[at] == "{":
                labels, at = parse_labels(line, at + 1)
            assert line[at] == " ", line
            assert VALUE.fullmatch(line[at + 1 :]), line
            assert (name, labels) not in samples, f"{name} {labels} twice"
            assert name in types, f"{name} has no TYPE"
            assert name in helps, f"{name} has no HELP"
            assert (types[name] == "counter") == name.endswith("_total"), f"{name} is a {types[name]}"
            samples[name, labels] = float(line[at + 1 :])
            if not families or families[-1] != name:
                families.append(name)
    assert len(families) == len(set(families)), "a family's samples must be together"
    assert set(families) == set(types) == helps
    return samples


@dataclass
class FakeReport:
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> Mapping[str, Any]:
        return self.fields


def publish(version: int, **changes: Any) -> FakeReport:
    fields = {
        "report": "publish",
        "version": version,
        "kind": "patch",
        "base_version": version - 1,
        "payload_bytes": 1000,
        "anchor_bytes": 0,
        "dense_bytes": 200_000,
        "ratio": 200.0,
        "density": 0.01,
        "num_changed": 500,
        "seconds": {"gate": 0.25, "encode": 0.5, "upload": 1.0},
    }
    return FakeReport(fields | changes)


def stage(version: int) -> FakeReport:
    seconds = {"fetch": 0.125, "decode": 0.25}
    return FakeReport({"report": "stage", "version": version, "fetched_bytes": 700, "seconds": seconds})


def apply(version: int, report: str = "apply", **more: Any) -> FakeReport:
    seconds = {"apply": 0.0625, "verify": 0.03125}
    return FakeReport({"report": report, "version": version, "num_changed": 500, "seconds": seconds} | more)


def read(metrics: Metrics, name: str, **labels: str) -> float | None:
    return parse(metrics.render()).get((name, tuple(labels.items())))


def test_nothing_yet() -> None:
    assert Metrics().render() == ""


def test_publisher() -> None:
    metrics = Metrics()
    metrics.observe(publish(120, kind="anchor", anchor_bytes=200_000, payload_bytes=200_000))
    metrics.observe(publish(121, committed=False))  # its upload runs; the next one is its report
    metrics.observe(publish(121, committed=True))
    metrics.observe(publish(122, density=0.02, ratio=100.0, seconds={"gate": 0.5}))
    samples = parse(metrics.render())

    def value(name: str, **labels: str) -> float:
        return samples["pulse_sync_" + name, tuple(labels.items())]

    assert value("versions_published_total", kind="anchor") == 1
    assert value("versions_published_total", kind="patch") == 2
    assert value("published_bytes_total", part="patch") == 2000
    assert value("published_bytes_total", part="anchor") == 200_000
    assert value("changed_weights_total", report="publish") == 1500
    assert value("version", state="published") == 122
    assert (value("density"), value("ratio"), value("payload_bytes"), value("dense_bytes")) == (
        0.02,
        100,
        1000,
        200_000,
    )
    assert value("phase_seconds_total", report="publish", phase="gate") == 1.0
    assert value("last_phase_seconds", report="publish", phase="gate") == 0.5
    assert value("last_phase_seconds", report="publish", phase="upload") == 1.0
    assert value("last_report_timestamp_seconds", report="publish") > 1.7e9
    assert ("pulse_sync_lag_versions", ()) not in samples  # a publisher applies nothing


def test_subscriber_and_lag() -> None:
    metrics = Metrics()
    metrics.observe(stage(7))
    assert read(metrics, "pulse_sync_lag_versions") is None
    metrics.observe(apply(7))
    assert read(metrics, "pulse_sync_lag_versions") == 0
    metrics.latest(10)
    assert read(metrics, "pulse_sync_lag_versions") == 3
    metrics.observe(stage(9))
    assert read(metrics, "pulse_sync_lag_versions") == 3
    metrics.observe(apply(9))
    assert read(metrics, "pulse_sync_lag_versions") == 1
    metrics.observe(apply(7, "rollback", latest=12))
    assert read(metrics, "pulse_sync_lag_versions") == 5
    assert read(metrics, "pulse_sync_version", state="staged") == 9
    assert read(metrics, "pulse_sync_version", state="applied") == 7
    assert read(metrics, "pulse_sync_versions_staged_total") == 2
    assert read(metrics, "pulse_sync_versions_applied_total") == 2
    assert read(metrics, "pulse_sync_rollbacks_total") == 1
    assert read(metrics, "pulse_sync_fetched_bytes_total") == 1400
    assert read(metrics, "pulse_sync_changed_weights_total", report="apply") == 1000
    assert read(metrics, "pulse_sync_phase_seconds_total", report="apply", phase="verify") == 0.0625


def test_the_exact_text() -> None:
    metrics = Metrics()
    metrics.observe(FakeReport({"report": "stage", "version": 3, "fetched_bytes": 12_345_678_901}))
    text = re.sub(r'(timestamp_seconds\{report="stage"\}) \S+', r"\1 T", metrics.render())
    assert text == (
        "# HELP pulse_sync_versions_staged_total Versions fetched, checked and decoded.\n"
        "# TYPE pulse_sync_versions_staged_total counter\n"
        "pulse_sync_versions_staged_total 1\n"
        "# HELP pulse_sync_fetched_bytes_total Bytes downloaded.\n"
        "# TYPE pulse_sync_fetched_bytes_total counter\n"
        "pulse_sync_fetched_bytes_total 12345678901\n"
        "# HELP pulse_sync_version Newest version published, staged and applied.\n"
        "# TYPE pulse_sync_version gauge\n"
        'pulse_sync_version{state="staged"} 3\n'
        "# HELP pulse_sync_last_report_timestamp_seconds Unix time of the last report.\n"
        "# TYPE pulse_sync_last_report_timestamp_seconds gauge\n"
        'pulse_sync_last_report_timestamp_seconds{report="stage"} T\n'
    )


@pytest.mark.parametrize("kind", ["stage", 'a "quoted" one', "two\nlines", "C:\\n", "\\", "ünïcode", "}", ",", ""])
def test_labels_are_escaped(kind: str) -> None:
    metrics = Metrics()
    metrics.failure(kind, ValueError("not shown"))
    metrics.failure(kind, ValueError("nor this"))
    metrics.failure(kind, KeyboardInterrupt())
    assert parse(metrics.render()) == {
        ("pulse_sync_failures_total", (("kind", kind), ("error", "ValueError"))): 2,
        ("pulse_sync_failures_total", (("kind", kind), ("error", "KeyboardInterrupt"))): 1,
    }


def test_values_that_are_no_plain_numbers() -> None:
    metrics = Metrics()
    metrics.observe(publish(1, ratio=math.inf, density=math.nan))
    assert read(metrics, "pulse_sync_ratio") == math.inf
    assert math.isnan(read(metrics, "pulse_sync_density") or 0)
    metrics.observe(publish(2, ratio=-math.inf, density=1e-9))
    assert read(metrics, "pulse_sync_ratio") == -math.inf
    assert read(metrics, "pulse_sync_density") == 1e-9
    # A counter takes nothing that it could not recover from.
    metrics.observe(publish(3, payload_bytes=-5, num_changed=math.nan, seconds={"gate": -1.0, "pack": math.nan}))
    assert read(metrics, "pulse_sync_published_bytes_total", part="patch") == 2000
    assert read(metrics, "pulse_sync_changed_weights_total", report="publish") == 1000
    assert read(metrics, "pulse_sync_phase_seconds_total", report="publish", phase="gate") == 0.5
    assert read(metrics, "pulse_sync_phase_seconds_total", report="publish", phase="pack") is None


def test_reports_may_lack_and_have_more() -> None:
    metrics = Metrics()
    metrics.observe(FakeReport({"report": "a later kind", "version": 9}))
    metrics.observe(FakeReport({"version": 9}))
    metrics.observe(FakeReport({"report": ["unhashable"]}))
    assert metrics.render() == ""
    metrics.observe(publish(4, note="dense was cheaper", parts=["x"], ratio=None, density="?", dense_bytes=True))
    metrics.observe(FakeReport({"report": "apply", "seconds": 3}))
    samples = parse(metrics.render())
    assert {name for name, _ in samples}.isdisjoint(
        {"pulse_sync_ratio", "pulse_sync_density", "pulse_sync_dense_bytes"}
    )
    assert samples["pulse_sync_version", (("state", "published"),)] == 4
    assert samples["pulse_sync_versions_applied_total", ()] == 1


@pytest.mark.parametrize("report", [None, {"report": "apply"}, FakeReport, FakeReport([1])], ids=repr)
def test_no_report(report: Any) -> None:
    metrics = Metrics()
    with pytest.raises(TypeError):
        metrics.observe(report)
    assert metrics.render() == ""


def test_threads() -> None:
    metrics, rounds, start = Metrics(), 300, threading.Barrier(7)
    texts: list[str] = []

    def work(k: int) -> None:
        start.wait()
        for j in range(rounds):
            if k == 0:
                texts.append(metrics.render())
            elif k < 4:
                metrics.observe(publish(j))
                metrics.observe(apply(j))
            else:
                metrics.failure("publish", OSError())
                metrics.latest(j)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = parse(metrics.render())
    assert samples["pulse_sync_versions_published_total", (("kind", "patch"),)] == 3 * rounds
    assert samples["pulse_sync_published_bytes_total", (("part", "patch"),)] == 3 * rounds * 1000
    assert samples["pulse_sync_versions_applied_total", ()] == 3 * rounds
    assert samples["pulse_sync_failures_total", (("kind", "publish"), ("error", "OSError"))] == 3 * rounds
    assert samples["pulse_sync_phase_seconds_total", (("report", "publish"), ("phase", "gate"))] == 0.25 * 3 * rounds
    last = 0.0
    for text in texts:  # every text is whole, and counters never fall
        count = parse(text).get(("pulse_sync_versions_applied_total", ()), 0.0)
        assert count >= last
        last = count


def ask(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_server() -> None:
    metrics = Metrics()
    metrics.failure("ünï", OSError())
    with metrics.serve() as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        status, headers, body = ask(server.port, "/metrics")
        assert (status, headers["Content-Type"]) == (200, CONTENT_TYPE)
        assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
        assert int(headers["Content-Length"]) == len(body)
        assert body.decode() == metrics.render() != ""
        assert "Python" not in headers["Server"]
        metrics.observe(publish(5))
        assert (
            parse(ask(server.port, "/metrics?name=x")[2].decode())["pulse_sync_version", (("state", "published"),)] == 5
        )
        for path in ("/", "/metrics/", "/metricsx", "/../etc/passwd"):
            assert ask(server.port, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            status, headers, _ = ask(server.port, "/metrics", method)
            assert (status, headers["Allow"]) == (405, "GET"), method
        assert ask(server.port, "/metrics", "BREW")[0] == 501


def test_close_frees_the_port() -> None:
    metrics = Metrics()
    server = metrics.serve()
    port = server.port
    with pytest.raises(OSError, match=rf"at 127\.0\.0\.1:{port}: .*in use; choose another port, or 0 for"):
        metrics.serve(port=port)
    with pytest.raises(ValueError, match="port is 65536, expected 0"):
        metrics.serve(port=1 << 16)
    idle = socket.create_connection(("127.0.0.1", port))  # says nothing, and must not hold up the end
    try:
        assert ask(port, "/metrics")[0] == 200
        server.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with metrics.serve(port=port) as again:
            assert again.port == port
            assert ask(port, "/metrics")[0] == 200
    finally:
        idle.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pulse-metrics"]


def test_a_broken_client_leaves_the_server_and_standard_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with Metrics().serve() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"\x00\xff garbage\r\n\r\n")
        assert ask(server.port, "/metrics")[0] == 200
    assert capfd.readouterr().err == ""


def test_http_is_loaded_by_serving_alone() -> None:
    code = "import sys, pulse_kernels.sync.metrics as m; m.Metrics(); assert 'http.server' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_reports_of_real_ends(tmp_path: Path) -> None:
    """What the publisher and the subscriber report is what the metrics read."""
    trainer, rollout = Metrics(), Metrics()
    weights = {"w": torch.arange(4096).bfloat16()}
    with (
        Publisher(tmp_path, weights, on_report=trainer.observe) as publisher,
        Subscriber(tmp_path, {"w": torch.zeros(4096).bfloat16()}, on_report=rollout.observe) as subscriber,
    ):
        anchor = publisher.publish()
        subscriber.poll()
        weights["w"][7:10] += 64
        patch = publisher.publish()
        newest = subscriber.latest()
        assert newest is not None
        rollout.latest(newest)
        assert read(rollout, "pulse_sync_lag_versions") == 1
        subscriber.poll()
    assert (anchor.kind, patch.kind) == ("anchor", "patch")
    assert read(trainer, "pulse_sync_versions_published_total", kind="patch") == 1
    assert read(trainer, "pulse_sync_published_bytes_total", part="anchor") == anchor.anchor_bytes
    assert read(trainer, "pulse_sync_published_bytes_total", part="patch") == patch.payload_bytes
    assert read(trainer, "pulse_sync_density") == 3 / 4096
    assert read(trainer, "pulse_sync_ratio") == patch.ratio
    assert read(trainer, "pulse_sync_last_phase_seconds", report="publish", phase="gate") == patch.seconds["gate"]
    assert read(rollout, "pulse_sync_lag_versions") == 0
    assert read(rollout, "pulse_sync_version", state="applied") == patch.version
    assert read(rollout, "pulse_sync_versions_applied_total") == 2
    assert read(rollout, "pulse_sync_fetched_bytes_total") == anchor.anchor_bytes + patch.payload_bytes
    assert (read(rollout, "pulse_sync_phase_seconds_total", report="apply", phase="apply") or 0) > 0
