"""Text of other nodes and machines, made safe to show: on a terminal, in a log, in an event."""

from __future__ import annotations

import os
import sys
import unicodedata

from gradstream.errors import ConfigError

# ---- text --------------------------------------------------------------------------------

LINE_BYTES = 256
"""The most bytes of one line in a log or on a terminal that a stranger can cause."""

TEXT_BYTES = 8192
"""The most bytes of a message: room for a path, which has 4,096 at most, and some sentences."""

ELLIPSIS = "…"


def escaped(text: str, limit_bytes: int, *, newlines: bool = False) -> str:
    r"""Returns the text without characters that act on a terminal or hide other text.

    Control characters, terminal escapes, marks that change the direction of writing, invisible characters
    and lone surrogates become backslash escapes such as `\x1b` and `\u202e`. Printable text of any
    script stays as it is.

    Args:
        text: text from outside.
        limit_bytes: the most bytes of UTF-8 in the result, at least 3; a longer text ends with "…".
        newlines: keeps newlines, for tracebacks.
    """
    cut = text[:limit_bytes]
    if not cut.isprintable():
        cut = "".join(
            char if char.isprintable() or (newlines and char == "\n") else _escape(char) for char in cut
        )
    data = cut.encode()
    if len(cut) >= len(text) and len(data) <= limit_bytes:
        return cut
    return data[: limit_bytes - len(ELLIPSIS.encode())].decode(errors="ignore") + ELLIPSIS


def say(text: str, limit_bytes: int = TEXT_BYTES) -> None:
    """Writes a message to stderr, at once and escaped: it may hold text of other nodes and names of files."""
    tell(f"{escaped(text, limit_bytes, newlines=True)}\n")


def open_standard_streams() -> None:
    """Opens /dev/null for closed file descriptors 0 to 2; otherwise the next opened files would get these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def tell(text: str) -> None:
    """Writes text to stderr, at once. If stderr is full or closed, only the text is lost."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
    except (OSError, ValueError):
        lose_stderr()


def pass_on(text: str) -> None:
    """Writes the output of a user's program to stdout, at once. If that fails, stderr says so once."""
    stream = sys.stdout
    try:
        if stream is not None:
            known = text.encode(stream.encoding or "utf-8", "backslashreplace").decode(
                stream.encoding or "utf-8"
            )
            stream.write(known)
            stream.flush()
    except (OSError, ValueError) as error:
        say(f"standard output takes nothing any more ({error}): what is printed from here on is lost")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # see `lose_stderr`


def lose_stderr() -> None:
    """Discards everything that this process writes to stderr from now on, since stderr accepts nothing any more.

    Otherwise the buffered output would fail again at the end, and the process would end with status 120.
    """
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends


def show(text: str, limit_bytes: int = TEXT_BYTES) -> None:
    """Writes a line to stdout, escaped as by `say`: the requested output of a command."""
    sys.stdout.write(f"{escaped(text.expandtabs(), limit_bytes, newlines=True)}\n")


def counted(text: str, more: int, limit_bytes: int = LINE_BYTES) -> str:
    """The escaped text, and the number of further messages like it: "… (and 3,211 more)".

    Args:
        text: text from outside.
        more: number of further messages; 0 adds nothing.
        limit_bytes: the most bytes of the result. The text is cut, the number never is.
    """
    behind = f" (and {more:,} more)" if more else ""
    return escaped(text, limit_bytes - len(behind)) + behind


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


# ---- names -------------------------------------------------------------------------------
# Names that become part of a path: of jobs, machines and runs.

MAX_NAME_BYTES = 100
"""File systems allow 255; a time and a number are added to the name."""

MAX_PATH_BYTES, MAX_PART_BYTES, MAX_PARTS = 1024, 255, 32
"""Of the name of a file in a folder: "deep/numbers"."""

_CONTROL = {"Cc", "Cs", "Zl", "Zp"}


def fault_of_path(name: str) -> str:
    """What is wrong with the name of a file inside a folder, to follow "a name that"; "" if nothing.

    A good name stays in the folder: it is relative, has no parts that are empty, "." or "..", and no control
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
        name: the name as the user typed it.
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
