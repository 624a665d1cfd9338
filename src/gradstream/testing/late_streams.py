"""A fake device for tests of `model.staging`: a second memory, and copies that are made late."""

from __future__ import annotations

from collections import deque

import torch

from gradstream.model.devices import Streams

__all__ = ["LateStreams"]


class LateStreams(Streams):
    """Copies into main memory are made in order, and only when the caller has asked for their event.

    Until then the place of a copy holds NaN (a number that is none of the results, where it is of integers),
    and its source is not read: a caller that reads the one or writes the other too early gets other bits.

    Args:
        late: number of questions that are answered with no before a copy is made.

    Attributes:
        asked, made: how many copies were asked for, and how many have been made.
        pinned: addresses of pinned memory.
    """

    def __init__(self, late: int = 2) -> None:
        super().__init__(torch.device("cpu"))
        self.late = late
        self.asked = 0
        self.made = 0
        self.pinned: set[int] = set()
        self._queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def pin(self, host: torch.Tensor) -> None:
        """See `Streams.pin`."""
        self.pinned.add(host.data_ptr())

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Streams.moved`."""
        return tensor.clone()

    def to_host(self, source: torch.Tensor, view: torch.Tensor) -> LateCopy:
        """See `Streams.to_host`."""
        view.fill_(torch.nan if view.is_floating_point() else -1)
        self._queue.append((source, view))
        self.asked += 1
        return LateCopy(self, self.asked)

    def make(self, upto: int) -> None:
        """Makes the copies up to this one."""
        while self.made < upto:
            source, view = self._queue.popleft()
            view.copy_(source)
            self.made += 1


class LateCopy:
    """The event of one copy."""

    def __init__(self, streams: LateStreams, number: int) -> None:
        self._streams = streams
        self._number = number
        self._questions = 0

    def query(self) -> bool:
        """See `Copied.query`."""
        self._questions += 1
        if self._questions > self._streams.late:
            self.synchronize()
        return self._streams.made >= self._number

    def synchronize(self) -> None:
        """See `Copied.synchronize`."""
        self._streams.make(self._number)
