"""The slow worker for which the others wait, if there is one."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypedDict

from gradstream.report.worker_figures import attributed
from gradstream.telemetry.events import EventDict

# ---- straggler ---------------------------------------------------------------------------

SLOWER = 1.5
NOTABLE = 0.1
"""A smaller share of the run is not mentioned."""


class Straggler(TypedDict):
    """A worker that is slower and keeps the others waiting.

    `slower`: how many times more samples the median worker computes per second of its gradients. `waited_s`: mean
        seconds
    for which each of the others waited for the worker: within their steps, and from their own last step to the slow
    worker's last step.
    """

    who: str
    slower: float
    waited_s: float


def straggler_of(
    steps: Sequence[EventDict], train_s: float | None, absent: Collection[str] = ()
) -> Straggler | None:
    """The slowest worker, if it is 1.5 times slower and the others wait for it for a tenth of the run.

    Args:
        steps: "step" events.
        train_s: seconds of training; None if unknown.
        absent: names of workers that did not wait for the end because they were lost.

    Returns:
        None if no worker is that slow, or if nobody waits for it, as with asynchronous strategies before the end.
    """
    samples: Counter[str] = Counter()
    computed_s: Counter[str] = Counter()
    ends_s: dict[str, float] = {}  # end of the last step; nobody waits for a dropped gradient
    for step in steps:
        if not step.get("late"):
            ends_s[step["node"]] = max(step["time_s"], ends_s.get(step["node"], 0.0))
        samples[step["node"]] += step["samples"]
        computed_s[step["node"]] += step["compute_s"]
    per_s = {who: samples[who] / computed_s[who] for who in samples if samples[who] and computed_s[who] > 0}
    if len(per_s) < 2 or not train_s:
        return None
    slowest = min(per_s, key=lambda who: per_s[who])
    others = [speed for who, speed in per_s.items() if who != slowest]
    slower = statistics.median(others) / per_s[slowest]
    waited = (
        step["waited_for"].get(slowest, 0.0)
        for step in attributed(steps)
        if step["node"] != slowest and "waited_for" in step
    )
    end_s = ends_s.get(slowest, 0.0)
    idle = (max(0.0, end_s - last_s) for who, last_s in ends_s.items() if who not in absent)
    waited_s = math.fsum([*waited, *idle]) / len(others)
    if slower < SLOWER or waited_s <= NOTABLE * train_s:
        return None
    return Straggler(who=slowest, slower=slower, waited_s=waited_s)


def straggler_text(straggler: Straggler | None) -> str:
    """A straggler in words: "worker-3 is 5.0 × slower; the others waited 12.0 s for it"; "" for none."""
    if straggler is None:
        return ""
    who, slower, waited_s = straggler["who"], straggler["slower"], straggler["waited_s"]
    return f"{who} is {slower:.1f} × slower; the others waited {waited_s:,.1f} s for it"


# ---- worth -------------------------------------------------------------------------------
# Whether the machines of a run train faster than the best of them alone would, from the first minute.

LOOK_S = 60.0
"""How long a run goes on before it is judged, from the end of its first step."""

LEAST_STEPS = 8
"""Steps of each worker before that: the first steps of a process are slow."""

AHEAD = 1.1
"""How many times faster one machine has to be for a message."""


class Worth:
    """Judges a run over several machines once: compares its samples/s with what the best machine alone would compute.

    A machine alone would wait for nobody. So its rate is Σ over its workers of samples / seconds in gradients, as
    measured while these workers ran side by side. A run that loses a node, or begins another phase, is judged by the
    minute after that.
    """

    def __init__(self) -> None:
        self._machine: dict[str, str] = {}  # by worker; "" is the launcher's
        self._workers = 0
        self._trains_locally = False
        self._over = False
        self._begin()

    def _begin(self) -> None:
        self._samples: Counter[str] = Counter()
        self._computed_s: defaultdict[str, float] = defaultdict(float)
        self._steps: Counter[str] = Counter()
        self._began_s = 0.0

    def note(self, event: Mapping[str, Any]) -> str:
        """Takes an event of the run. Returns a message for the user; "" for none."""
        if event["event"] == "machine" and event["state"] == "joined":
            self._machine |= dict.fromkeys(event["nodes"], event["who"])
        elif event["event"] in ("started", "phase"):
            self._workers, self._trains_locally = int(event["workers"]), bool(event.get("trains_locally"))
            self._begin()
        elif event["event"] == "left":
            self._begin()
        elif event["event"] == "step" and not self._over:
            return self._step(event)
        return ""

    def _step(self, event: Mapping[str, Any]) -> str:
        who, now_s = event["node"], event["time_s"]
        self._steps[who] += 1
        if self._steps[who] == 1:  # it included compiling and filling caches
            self._began_s = max(self._began_s, now_s)
            return ""
        self._samples[who] += event["samples"]
        self._computed_s[who] += event["compute_s"]
        enough = len(self._steps) >= self._workers and min(self._steps.values()) > LEAST_STEPS
        if not enough or now_s < self._began_s + LOOK_S:
            return ""
        self._over = True
        return self._judged(now_s - self._began_s)

    def _judged(self, seconds: float) -> str:
        alone: defaultdict[str, float] = defaultdict(float)
        for who, computed_s in self._computed_s.items():
            if computed_s > 0:
                alone[self._machine.get(who, "")] += self._samples[who] / computed_s
        together = self._samples.total() / seconds
        if len(alone) < 2 or max(alone.values()) < AHEAD * together:
            return ""
        machine, rate = max(alone.items(), key=itemgetter(1))
        waits = 1 - sum(self._computed_s.values()) / (seconds * len(self._computed_s))
        return (
            f"this run is slower than one machine: {together:,.0f} samples/s together, and {machine or 'this machine'} "
            f"alone would do {rate:,.0f}; workers wait {waits:.0%} of the time for one another and the network. "
            + (
                "Larger minibatches or a longer period would help"
                if self._trains_locally
                else "Larger minibatches would help, or a strategy that exchanges less often: local-sgd, or auto, "
                "which measures"
            )
        )
