"""log, fsck, prune, keygen: what is in a store of versions, whether it is sound, and what of it stays."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulse_kernels.cli.arguments import STORE, command, count, many
from pulse_kernels.cli.checkpoints import size
from pulse_kernels.errors import ChainError, PulseError

if TYPE_CHECKING:
    from pulse_kernels.sync import Store


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    log = command(commands, "log", _log, "list the versions in STORE: size, density, age; the newest last")
    log.add_argument("store", metavar="STORE", help=STORE)
    log.add_argument("--limit", type=count, metavar="N", help="the newest N only")

    fsck = command(commands, "fsck", _fsck, "read and rebuild every version in STORE; exit code 1 where one is damaged")
    fsck.add_argument("store", metavar="STORE", help=STORE)
    fsck.add_argument("--trust", action="append", metavar="KEY",
                      help="public key (hexadecimal, or PEM file) that must have signed; repeatable")  # fmt: skip
    depth = fsck.add_mutually_exclusive_group()
    depth.add_argument("--shallow", action="store_true", help="manifests and sizes only; parts are not read")
    depth.add_argument("--repair", action="store_true", help="write the indexes of anchors that lack theirs")

    prune = command(commands, "prune", _prune, "remove old versions from STORE, and what interrupted publishers left")
    prune.add_argument("store", metavar="STORE", help=STORE)
    prune.add_argument("--keep-anchors", type=count, metavar="N",
                       help="the newest N anchors stay; without --keep-patches, all after them, too")  # fmt: skip
    prune.add_argument("--keep-patches", type=count, metavar="N", help="the newest N versions stay")
    prune.add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")

    keygen = command(commands, "keygen", _keygen, "make an Ed25519 key: sign versions with it, trust its public half")
    keygen.add_argument("-o", "--output", metavar="FILE", required=True, help="the private key's file, made new")


def _open(place: str) -> Store:
    from pulse_kernels.sync import open_store

    return open_store(place, create=False)


def _log(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels.sync.chain import Chain
    from pulse_kernels.sync.store import NotFound

    with _open(arguments.store) as store:
        chain = Chain(store)
        versions = chain.versions()
        shown = versions if arguments.limit is None else versions[-arguments.limit :]
        rows: list[dict[str, Any]] = []
        for version in shown:
            try:
                manifest = chain.manifest(version)
            except NotFound:  # removed since the listing
                continue
            except ChainError as error:
                rows.append({"version": version, "error": str(error)})
                continue
            changed, numel = manifest.facts.get("num_changed"), manifest.facts.get("numel")
            known = isinstance(changed, int) and isinstance(numel, int) and bool(manifest.patch)
            rows.append(
                {
                    "version": version,
                    "kind": manifest.kind,
                    "base_version": manifest.base_version,
                    "patch_bytes": sum(part.bytes for part in manifest.patch),
                    "anchor_bytes": sum(part.bytes for part in manifest.anchor),
                    "density": changed / max(1, numel) if known else None,  # type: ignore[operator,type-var]
                    "age_seconds": max(0, int(time.time()) - manifest.time),
                    "digest": manifest.digest,
                }
            )
    lines = [f"{arguments.store}: {many(len(versions), 'version')}{'' if chain.id is None else f', chain {chain.id}'}"]
    lines += [_log_line(row) for row in rows]
    return 0, {"chain": chain.id, "num_versions": len(versions), "versions": rows}, "\n".join(lines)


def _log_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['version']:>8}  DAMAGED  {row['error']}"
    base = "" if row["base_version"] is None else f"from {row['base_version']}"
    density = "" if row["density"] is None else f"{row['density']:.3%}"
    patch = size(row["patch_bytes"]) if row["patch_bytes"] else ""
    anchor = f"anchor {size(row['anchor_bytes'])}" if row["anchor_bytes"] else ""
    return f"{row['version']:>8}  {base:<14}{patch:>10}  {density:>9}  {_age(row['age_seconds']):>6}  {anchor}".rstrip()


def _age(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _fsck(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels.sync.fsck import fsck
    from pulse_kernels.sync.signing import trusted_keys

    trust = None if arguments.trust is None else trusted_keys(arguments.trust)
    with _open(arguments.store) as store:
        report = fsck(store, trust=trust, deep=not arguments.shallow, repair=arguments.repair)
    if not report.versions:
        raise ChainError(f"{arguments.store}: there is no version in it; check the address")
    lines = []
    for problem in report.problems:
        where = problem.key if problem.version is None else f"version {problem.version}, {problem.key}"
        lines.append(f"{problem.kind}: {where}: {problem.message}")
    lines += [f"repaired: {key}" for key in report.repaired]
    verdict = "DAMAGED" if report.damaged else "sound"
    lines.append(
        f"{arguments.store}: {verdict}; {many(report.versions, 'version')}, {many(report.anchors, 'anchor')} and "
        f"{many(report.patches, 'patch')} verified, {size(report.bytes_read)} read"
    )
    if report.unverified:
        which = "version" if len(report.unverified) == 1 else "versions"
        lines.append(f"could not be rebuilt: {which} {', '.join(map(str, report.unverified))}")
    return int(report.damaged), report.to_dict(), "\n".join(lines)


def _prune(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels.sync.chain import Chain
    from pulse_kernels.sync.retention import prune

    with _open(arguments.store) as store:
        report = prune(
            Chain(store),
            keep_anchors=arguments.keep_anchors,
            keep_patches=arguments.keep_patches,
            dry_run=arguments.dry_run,
        )
    done = "would be removed" if report.dry_run else "removed"
    stay = "stays" if len(report.kept) == 1 else "stay"
    text = (
        f"{arguments.store}: {many(len(report.removed), 'version')}, {many(report.objects, 'object')}, "
        f"{size(report.nbytes)} {done}; {many(len(report.kept), 'version')} {stay}"
    )
    return 0, report.to_dict(), text


def _keygen(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from pulse_kernels.sync.signing import generate_key

    private, public = generate_key()
    path = Path(arguments.output)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise PulseError(f"{path}: exists already; a key is never replaced, choose another name") from None
    except OSError as error:
        raise PulseError(f"{path}: cannot write the key: {error.strerror or error}; choose another place") from error
    with os.fdopen(handle, "wb") as file:
        file.write(private)
    return 0, {"path": str(path), "public_key": public}, f"{path}: private key, keep it secret\npublic key {public}"
