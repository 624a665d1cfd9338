"""Names that become part of a path: of jobs, machines and runs."""

from __future__ import annotations

from gradstream.errors import ConfigError

MAX_NAME_BYTES = 100
"""File systems allow 255; a time and a number are added to the name."""


def check_name(name: str, what: str) -> str:
    """Returns the name if it is safe as the name of a file or folder.

    Args:
        name: the name as the user gave it.
        what: the kind of name for the message: "name (--name)".

    Raises:
        ConfigError: the name is empty, too long, "." or "..", or has a separator or a control character in it.
    """
    size_bytes = len(name.encode(errors="surrogateescape"))
    bad = [letter for letter in name if letter in "/\\" or not letter.isprintable()]
    if name and name not in (".", "..") and not bad and size_bytes <= MAX_NAME_BYTES:
        return name
    got = repr(name) if size_bytes <= MAX_NAME_BYTES else f"{name[:20]!r}… of {size_bytes} bytes"
    raise ConfigError(
        f"{what} is {got}: expected 1 to {MAX_NAME_BYTES} bytes of printable characters without / and \\, "
        "and neither '.' nor '..', since it becomes part of a path"
    )
