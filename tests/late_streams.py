"""A fake device for tests of `model.staging`: it has its own memory, and makes copies late."""

from __future__ import annotations

from collections import deque

import torch

from gradstream.model.devices import Streams


class LateStreams(Streams):
    """Makes copies into main memory in order, and only when the caller waits for them or asks often enough.

    Until then the target of a copy holds NaN (-1 for integers), and its source is not read. So a caller that reads
    the target or overwrites the source too early gets wrong bits.

    Args:
        late: how often `query` answers no before the copy is made.

    Attributes:
        asked, made: numbers of copies requested and made.
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
