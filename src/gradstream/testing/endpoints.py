"""Conformance of a carrier: the promises of `transport.base`, as checks that every endpoint must pass.

A carrier supplies a `MakePair`, which makes two endpoints that know each other, "near" and "far".
`check_endpoint` runs all of `CHECKS`; a test suite may run them one by one::

    async def test_order():
        await run_check(order, make_pair)

A check raises `ConformanceError` when a promise is broken; an unexpected exception of an endpoint passes
through. Each check takes bounded time: a carrier that loses a frame fails by deadline.
"""

from __future__ import annotations

from gradstream.errors import GradstreamError
from gradstream.testing.ending_checks import (
    cancel_by_called,
    cancel_by_caller,
    closing,
    deadline,
    early_finish,
    ends,
    peer_death,
    sender_deadline,
    unknown_peer,
    waiting_resets,
)
from gradstream.testing.flow_checks import (
    callers_window,
    concurrent_calls,
    credit,
    credit_then_send,
    independence,
    largest_chunk,
    order,
    priority,
)
from gradstream.testing.memory_checks import (
    landing,
    lending,
    lent_while_waiting,
    ownership_after_deadline,
    ownership_after_half,
    taken_over,
    tensors,
)
from gradstream.testing.pieces import (
    LIMIT_S,
    Check,
    ConformanceError,
    MakePair,
    Pair,
)
from gradstream.testing.refusal_checks import (
    absent,
    bad_answers,
    bad_chunks,
    handler_errors,
    identity,
    wrong_tensor,
)

__all__ = [
    "CHECKS",
    "Check",
    "ConformanceError",
    "MakePair",
    "Pair",
    "absent",
    "bad_answers",
    "bad_chunks",
    "callers_window",
    "cancel_by_called",
    "cancel_by_caller",
    "check_endpoint",
    "closing",
    "concurrent_calls",
    "credit",
    "credit_then_send",
    "deadline",
    "early_finish",
    "ends",
    "handler_errors",
    "identity",
    "independence",
    "landing",
    "largest_chunk",
    "lending",
    "lent_while_waiting",
    "order",
    "ownership_after_deadline",
    "ownership_after_half",
    "peer_death",
    "priority",
    "run_check",
    "sender_deadline",
    "taken_over",
    "tensors",
    "unknown_peer",
    "waiting_resets",
    "wrong_tensor",
]


async def check_endpoint(make_pair: MakePair) -> None:
    """Runs every check, each on a fresh pair.

    Raises:
        ConformanceError: a promise is broken; the message names the check.
    """
    for check in CHECKS:
        await run_check(check, make_pair)


async def run_check(check: Check, make_pair: MakePair) -> None:
    """Runs one check on a fresh pair, for at most `LIMIT_S` seconds."""
    async with make_pair() as pair:
        try:
            await pair.runtime.within(LIMIT_S, check(pair))
        except TimeoutError as error:
            if isinstance(error, GradstreamError):
                raise
            raise ConformanceError(f"{check.__name__}: not done in {LIMIT_S:g} s") from None
        except ConformanceError as error:
            raise ConformanceError(f"{check.__name__}: {error}") from None


CHECKS: tuple[Check, ...] = (
    order,
    largest_chunk,
    independence,
    credit,
    callers_window,
    credit_then_send,
    priority,
    concurrent_calls,
    ends,
    early_finish,
    cancel_by_caller,
    cancel_by_called,
    deadline,
    waiting_resets,
    sender_deadline,
    peer_death,
    unknown_peer,
    closing,
    tensors,
    taken_over,
    landing,
    lending,
    lent_while_waiting,
    ownership_after_deadline,
    ownership_after_half,
    identity,
    bad_chunks,
    bad_answers,
    wrong_tensor,
    absent,
    handler_errors,
)
