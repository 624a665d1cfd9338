"""The settled pushes of a worker: shards may forget which minibatches they had.

If the worker dies, the coordinator asks the shards which pushes they have applied. That matters only for minibatches
whose receipts it has not heard: so each push says up to which push the coordinator has all receipts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gradstream.data.base import BatchRef
from gradstream.server.update import Update
from gradstream.wire import v1


class SettledPushes:
    """Writes into each push which earlier pushes are settled: the coordinator has the receipts of their minibatches.

    Args:
        num_receipts: returns the number of receipts that this worker has reported.
        num_heard: returns how many of those the coordinator has.
        name_of: returns the name of a minibatch as messages contain it.
    """

    def __init__(
        self,
        num_receipts: Callable[[], int],
        num_heard: Callable[[], int],
        name_of: Callable[[BatchRef], v1.Receipt],
    ) -> None:
        self._num_receipts = num_receipts
        self._num_heard = num_heard
        self._name_of = name_of
        self._open: deque[tuple[int, int]] = deque()  # number of a push, and of all receipts with its own
        self._newest = 0

    def begin(self, update: Update) -> None:
        """Sets `names` and `settled` of an update that has its `sequence`, and follows its receipts once it is done."""
        heard = self._num_heard()
        while self._open and self._open[0][1] <= heard:
            self._newest, _ = self._open.popleft()
        update.settled = self._newest
        update.names = [self._name_of(ref) for ref in update.refs]
        done = update.on_done

        def on_done() -> None:
            if done is not None:
                done()
            self._open.append((update.sequence, self._num_receipts()))

        update.on_done = on_done
