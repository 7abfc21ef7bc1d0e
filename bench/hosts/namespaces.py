"""Two network namespaces joined by a veth pair whose rate ``tc ... tbf`` limits both ways. They vanish with the
processes that hold them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("unshare", "nsenter", "ip", "tc")


class NotPermitted(Exception):
    """Namespaces cannot be made here; says why."""


@dataclass(frozen=True)
class Host:
    """A network namespace, held open by a process."""

    pid: int
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs ``words`` on this host, as one process."""
        return ["nsenter", "--preserve-credentials", "-t", str(self.pid), "-U", "-n", "--", *words]

    def run(self, *words: str) -> None:
        done = subprocess.run(self.command(words), capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise NotPermitted(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(words), text=True, **options)


@contextmanager
def two_hosts(rate: str = "100mbit") -> Iterator[tuple[Host, Host]]:
    """Hosts 10.77.0.1 and 10.77.0.2 with ``rate`` between them. NotPermitted where the system does not let us."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotPermitted(f"{', '.join(missing)} not found")
    with ExitStack() as stack:
        first = Host(_holder(stack, ["unshare", "--user", "--map-root-user", "--net"]), ADDRESSES[0])
        second = Host(_holder(stack, first.command(["unshare", "--net"])), ADDRESSES[1])
        first.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.pid))
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "link", "set", "cable", "up")
            # Segmentation off: the limit sees packets, not bursts of 64 KiB.
            host.run(
                "tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "200ms"
            )
        yield first, second


def _holder(stack: ExitStack, words: Sequence[str]) -> int:
    """A process in a namespace of its own, which lives as long as ``stack``."""
    process = subprocess.Popen(
        [*words, "sh", "-c", "echo here; exec cat"],  # ends with us, however we end
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "here":
        _, errors = process.communicate(timeout=30)
        raise NotPermitted(errors.strip() or "unshare failed")
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
