"""Whether the links of a group are quick enough for its exchange, and if not, how to exchange instead: in one sentence.

The group has measured what a message costs, α + n·β seconds for n bytes, and the steps say how long a minibatch is
computed: c seconds on the slowest worker. For W workers and a gradient of n bytes, C of them encoded, an exchange takes

    summed          2(W - 1)·(α + n·β/W)        a ring
    gathered        (W - 1)·(α + C·β)           a sum of encoded vectors is no encoded vector, so each gets those of all

Workers that wait less than a quarter of c need no advice. For others it is local SGD of the shortest period H at which
an exchange takes at most H·c/10, with the first of no codec, `int8`, `float4` and `one-bit` for which H ≤ 20: no codec
loses more than it has to. Where none is enough, it is the quickest of them and H ≤ 500. The time of encoding is left
out. Whether a model learns as well at such a period is for its user to see.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradstream.codec import named

ENOUGH = 0.25
"""Seconds of waiting for each second of computing above which there is advice."""
SHARE = 0.1
"""The most seconds of exchanges for each second of computing."""
NEAR, LONGEST = 20, 500
"""The longest period before a codec that loses more is taken, and the longest of all."""
CODECS = {"int8": named.int8, "float4": named.float4, "one-bit": named.one_bit}
"""From what loses least to what loses most."""
BITS = 8e-6
"""Megabits of a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What was measured.

    Args:
        workers: W.
        elems: number of elements of the gradient, float32.
        alpha_s, beta_s_byte: α and β.
        compute_s, wait_s: of a minibatch, on the worker that computes longest.
    """

    workers: int
    elems: int
    alpha_s: float
    beta_s_byte: float
    compute_s: float
    wait_s: float

    @property
    def sum_s(self) -> float:
        """Seconds of an exchange without a codec."""
        return 2 * (self.workers - 1) * (self.alpha_s + 4 * self.elems * self.beta_s_byte / self.workers)

    def gathered_s(self, codec: str) -> float:
        """Seconds of an exchange with a codec; infinite where it is refused, since it would send more."""
        encoded = CODECS[codec]().encoded_bytes(self.elems)
        if encoded >= 8 * self.elems / self.workers:
            return math.inf
        return (self.workers - 1) * (self.alpha_s + encoded * self.beta_s_byte)

    def advice(self) -> tuple[int, str | None, float]:
        """(H, codec, seconds of an exchange) of local SGD."""
        ways: dict[str | None, float] = {None: self.sum_s}
        ways |= {codec: self.gathered_s(codec) for codec in CODECS}
        near = (codec for codec, seconds in ways.items() if seconds <= NEAR * SHARE * self.compute_s)
        codec = next(near, min(ways, key=lambda one: ways[one]))
        every = max(2, math.ceil(ways[codec] / (SHARE * self.compute_s)))
        return min(every, LONGEST), codec, ways[codec]

    def sentence(self) -> str:
        """The advice in words."""
        now = f"{_seconds(self.compute_s)} of computing and {_seconds(self.wait_s)} of waiting for each minibatch"
        every, codec, seconds = self.advice()
        if self.wait_s <= max(ENOUGH * self.compute_s, seconds / every):
            return now
        option = "" if codec is None else f" --codec {codec}"
        return (
            f"{now}, at {_short(BITS / self.beta_s_byte)} Mbit/s; --strategy local-sgd --set strategy.every={every}"
            f"{option} would wait {_seconds(seconds / every)}"
        )


def links_of(events: Iterable[Mapping[str, Any]]) -> Links | None:
    """What a run by allreduce has measured; None for other runs, in one machine's memory, and where nothing was.

    None too where local SGD, or its codecs, would be refused: for a user's own loop, split models, and other numbers
    than float32.
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
    workers, elems = started.get("workers", 0), started.get("num_parameters", 0)
    if started.get("strategy") != "allreduce" or workers < 2 or not elems:
        return None
    if not formed.get("beta_s_byte") or not steps or split or not started.get("num_samples"):
        return None
    if whole_bytes > 6 * elems * sum(map(len, steps.values())):  # float64
        return None
    compute_s, wait_s = max(
        tuple(statistics.median(step[key] for step in mine) for key in ("compute_s", "wait_s"))
        for mine in steps.values()
    )
    return Links(
        workers=workers,
        elems=elems,
        alpha_s=formed["alpha_s"],
        beta_s_byte=formed["beta_s_byte"],
        compute_s=compute_s,
        wait_s=wait_s,
    )


def _seconds(seconds: float) -> str:
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(1e3 * seconds)} ms"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
