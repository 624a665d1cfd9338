"""Names that become part of a path: of jobs, machines and runs."""

from __future__ import annotations

import unicodedata

from gradstream.errors import ConfigError

MAX_NAME_BYTES = 100
"""File systems allow 255; a time and a number are added to the name."""

MAX_PATH_BYTES, MAX_PART_BYTES, MAX_PARTS = 1024, 255, 32
"""Of the name of a file in a folder: "deep/numbers"."""

_CONTROL = {"Cc", "Cs", "Zl", "Zp"}


def fault_of_path(name: str) -> str:
    """What is wrong with the name of a file or folder inside of another one, to follow "a name that"; "" if nothing.

    Such a name leads nowhere else: it is relative, has no empty parts and none that is "." or "..", and no control
    characters.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads elsewhere, or has an empty part"
    if any(unicodedata.category(letter) in _CONTROL for letter in name):
        return "has a control character, or is not Unicode"
    if len(name.encode()) > MAX_PATH_BYTES or len(parts) > MAX_PARTS:
        return f"has more than {MAX_PATH_BYTES:,} bytes or {MAX_PARTS} parts"
    if any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"has a part of more than {MAX_PART_BYTES} bytes"
    return ""


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
