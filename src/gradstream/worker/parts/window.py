"""The minibatches that a replica has admitted to its pipeline, beside the one whose gradient is computed."""

from __future__ import annotations

from collections import deque

from gradstream.data.base import BatchRef


class Window:
    """Admits minibatches in order. A part takes the oldest when it knows all that its gradient's passes read.

    A stream is the minibatches that are admitted until `closing` is set: the next one comes after their updates.

    Args:
        ahead: number of minibatches after the present one that the passes of its gradient may read. 0 where the
            pipeline is empty between two minibatches.

    Attributes:
        stream: (minibatch, number of samples) of those that have samples, and whose gradients are not computed yet.
        number: number of the stream.
        closing: whether the stream gets no further minibatch; the next one that is admitted begins another stream.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self.stream = deque[tuple[BatchRef, int]]()
        self.number = 0
        self.closing = False
        self._left = deque[BatchRef]()

    def admit(self, ref: BatchRef, samples: int | None) -> None:
        """Adds a minibatch. One without samples is taken in its turn, but is not in `stream`: it has no gradient."""
        if self.closing:
            self.number, self.closing = self.number + 1, False
        if samples:
            self.stream.append((ref, samples))
        self._left.append(ref)

    @property
    def ready(self) -> bool:
        """Whether the oldest minibatch may be taken."""
        return len(self._left) > (0 if self.closing else self.ahead)

    @property
    def last(self) -> bool:
        """Whether the minibatch that was taken last is the last one of its stream."""
        return self.closing and not self._left

    def take(self) -> BatchRef:
        """The oldest minibatch."""
        return self._left.popleft()
