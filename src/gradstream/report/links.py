"""Reads from a run's events what `Links` gives advice by: see `coordinator.links`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gradstream.coordinator.links import Links


def links_of(events: Iterable[Mapping[str, Any]]) -> Links | None:
    """What a run by allreduce has measured; None for other runs, in one machine's memory, and where nothing was.

    None too where local SGD, or its codecs, would be refused: for a user's own loop, split models, and other numbers
    than float32; and where a phase of the run has another strategy.
    """
    started: Mapping[str, Any] = {}
    formed: Mapping[str, Any] = {}
    steps = defaultdict[str, list[Mapping[str, Any]]](list)
    whole_bytes, split = 0, False
    for event in events:
        match event["event"]:
            case "started":
                started = event
            case "group":
                formed = event
            case "step":
                steps[event["node"]].append(event)
            case "exchange":
                whole_bytes += event.get("whole_pushed_bytes", 0)  # earlier versions did not record it
            case "part":
                split = True
            case "phase" if event["strategy"] != "allreduce":
                return None
    workers, elems = started.get("workers", 0), started.get("num_parameters", 0)
    if started.get("strategy") != "allreduce" or workers < 2 or not elems:
        return None
    if not formed.get("beta_s_byte") or not steps or split or not started.get("num_samples"):
        return None
    if whole_bytes > 6 * elems * sum(map(len, steps.values())):  # float64
        return None
    medians = [
        tuple(statistics.median(step[key] for step in mine) for key in ("compute_s", "wait_s", "samples"))
        for mine in steps.values()
    ]
    compute_s, wait_s, _ = max(medians)
    return Links(
        workers=workers,
        elems=elems,
        alpha_s=formed["alpha_s"],
        beta_s_byte=formed["beta_s_byte"],
        compute_s=compute_s,
        wait_s=wait_s,
        epoch=int(started["num_samples"] / sum(samples for *_, samples in medians)),
        spread=compute_s / (min(medians)[0] or compute_s),
    )
