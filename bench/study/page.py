"""What a reader sees of a study's record: tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marks import table
from study.findings import NEAR
from study.methods import EXPONENTS

__all__ = ["state", "study_tables"]

Found = Mapping[str, Any]


def study_tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the study's page, by the name of their place on it."""
    found: Mapping[str, Found] = record["findings"]["methods"]
    run = {name: one for name, one in found.items() if one["by_rate"]}
    return {
        "state": state(record, len(found)),
        "accuracy": _accuracy(run, record["findings"]["equal_s"]),
        "time": _time(run, record["findings"]["target"]),
        "rates": _rates(run, record["budget"]["rates"]),
        "exponents": _exponents(run, record["budget"]["rates"]),
    }


def state(record: Mapping[str, Any], num_methods: int) -> str:
    """How far a study is, and where it was made."""
    budget = record["budget"]
    whole = num_methods * (len(budget["rates"]) + len(budget["seeds"]))
    missing = "" if record["runs"] >= whole else "; what is missing below was not run yet"
    machine = record["machine"]["machine"]
    return (
        f"Made of {record['runs']} of {whole} runs, {record['date']}, on {machine['cores']} cores of an "
        f"{machine['processor']}{missing}."
    )


def _accuracy(found: Mapping[str, Found], equal_s: float | None) -> str:
    alone = found.get("single", {}).get("rate")
    head = [
        "",
        "rate",
        "accuracy at equal samples",
        "± of seeds",
        f"after {equal_s or 0:.1f} s",
        f"at {alone or 0:g}, one machine's rate",
        "staleness, mean",
        "at most",
        f"rates within {100 * NEAR:.0f} points",
    ]
    rows = [
        [
            one["title"],
            _number(one["rate"], "g"),
            _percent(one.get("accuracy")),
            _points(one.get("deviation")),
            _percent(one.get("at_equal_s")),
            _percent(one["by_rate"].get(f"{alone:g}") if alone else None),
            _number(one.get("staleness_mean"), ".1f"),
            _number(one.get("staleness_max"), "d"),
            _percent(one.get("near"), 0),
        ]
        for one in found.values()
    ]
    return table(head, rows)


def _time(found: Mapping[str, Found], target: float) -> str:
    head = [
        "",
        "ms an iteration",
        f"iterations to {100 * target:.0f} %",
        "seconds",
        "times one machine",
        "kB a gradient",
    ]
    alone = found.get("single", {}).get("seconds")
    rows = []
    for one in found.values():
        seconds = one.get("seconds")
        iteration_s = one.get("iteration_s")
        rows.append(
            [
                one["title"],
                _number(None if iteration_s is None else 1e3 * iteration_s, ".1f"),
                _number(one.get("iterations"), ".0f"),
                _number(seconds, ".2f"),
                _number(alone / seconds if alone and seconds else None, ".1f"),
                _number(one["moved_bytes"] / 1e3 if "moved_bytes" in one else None, ".0f"),
            ]
        )
    return table(head, rows)


def _rates(found: Mapping[str, Found], rates: Sequence[float]) -> str:
    names = [f"{rate:g}" for rate in rates]
    rows = []
    for one in found.values():
        cells = []
        for name in names:
            accuracy = _percent(one["by_rate"].get(name))
            cells.append(f"{accuracy} ✗" if name in one["failed"] else accuracy)
        rows.append([one["title"], *cells])
    return table(["rate:", *names], rows)


def _exponents(found: Mapping[str, Found], rates: Sequence[float]) -> str:
    """Where do we draw the line? By exponent."""
    names = [f"{rate:g}" for rate in rates]
    rows = []
    for exponent in EXPONENTS:
        one = next((one for one in found.values() if one.get("exponent") == exponent), None)
        if one is not None:
            tuned = [_percent(one["by_rate"].get(name)) for name in names]
            rows.append([f"{exponent:g}", _number(one["rate"], "g"), _percent(one.get("accuracy")), *tuned])
    return table(["p", "best rate", "accuracy", *(f"at {name}" for name in names)], rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
