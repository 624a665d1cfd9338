"""Parses JSON and TOML from outside in bounded memory and depth, or refuses them with one typed error."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any, NoReturn

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
        text: the document.
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
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"{twice[:80]!r} is in one object twice")
    return found


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
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
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
