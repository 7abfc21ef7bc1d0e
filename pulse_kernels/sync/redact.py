"""What of an address or of somebody else's error text may be shown: never a password, a token or a signature."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_TEXT = 600

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s\"'<>`]*)")
_SECRET_OPTION = re.compile(r"key|secret|token|passw|pwd|sas|cred|sign|auth|header|cookie|proxy", re.IGNORECASE)
_XML = re.compile(r"<(?:\?xml|!DOCTYPE|Error|html)", re.IGNORECASE)
_ELEMENT = re.compile(r"<(Code|Message)>([^<]*)</")


def url(text: str) -> str:
    """A URL without user, password, query and fragment."""
    scheme, _, rest = text.partition("://")
    end = min((k for k in map(rest.find, "?#") if k >= 0), default=len(rest))
    rest, hidden = rest[:end], end < len(rest)
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{'?...' if hidden else ''}"


def text(message: str, secrets: Iterable[str] = ()) -> str:
    """The first paragraph of an error text on one line: URLs bare, of an XML or HTML answer only code and message,
    ``secrets`` (longest first is done here) replaced by ``***``. At most MAX_TEXT characters."""
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, "***")
    message = message.split("\n\nDebug source", 1)[0].split("\n\n", 1)[0]
    markup = _XML.search(message)
    if markup:
        found = [value for _, value in _ELEMENT.findall(message[markup.start() :])]
        message = message[: markup.start()] + ": ".join(found)
    message = _URL.sub(lambda match: url(match.group(0)), message)
    message = " ".join(message.split()).rstrip(":. ")
    return message if len(message) <= MAX_TEXT else message[: MAX_TEXT - 3] + "..."


def secrets_of(options: Mapping[str, Any]) -> set[str]:
    """The values among a store's options that must not be shown, nested ones too."""
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            inner = {f"{name}.{key}": item for key, item in value.items()}
            found |= secrets_of(inner)
        elif _SECRET_OPTION.search(str(name)) and isinstance(value, (str, bytes)):
            shown = value.decode("latin-1") if isinstance(value, bytes) else value
            if len(shown) >= 4:
                found.add(shown)
    return found


def secrets_of_url(text: str) -> set[str]:
    """User, password and query values of a URL."""
    rest = text.partition("://")[2]
    before, _, query = rest.partition("?")
    user, at, _ = before.partition("/")[0].rpartition("@")
    values = user.split(":") if at else []
    values += [item.partition("=")[2] for item in re.split(r"[&;#]", query)]
    return {value for value in values if len(value) >= 4}
