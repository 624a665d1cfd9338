"""The suites that every carrier and every strategy must pass: `check_endpoint` and `check_strategy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradstream.errors import ConfigError, GradstreamError
from gradstream.job.registry import find_strategy
from gradstream.strategies.base import Strategy
from gradstream.testing.pieces import CHECKS as MEMORY_CHECKS
from gradstream.testing.pieces import LIMIT_S, Check, ConformanceError, MakePair
from gradstream.testing.properties import PROPERTIES, BrokenPropertyError, Property
from gradstream.testing.refusal_checks import CHECKS as REFUSAL_CHECKS
from gradstream.testing.stream_checks import ENDING_CHECKS, FLOW_CHECKS

# ---- carriers ----------------------------------------------------------------------------
# Conformance of a carrier: the promises of `transport.base`, as checks that every endpoint must pass.
#
# A carrier supplies a `MakePair`, which makes two endpoints that know each other, "near" and "far".
# `check_endpoint` runs all of `CHECKS`; a test suite may run them one by one::
#
#     async def test_order():
#         await run_check(stream_checks.order, make_pair)
#
# A check raises `ConformanceError` where the carrier breaks a promise. Unexpected exceptions of an endpoint pass
# through. Each check takes bounded time: for a carrier that loses a frame, it fails by deadline.

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


# ---- strategies --------------------------------------------------------------------------
# Whether a strategy, built-in or yours, has the properties that every strategy must have.


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """One property, and the result of its check.

    Args:
        name: name of the property.
        says: the property in a sentence.
        holds: whether the strategy has it.
        seen: the figures of the check, or the counterexample.
    """

    name: str
    says: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{'holds ' if self.holds else 'BROKEN'}  {self.name:<12}  {self.seen}"


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """The results of all checks of one strategy; `str` of it has a line for each.

    Args:
        strategy: class and options of the strategy, as text.
        results: the results, in the order of `properties.PROPERTIES`.
    """

    strategy: str
    results: tuple[PropertyResult, ...]

    @property
    def broken(self) -> tuple[PropertyResult, ...]:
        """The results of the checks that failed."""
        return tuple(result for result in self.results if not result.holds)

    def __str__(self) -> str:
        return "\n".join([self.strategy, *(f"  {result}" for result in self.results)])


class BrokenPropertiesError(AssertionError):
    """A strategy lacks properties; the message names each, and `report` has all results."""

    def __init__(self, report: StrategyReport) -> None:
        broken = "\n".join(
            f"  {result.name}: {result.says}\n    But: {result.seen}" for result in report.broken
        )
        super().__init__(
            f"{report.strategy} breaks {len(report.broken)} of {len(report.results)} properties:\n{broken}"
        )
        self.report = report


def check_strategy(strategy: str | type[Strategy] | Strategy, **options: Any) -> StrategyReport:
    """Runs a strategy in about a hundred small simulations, and reports which properties hold.

    It takes seconds and no processes. The properties and their checks are in `gradstream.testing.properties`.
    Where pushes are sums of gradients (by `accumulate` and `update`, without momentum), the checks count them
    sample by sample. Where a strategy pushes differences, they count the sum over the server and all workers.
    One that pushes parameters must take their mean where all workers have gone through equally many
    samples. Outer gradients are counted like gradients, with an outer optimizer that only subtracts them.
    A strategy with a group weighs each gradient by a method `weight`, as `AllReduce` does.

    Args:
        strategy: a class, an object, a name, or "file.py:Class".
        options: fields of the strategy, where it is not an object.

    Raises:
        BrokenPropertiesError: some properties do not hold; the message names each with its figures, and `report`
            is the `StrategyReport`.
        ConfigError: there is no such strategy, it refuses the options, or it is a batch method.
    """
    made = find_strategy(strategy, options)  # type: ignore[arg-type]  # it takes classes too
    if made.in_passes:
        raise ConfigError(
            f"{made!r} makes its own steps from passes over all samples, and these checks give a strategy an update "
            "rule: hold a batch method to one that runs in one process, as tests/strategies/test_batch_runs.py does"
        )
    report = StrategyReport(repr(made), tuple(_result(check, made) for check in PROPERTIES))
    if report.broken:
        raise BrokenPropertiesError(report)
    return report


def _result(check: Property, strategy: Strategy) -> PropertyResult:
    says = (check.__doc__ or "").splitlines()[0]
    try:
        return PropertyResult(check.__name__, says, True, check(strategy))
    except BrokenPropertyError as broken:
        return PropertyResult(check.__name__, says, False, str(broken))
