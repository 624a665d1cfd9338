"""`Links`: whether the links of a group are quick enough for its exchange, and if not, how to exchange instead.

`report.links` gives that as advice after a run, and `link_choice` chooses by it between two phases of a run.

The group has measured what a message costs, α + n·β seconds for n bytes, and the steps say how long a minibatch is
computed: c seconds on the slowest worker. For W workers and a gradient of n bytes, C of them encoded, an exchange takes

    summed          2α + 2(W - 1)/W·n·β         slices go to their owners, sums of them to all
    encoded         2α + 2(W - 1)/W·C·β         the same, encoded each time; for W = 2 once, α + C·β

Workers that wait less than a quarter of c need no advice. For others it is local SGD of the shortest period H of
which a quarter takes as long as an exchange, x seconds: ⌈x/c⌉ minibatches, which are computed meanwhile (`delay`). So
nobody waits. The codec is the first of none, `int8`, `float4` and `one-bit` for which H ≤ 20: none loses more than it
has to. Where none is enough, it is the first with which x is at most a quarter longer than with the quickest: where α
is most of x, no codec helps. H is no longer than a data epoch, with which rounds end, and at most 500; where the epoch
would end with a short round, H is longer by so much that all rounds of an epoch are alike. The time of encoding is left
out. Whether a model learns as well at such a period is for its user to see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradstream.codec import named

ENOUGH = 0.25
"""Seconds of waiting for each second of computing above which there is advice."""
PARTS = 4
"""Seconds of computing for each second of an exchange, and minibatches of a round for each that is delayed."""
NEAR, LONGEST = 20, 500
"""The longest period before a codec that loses more is taken, and the longest of all."""
ALIKE = 1.25
"""Seconds of an exchange, over those of the quickest, at which a codec that loses more is not worth it."""
UNEVEN = 1.5
"""Times that one worker computes longer than another, from which on it is said."""
CODECS = {"int8": named.int8, "float4": named.float4, "one-bit": named.one_bit}
"""From what loses least to what loses most."""
BITS = 8e-6
"""Megabits of a byte."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Local SGD as it suits some links.

    Args:
        every: H, minibatches of a round.
        delay: those of them that are computed during the exchange.
        codec: name of the codec; None for none.
        exchange_s: seconds of an exchange.
        wait_s: seconds that a worker waits, for each minibatch.
    """

    every: int
    delay: int
    codec: str | None
    exchange_s: float
    wait_s: float

    @property
    def options(self) -> str:
        """On the command line."""
        delay = f" --set strategy.delay={self.delay}" if self.delay else ""
        codec = "" if self.codec is None else f" --codec {self.codec}"
        return f"--strategy local-sgd --set strategy.every={self.every}{delay}{codec}"

    @property
    def waits(self) -> str:
        """What a worker waits for each minibatch, in words."""
        return in_words(self.wait_s) if self.wait_s else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What was measured.

    Args:
        workers: W.
        elems: number of elements of the gradient.
        alpha_s, beta_s_byte: α and β.
        compute_s, wait_s: of a minibatch, on the worker that computes longest.
        itemsize: bytes of an element; codecs need 4.
        epoch: minibatches of a worker in a data epoch; None: not known.
        spread: that worker's seconds of computing over those of the one that computes shortest.
    """

    workers: int
    elems: int
    alpha_s: float
    beta_s_byte: float
    compute_s: float
    wait_s: float
    itemsize: int = 4
    epoch: int | None = None
    spread: float = 1.0

    @property
    def sum_s(self) -> float:
        """Seconds of an exchange without a codec."""
        size = self.itemsize * self.elems
        return 2 * self.alpha_s + self._sent * size * self.beta_s_byte

    @property
    def _sent(self) -> float:
        """What a worker sends in an exchange, over the size of the whole vector."""
        return 2 * (self.workers - 1) / self.workers

    def encoded_s(self, codec: str) -> float:
        """Seconds of an exchange with a codec; infinite where it is refused."""
        if self.itemsize != 4:
            return math.inf
        encoded = CODECS[codec]().encoded_bytes(self.elems)
        messages = 1 if self.workers == 2 else 2
        return messages * self.alpha_s + self._sent * encoded * self.beta_s_byte

    def advice(self) -> Advice:
        """See the module."""
        ways: dict[str | None, float] = {None: self.sum_s}
        ways |= {codec: self.encoded_s(codec) for codec in CODECS}
        enough_s = max(NEAR / PARTS * self.compute_s, ALIKE * min(ways.values()))
        codec, seconds = next((codec, seconds) for codec, seconds in ways.items() if seconds <= enough_s)
        longest = min(LONGEST, self.epoch or LONGEST)
        delay = max(1, min(math.ceil(seconds / self.compute_s), longest // PARTS))
        every = max(2, min(PARTS * delay, longest))
        if self.epoch:  # rounds end with an epoch: as many of them, of one length
            every = max(every, min(LONGEST, math.ceil(self.epoch / max(1, self.epoch // every))))
        return Advice(every, delay, codec, seconds, max(0.0, seconds - delay * self.compute_s) / every)

    @property
    def is_quick(self) -> bool:
        """Whether nothing is to be changed: workers wait little, or would wait no less."""
        return self.wait_s <= max(ENOUGH * self.compute_s, self.advice().wait_s)

    @property
    def measured(self) -> str:
        """What a minibatch takes, in words."""
        return f"{self.computing} and {in_words(self.wait_s)} of waiting for each minibatch"

    @property
    def computing(self) -> str:
        """How long a minibatch is computed, in words, and how much longer than on another worker."""
        said = f"{in_words(self.compute_s)} of computing"
        if self.spread < UNEVEN:
            return said
        return f'{said} on the slowest worker ({self.spread:.2g} times the fastest\'s: see shares="measured")'

    @property
    def speed(self) -> str:
        """The bandwidth, in words."""
        return f"{_short(BITS / self.beta_s_byte)} Mbit/s"

    def sentence(self) -> str:
        """The advice in words."""
        if self.is_quick:
            return self.measured
        advice = self.advice()
        return f"{self.measured}, at {self.speed}; {advice.options} would wait {advice.waits}"


def in_words(seconds: float) -> str:
    """Seconds with three digits: "16 ms"."""
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(1e3 * seconds)} ms"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
