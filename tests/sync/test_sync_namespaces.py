"""The two hosts that other tests use: the link's rate, that they see nothing else, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest
from namespaces import NotPermittedError, TwoHosts, group, hosts, running, two_hosts, wait_for_port

__all__ = ["hosts"]  # a fixture

SIZE = 12_000_000

DOWNLOAD = """
import socket, sys, time, urllib.request
url = sys.argv[1]
start = time.monotonic()
data = urllib.request.urlopen(url, timeout=60).read()
print(len(data), time.monotonic() - start)
"""


def serve(hosts: TwoHosts, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "http.server", "8000", "--bind", hosts.a.address, "--directory", str(folder)]
    server = hosts.a.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_port(hosts.a, 8000, server)
    return server


def test_the_link_and_the_end(tmp_path: Path) -> None:
    """12 MB take 0.96 s at 100 Mbit/s: a fact about the link, checked so that times measured over it mean something."""
    (tmp_path / "weights").write_bytes(os.urandom(SIZE))
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts(100))
        except NotPermittedError as error:
            pytest.skip(f"no two hosts here: {error}")
        server = serve(pair, tmp_path)
        rates = []
        for _ in range(5):
            size, seconds = pair.b.run(
                [sys.executable, "-c", DOWNLOAD, f"http://{pair.a.address}:8000/weights"]
            ).split()
            assert int(size) == SIZE
            assert float(seconds) >= 0.8
            rates.append(SIZE * 8e-6 / float(seconds))
            if rates[-1] > 50:  # a busy machine may take longer, now and then
                break
        assert 50 < max(rates) < 100.5
        assert server.poll() is None
        # A grandchild is ended as well.
        nested = pair.b.start(["sh", "-c", "sleep 1000 & sleep 1000"])
        while len(group(nested.pid)) < 2:
            assert nested.poll() is None
            time.sleep(0.01)
        holders = [int(host.enter[1].removeprefix("--target=")) for host in (pair.a, pair.b)]
        assert all(running(pid) for pid in holders)
    for process in (server, nested):
        assert process.returncode is not None
        assert not group(process.pid)
    assert not any(running(pid) for pid in holders)


def test_the_hosts_see_each_other_alone(hosts: TwoHosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        code = (
            "import socket, sys\n"
            "for target in (('127.0.0.1', int(sys.argv[1])), ('192.0.2.1', 80)):\n"
            "    try: socket.create_connection(target, timeout=5)\n"
            "    except OSError as error: print(type(error).__name__, error.errno)\n"
            "    else: print('reached', target)\n"
            "print(sorted(name for _, name in socket.if_nameindex()))\n"
        )
        for host in (hosts.a, hosts.b):
            lines = host.run([sys.executable, "-c", code, str(port)]).splitlines()
            assert lines[0].startswith("ConnectionRefusedError")
            assert lines[1] == "OSError 101"  # network unreachable
            assert "lo" in lines[2]
            assert namespaces.DEVICE in lines[2]


def test_a_failing_command_says_why(hosts: TwoHosts) -> None:
    with pytest.raises(AssertionError, match="told you"):
        hosts.b.run([sys.executable, "-c", "import sys; sys.exit('told you')"])
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.b.run(["sleep", "1000"], timeout=0.2)
    assert not group(hosts.b.started[-1].pid)


def test_hosts_go_when_the_tests_are_killed() -> None:
    """Their holders read the end of a pipe that only the killed process held."""
    code = (
        "import sys, namespaces\n"
        "try:\n"
        "    with namespaces.two_hosts() as pair:\n"
        "        print(*[h.enter[1].removeprefix('--target=') for h in (pair.a, pair.b)], flush=True)\n"
        "        sys.stdin.read()\n"
        "except namespaces.NotPermittedError as error:\n"
        "    print('none:', error, flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
        process.wait(timeout=10)
        if line.startswith("none:"):
            pytest.skip(f"no two hosts here: {line}")
        for holder in line.split():
            assert wait_until_gone(int(holder))


def wait_until_gone(pid: int) -> bool:
    limit = time.monotonic() + 10
    while running(pid) is not None and time.monotonic() < limit:
        time.sleep(0.01)
    return running(pid) is None


def test_reasons_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else found(name))
    with pytest.raises(NotPermittedError, match=r"no tc here .*iproute2"), two_hosts():
        pass
    monkeypatch.undo()
    monkeypatch.setattr(namespaces, "new_host", refuse)
    with pytest.raises(NotPermittedError, match="Operation not permitted"), two_hosts():
        pass


def refuse(*_: object, **__: object) -> None:
    raise NotPermittedError("unshare --net: Operation not permitted")
