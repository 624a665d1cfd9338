"""`check_strategy`: whether a strategy, of the house or of yours, obeys the laws of strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradstream.job.registry import find_strategy
from gradstream.strategies.base import Strategy
from gradstream.testing.properties import LAWS, BrokenPropertyError, Law

__all__ = ["BrokenPropertiesError", "PropertyResult", "StrategyReport", "check_strategy"]


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """One law, and what was seen of it.

    Args:
        law: its name.
        says: the law in a sentence.
        holds: whether the strategy obeys.
        seen: figures, or how it is broken.
    """

    law: str
    says: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{'holds ' if self.holds else 'BROKEN'}  {self.law:<12}  {self.seen}"


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """All laws of one strategy. As text, a line for each.

    Args:
        strategy: as it was checked.
        verdicts: in the order of the laws.
    """

    strategy: str
    verdicts: tuple[PropertyResult, ...]

    @property
    def broken(self) -> tuple[PropertyResult, ...]:
        """The laws that it breaks."""
        return tuple(verdict for verdict in self.verdicts if not verdict.holds)

    def __str__(self) -> str:
        return "\n".join([self.strategy, *(f"  {verdict}" for verdict in self.verdicts)])


class BrokenPropertiesError(AssertionError):
    """A strategy breaks laws; the message names each, `report` has all of them."""

    def __init__(self, report: StrategyReport) -> None:
        broken = "\n".join(f"  {one.law}: {one.says}\n    But: {one.seen}" for one in report.broken)
        super().__init__(
            f"{report.strategy} breaks {len(report.broken)} of {len(report.verdicts)} laws:\n{broken}"
        )
        self.report = report


def check_strategy(strategy: str | type[Strategy] | Strategy, **options: Any) -> StrategyReport:
    """Runs a strategy through some hundred small simulations, and says which laws it obeys.

    It takes seconds and no processes. The laws, and how each is looked at, are in
    `gradstream.testing.properties`. They are of strategies whose pushes are sums of gradients
    (what `accumulate` and `update` make of them, without momentum): those are counted sample by sample. Of a
    strategy that pushes differences, Σ over the server and all workers is; one that pushes parameters is
    expected to take their mean where all have gone through as many samples. Outer gradients are counted as
    gradients are, with an outer optimizer that only subtracts them.
    One that goes through a group weighs each gradient by a method `weight`, as `AllReduce` does.

    Args:
        strategy: a class, an object, a name, or "file.py:Class".
        options: fields of the strategy, where it is not an object.

    Raises:
        BrokenLawsError: it breaks some; names all of them with the figures, and has the `StrategyReport`.
        ConfigError: there is no such strategy, or it refuses the options.
    """
    made = find_strategy(strategy, options)  # type: ignore[arg-type]  # it takes classes too
    report = StrategyReport(repr(made), tuple(_verdict(law, made) for law in LAWS))
    if report.broken:
        raise BrokenPropertiesError(report)
    return report


def _verdict(law: Law, strategy: Strategy) -> PropertyResult:
    says = (law.__doc__ or "").splitlines()[0]
    try:
        return PropertyResult(law.__name__, says, True, law(strategy))
    except BrokenPropertyError as broken:
        return PropertyResult(law.__name__, says, False, str(broken))
