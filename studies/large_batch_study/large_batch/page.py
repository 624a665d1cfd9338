"""The tables of docs/large-batch.md, of what a record has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import table

METHODS = {
    "plain": "the rate of 128",
    "linear": "linear scaling of it",
    "longer": "the rate of 128, as many updates",
    "sgd": "SGD, tuned",
    "lars": "LARS, tuned",
    "lamb": "LAMB, tuned",
}
CASES = {
    "quartic": "f(x, y), from the saddle",
    "near": "f(x, y), from 1e-6 beside it",
    "linear": "linear network, from the saddle",
    "zero": "linear network, from 0",
}
FULL, DIRECTIONS = "full space, 1e-3", "100 directions, 1e-3"


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The tables by the name of their place, of the parts that are there."""
    found = record["found"]
    made = {
        "accuracies": lambda: minima(found["batch"], accuracy),
        "losses": lambda: minima(found["batch"], lambda one: around(one.get("loss"), 3)),
        "sharpness": lambda: minima(found["batch"], lambda one: around(one.get("sharpness", {}).get(FULL))),
        "starts": lambda: starts(found.get("batch", {}), found["start"]),
        "growths": lambda: growths(found["growth"]),
        "saddles": lambda: saddles(found["saddle"]),
        "counts": lambda: counts(found["count"]),
        "noise": lambda: noise(found["count"]),
    }
    needs = {"starts": "start", "growths": "growth", "saddles": "saddle", "counts": "count", "noise": "count"}
    return {place: make() for place, make in made.items() if needs.get(place, "batch") in found}


def around(figures: Sequence[float] | None, digits: int = 1) -> str:
    """Mean ± standard deviation."""
    return "–" if figures is None else f"{figures[0]:,.{digits}f} ± {figures[1]:,.{digits}f}"


def accuracy(one: Mapping[str, Any]) -> str:
    """Of a case: accuracy, how many runs broke down, and the rate if it was a choice."""
    failed, edge = f", {one['failed']} failed" if one["failed"] else "", "*" if one["at_edge"] else ""
    return f"{around(one['accuracy'])}{failed} ({one['rate']:g}{edge})"


def minima(by_model: Mapping[str, Any], cell: Callable[[Mapping[str, Any]], str]) -> str:
    """A figure by batch size and method."""
    lines = []
    for model, by_size in by_model.items():
        for size, by_method in by_size.items():
            cells = (cell(by_method[name]) if name in by_method else "" for name in METHODS)
            lines.append([model, size, *cells])
    return table(["", "batch", *METHODS.values()], lines)


HEAD = ("updates", "accuracy in % (rate)", "training loss", "sharpness", "in 100 directions")


def _row(title: Sequence[str], one: Mapping[str, Any]) -> list[str]:
    boxes = one.get("sharpness", {})
    sharp = (around(boxes.get(name)) for name in (FULL, DIRECTIONS))
    return [*title, f"{one['updates']:,}", accuracy(one), around(one.get("loss"), 3), *sharp]


def starts(by_model: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """By the number of small-batch epochs."""
    lines = []
    for model, by_size in after.items():
        for size, by_case in by_size.items():
            if without := by_model.get(model, {}).get(size):
                lines.append(_row([model, "0"], without["sgd"]))
            lines += [_row([model, case], one) for case, one in by_case.items()]
    return table(["", "epochs of 128 first", *HEAD], lines)


def growths(by_model: Mapping[str, Any]) -> str:
    """Growing batches beside falling rates."""
    lines = [
        _row([model, case], one)
        for model, by_size in by_model.items()
        for by_case in by_size.values()
        for case, one in by_case.items()
    ]
    return table(["", "", *HEAD], lines)


def saddles(by_case: Mapping[str, Any]) -> str:
    """Updates and samples out of a saddle."""
    lines = [
        [CASES[case], size, str(one["left"]), around(one["updates"]), around(one["samples"], 0)]
        for case, by_size in by_case.items()
        for size, one in by_size.items()
    ]
    return table(["", "batch", "runs that left", "updates", "samples"], lines)


def counts(by_model: Mapping[str, Any]) -> str:
    """Updates and samples to the target."""
    lines = [
        [
            model,
            size,
            f"{one['rate']:g}{' (edge)' if one['at_edge'] else ''}",
            around(one["updates"]),
            f"{one['fit']:,.1f}",
            around(one["samples"], 0),
        ]
        for model, found in by_model.items()
        for size, one in found["batches"].items()
    ]
    return table(["", "batch", "rate", "updates", "of the fit", "samples"], lines)


def noise(by_model: Mapping[str, Any]) -> str:
    """The critical batch and the noise scale."""
    lines = [
        [
            model,
            around(found["least_updates"]),
            around(found["least_samples"], 0),
            around(found["critical"]),
            ", ".join(f"{one[0]:,.0f}" for one in found["noise"]),
            around(found["noise_mean"]),
            around(found["critical_over_noise"], 2),
        ]
        for model, found in by_model.items()
    ]
    head = ("S_min", "E_min", "critical batch", "noise scale on the way", "its mean", "critical / noise")
    return table(["", *head], lines)
