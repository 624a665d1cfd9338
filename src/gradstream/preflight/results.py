"""Runs the checks of a dry run and collects their results."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradstream.errors import UserCodeError

__all__ = ["Check", "CheckResult", "carry_out"]

Check = Callable[[], str]
"""A check: returns its figures as a text, or raises an error."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Args:
        name: of the check.
        ok: whether it is fine.
        detail: figures, or what is wrong.
        seconds: how long it took.
        trace: the user's own traceback, where their code failed.
    """

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0
    trace: str = ""


def carry_out(checks: Mapping[str, Check]) -> list[CheckResult]:
    """Runs the checks in turn, up to the first that fails."""
    results = []
    for name, check in checks.items():
        begun_s = time.perf_counter()
        try:
            detail = check()
            results.append(CheckResult(name, True, detail, time.perf_counter() - begun_s))
        except Exception as error:
            results.append(_failure(name, error, time.perf_counter() - begun_s))
            break
    return results


def _failure(name: str, error: Exception, seconds: float) -> CheckResult:
    ours = hasattr(error, "exit_status")
    own_code = isinstance(error, UserCodeError) or not ours
    trace = getattr(error, "traceback_text", "") or (traceback.format_exc() if own_code else "")
    return CheckResult(
        name, False, str(error) if ours else f"{type(error).__name__}: {error}", seconds, trace
    )
