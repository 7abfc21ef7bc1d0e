"""Two hosts on one machine: network namespaces joined by a pair of virtual Ethernet devices with a limited rate.

    with two_hosts(rate_mbit=100) as hosts:
        server = hosts.a.start([sys.executable, "server.py"])
        hosts.b.run([sys.executable, "client.py", hosts.a.address])

Each host has a loopback device and one link, 10.77.0.1 and 10.77.0.2, and sees nothing else of any network; files are
shared with the tests. Root of a user namespace is enough, so no privileges are needed where the kernel lets users have
one. A host lives as long as its holder, a ``cat`` whose standard input is a pipe to the tests: should these be killed,
it reads the end of the file and goes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

DEVICE = "pulse0"
ADDRESS_A, ADDRESS_B = "10.77.0.1", "10.77.0.2"
TOOLS = ("unshare", "nsenter", "ip", "tc", "ss", "cat")


class NotPermittedError(Exception):
    """Why there can be no namespaces here."""


@dataclass
class Host:
    """One of two hosts: ``start`` and ``run`` are ``subprocess.Popen`` and ``subprocess.run`` inside it."""

    address: str
    enter: list[str]
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command, in a process group of its own that ends with the hosts. ``pid`` is the command's own."""
        process: subprocess.Popen[Any] = subprocess.Popen([*self.enter, *command], start_new_session=True, **options)
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], *, timeout: float = 120) -> str:
        """Run a command to its end; its standard output. Raises AssertionError with its errors where it fails."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            raise
        assert process.returncode == 0, f"{command} failed in {self.address}: {errors}"
        return str(output)


@dataclass
class TwoHosts:
    """a, b: hosts whose link carries ``rate_mbit`` Mbit/s each way, Ethernet headers counted."""

    a: Host
    b: Host
    rate_mbit: int


def end(process: subprocess.Popen[Any]) -> None:
    """End a command, whatever it started in its process group, and its pipes."""
    for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        if not group(process.pid):
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        limit = time.monotonic() + seconds
        while group(process.pid) and time.monotonic() < limit:
            time.sleep(0.01)
    process.wait(timeout=10)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def running(pid: int) -> int | None:
    """The process group of a process, None where it has ended, also where its parent has not asked for it yet."""
    try:
        state, _, process_group = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(process_group)


def group(number: int) -> list[int]:
    """The running processes of a process group."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if running(int(path.name)) == number]


@contextlib.contextmanager
def two_hosts(rate_mbit: int = 100) -> Iterator[TwoHosts]:
    """Both hosts, ready; what was started in them is ended on leaving. NotPermittedError says why there are none."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotPermittedError(f"no {', '.join(missing)} here (packages util-linux and iproute2)")
    with contextlib.ExitStack() as stack:
        _, enter_a = new_host(stack, [], user=True)
        # The second one is made by the root of the first one's user namespace, which then may join them.
        holder_b, enter_b = new_host(stack, enter_a, user=False)
        hosts = TwoHosts(Host(ADDRESS_A, enter_a), Host(ADDRESS_B, enter_b), rate_mbit)
        tool(
            enter_a, "ip", "link", "add", "name", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(holder_b)
        )
        for host in (hosts.a, hosts.b):
            tool(host.enter, "ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                tool(host.enter, "ip", "link", "set", device, "up")
            limit = ["rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "400ms"]
            tool(host.enter, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        try:
            yield hosts
        finally:
            for process in [*hosts.b.started, *hosts.a.started]:
                end(process)


def new_host(stack: contextlib.ExitStack, enter: list[str], *, user: bool) -> tuple[int, list[str]]:
    """A process that holds a new network namespace (and user namespace), and the command that enters it."""
    flags = ["--user", "--map-root-user", "--net"] if user else ["--net"]
    holder = subprocess.Popen(
        [*enter, "unshare", *flags, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    stack.callback(end_holder, holder)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write(b"ready\n")
        holder.stdin.flush()
        ready = holder.stdout.readline()  # cat answers once unshare has made the namespaces, or the pipe ends
    except BrokenPipeError:
        ready = b""
    if ready != b"ready\n":
        raise NotPermittedError(f"unshare {' '.join(flags)}: {all_of(holder.stderr)}")
    # The user namespace of both is the first one's; its root keeps what it may do in it.
    entering = ["nsenter", f"--target={holder.pid}", "--user", "--preserve-credentials", "--net", "--"]
    return holder.pid, entering


def end_holder(holder: subprocess.Popen[Any]) -> None:
    assert holder.stdin is not None
    with contextlib.suppress(OSError):
        holder.stdin.close()
    try:
        holder.wait(timeout=5)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait(timeout=5)
    for pipe in (holder.stdout, holder.stderr):
        if pipe is not None:
            pipe.close()


def tool(enter: list[str], *command: str) -> None:
    """Set something up in a host; what the kernel lacks or refuses is a reason to skip."""
    done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def all_of(pipe: IO[bytes] | None) -> str:
    return "" if pipe is None else pipe.read().decode(errors="replace").strip()


def wait_for_port(host: Host, port: int, server: subprocess.Popen[Any], timeout: float = 30) -> None:
    """Until something listens at ``host.address:port``; AssertionError where ``server`` ends before."""
    wanted = f"{host.address}:{port} "
    limit = time.monotonic() + timeout
    while True:
        listening = subprocess.run([*host.enter, "ss", "-Hltn"], capture_output=True, text=True, timeout=30).stdout
        if wanted in listening or f"0.0.0.0:{port} " in listening or f"*:{port} " in listening:
            return
        assert server.poll() is None, f"the server ended with {server.returncode}"
        assert time.monotonic() < limit, f"nothing listens at {wanted}"
        time.sleep(0.02)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts over 100 Mbit/s; skips with the reason where namespaces are not permitted."""
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except NotPermittedError as error:
            pytest.skip(f"no two hosts here: {error}")
        yield pair
