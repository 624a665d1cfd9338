"""Options of strategies that would have no effect, or a wrong one, are refused with a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError
from gradstream.testing.runs import least_squares


def of_tau(staleness: int) -> float:
    return 1 / (1 + staleness)


@pytest.mark.parametrize(
    ("made", "option", "least"),
    [
        (gs.strategies.AsySG, "gradients", 1),
        (gs.DiLoCo, "every", 1),
        (gs.StreamingDiLoCo, "fragments", 1),
        (gs.Downpour, "push_every", 1),
        (gs.Downpour, "fetch_every", 1),
        (gs.strategies.EAMSGD, "every", 1),
        (gs.ElasticAveraging, "every", 1),
        (gs.ParameterAveraging, "every", 1),
        (gs.Softsync, "splits", 1),
        (gs.SSP, "bound", 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_counted_is_a_whole_number(made: Callable[..., Any], option: str, least: int) -> None:
    """A period of 1.5 steps would never be over: one that averages by it would meet once, at the end."""
    for wrong in (least - 1, 1.5, math.inf, "2", True):
        with pytest.raises(ConfigError, match=rf"\({option}={wrong!r}\): expected a whole number.*{least}"):
            made(**{option: wrong})


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, "0.1"])
@pytest.mark.parametrize("made", [gs.SSP, gs.Downpour])
def test_local_rates_are_rates(made: Any, rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"local_lr=.*expected a finite rate of at least 0"):
        made(local_lr=rate)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: gs.strategies.StalenessAware(weight=of_tau, power=2.0), r"weight=of_tau.*leave power out"),
        (lambda: gs.Softsync(weight=of_tau, power=0.0), "leave power out"),
        (lambda: gs.Softsync(power="1"), r"power='1'\): expected a finite number"),  # type: ignore[arg-type]
        (lambda: gs.SSP(bound=0, local_lr=0.1), "leave local_lr out"),
        (lambda: gs.Downpour(local_lr=0.1), "take a longer fetch_every, or leave local_lr out"),
        (lambda: gs.Downpour(significance_of="absolute"), "everything is significant"),
        (lambda: gs.Downpour(significance=0.1, local_momentum=0.5), "use one of the two"),
        (lambda: gs.strategies.DCASGD(adaptive=False, decay=0.9), "leave decay and eps out"),
        (lambda: gs.strategies.DCASGD(adaptive=False, eps=1e-3), "leave decay and eps out"),
    ],
)
def test_what_would_be_ignored_is_refused(make: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: gs.Softsync(weight="mine.py:of_tau"),  # type: ignore[arg-type]
        lambda: gs.ParameterAveraging(combine="mine.py:of_tau"),  # type: ignore[arg-type]
    ],
)
def test_the_place_of_a_function_is_for_settings(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"mine.py:of_tau'\): expected the function itself"):
        make()


def test_elastic_averaging_in_step_does_not_go_past_the_mean() -> None:
    """β = W·α above 1: the centre overshoots, in a few exchanges beyond all bounds."""
    model, data = least_squares(48, 3)
    options: dict[str, Any] = {"workers": 4, "batch_size": 4, "epochs": 2}
    with pytest.raises(ConfigError, match=r"moving_rate=0.26.*4 workers: expected at most 0.25"):
        simulate(
            model, data, strategy=gs.ElasticAveraging(every=2, moving_rate=0.26, synchronous=True), **options
        )
    simulate(
        model, data, strategy=gs.ElasticAveraging(every=2, moving_rate=0.25, synchronous=True), **options
    )
    simulate(model, data, strategy=gs.ElasticAveraging(every=2, moving_rate=0.26), **options)


class Ruleless(gs.Downpour):
    """Its author has made a mistake in the rule."""

    def rule(self, num_workers: int, reduction: Any) -> Any:
        raise ValueError(f"no rule for {num_workers} workers")


def test_what_a_rule_raises_is_raised_before_anything_starts() -> None:
    model, data = least_squares(8, 4)
    with pytest.raises(ValueError, match="no rule for 2 workers"):
        simulate(model, data, strategy=Ruleless(), workers=2, batch_size=2, steps=1)


def test_a_rule_that_is_no_aggregation_rule_is_refused_before_the_run() -> None:
    """Otherwise each shard would fail at the missing method."""

    class Bare(gs.Downpour):
        def rule(self, num_workers: int, reduction: Any) -> Any:
            return "every push"

    model, data = least_squares(64, 4, whole=False)
    with pytest.raises(
        ConfigError, match=r"Bare.rule\(\) returned 'every push'.*derives from .*AggregationRule"
    ):
        simulate(model, data, strategy=Bare(), workers=2, batch_size=8, steps=2)
