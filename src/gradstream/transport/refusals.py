"""Refusals: from an exception to the frame that refuses a stream, and back."""

from __future__ import annotations

from typing import cast

from gradstream.errors import RefusedError
from gradstream.wire import v1

MISBEHAVIOUR = frozenset(
    {v1.BAD_REQUEST, v1.UNKNOWN_METHOD, v1.BAD_CERTIFICATE, v1.FORBIDDEN, v1.OVER_LIMIT, v1.NOT_MEMBER}
)
"""Codes that a node which follows the protocol does not meet repeatedly."""

_CODES = cast("dict[str, v1.Code]", dict(v1.Code.items()))


def code_of(error: BaseException) -> tuple[v1.Code, str]:
    """The code and the message that refuse a stream whose handler raised `error`."""
    if isinstance(error, RefusedError) and error.code in _CODES:
        return _CODES[error.code], error.reason
    return v1.INTERNAL, f"{type(error).__name__}: {error}"


def refusal_of(error: RefusedError) -> v1.Refuse:
    """The refusal that the peer would have sent to cause this error."""
    code, message = code_of(error)
    return v1.Refuse(code=code, message=message)


def refused_by(peer: str, refuse: v1.Refuse) -> RefusedError:
    """The error that a refusal by `peer` raises at the refused side."""
    code = next((name for name, value in _CODES.items() if value == refuse.code), str(refuse.code))
    return RefusedError(peer, code, refuse.message)
