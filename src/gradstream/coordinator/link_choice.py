"""`LinkChoice`: measures links and computing in one phase of a job, and chooses how the next one exchanges.

It follows the advice of `Links`: allreduce after each minibatch if workers wait little, else local SGD every H
minibatches, with or without a codec. In a phase of local SGD nobody sees how long workers would wait for a sum after
each minibatch, nor in a phase that the workers ended before its first sum (`FirstLook` of `worker.group.exchange`). The
wait is then estimated as the part of a sum that exceeds half of the computing, behind which backprop hides it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from gradstream.codec import named
from gradstream.codec.base import Codec
from gradstream.coordinator.admission import Admission
from gradstream.coordinator.lead import Instruction, Lead
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.wire.frames import itemsize_bytes

# ---- links -------------------------------------------------------------------------------
# `Links`: whether the links of a group are fast enough for its exchange, and if not, how to exchange instead.
#
# `report.summary` gives that as advice after a run, and `link_choice` uses it between two phases of a run.
#
# The group has measured the cost of a message, α + n·β seconds for n bytes, and the steps show how long a minibatch is
# computed: c seconds on the slowest worker. For W workers and a gradient of n bytes, C of them encoded, an exchange
# takes
#
#     summed          2α + 2(W - 1)/W·n·β         slices go to their owners, sums of them to all
#     encoded         2α + 2(W - 1)/W·C·β         the same, encoded each time; for W = 2 once, α + C·β
#     few numbers     ⌈lg W⌉α + (W - 1)·C·β       all parts go to all: `chunk-top-k`
#
# Workers that wait less than a quarter of c need no advice. Others are advised the local SGD that reaches an accuracy
# soonest: the cost of its minibatches times how many of them it needs. For an exchange of x seconds every H
# minibatches, d of which are computed during it (`delay`), that is
#
#     (c + max(0, x - d·c)/H) · m · (1 + (H/h)⁴)^(p/4) · (1 + 0.6 d/H)         m, h and p in `COMPRESSIONS`
#
# where d is ⌈x/c⌉, at most H/4, or 0. The second and all further factors are rough. They come from three networks
# over slow links (`docs/codecs.md`). At H = 20 one bit needed 1.10 to 1.23 times the minibatches of `float4`, `chunk-
# top-k` with outer momentum 1.15 to 1.5 times, and a delay of a quarter 1.10 to 1.17 times. At H = 40 `float4` needed
# 1.05 times those of H = 20. Lossier codecs need more rounds: one of the networks took 2.2 times as many with one bit
# at H = 55, and with `chunk-top-k` 1.4 times at H = 28 and 2.6 times at H = 55, without the delay. So their
# minibatches finally grow with H, and with √H where little is lost. Among compressions that cost the same, up to 5 %,
# the one that loses least is taken, and the shortest H.
#
# H is no longer than a data epoch, with which rounds end, and at most 500; if the epoch would end with a short
# round, H is adjusted so that all rounds of an epoch are about equal. The time of encoding is ignored. Whether
# a model learns as well at such a period is for its user to judge.

ENOUGH = 0.25
"""Seconds of waiting per second of computing above which there is advice."""
PARTS = 4
"""Least number of minibatches of a round for each delayed one."""
LONGEST = 500
"""The longest period."""
DELAYED = 0.6
"""How many more minibatches are needed for each part of a round that is delayed."""
ALIKE = 1.05
"""Cost relative to the cheapest choice up to which a choice that loses less is taken."""
SHORTER = 0.9
"""Factor over a period up to which the shortest period replaces it."""
UNEVEN = 1.5
"""How much longer one worker computes than another before a message mentions it."""
CLEAR = 4
"""Seconds of a sum per second of computing from which on one sum, or none, is enough to decide."""
BITS = 8e-6
"""Megabits of a byte."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How local SGD compresses what it exchanges.

    Args:
        codec: name of the codec; None for none.
        minibatches: m, relative to lossless compression.
        knee, power: h and p, which determine how many more are needed for longer periods.
        outer_momentum: of the strategy.
        make: makes the codec.
    """

    codec: str | None
    minibatches: float
    knee: float
    power: float
    outer_momentum: float = 0.0
    make: Callable[[], Codec] | None = None

    def needed(self, every: int, delay: int) -> float:
        """How many minibatches it needs to reach an accuracy, for each of allreduce."""
        period = (1 + (every / self.knee) ** 4) ** (self.power / 4)
        return float(self.minibatches * period * (1 + DELAYED * delay / every))


COMPRESSIONS = (
    Compression(None, 1.0, 40, 0.5),
    Compression("int8", 1.0, 40, 0.5, make=named.int8),
    Compression("float4", 1.0, 40, 0.5, make=named.float4),
    Compression("one-bit", 1.02, 20, 0.75, make=named.one_bit),
    Compression("chunk-top-k", 1.13, 20, 1.0, 0.5, named.chunk_top_k),
)
"""From what loses least to what loses most."""
PERIODS = sorted({round(2 * 1.12**power) for power in range(49)} | {LONGEST})


@dataclass(frozen=True, slots=True)
class Advice:
    """Local SGD that suits some links.

    Args:
        every: H, minibatches of a round.
        delay: how many of them are computed during the exchange.
        codec: name of the codec; None for none.
        outer_momentum: of the strategy.
        exchange_s: seconds of an exchange.
        wait_s: seconds that a worker waits, per minibatch.
        cost_s: seconds of a minibatch, times how many are needed for one of allreduce.
    """

    every: int
    delay: int
    codec: str | None
    outer_momentum: float
    exchange_s: float
    wait_s: float
    cost_s: float

    @property
    def options(self) -> str:
        """The advice as command-line options."""
        options = {"every": self.every, "delay": self.delay, "outer_momentum": self.outer_momentum}
        sets = "".join(f" --set strategy.{name}={value}" for name, value in options.items() if value)
        codec = "" if self.codec is None else f" --codec {self.codec}"
        return f"--strategy local-sgd{sets}{codec}"

    @property
    def waits(self) -> str:
        """How long a worker waits per minibatch, in words."""
        return in_words(self.wait_s) if self.wait_s else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The measurements.

    Args:
        workers: W.
        elems: number of elements of the gradient.
        alpha_s, beta_s_byte: α and β.
        compute_s, wait_s: of a minibatch, on the worker that computes longest.
        itemsize: bytes of an element; codecs need 4.
        epoch: minibatches of a worker in a data epoch; None if unknown.
        delays: whether workers can go on during an exchange.
        spread: that worker's seconds of computing, relative to the fastest worker's.
    """

    workers: int
    elems: int
    alpha_s: float
    beta_s_byte: float
    compute_s: float
    wait_s: float
    itemsize: int = 4
    epoch: int | None = None
    delays: bool = True
    spread: float = 1.0

    @property
    def sum_s(self) -> float:
        """Seconds of an exchange without a codec."""
        return summed_s(self.workers, self.alpha_s, self.beta_s_byte, self.itemsize * self.elems)

    def exchange_s(self, compression: Compression) -> float:
        """Seconds of an exchange; infinite if the codec is refused."""
        if compression.make is None:
            return self.sum_s
        if self.itemsize != 4:
            return math.inf
        codec = compression.make()
        encoded = codec.encoded_bytes(self.elems)
        if self.workers == 2 or not getattr(codec, "dense", False):
            messages = math.ceil(math.log2(self.workers))
            return messages * self.alpha_s + (self.workers - 1) * encoded * self.beta_s_byte
        return summed_s(self.workers, self.alpha_s, self.beta_s_byte, encoded)

    def advice(self) -> Advice:
        """The best local SGD; see the top of the module."""
        choices = [advice for compression in COMPRESSIONS for advice in self._periods(compression)]
        enough_s = ALIKE * min(advice.cost_s for advice in choices)
        return next(advice for advice in choices if advice.cost_s <= enough_s)

    def _periods(self, compression: Compression) -> Iterator[Advice]:
        """The advice for a compression with all periods and delays, the shortest first."""
        exchange_s, c = self.exchange_s(compression), self.compute_s
        if math.isinf(exchange_s):
            return
        hides = math.ceil(exchange_s / c)
        periods = {period for period in PERIODS if self.epoch is None or period <= max(2, self.epoch)}
        if self.epoch:
            periods = {_alike(period, self.epoch) for period in periods}
        for every in sorted(periods):
            for delay in sorted({0, min(hides, every // PARTS) * self.delays}):
                wait_s = max(0.0, exchange_s - delay * c) / every
                cost_s = (c + wait_s) * compression.needed(every, delay)
                yield Advice(
                    every, delay, compression.codec, compression.outer_momentum, exchange_s, wait_s, cost_s
                )

    @property
    def is_quick(self) -> bool:
        """Whether nothing should change: workers wait little, or other choices cost as much."""
        return self.wait_s <= ENOUGH * self.compute_s or self.compute_s + self.wait_s <= self.advice().cost_s

    @property
    def measured(self) -> str:
        """The times of a minibatch, in words."""
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


def _alike(every: int, epoch: int) -> int:
    """A period that gives an epoch rounds of about equal length: at most a tenth shorter than `every`, or longer."""
    rounds = max(1, epoch // every)
    shorter, longer = math.ceil(epoch / (rounds + 1)), math.ceil(epoch / rounds)
    return min(LONGEST, shorter if shorter >= SHORTER * every else longer)


def summed_s(workers: int, alpha_s: float, beta_s_byte: float, size_bytes: int) -> float:
    """Seconds for workers to sum a vector of this many bytes without a codec."""
    return 2 * alpha_s + 2 * (workers - 1) / workers * size_bytes * beta_s_byte


def in_words(seconds: float) -> str:
    """Seconds with three digits: "16 ms"."""
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(1e3 * seconds)} ms"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# ---- link choice -------------------------------------------------------------------------

HIDDEN = 0.5
"""The part of a minibatch's computing behind which backprop hides a sum."""
SHORTEST_S = 1e-6
"""Least seconds of computing, whatever a clock says."""
KEPT_STEPS = 10
"""Number of each worker's last steps of which the median counts, since the first are slow."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a phase exchanges.

    Args:
        every: minibatches between two exchanges; 1 is allreduce after each, more is local SGD.
        codec: name of its codec; None for none.
        why: the reason, a sentence for the user.
        delay: minibatches of each period that are computed during its exchange.
        outer_momentum: of local SGD.
    """

    every: int = 1
    codec: str | None = None
    why: str = ""
    delay: int = 0
    outer_momentum: float = 0.0

    def as_json(self) -> str:
        """For `of_json`."""
        return json.dumps([self.every, self.codec, self.why, self.delay, self.outer_momentum])

    @classmethod
    def of_json(cls, text: str) -> Chosen:
        """The choice from `as_json`; "" is the choice before anything was measured: allreduce."""
        return cls(*json.loads(text)) if text else cls()


class LinkChoice:
    """Follows the events of a phase.

    Args:
        workers: W of the phase for which it chooses.
        every: minibatches between two exchanges in the phase that it follows.
        epoch: minibatches of a worker in a data epoch of the phase for which it chooses; None if unknown.
        only_measures: whether the phase that it follows serves nothing else, and may end early.
        balanced: whether workers get shares that fit their speed, so that no message needs to suggest that.
        delays: see `Links`.

    Attributes:
        only_measures: see above.
    """

    KEPT = ("_alpha_s", "_beta_s_byte", "_seconds", "_rehearsed")
    """See `durable.state`."""

    def __init__(
        self,
        workers: int,
        every: int = 1,
        epoch: int | None = None,
        *,
        only_measures: bool = False,
        balanced: bool = False,
        delays: bool = True,
    ) -> None:
        self._workers = workers
        self._every = every
        self._epoch = epoch
        self.only_measures = only_measures
        self._balanced = balanced
        self._delays = delays
        self._alpha_s = 0.0
        self._beta_s_byte = 0.0
        self._rehearsed = False  # whether no step was waited for
        self._seconds: dict[
            str, list[list[float]]
        ] = {}  # by worker, seconds of computing and of waiting of its last steps

    def event(self, event: Mapping[str, Any]) -> None:
        """Takes an event of any node."""
        if event["event"] == "group" and event.get("beta_s_byte"):
            self._alpha_s, self._beta_s_byte = event["alpha_s"], event["beta_s_byte"]
        elif event["event"] == "rehearsed":
            self._rehearsed = True
            self._seconds = {node: [[compute_s, 0.0]] for node, compute_s in event["compute_s"].items()}
        elif event["event"] == "step":
            last = self._seconds.setdefault(event["node"], [])
            last.append([event["compute_s"], event["wait_s"]])
            del last[:-KEPT_STEPS]

    def chosen(self, elems: int, itemsize: int) -> Chosen:
        """The choice for a model of this many elements, from the measurements so far."""
        if self._workers < 2:
            return Chosen(why="one worker exchanges with nobody")
        if not self._seconds or not self._beta_s_byte:
            return Chosen(why="no link between machines was measured")
        links = self._links(elems, itemsize)
        measured = links.measured
        if self._unseen:
            measured = f"{links.computing} for each minibatch, and {in_words(links.sum_s)} for a sum"
        if links.is_quick:
            return Chosen(why=f"{measured}, at {links.speed}: allreduce after each is quick enough")
        advice = links.advice()
        codec = "" if advice.codec is None else f" with {advice.codec}"
        momentum = f" and outer momentum {advice.outer_momentum:g}" if advice.outer_momentum else ""
        how = f"every {advice.every} minibatches{codec}{momentum}"
        behind = f", exchanged behind {advice.delay} of them," if advice.delay else ""
        why = f"{measured}, at {links.speed}: local SGD {how}{behind} waits {advice.waits} for each"
        return Chosen(advice.every, advice.codec, why, advice.delay, advice.outer_momentum)

    def ends(self, elems: int, itemsize: int) -> str:
        """Why the phase ends now: each of its steps would wait for slow links; "" if it goes on.

        The first step of each worker may be slow for other reasons, but then the sum is even longer in comparison. A
        second step is under way by now, and the choice uses it.
        """
        steps = list(self._seconds.values())
        if self.only_measures and self._rehearsed and steps:
            sum_s = self._links(elems, itemsize).sum_s
            return f"a sum takes {in_words(sum_s)} over these links, as is known without one"
        if not self.only_measures or len(steps) < self._workers:
            return ""
        sum_s = self._links(elems, itemsize).sum_s
        if sum_s < CLEAR * max(last[-1][0] for last in steps):
            return ""
        return f"a sum takes {in_words(sum_s)} over these links: one step is enough to know"

    @property
    def _unseen(self) -> bool:
        """Whether nobody has waited for a sum after each minibatch."""
        return self._every > 1 or self._rehearsed

    def _links(self, elems: int, itemsize: int) -> Links:
        # Of two steps the shorter one counts: the first may have been slow for other reasons. Of two rounds the
        # longer one counts: an epoch may end with a round of fewer minibatches.
        middle = statistics.median_low if self._every == 1 else statistics.median_high
        medians = [
            (middle([step[0] for step in last]), statistics.median(step[1] for step in last))
            for last in self._seconds.values()
        ]
        compute_s, wait_s = max(medians)
        links = Links(
            workers=self._workers,
            elems=elems,
            alpha_s=self._alpha_s,
            beta_s_byte=self._beta_s_byte,
            compute_s=max(SHORTEST_S, compute_s / self._every),
            wait_s=wait_s,
            itemsize=itemsize,
            epoch=self._epoch,
            delays=self._delays,
            spread=1.0 if self._balanced else compute_s / (min(medians)[0] or compute_s),
        )
        if not self._unseen:
            return links
        return replace(links, wait_s=max(0.0, links.sum_s - HIDDEN * links.compute_s))


# ---- lead --------------------------------------------------------------------------------


class ExchangeChoice(Lead):
    """Chooses, while a plan goes on, how the workers of the next one exchange, and ends it early where that is clear.

    Args:
        choice: follows the events.
        life: has where the run goes on, which says what was chosen.
        admission: has the model whose exchange is chosen.
    """

    def __init__(self, choice: LinkChoice, life: Lifecycle, admission: Admission) -> None:
        self._choice = choice
        self._life = life
        self._admission = admission

    @override
    def durable(self) -> dict[str, object]:
        return {"links": self._choice}

    def on_event(self, event: Mapping[str, Any], at_s: float) -> list[Instruction]:
        """Looks at an event of any node."""
        choice, life, model = self._choice, self._life, self._admission.model
        if model is None or life.follows is None:
            return []
        choice.event(event)
        if event["event"] not in ("step", "rehearsed"):
            return []
        size = (model.elems, itemsize_bytes(model.dtype))
        reason = choice.ends(*size)
        if reason or event["rank"] == 0:
            life.follows = replace(life.follows, chosen=choice.chosen(*size).as_json())
        return life.finish_plan(reason, at_s) if reason else []
