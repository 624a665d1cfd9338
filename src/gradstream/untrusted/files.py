"""Reads files that anybody may have replaced by anything: none of these functions blocks, whatever lies there."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from gradstream.errors import ConfigError

# ---- files -------------------------------------------------------------------------------

FILE_BYTES = 1 << 28
"""Longest file to read whole."""


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> BinaryIO:
    """Opens a regular file for reading, and refuses pipes, whose reader waits for a writer, and devices.

    Args:
        links: whether it may be a link to a regular file.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return cast("BinaryIO", open(descriptor, "rb", buffering=0))


def read_regular(path: str | os.PathLike[str], max_bytes: int = FILE_BYTES, *, links: bool = True) -> bytes:
    """The content of a regular file of at most this many bytes. Raises OSError for any other."""
    with open_regular(path, links=links) as file:
        if (size_bytes := os.fstat(file.fileno()).st_size) > max_bytes:
            text = f"it has {size_bytes:,} bytes, expected at most {max_bytes:,}"
            raise OSError(errno.EFBIG, text, os.fspath(path))
        return file.read()


def read_settings(path: Path, max_bytes: int) -> bytes:
    """The content of one of gradstream's own files, which must not be a link.

    Raises:
        FileNotFoundError: there is nothing.
        ConfigError: it is a link, a pipe or not a file at all, is larger, or cannot be read.
    """
    try:
        return read_regular(path, max_bytes, links=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as a regular file, which it has to be: {error.strerror}"
        ) from None


# ---- documents ---------------------------------------------------------------------------
# Parses JSON and TOML from outside in bounded memory and depth, or refuses them with one typed error.

MAX_DEPTH = 10
"""The deepest nesting of lists and tables."""

MAX_KEY_PARTS = 32
"""The most parts of a dotted key in TOML: Python's reader takes quadratic time for them."""

_LONG_KEY = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){%d}""" % MAX_KEY_PARTS  # noqa: UP031
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class DocumentError(ValueError):
    """A document that cannot be read, or that is larger or deeper than its reader accepts."""


def parse_json(
    data: bytes | str,
    *,
    max_bytes: int = 1 << 20,
    max_depth: int = MAX_DEPTH,
    max_values: int = 1_000_000,
    unique: bool = True,
) -> Any:
    """The value of a JSON document.

    Args:
        data: the document, as UTF-8 or text.
        max_bytes: the most bytes of the document.
        max_depth: the deepest nesting of lists and objects.
        max_values: the most values in the document; this bounds the memory of the parser.
        unique: refuses an object with the same name twice; otherwise the last one counts.

    Raises:
        DocumentError: the document is no JSON (NaN and infinities are not), is too large or too deep, has a
            name twice in one object, or text that is not Unicode. No other exception.
    """
    try:
        raw = data.encode() if isinstance(data, str) else data
        if len(raw) > max_bytes:
            raise DocumentError(f"a document of {len(raw):,} bytes; expected at most {max_bytes:,}")
        opened = raw.count(b"[") + raw.count(b"{")
        if opened + raw.count(b",") > max_values:
            raise DocumentError(f"more than {max_values:,} values in one document")
        value = (_UNIQUE if unique else _PLAIN).decode(raw.decode())
    except DocumentError:
        raise
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:  # no JSON, no UTF-8, a number of thousands of digits
        raise DocumentError(f"not JSON: {error}") from None
    if opened > max_depth:
        _check_depth(value, max_depth)
    if _SURROGATE.search(raw):
        _check_text(value)
    return value


def parse_toml(text: str, *, max_bytes: int = 1 << 16, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The value of a TOML document.

    Args:
        max_bytes: the most characters of the document.
        max_depth: the deepest nesting of tables and lists.

    Raises:
        DocumentError: the document is no TOML, or is too large or too deep. No other exception.
    """
    if len(text) > max_bytes:
        raise DocumentError(f"a document of {len(text):,} characters; expected at most {max_bytes:,}")
    if _LONG_KEY.search(text):
        raise DocumentError(f"a key of more than {MAX_KEY_PARTS} parts")
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:
        raise DocumentError(str(error)) from None
    except Exception as error:  # Python's reader lets errors of its own helpers through
        raise DocumentError(f"a value that cannot be read: {error!r}") from None
    _check_depth(tree, max_depth)
    return tree


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"{twice[:80]!r} is in one object twice")
    return members


def _no_number(text: str) -> NoReturn:
    raise DocumentError(f"{text} is no number in JSON")


_PLAIN = json.JSONDecoder(parse_constant=_no_number)
_UNIQUE = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_object)


def _too_deep(max_depth: int) -> DocumentError:
    return DocumentError(f"more than {max_depth} lists and tables in one another")


def _check_depth(value: Any, max_depth: int) -> None:
    """Raises for too deep a value, without recursion: the value may be as deep as the parser's stack."""
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for node in level
            if isinstance(node, dict | list)
            for inner in (node.values() if isinstance(node, dict) else node)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep(max_depth)


def _check_text(value: Any) -> None:
    """Raises for lone surrogates, which no file and no terminal accepts."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DocumentError("text with half a surrogate pair, which is not Unicode") from None
