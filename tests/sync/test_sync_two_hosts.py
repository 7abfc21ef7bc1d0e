"""Trainer and rollout on two hosts with 100 Mbit/s between them, S3 protocol over HTTP, 25 million weights."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench.hosts.link import link  # noqa: E402
from bench.hosts.namespaces import NotPermitted, two_hosts  # noqa: E402

NUMEL = 25_000_000


@pytest.fixture(autouse=True)
def permitted() -> None:
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    try:
        with two_hosts():
            pass
    except NotPermitted as why:
        pytest.skip(f"network namespaces: {why}")


def test_hosts_reach_each_other_and_nobody_else_and_vanish() -> None:
    with two_hosts() as (first, second):
        first.run("ping", "-c", "1", "-W", "5", second.address) if os.path.exists("/bin/ping") else None
        with pytest.raises(NotPermitted, match=r"(?i)unreachable|no route"):
            first.run("ip", "route", "get", "192.0.2.1")
        pids = first.pid, second.pid
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_patches_over_a_slow_cable(capsys: pytest.CaptureFixture[str]) -> None:
    sparse, pauses, payloads = [], [], []
    with link(NUMEL, 0.01) as cable:
        for _ in range(5):
            cable.step()
            start = time.perf_counter()
            reports = cable.publish_and_apply()
            sparse.append(time.perf_counter() - start)
            published, applied = reports["published"], reports["applied"]
            assert applied["version"] == published["version"]
            assert published["kind"] == "patch"
            ours, theirs = cable.digests()
            assert ours == theirs == published["digest"]
            pauses.append(applied["seconds"]["apply"])
            payloads.append(published["payload_bytes"])
        start = time.perf_counter()
        cable.dense()
        dense = time.perf_counter() - start
    assert dense > 0.9 * 8 * 2 * NUMEL / 100e6  # or the cable is no such cable
    assert max(payloads) < 2 * NUMEL / 100
    total = statistics.median(sparse)
    with capsys.disabled():
        print(
            f"\n100 Mbit/s, {NUMEL:,} weights, 1% changed: publish to applied {1e3 * total:.0f} ms, of it the pause "
            f"{1e3 * statistics.median(pauses):.0f} ms; dense {1e3 * dense:.0f} ms, {dense / total:.0f} times as long"
        )
