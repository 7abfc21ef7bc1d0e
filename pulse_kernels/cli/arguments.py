"""What the command modules share in describing their arguments."""

from __future__ import annotations

import argparse
from typing import Any

STORE = "where versions are kept: a folder, s3://bucket/prefix or another URL that obstore knows"


def count(text: str) -> int:
    """An argument that is an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def command(commands: Any, name: str, run: Any, text: str, *, json_lines: bool = False) -> argparse.ArgumentParser:
    """A subparser for ``run``, with the options every command has. json_lines: it prints many objects, one a line."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    one = "one JSON object a line" if json_lines else "one JSON object"
    parser.add_argument("--json", action="store_true", help=f"print {one} instead of text")
    parser.set_defaults(run=run, json_lines=json_lines)
    return parser
