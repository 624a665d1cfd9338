"""`FirstLook`: whether a phase that only measures its links has to wait for a sum at all.

The workers have measured their links when they form their group. So they know beforehand how long a sum takes. Where
that is a second or more, each computes a gradient that nobody uses, and says how long that takes. If a sum takes many
times as long, no worker begins the first minibatch: the coordinator ends the phase, and the next one begins with it.
"""

from __future__ import annotations

from collections.abc import Callable

from gradstream.coordinator.links import CLEAR, summed_s
from gradstream.errors import DeadlineError
from gradstream.runtime.base import Runtime
from gradstream.telemetry.events import Event, GroupEvent, RehearsedEvent
from gradstream.worker.replica.group import GroupReplica

WORTH_S = 1.0
"""Seconds of a sum from which on it is worth a look before."""


class FirstLook:
    """The look of one worker, for every group that it is in. All workers of a group come to the same end.

    Args:
        runtime: runtime of the worker's node.
        size_bytes: of the vector that the group sums.
        emit: adds an event to those of the run.
        answer_s: how long the coordinator may take to end the phase.
    """

    def __init__(
        self, runtime: Runtime, size_bytes: int, emit: Callable[[Event], None], answer_s: float
    ) -> None:
        self._runtime = runtime
        self._answer_s = answer_s
        self._size_bytes = size_bytes
        self._emit = emit
        self._sum_s = 0.0  # unknown

    def heard(self, event: Event) -> None:
        """Takes the event of a new group, which the worker of rank 0 in it gets, and reports it."""
        self._sum_s = 0.0
        if isinstance(event, GroupEvent) and event.alpha_s is not None and event.beta_s_byte is not None:
            self._sum_s = summed_s(len(event.ranks), event.alpha_s, event.beta_s_byte, self._size_bytes)
        self._emit(event)

    async def take(self, replica: GroupReplica) -> None:
        """Returns when the worker may train. Where the phase ends here, that is when its gate is closed.

        Raises:
            PeerLostError, DeadlineError, ClosedError: a worker was lost meanwhile.
            UserCodeError, GradientError, DataError: from the user's code.
        """
        group = replica.group
        sum_s = (await group.tell(self._sum_s))[0][0]
        if sum_s < WORTH_S:
            return
        seconds = [compute_s for compute_s, _ in await group.tell(await replica.rehearse())]
        if not all(seconds) or sum_s < CLEAR * max(seconds):
            return
        if replica.setup.group.rank == 0:
            by_node = dict(zip(replica.setup.group.names, seconds, strict=True))
            self._emit(RehearsedEvent(rank=replica.rank, compute_s=by_node))
        try:
            await self._runtime.within(self._answer_s, replica.asked_to_stand())
        except DeadlineError:
            raise
        except TimeoutError:
            return  # the coordinator does not know, so all go on with the first minibatch
