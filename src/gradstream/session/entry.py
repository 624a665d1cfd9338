"""What a worker has to know that comes to a run of own loops which has begun, besides the models and optimizers.

A worker that has been there answers it between two of its turns: its loop waits for an exchange. In rounds the newcomer
takes part in this one without samples. So it makes the same step as the others, and is one of them after it.

    worker-0     forward, backward, exchange … wait … again ──▶ step
    newcomer          wrap ◀── state of worker-0 ──┘   │
                        forward, backward (no samples) ┴──────▶ step
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradstream.checkpoint.own_state import SESSION
from gradstream.errors import ConfigError
from gradstream.model.buffers import Arrays
from gradstream.session.bridge import LoopBridge
from gradstream.session.loaders_part import Takeover
from gradstream.session.places import LoopPlaces, ResumePoint
from gradstream.session.registered import Registered
from gradstream.session.roster import Roster


class SessionEntry:
    """A session's place in its run: where its loop is, what its loaders have dealt, and who makes the rounds.

    Args:
        takeover: the loaders.
        resume_point: where a resumed loop continues.
        registered: the objects that the script has registered.
        places: where the loop is in its epochs.
        knows_all: returns whether the loop has used nothing but minibatches of loaders that are shared out.

    Attributes:
        bridge: the worker beside the loop; None before it joins.
        came: what `load` has read; None in a worker that was there when the run began.
        rounds: returns the numbers that workers compare in each round.
        is_closing: the loop has ended; the round that is made now, if any, has what was left.
    """

    def __init__(
        self,
        takeover: Takeover,
        resume_point: ResumePoint,
        registered: Registered,
        places: LoopPlaces,
        knows_all: Callable[[], bool],
    ) -> None:
        self.bridge: LoopBridge | None = None
        self.came: Mapping[str, Any] | None = None
        self.rounds: Callable[[], Any] = lambda: None
        self.is_closing = False
        self._takeover = takeover
        self._resume_point = resume_point
        self._registered = registered
        self._places = places
        self._knows_all = knows_all

    @property
    def roster(self) -> Roster:
        """Which workers make which rounds."""
        return self._takeover.roster

    @property
    def is_behind(self) -> bool:
        """Whether this newcomer's loop has not come to its first round yet."""
        bridge = self.bridge
        if self.came is None or bridge is None or not self._takeover.in_rounds:
            return False
        return bool(bridge.counts.batches <= self.came["counts"][0])

    @property
    def is_at_edge(self) -> bool:
        """See `LoopBridge`: a newcomer would repeat a minibatch in this round, and go on in the loop as the others."""
        number, deals = self._takeover.steps(), self._takeover.deals.values()
        begins = not deals or (number is not None and any(one.has_round(number - 1) for one in deals))
        return begins and not self.is_closing

    def saved(self) -> Arrays:
        """The state as arrays. Call it while the loop waits for the exchange of a round; {} before the first."""
        bridge = self.bridge
        if bridge is None or not bridge.counts.batches:
            return {}
        plain = {
            "contributed": list(bridge.contributed.items()),
            "counts": bridge.counts.saved(local_rounds=not bridge.averages_gradients),
            "before": [bridge.before[0], 0, bridge.before[2]],
            "skips": self._places.skips,
            "knows_all": self._knows_all()
            and all(deals.is_finite for deals in self._takeover.deals.values()),
            "place": self._places.entry_state(),
            "loaders": self._takeover.saved(),
            "roster": self._takeover.roster.saved(),
            "rounds": self.rounds(),
        }
        own = np.frombuffer(json.dumps(plain).encode(), np.uint8)
        return {SESSION: own, **self._registered.marked()}

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Takes what `saved` of another worker has returned. The loop waits in `wrap`."""
        bridge = self.bridge
        if bridge is None or not bridge.is_late or SESSION not in arrays:
            return
        came = self.came = json.loads(arrays[SESSION].tobytes())
        in_rounds = self._takeover.in_rounds
        if not (came["knows_all"] or (came["skips"] and in_rounds)):
            raise ConfigError(
                "session.wrap: this worker has come to a run that had begun, and nobody knows where in their data the "
                "others are: they have used minibatches that no loader of session.shard has given out, or have taken "
                "some ahead. Take each minibatch from a DataLoader of session.shard when it is needed, or skip those "
                "that are done: if session.skip(): continue"
            )
        if in_rounds:  # else it counts its own steps
            bridge.contributed = Counter(dict(came["contributed"]))
            bridge.counts.load(*came["counts"])
            bridge.before = tuple(came["before"])
        self._places.enter(came["place"])
        self._takeover.load({int(number): state for number, state in came["loaders"].items()})
        self._takeover.roster.load(came["roster"])
        self._resume_point.enter(bridge.counts.steps, skips=not came["knows_all"])
        self._registered.load(arrays, own=False, loaders=False)
        self._registered.again = False  # the newcomer makes this step with the others
