"""What a reader sees of a study's record: tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, table
from study import subject
from study.findings import ITERATION, NEAR
from study.methods import EXPONENTS
from study.scenes import BATCH_COUNTS

Found = Mapping[str, Any]
Units = Mapping[str, Found]
OWN: Mapping[str, tuple[str, ...]] = {
    "dc-asgd": ("dc-asgd", "dc-asgd-a", "downpour"),
    "diloco": ("diloco", "averaging"),
    "downpour": ("downpour", "downpour-adagrad", "downpour-momentum"),
    "elastic-averaging": ("elastic", "eamsgd", "averaging"),
    "parameter-averaging": ("averaging", "one-shot", "diloco"),
    "softsync": tuple(f"softsync-{splits}{rule}" for splits in (1, 15, 30) for rule in ("", "-aware")),
    "ssp": ("ssp", "downpour"),
    "synchronous": ("synchronous", "synchronous-momentum", "allreduce"),
}
"""By page of a strategy, methods that it shows."""
RULES = {"sgd": "fixed rate", "adagrad": "Adagrad", "lbfgs": "Sandblaster L-BFGS"}
"""Figure 5's lines."""
SAME = "="
"""What stands behind a difference whose interval has 0 in it."""


def path_of(page: str) -> Path:
    """Where a page is: those of the study beside its record, those of strategies in docs/."""
    folder = ROOT / "studies" / "async_study"
    if page == "study":
        return folder / "README.md"
    if page == "distbelief":
        return folder / "distbelief.md"
    return ROOT / "docs" / "strategies" / f"{page}.md"


def tables(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By page, the tables by the name of their place on it."""
    scenes, target = {name: _begun(scene) for name, scene in record["scenes"].items()}, record["target"]
    equal = scenes["equal"]
    study = {
        "state": state(record),
        "accuracy": _accuracy(equal, "synchronous"),
        "clock": _by_clock(equal),
        "time": _time(equal["units"], target),
        "rates": _rates(equal["units"], equal["rates"]),
        "exponents": _exponents(_together(scenes, "equal", "exponents"), equal["rates"]),
    }
    if "paper" in scenes:
        study["paper"] = _accuracy(scenes["paper"], "single-momentum")
    for name in ("uneven", "by-label", "cnn"):
        if name in scenes:
            study[name] = _accuracy(scenes[name], "allreduce")
            study[f"{name}-clock"] = _by_clock(scenes[name])
    pages = {"study": study}
    for page, names in OWN.items():
        there = {name: equal["units"][name] for name in names if name in equal["units"]}
        pages[page] = {"study": _own(there, target)}
    if "figure-5" in scenes:
        pages["distbelief"] = {
            "state": state(record),
            "figure-4": _figure_4(scenes["figure-4"]["units"]),
            "figure-5": _figure_5(scenes["figure-5"]["units"], target),
        }
    return pages


def _begun(scene: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the methods of which nothing was run yet."""
    units = {name: one for name, one in scene["units"].items() if one["by_rate"] or one["accuracies"]}
    return {**scene, "units": units}


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(head, rows) if rows else "Not run yet."


def _together(scenes: Mapping[str, Any], *names: str) -> Units:
    return {name: one for scene in names if scene in scenes for name, one in scenes[scene]["units"].items()}


def state(record: Mapping[str, Any]) -> str:
    """How far a study is, and where it was made."""
    machine = record["machine"]
    machine = machine.get("machine", machine)
    whole = "All" if record["complete"] else "Not all is there yet:"
    commits = ", ".join(record["commits"])
    return (
        f"{whole} {record['runs']:,} runs, {record['hours']} hours of a core, {record['date']}, on "
        f"{machine['cores']} cores of an {machine['processor']}, commits {commits}."
    )


def _accuracy(scene: Mapping[str, Any], beside: str) -> str:
    """At equal samples."""
    units: Units = {name: one for name, one in scene["units"].items() if not one["timed"]}
    head = [
        f"{scene['epochs']:g} epochs",
        "rate",
        "accuracy",
        "± of seeds",
        f"minus {units[beside]['title']}" if beside in units else "minus",
        "staleness, mean",
        "at most",
        f"rates within {100 * NEAR:.0f} points",
    ]
    rows = [
        [
            one["title"],
            _rate(one),
            _percent(one.get("accuracy")),
            _points(one.get("deviation")),
            _difference(one["minus"].get(beside)),
            _number(one.get("staleness_mean"), ".1f"),
            _number(one.get("staleness_max"), "d"),
            _percent(one.get("near"), 0),
        ]
        for one in units.values()
    ]
    return _rows(head, rows)


def _by_clock(scene: Mapping[str, Any]) -> str:
    """At equal time: each with a schedule that ends then."""
    units: Units = scene["units"]
    clock = scene["clock"]
    in_time = {
        name: one
        for name, one in units.items()
        if one["timed"] or (f"{name}-timed" not in units and one["workers"] > 1)
    }
    title = units[clock]["title"] if clock in units else clock
    head = [
        f"{scene['equal_s'] or 0:.1f} s",
        "epochs",
        "ms an iteration",
        "rate",
        "accuracy",
        "± of seeds",
        f"minus {title}",
    ]
    rows = [
        [
            one["title"],
            f"{one['epochs']:g}",
            _number(one["iteration_s"] * 1e3 if "iteration_s" in one else None, ".1f"),
            _rate(one),
            _percent(one.get("accuracy")),
            _points(one.get("deviation")),
            _difference(one["minus"].get(clock)),
        ]
        for one in sorted(in_time.values(), key=lambda one: -one.get("accuracy", 0.0))
    ]
    return _rows(head, rows)


def _time(units: Units, target: float) -> str:
    """Times to the target, in the runs of equal samples."""
    head = [
        "",
        "ms an iteration",
        f"seconds to {100 * target:.0f} %",
        "± of seeds",
        "iterations",
        "times the best single machine",
        "kB a gradient",
    ]
    alone = min(
        (one["seconds"] for one in units.values() if one["workers"] == 1 and one.get("seconds")), default=None
    )
    rows = []
    for one in units.values():
        if one["timed"]:
            continue
        seconds, iteration_s = one.get("seconds"), one.get("iteration_s")
        known = seconds is not None and iteration_s is not None
        rows.append(
            [
                one["title"],
                _number(None if iteration_s is None else 1e3 * iteration_s, ".1f"),
                _number(seconds, ".2f") if known else _reached(one),
                _number(one.get("seconds_deviation"), ".2f"),
                _number(seconds / iteration_s if known else None, ".0f"),
                _number(alone / seconds if alone and seconds else None, ".1f"),
                _number(one["moved_bytes"] / 1e3 if "moved_bytes" in one else None, ".0f"),
            ]
        )
    return _rows(head, rows)


def _own(units: Units, target: float) -> str:
    """A few methods on equal machines, for the page of a strategy."""
    head = [
        "30 workers, 10 epochs",
        "rate",
        "accuracy",
        "± of seeds",
        "minus synchronous",
        f"seconds to {100 * target:.0f} %",
        "kB a gradient",
    ]
    rows = [
        [
            one["title"],
            _rate(one),
            _percent(one.get("accuracy")),
            _points(one.get("deviation")),
            _difference(one["minus"].get("synchronous")),
            _number(one["seconds"], ".2f") if one.get("seconds") else _reached(one),
            _number(one["moved_bytes"] / 1e3 if "moved_bytes" in one else None, ".0f"),
        ]
        for one in units.values()
    ]
    return _rows(head, rows)


def _reached(one: Found) -> str:
    return f"{one['reached']} of {len(one['accuracies'])} seeds" if "reached" in one else ""


def _rates(units: Units, rates: Sequence[float]) -> str:
    names = [f"{rate:g}" for rate in rates]
    rows = []
    for one in units.values():
        if one["timed"]:
            continue
        cells = []
        for name in names:
            accuracy = _percent(one["by_rate"].get(name))
            cells.append(f"{accuracy} ✗" if name in one["failed"] else accuracy)
        rows.append([one["title"], *cells])
    return _rows(["rate:", *names], rows)


def _exponents(units: Units, rates: Sequence[float]) -> str:
    """Where do we draw the line? By exponent."""
    names = [f"{rate:g}" for rate in rates]
    rows = []
    for exponent in EXPONENTS:
        one = next((one for one in units.values() if one.get("exponent") == exponent), None)
        if one is not None:
            tuned = [_percent(one["by_rate"].get(name)) for name in names]
            accuracy, deviation = _percent(one.get("accuracy")), _points(one.get("deviation"))
            rows.append([f"{exponent:g}", _rate(one), accuracy, deviation, *tuned])
    return _rows(["p", "best rate", "accuracy", "± of seeds", *(f"at {name}" for name in names)], rows)


def _figure_4(units: Units) -> str:
    head = [
        "",
        "rate",
        "test accuracy",
        "± of seeds",
        "training accuracy",
        "staleness, mean",
        "seconds an epoch",
    ]
    rows = [
        [
            one["title"],
            _rate(one),
            _percent(one.get("accuracy")),
            _points(one.get("deviation")),
            _percent(one.get("train_accuracy")),
            _number(one.get("staleness_mean"), ".1f"),
            _number(
                one["iteration_s"] * subject.TRAIN_SAMPLES / ITERATION if "iteration_s" in one else None,
                ".2f",
            ),
        ]
        for one in units.values()
    ]
    return _rows(head, rows)


def _figure_5(units: Units, target: float) -> str:
    rows = []
    for rule, title in RULES.items() if units else ():
        found = [units.get(f"{rule}-{count}") for count in BATCH_COUNTS]
        rows.append([title, *(_seconds(one) for one in found)])
        if rule != "lbfgs":
            rows.append(["at rate", *(_rate(one) if one else "" for one in found)])
    return _rows(
        [f"seconds to {100 * target:.0f} %, replicas:", *(f"{count:,}" for count in BATCH_COUNTS)], rows
    )


def _seconds(one: Found | None) -> str:
    if one is None or "reached" not in one:
        return ""
    if one["seconds"] is None:
        return _reached(one)
    several = f" ± {one['seconds_deviation']:.2f}" if len(one["accuracies"]) > 1 else ""
    return f"{one['seconds']:.2f}{several}"


def _rate(one: Found) -> str:
    """The best one; at the edge of the grid it says so."""
    if one["rate"] is None:
        return ""
    return f"{one['rate']:g}{' (edge)' if one['at_edge'] else ''}"


def _difference(found: Sequence[float] | None) -> str:
    """In points, with its interval of 95 %; `=` where they cannot be told apart."""
    if found is None:
        return ""
    mean, half = found
    same = f" {SAME}" if abs(mean) <= half else ""
    return f"{100 * mean:+.1f} ± {100 * half:.1f}{same}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
