"""What the command modules share in describing their arguments."""

from __future__ import annotations

import argparse
import re
from typing import Any

STORE = "where versions are kept: a folder, s3://bucket/prefix or another URL that obstore knows"


def count(text: str) -> int:
    """An argument that is an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def many(number: int, what: str) -> str:
    """A number and what it counts: 1 version, 2 versions."""
    return f"{number} {what if number == 1 else 'patches' if what == 'patch' else what + 's'}"


# What the package's errors call its Python arguments, and what that is on the command line.
_OPTIONS = [
    (r"^signer: ", "--key: "),
    (r"^trust: ", "--trust: "),
    (r", or pass an object with sign\(\) and public_key", ""),
    (r"Pass signer=\.\.\.", "Give its key with --key"),
    (r"with signer=, or pass trust=None to take", "with --key, or leave --trust out to take"),
    (r"with on_nonfinite='allow'", "with --on-nonfinite allow"),
    (r"older than min_version,", "older than --min-version,"),
]


def in_options(message: str) -> str:
    """An error of the package in the words of the command line."""
    for pattern, option in _OPTIONS:
        message = re.sub(pattern, option, message)
    return message


def command(commands: Any, name: str, run: Any, text: str, *, json_lines: bool = False) -> argparse.ArgumentParser:
    """A subparser for ``run``, with the options every command has. json_lines: it prints many objects, one a line."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    one = "one JSON object a line" if json_lines else "one JSON object"
    parser.add_argument("--json", action="store_true", help=f"print {one} instead of text")
    parser.set_defaults(run=run, json_lines=json_lines)
    return parser
