"""What the command modules share in describing their arguments."""

from __future__ import annotations

import argparse
from typing import Any


def command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    """A subparser for ``run``, with the options every command has."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)
    return parser
