"""diff, apply, inspect, verify: patches between checkpoints on disk."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pulse_kernels import checkpoint_patch, codec
from pulse_kernels.checkpoint import Checkpoint, checkpoint_state
from pulse_kernels.cli.arguments import command, many
from pulse_kernels.cli.progress import ProgressBar
from pulse_kernels.codec.segment import PROFILES
from pulse_kernels.errors import naming

_CHECKPOINT = "a safetensors file or a Hugging Face checkpoint folder"


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    diff = command(commands, "diff", _diff, "write the patch that turns checkpoint OLD into NEW")
    diff.add_argument("old", metavar="OLD", help=_CHECKPOINT)
    diff.add_argument("new", metavar="NEW", help=_CHECKPOINT)
    diff.add_argument("-o", "--output", metavar="PATCH", required=True, help="the patch file to write")
    diff.add_argument("--profile", choices=PROFILES, default="balanced", help="how to code it (default: %(default)s)")
    diff.add_argument(
        "--base-version", type=version_number, metavar="N", help="version number of OLD, recorded in the patch"
    )
    diff.add_argument(
        "--new-version", type=version_number, metavar="N", help="version number of NEW, recorded in the patch"
    )

    apply = command(commands, "apply", _apply, "write the checkpoint that PATCH makes of BASE")
    apply.add_argument("base", metavar="BASE", help=_CHECKPOINT)
    apply.add_argument("patch", metavar="PATCH", help="a patch file")
    place = apply.add_mutually_exclusive_group(required=True)
    place.add_argument("-o", "--output", metavar="OUT", help="the checkpoint to write")
    place.add_argument(
        "--in-place", action="store_true", help="replace BASE; old or new is in place, whole, at every moment"
    )
    apply.add_argument("--overwrite", action="store_true", help="replace weights that are already in OUT")

    inspect = command(commands, "inspect", _inspect, "show what a patch changes, or what state a checkpoint is in")
    inspect.add_argument("path", metavar="PATH", help=f"a patch file, {_CHECKPOINT}")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor of a patch")

    verify = command(commands, "verify", _verify, "check that PATCH turns BASE into exactly NEW; writes nothing")
    verify.add_argument("base", metavar="BASE", help=_CHECKPOINT)
    verify.add_argument("patch", metavar="PATCH", help="a patch file")
    verify.add_argument("new", metavar="NEW", help=_CHECKPOINT)


def version_number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def _diff(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    with ProgressBar("diff", quiet=arguments.json) as progress:
        report = checkpoint_patch.diff(
            *(arguments.old, arguments.new, arguments.output),
            profile=arguments.profile,
            base_version=arguments.base_version,
            version=arguments.new_version,
            progress=progress,
        )
    text = (
        f"{arguments.output}: {size(report.patch_bytes)}, 1/{report.ratio:.1f} of the {size(report.dense_bytes)} dense "
        f"checkpoint, {report.profile}\n"
        f"{report.num_changed:,} of {report.num_elements:,} elements changed ({report.density:.3%}) in "
        f"{many(report.tensors_changed, 'tensor')}; {report.tensors_added} added, {report.tensors_removed} removed\n"
        f"digest {report.base_digest} -> {report.digest}\n"
        f"{report.seconds:.2f} s"
    )
    return 0, report.to_dict(), text


def _apply(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    with ProgressBar("apply", quiet=arguments.json) as progress:
        report = checkpoint_patch.apply(
            *(arguments.base, arguments.patch, None if arguments.in_place else arguments.output),
            overwrite=arguments.overwrite,
            progress=progress,
        )
    version = "" if report.version is None else f"version {report.version}, "
    text = (
        f"{report.path}: {version}digest {report.digest}\n"
        f"{report.num_changed:,} elements changed, {size(report.bytes_written)} written in {report.seconds:.2f} s"
    )
    return 0, report.to_dict(), text


def _inspect(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    if Path(arguments.path).is_dir() or not _is_patch(arguments.path):
        return _inspect_checkpoint(arguments.path)
    with naming(arguments.path):
        header = codec.peek(codec.read_file(arguments.path))
    nbytes = Path(arguments.path).stat().st_size
    data: dict[str, Any] = {
        "kind": "patch",
        "bytes": nbytes,
        "profile": header.profile,
        "base_version": header.base_version,
        "version": header.version,
        "base_digest": header.base_digest,
        "digest": header.digest,
        "num_changed": header.num_changed,
        "num_elements": header.numel,
        "density": header.density,
        "index_bytes": header.index_bytes,
        "value_bytes": header.value_bytes,
        "added_bytes": header.added_bytes,
        "bits_per_change": 8 * (header.index_bytes + header.value_bytes) / max(1, header.num_changed),
        "needs_base": header.needs_base,
        "files": [file["name"] for file in (header.layout or {}).get("files", [])],
        "removed": list(header.removed),
        "added": [_tensor_row(tensor) for tensor in header.added],
        "tensors": [_tensor_row(tensor) for tensor in header.tensors],
    }
    lines = [
        f"{arguments.path}: patch, {size(nbytes)}, profile {header.profile}",
        f"version   {_or_none(header.base_version)} -> {_or_none(header.version)}",
        f"digest    {header.base_digest or 'unknown'} -> {header.digest or 'unknown'}",
        f"changed   {header.num_changed:,} of {header.numel:,} elements in {many(len(header.tensors), 'tensor')} "
        f"({header.density:.3%}), {data['bits_per_change']:.2f} bits a change",
        f"payload   indices {size(header.index_bytes)}, values {size(header.value_bytes)}, "
        f"added tensors {size(header.added_bytes)}",
        f"tensors   {len(header.added)} added or replaced, {len(header.removed)} removed",
    ]
    if arguments.tensors:
        for tensor in (*header.tensors, *header.added):
            lines.append(
                f"  {tensor.name}  {tensor.dtype_name} {list(tensor.shape)}  {tensor.num_changed:,} values  "
                f"{size(tensor.payload_bytes)}"
            )
        lines += [f"  {name}  removed" for name in header.removed]
    return 0, data, "\n".join(lines)


def _or_none(version: int | None) -> str:
    return "unnumbered" if version is None else str(version)


def _tensor_row(tensor: codec.TensorHeader) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype_name,
        "shape": list(tensor.shape),
        "num_changed": tensor.num_changed,
        "bytes": tensor.payload_bytes,
    }


def _is_patch(path: str) -> bool:
    """Whether a file says it is a patch; a damaged one does so too."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(min(length, 1 << 16))
    except OSError:
        return True  # let the reader explain
    return b'"pulse"' in head or not head.startswith(b"{")


def _inspect_checkpoint(path: str) -> tuple[int, dict[str, Any], str]:
    state = checkpoint_state(path)
    with Checkpoint.open(path) as checkpoint:
        infos = list(checkpoint.tensors.values())
        files = sorted({info.file for info in infos})
    interrupted = None
    if state.interrupted is not None:
        interrupted = {
            "from": state.interrupted.old_digest,
            "to": state.interrupted.new_digest,
            "holds": state.interrupted.holds,
            "running": state.running,
        }
    data = {
        "kind": "checkpoint",
        "tensors": len(infos),
        "num_elements": sum(info.numel for info in infos),
        "bytes": sum(info.nbytes for info in infos),
        "files": files,
        "digest": state.digest,
        "version": state.version,
        "interrupted": interrupted,
        "leftovers": list(state.leftovers),
    }
    lines = [
        str(state),
        f"{many(len(infos), 'tensor')}, {data['num_elements']:,} elements, {size(sum(i.nbytes for i in infos))} in "
        f"{many(len(files), 'file')}",
    ]
    if state.leftovers:
        lines.append(f"leftovers of an interrupted apply, removed by the next: {', '.join(state.leftovers)}")
    return 0, data, "\n".join(lines)


def _verify(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    with ProgressBar("verify", quiet=arguments.json) as progress:
        report = checkpoint_patch.verify(arguments.base, arguments.patch, arguments.new, progress=progress)
    if report.identical:
        text = (
            f"identical: {many(report.tensors, 'tensor')}, {size(report.bytes_compared)} compared bit by bit, "
            f"digest {report.digest}, {report.seconds:.2f} s"
        )
        return 0, report.to_dict(), text
    lines = [f"NOT identical: {report.num_differences} differences", *(f"  {line}" for line in report.differences)]
    if report.num_differences > len(report.differences):
        lines.append(f"  ... the first {len(report.differences)} of {report.num_differences}")
    return 1, report.to_dict(), "\n".join(lines)
