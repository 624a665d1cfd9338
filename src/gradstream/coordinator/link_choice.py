"""`LinkChoice`: measures the links and the computing in one phase of a run, and chooses how the next one exchanges.

It is the advice of `Links`: allreduce after each minibatch where workers wait little, else local SGD every H
minibatches, with or without a codec. In a phase of local SGD nobody sees how long they would wait for a sum after each
minibatch, nor in a phase that the workers have ended before its first one (`worker.exchange.first_look`). It is taken
as what a sum takes beyond half of the computing, behind which backprop hides it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradstream.coordinator.links import CLEAR, Links, in_words

HIDDEN = 0.5
"""The part of a minibatch's computing behind which backprop hides a sum."""
SHORTEST_S = 1e-6
"""Computing takes at least so long, whatever a clock says."""
KEPT_STEPS = 10
"""Steps of each worker of which the median counts: the last ones, since the first are slow."""


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
        """What `as_json` was called of; "" is the choice before anything was measured: allreduce."""
        return cls(*json.loads(text)) if text else cls()


class LinkChoice:
    """Follows the events of a phase.

    Args:
        workers: W of the phase that it chooses for.
        every: minibatches between two exchanges in the phase that it follows.
        epoch: minibatches of a worker in a data epoch of the phase that it chooses for; None: not known.
        only_measures: the phase that it follows is there for nothing else, and may end early.
        balanced: workers get shares that fit their speed, so that nobody is told to ask for that.

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
    ) -> None:
        self._workers = workers
        self._every = every
        self._epoch = epoch
        self.only_measures = only_measures
        self._balanced = balanced
        self._alpha_s = 0.0
        self._beta_s_byte = 0.0
        self._rehearsed = False  # no step was waited for
        self._seconds: dict[
            str, list[list[float]]
        ] = {}  # of computing and of waiting, of each worker's last steps

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
        """The choice for a model of so many elements, from what was measured up to now."""
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

        The first step of each worker may be slow for other reasons: then the sum is longer still beside the others. A
        second one is under way by now, and the choice goes by that.
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
        # Of two steps the shorter one counts: the first may have been slow for other reasons. Of two rounds it is the
        # longer one: an epoch may end with one of fewer minibatches.
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
            spread=1.0 if self._balanced else compute_s / (min(medians)[0] or compute_s),
        )
        if not self._unseen:
            return links
        return replace(links, wait_s=max(0.0, links.sum_s - HIDDEN * links.compute_s))
