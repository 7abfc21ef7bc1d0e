"""A trainer with its store on one host, a rollout on the other: versions over the cable, as patches and dense.

Both are processes that obey orders, one JSON object a line:

    python -m bench.hosts.link trainer ADDRESS NUMEL DENSITY      owns an S3 server and publishes there
    python -m bench.hosts.link rollout ENDPOINT NUMEL             follows it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.hosts.namespaces import Host, two_hosts

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "pulse"
DENSE_KEY = "dense/model.safetensors"


class Peer:
    """A process on a host, and its orders."""

    def __init__(self, host: Host, words: Sequence[str]) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._process = host.start(
            [sys.executable, "-m", "bench.hosts.link", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment,
        )  # fmt: skip

    def ask(self, order: str, **data: Any) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.tell(order, **data)
        return self.answer()

    def tell(self, order: str, **data: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"order": order, **data}), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended with {self._process.wait(10)}; its errors are printed above")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Link:
    """A trainer and a rollout that holds the trainer's first version."""

    def __init__(self, trainer: Peer, rollout: Peer) -> None:
        self.trainer, self.rollout = trainer, rollout

    def step(self) -> None:
        """One update of the trainer's masters."""
        self.trainer.ask("step")

    def publish_and_apply(self) -> dict[str, Any]:
        """From the call of ``publish`` to the new weights in place on the other host."""
        self.rollout.tell("follow")
        published = self.trainer.ask("publish")
        return {"published": published, "applied": self.rollout.answer()}

    def dense(self) -> None:
        """The same with the whole state: cast, written as a safetensors file, fetched, copied in."""
        self.trainer.ask("dense")
        self.rollout.ask("dense")

    def digests(self) -> tuple[str, str]:
        """Of all weights, on either side."""
        return self.trainer.ask("digest")["digest"], self.rollout.ask("digest")["digest"]


@contextmanager
def link(numel: int, density: float, rate: str = "100mbit") -> Iterator[Link]:
    """NotPermitted where namespaces are not."""
    with ExitStack() as stack:
        first, second = stack.enter_context(two_hosts(rate))
        trainer = Peer(first, ["trainer", first.address, str(numel), str(density)])
        stack.callback(trainer.end)
        endpoint = trainer.answer()["endpoint"]
        rollout = Peer(second, ["rollout", endpoint, str(numel)])
        stack.callback(rollout.end)
        rollout.answer()
        yield Link(trainer, rollout)


# ---- the two processes -----------------------------------------------------------------------------------------------


def _open(endpoint: str) -> Any:
    from pulse_kernels.sync import open_store

    config = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "false",
        "secret_access_key": "false",
        "virtual_hosted_style_request": False,
    }
    return open_store(f"s3://{BUCKET}/run", config=config)


def _say(**data: Any) -> None:
    print(json.dumps(data), file=_answers, flush=True)


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def trainer_main(address: str, numel: int, density: float) -> None:
    import logging
    import urllib.request

    import torch
    from moto.server import ThreadedMotoServer
    from safetensors.torch import save

    from pulse_kernels import StateDigest
    from pulse_kernels.cli.bench_quick import changed_positions, random_masters
    from pulse_kernels.sync import Publisher

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=false/20260101/us-east-1/s3/aws4_request")
    urllib.request.urlopen(request, timeout=30).close()

    master = random_masters(numel).bfloat16().float()
    weights = {"weight": master.bfloat16()}
    positions = changed_positions(numel, density)
    sides = [master.view(torch.int32)[positions]]
    sides.append(sides[0] ^ (1 << 16))
    side = 0
    store = _open(endpoint)
    publisher = Publisher(store, weights, masters={"weight": master}, anchor_every=1_000_000)
    publisher.publish()
    _say(endpoint=endpoint)
    for order in _orders():
        if order["order"] == "step":
            side ^= 1
            master.view(torch.int32)[positions] = sides[side]
            _say()
        elif order["order"] == "publish":
            _say(**publisher.publish().to_dict())
        elif order["order"] == "dense":
            store.put(DENSE_KEY, save({"weight": master.bfloat16()}))
            _say()
        elif order["order"] == "digest":
            _say(digest=StateDigest.of(weights).hexdigest())


def rollout_main(endpoint: str, numel: int) -> None:
    import torch

    from pulse_kernels import StateDigest
    from pulse_kernels.checkpoint.in_memory import tensors_in
    from pulse_kernels.sync import Subscriber

    weights = {"weight": torch.zeros(numel, dtype=torch.bfloat16)}
    store = _open(endpoint)
    subscriber = Subscriber(store, weights)
    subscriber.poll()
    _say()
    for order in _orders():
        if order["order"] == "follow":
            while (report := subscriber.poll()) is None:
                time.sleep(0.005)
            _say(**report.to_dict())
        elif order["order"] == "dense":
            data = store.get(DENSE_KEY, store.size(DENSE_KEY))
            weights["weight"].copy_(tensors_in(data, DENSE_KEY)["weight"])
            _say()
        elif order["order"] == "digest":
            _say(digest=StateDigest.of(weights).hexdigest())


if __name__ == "__main__":
    _answers, sys.stdout = sys.stdout, sys.stderr  # nobody else's prints among the answers
    if sys.argv[1] == "trainer":
        trainer_main(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        rollout_main(sys.argv[2], int(sys.argv[3]))
