"""``pulse-kernels``: the command line. One module a group of commands; ``main`` parses, runs and reports.

Exit codes: 0 success; 1 the answer is no (verify found a difference, the demo did not improve); 2 wrong usage;
also a PULSE_BACKEND that is not there; 3 an input cannot be read or an output not written; 4 the patch belongs to
another base; 5 a result did not have the digest it must have; 6 PyTorch or a device failed; 130 interrupted. After 2 to
6 and 130 nothing was changed. publish and follow run until Ctrl-C, which is 130, too: what they finished stays, and
what they were at was done whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pulse_kernels.errors import BackEndError, BaseMismatchError, PulseError, VerificationError

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_BASE = 4
EXIT_DIGEST = 5
EXIT_FAILED = 6
EXIT_INTERRUPTED = 130

# exit code, --json object, text; no object: the command printed what there was to print itself
Command = Callable[[argparse.Namespace], tuple[int, dict[str, Any] | None, str]]


def _parser() -> argparse.ArgumentParser:
    from pulse_kernels import __version__
    from pulse_kernels.cli import chains, checkpoints, diagnose, streams

    parser = argparse.ArgumentParser(
        prog="pulse-kernels",
        description="Lossless sparse weight patches between checkpoints.",
        epilog="exit codes: 0 success, 1 the answer is no, 2 wrong usage, 3 unreadable input or unwritable output, "
        "4 another base, 5 wrong digest, 6 PyTorch or a device failed, 130 interrupted; after 2 to 6 and 130 nothing "
        "was changed",
    )
    parser.add_argument("--version", action="version", version=f"pulse-kernels {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    checkpoints.add_commands(commands)
    streams.add_commands(commands)
    chains.add_commands(commands)
    diagnose.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    as_json = bool(arguments.json)
    indent = None if arguments.json_lines else 1
    run: Command = arguments.run
    from pulse_kernels.backends import asked_for

    try:
        asked_for()  # also where the command computes nothing
        code, data, text = run(arguments)
    except KeyboardInterrupt:
        return _fail(EXIT_INTERRUPTED, "KeyboardInterrupt", "interrupted; nothing was changed", as_json, indent)
    except BaseMismatchError as error:
        return _fail(EXIT_BASE, type(error).__name__, str(error), as_json, indent)
    except VerificationError as error:
        return _fail(EXIT_DIGEST, type(error).__name__, str(error), as_json, indent)
    except BackEndError as error:
        return _fail(EXIT_USAGE, type(error).__name__, str(error), as_json, indent)
    except (PulseError, ValueError, TypeError, OSError, MemoryError) as error:
        if os.environ.get("PULSE_DEBUG"):
            raise
        return _fail(EXIT_INPUT, type(error).__name__, str(error) or "out of memory", as_json, indent)
    except RuntimeError as error:
        if os.environ.get("PULSE_DEBUG"):
            raise
        # PyTorch's messages may have its C++ frames behind the first line.
        message = next(filter(None, map(str.strip, str(error).splitlines())), "no message")
        kind = type(error).__name__
        return _fail(EXIT_FAILED, kind, f"{kind}: {message} (PULSE_DEBUG=1 shows where)", as_json, indent)
    try:
        if data is not None:
            print(json.dumps(data, indent=indent) if as_json else text, flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _fail(code: int, kind: str, message: str, as_json: bool, indent: int | None) -> int:
    from pulse_kernels.cli.arguments import in_options

    message = in_options(message)
    if as_json:
        print(json.dumps({"error": {"type": kind, "message": message}, "exit_code": code}, indent=indent), flush=True)
    print(f"pulse-kernels: error: {message}", file=sys.stderr, flush=True)
    return code


__all__ = ["main"]
