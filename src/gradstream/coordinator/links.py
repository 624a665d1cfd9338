"""`Links`: whether the links of a group are quick enough for its exchange, and if not, how to exchange instead.

`report.links` gives that as advice after a run, and `link_choice` chooses by it between two phases of a run.

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
from dataclasses import dataclass

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
        elems: number of elements of the gradient.
        alpha_s, beta_s_byte: α and β.
        compute_s, wait_s: of a minibatch, on the worker that computes longest.
        itemsize: bytes of an element; codecs need 4.
    """

    workers: int
    elems: int
    alpha_s: float
    beta_s_byte: float
    compute_s: float
    wait_s: float
    itemsize: int = 4

    @property
    def sum_s(self) -> float:
        """Seconds of an exchange without a codec."""
        size = self.itemsize * self.elems
        return 2 * (self.workers - 1) * (self.alpha_s + size * self.beta_s_byte / self.workers)

    def gathered_s(self, codec: str) -> float:
        """Seconds of an exchange with a codec; infinite where it is refused, or would send more."""
        encoded = CODECS[codec]().encoded_bytes(self.elems)
        if self.itemsize != 4 or encoded >= 8 * self.elems / self.workers:
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

    @property
    def is_quick(self) -> bool:
        """Whether nothing is to be changed: workers wait little, or would wait no less."""
        every, _, seconds = self.advice()
        return self.wait_s <= max(ENOUGH * self.compute_s, seconds / every)

    @property
    def measured(self) -> str:
        """What a minibatch takes, in words."""
        return f"{in_words(self.compute_s)} of computing and {in_words(self.wait_s)} of waiting for each minibatch"

    @property
    def speed(self) -> str:
        """The bandwidth, in words."""
        return f"{_short(BITS / self.beta_s_byte)} Mbit/s"

    def sentence(self) -> str:
        """The advice in words."""
        if self.is_quick:
            return self.measured
        every, codec, seconds = self.advice()
        option = "" if codec is None else f" --codec {codec}"
        return (
            f"{self.measured}, at {self.speed}; --strategy local-sgd --set strategy.every={every}"
            f"{option} would wait {in_words(seconds / every)}"
        )


def in_words(seconds: float) -> str:
    """Seconds with three digits: "16 ms"."""
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(1e3 * seconds)} ms"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
