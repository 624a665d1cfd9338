"""What a worker has to know that comes to a run of own loops which has begun, besides the models and optimizers.

A worker that has been there answers it between two of its turns: its loop waits for the exchange of a round. The
newcomer takes part in this round without samples. So it makes the same step as the others, and is one of them after it.

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

from gradstream.checkpoint.own_state import EXTRA
from gradstream.errors import ConfigError
from gradstream.model.buffers import Arrays
from gradstream.session.bridge import LoopBridge, ResumePoint
from gradstream.session.loaders_part import Takeover
from gradstream.session.registered import Registered
from gradstream.session.roster import Roster

SESSION = EXTRA + "session"
"""Name of the array that has the state as JSON."""


class SessionEntry:
    """A session's place in its run: where its loop is, what its loaders have dealt, and who makes the rounds.

    Args:
        takeover: the loaders.
        resume_point: where a resumed loop continues.
        registered: the objects that the script has registered.
        knows_all: returns whether the loop has used nothing but minibatches of loaders that are shared out.

    Attributes:
        bridge: the worker beside the loop; None before it joins.
        came: what `load` has read; None in a worker that was there when the run began.
        rounds: returns the numbers that workers compare in each round.
    """

    def __init__(
        self,
        takeover: Takeover,
        resume_point: ResumePoint,
        registered: Registered,
        knows_all: Callable[[], bool],
    ) -> None:
        self.bridge: LoopBridge | None = None
        self.came: Mapping[str, Any] | None = None
        self.rounds: Callable[[], Any] = lambda: None
        self._takeover = takeover
        self._resume_point = resume_point
        self._registered = registered
        self._knows_all = knows_all

    @property
    def roster(self) -> Roster:
        """Which workers make which rounds."""
        return self._takeover.roster

    def saved(self) -> Arrays:
        """The state as arrays. Call it while the loop waits for the exchange of a round; {} before the first."""
        bridge = self.bridge
        if bridge is None or not bridge.counts.batches:
            return {}
        plain = {
            "contributed": list(bridge.contributed.items()),
            "counts": bridge.counts.saved(local_rounds=self._takeover.local_rounds),
            "is_silent": bridge.is_silent,
            "asks": self._resume_point.asked,
            "knows_all": self._knows_all(),
            "loaders": {number: deals.saved() for number, deals in self._takeover.deals.items()},
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
        if not (came["knows_all"] or came["asks"]):
            raise ConfigError(
                "session.wrap: this worker has come to a run that had begun, and nobody knows where in their data the "
                "others are: they have used minibatches that no loader of session.shard has given out, or have taken "
                "some ahead. Take each minibatch from a DataLoader of session.shard when it is needed, or begin the "
                "loop at session.step"
            )
        bridge.stays_out, bridge.contributed = came["is_silent"], Counter(dict(came["contributed"]))
        bridge.counts.load(*came["counts"])
        self._takeover.load({int(number): state for number, state in came["loaders"].items()})
        self._takeover.roster.load(came["roster"])
        self._resume_point.enter(bridge.counts.steps, skips=not came["knows_all"])
        self._registered.load(arrays, own=False)
