"""publish, follow: checkpoints into a store as they appear, and out of it into a folder that stays current."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pulse_kernels.checkpoint import Checkpoint
from pulse_kernels.cli.arguments import STORE, command, count, in_options
from pulse_kernels.cli.checkpoints import size, version_number
from pulse_kernels.cli.endless import Lines, Result, Retry, run_endless
from pulse_kernels.cli.watching import Found, Watch, weights_state
from pulse_kernels.errors import BaseMismatchError, ChainError, CheckpointError, PulseError, StoreError
from pulse_kernels.state import StateDigest

if TYPE_CHECKING:
    from pulse_kernels.sync import Publisher, PublishReport, Store, Subscriber
    from pulse_kernels.sync.metrics import Metrics

EXIT_NO = 1


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    publish = _stream(commands, "publish", _publish, "send each checkpoint that appears in DIR to STORE as a version")
    publish.add_argument("dir", metavar="DIR", help="a checkpoint that is replaced, or a folder of step checkpoints")
    publish.add_argument("store", metavar="STORE", help=STORE)
    publish.add_argument("--settle", type=_seconds, default=1.0, metavar="SECONDS",
                         help="files at rest for so long are complete (%(default)s)")  # fmt: skip
    publish.add_argument("--version-from-step", action="store_true", help="a step's number is its version's")
    publish.add_argument("--anchor-every", type=count, default=30, metavar="N",
                         help="versions from one whole checkpoint to the next (%(default)s)")  # fmt: skip
    publish.add_argument("--profile", choices=("balanced", "fast"), default="balanced",
                         help="how patches are coded (%(default)s)")  # fmt: skip
    publish.add_argument("--key", metavar="FILE", help="Ed25519 private key (PEM) that signs every version")
    publish.add_argument("--keep-anchors", type=count, metavar="N", help="retention, see prune (default: all)")
    publish.add_argument("--keep-patches", type=count, metavar="N", help="retention, see prune (default: all)")
    publish.add_argument("--on-nonfinite", choices=("error", "allow"), default="error",
                         help="weights that are infinite or NaN (%(default)s)")  # fmt: skip

    follow = _stream(commands, "follow", _follow, "keep the checkpoint in DIR at the newest version of STORE")
    follow.add_argument("store", metavar="STORE", help=STORE)
    follow.add_argument("dir", metavar="DIR", help="the checkpoint's folder, made where there is none")
    follow.add_argument("--trust", action="append", metavar="KEY",
                        help="public key (hexadecimal, or PEM file) that must have signed; repeatable")  # fmt: skip
    follow.add_argument("--chain", metavar="ID", help="the chain's id, where it is known; `log` shows it")
    follow.add_argument("--min-version", type=version_number, metavar="N", help="refuse anything older")
    follow.add_argument("--verify", choices=("digest", "full"), default="digest",
                        help="full also sweeps all weights after each version (%(default)s)")  # fmt: skip
    follow.add_argument("--exec", type=_command_line, metavar="CMD", dest="run_after",
                        help="run this after each version, with PULSE_VERSION and PULSE_DIR set; no shell")  # fmt: skip


def _stream(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser = command(commands, name, run, text, json_lines=True)
    parser.add_argument("--once", action="store_true", help="end after what there is now")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS",
                        help="between two looks (%(default)s)")  # fmt: skip
    parser.add_argument("--metrics-port", type=_port, metavar="PORT",
                        help="answer GET /metrics on 127.0.0.1 in Prometheus' format; 0 takes a free port")  # fmt: skip
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise ValueError(text)
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise ValueError(text)
    return value


def _command_line(text: str) -> list[str]:
    words = shlex.split(text)
    if not words or shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: no such command")
    return words


# ---- publish --------------------------------------------------------------------------------------------------------


class _CheckpointSource:
    """The newest checkpoint in memory, read tensor by tensor over the one before."""

    def __init__(self) -> None:
        self.params: dict[str, Tensor] = {}

    def load(self, found: Found) -> None:
        """CheckpointError where it is not whole or was written meanwhile; ``params`` then are of no use until the next
        call succeeds. BaseMismatchError where it is another model's than the one before."""
        with Checkpoint.open(found.path) as checkpoint:
            kinds = {name: (info.dtype, tuple(info.shape)) for name, info in checkpoint.tensors.items()}
            if not self.params:
                self.params = {n: torch.empty(shape, dtype=t, device="cpu") for n, (t, shape) in kinds.items()}
            held = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.params.items()}
            if kinds != held:
                odd = min(name for name in kinds.keys() | held.keys() if kinds.get(name) != held.get(name))
                raise BaseMismatchError(
                    f"{found.path}: {odd!r:.200} is another tensor than in the checkpoint before, or in one of them "
                    "alone; a chain keeps its tensors: publish another model to another STORE"
                )
            for name in checkpoint.tensors:
                checkpoint.read_into(name, 0, self.params[name])
            if not checkpoint.is_current() or weights_state(found.path) != found.state:
                raise CheckpointError(f"{found.path}: written while it was read")


def _publish(arguments: argparse.Namespace) -> Result:
    return run_endless(arguments, _publish_loop, create=True)


def _publish_loop(arguments: argparse.Namespace, store: Store, lines: Lines, retry: Retry) -> int:
    watch, source = Watch(arguments.dir, arguments.settle), _CheckpointSource()
    publisher: Publisher | None = None
    loaded: Found | None = None  # in memory, and perhaps not sent yet
    while True:
        found = watch.look()
        if found is None:
            lines.note(watch.waiting)
            if arguments.once and not watch.waiting.endswith("is being written"):
                raise CheckpointError(watch.waiting)
            time.sleep(min(arguments.interval, max(arguments.settle / 4, 0.05)))
            continue
        try:
            if found != loaded:
                loaded = None
                source.load(found)
                loaded = found
            publisher = publisher or _publisher(arguments, store, source, lines, retry.metrics)
            _send(publisher, source, found, arguments.version_from_step, lines)
        except CheckpointError as error:  # another one is being written there
            if arguments.once and weights_state(found.path) == found.state:
                raise
            lines.note(str(error))
            time.sleep(max(arguments.interval, 0.1))
            continue
        except StoreError as error:
            if arguments.once:
                raise
            retry.pause(error)
            continue
        watch.done(found)
        retry.reset()
        lines.at = f"version {publisher.version} is the last one published"
        if arguments.once:
            return 0
        time.sleep(arguments.interval)


def _publisher(
    arguments: argparse.Namespace, store: Store, source: _CheckpointSource, lines: Lines, metrics: Metrics | None
) -> Publisher:
    from pulse_kernels.sync import Publisher
    from pulse_kernels.sync.signing import signer_from

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        signer = None if arguments.key is None else signer_from(Path(arguments.key))
    for warning in caught:
        lines.note(in_options(str(warning.message)))
    return Publisher(
        store,
        source.params,
        anchor_every=arguments.anchor_every,
        profile=arguments.profile,
        signer=signer,
        on_nonfinite=arguments.on_nonfinite,
        keep_anchors=arguments.keep_anchors,
        keep_patches=arguments.keep_patches,
        on_report=None if metrics is None else metrics.observe,
    )


def _send(publisher: Publisher, source: _CheckpointSource, found: Found, version_from_step: bool, lines: Lines) -> None:
    """Publish what is in memory, unless it is the newest version already."""
    version = found.step if version_from_step else None
    head = publisher.version
    if head is not None and (version is None or version <= head) and _is_newest(publisher, source):
        lines.note(f"{found.path} is version {head}, which is published")
        return
    publisher.aux_files = found.path if found.path.is_dir() else None
    try:
        report = publisher.publish(version)
    except (PulseError, ValueError):
        if publisher.version == head or not _is_newest(publisher, source):
            raise
        lines.note(
            f"{found.path} is version {publisher.version}: an earlier attempt had succeeded, its answer was lost"
        )
        return
    lines.version({**report.to_dict(), "source": str(found.path)}, _publish_line(report, found.path))


def _is_newest(publisher: Publisher, source: _CheckpointSource) -> bool:
    assert publisher.version is not None
    return publisher.chain.manifest(publisher.version).digest == StateDigest.of(source.params).hexdigest()


def _publish_line(report: PublishReport, path: Path) -> str:
    sent = []
    if report.payload_bytes and report.ratio:
        sent.append(f"patch {size(report.payload_bytes)}, 1/{report.ratio:.0f} of dense")
    if report.anchor_bytes:
        sent = sent if report.base_version is not None else []
        sent.append(f"anchor {size(report.anchor_bytes)}")
    changed = "" if report.base_version is None else f"  {report.density:.3%} changed"
    note = f"  ({report.note})" if report.note else ""
    return f"version {report.version}  {', '.join(sent)}{changed}  {report.total_seconds:.2f} s  {path}{note}"


# ---- follow ---------------------------------------------------------------------------------------------------------


def _follow(arguments: argparse.Namespace) -> Result:
    return run_endless(arguments, _follow_loop, create=False)


def _follow_loop(arguments: argparse.Namespace, store: Store, lines: Lines, retry: Retry) -> int:
    subscriber: Subscriber | None = None
    saved: int | None = None  # the version that DIR is at
    code = 0
    while True:
        try:
            if subscriber is None and (subscriber := _subscriber(arguments, store, lines, retry.metrics)) is not None:
                saved = subscriber.saved_version
            if subscriber is not None:
                started = time.perf_counter()
                report = subscriber.poll()
                if subscriber.version is not None and subscriber.version != saved:
                    before, saved = saved, _keep(subscriber, Path(arguments.dir), lines)
                    data = {
                        "report": "follow",
                        "version": saved,
                        "from_version": before,
                        "digest": subscriber.digest,
                        "num_changed": None if report is None else report.num_changed,
                        "seconds": {} if report is None else report.seconds,
                        "total_seconds": time.perf_counter() - started,
                    }
                    lines.version(data, _follow_line(data, arguments.dir))
                    lines.at = f"{arguments.dir} is at version {saved}"
                    code = _run_after(arguments, saved, lines)
            retry.reset()
        except StoreError as error:
            if arguments.once:
                raise
            retry.pause(error)
            continue
        if arguments.once:
            if subscriber is None:
                raise PulseError(f"{arguments.store} has no version yet; publish one first")
            return code
        time.sleep(arguments.interval)


def _subscriber(
    arguments: argparse.Namespace, store: Store, lines: Lines, metrics: Metrics | None
) -> Subscriber | None:
    """The subscriber whose weights are DIR's, or the newest version's; None while there is neither."""
    from pulse_kernels.sync import Chain, Subscriber
    from pulse_kernels.sync.persist import StateFolder
    from pulse_kernels.sync.signing import trusted_keys

    trust = None if arguments.trust is None else trusted_keys(arguments.trust)
    occupied = StateFolder(arguments.dir).occupied()
    if not occupied and Chain(store, trust=trust).newest() is None:
        lines.note(f"{store.describe()} has no version yet; waiting for the first")
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subscriber = Subscriber(
            store,
            None,
            verify=arguments.verify,
            trust=trust,
            state_dir=arguments.dir,
            chain=arguments.chain,
            min_version=arguments.min_version,
            on_report=None if metrics is None else metrics.observe,
        )
    for warning in caught:
        lines.note(str(warning.message))
    return subscriber


def _keep(subscriber: Subscriber, folder: Path, lines: Lines) -> int:
    """Write the version to DIR, the first time with the files that belong to the model."""
    from pulse_kernels.sync.persist import StateFolder

    if not StateFolder(folder).occupied():
        try:
            _write_aux_files(subscriber, folder)
        except ChainError as error:  # the weights are another matter
            lines.note(f"{error}; the model's other files were not written to {folder}")
    return subscriber.save()


def _write_aux_files(subscriber: Subscriber, folder: Path) -> None:
    from pulse_kernels.sync.aux_files import fetch_aux

    assert subscriber.version is not None
    anchors = (route.anchor for route in subscriber.chain.routes(subscriber.version))
    newest = max((anchor for anchor in anchors if anchor is not None), key=lambda anchor: anchor.version)
    for name, data in fetch_aux(subscriber.store, newest).items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.part")
            temporary.write_bytes(data)
            os.replace(temporary, path)


def _follow_line(data: dict[str, Any], folder: str) -> str:
    changed = "" if data["num_changed"] is None else f"  {data['num_changed']:,} changed"
    return f"version {data['version']}{changed}  {data['total_seconds']:.2f} s  {folder}"


def _run_after(arguments: argparse.Namespace, version: int, lines: Lines) -> int:
    """Run --exec's command; 1 where it failed, which does not end anything."""
    if arguments.run_after is None:
        return 0
    environment = {**os.environ, "PULSE_VERSION": str(version), "PULSE_DIR": os.path.abspath(arguments.dir)}
    done = subprocess.run(arguments.run_after, env=environment, stdout=2 if arguments.json else None, check=False)
    if done.returncode:
        lines.note(f"{shlex.join(arguments.run_after)} ended with {done.returncode} for version {version}")
    return EXIT_NO if done.returncode else 0
