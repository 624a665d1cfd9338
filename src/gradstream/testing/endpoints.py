"""Conformance of a carrier: the promises of `transport.base`, as checks that every endpoint must pass.

A carrier supplies a `MakePair`, which makes two endpoints that know each other, "near" and "far".
`check_endpoint` runs all of `CHECKS`; a test suite may run them one by one::

    async def test_order():
        await run_check(flow_checks.order, make_pair)

A check raises `ConformanceError` where the carrier breaks a promise. Unexpected exceptions of an endpoint pass
through. Each check takes bounded time: for a carrier that loses a frame, it fails by deadline.
"""

from __future__ import annotations

from gradstream.errors import GradstreamError
from gradstream.testing.ending_checks import CHECKS as ENDING_CHECKS
from gradstream.testing.flow_checks import CHECKS as FLOW_CHECKS
from gradstream.testing.pieces import CHECKS as MEMORY_CHECKS
from gradstream.testing.pieces import LIMIT_S, Check, ConformanceError, MakePair, Pair
from gradstream.testing.refusal_checks import CHECKS as REFUSAL_CHECKS

__all__ = ["CHECKS", "Check", "ConformanceError", "MakePair", "Pair", "check_endpoint", "run_check"]

CHECKS: tuple[Check, ...] = (*FLOW_CHECKS, *ENDING_CHECKS, *MEMORY_CHECKS, *REFUSAL_CHECKS)


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
