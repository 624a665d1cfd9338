"""Gradients on their way into a round's vector: what is final from the front on leaves at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from gradstream.errors import GradientError, UserCodeError
from gradstream.model.check import finite
from gradstream.model.devices import Copied, Streams, streams_of

__all__ = ["Outgoing"]

REPORT_ELEMS = 1 << 16
"""So many more elements are told at once, or a model of small layers would be told of all the time."""


class Outgoing:
    """Fills a vector with gradients, in any order, and reports how far it is final from the front.

    Gradients on a device are copied by it, beside the backward: they are final once their copy is made.

    Args:
        names: of the parameters that have a place, in the vector's order.
        bounds: [start, stop) of each.
        report: called with how many elements from the front are final.
        streams_of: how to copy from a device.

    Attributes:
        broken: numbers of the gradients that are not finite: zeros stand in their place.
    """

    def __init__(
        self,
        names: Sequence[str],
        bounds: Sequence[tuple[int, int]],
        report: Callable[[int], None],
        streams_of: Callable[[torch.device], Streams] = streams_of,
    ) -> None:
        self.broken: set[int] = set()
        self._names = names
        self._bounds = bounds
        self._report = report
        self._streams_of = streams_of
        self._streams: dict[torch.device, Streams] = {}
        self._vector: torch.Tensor | None = None
        self._begun: set[int] = set()
        self._landed: set[int] = set()
        self._under_way: deque[tuple[int, Copied]] = deque()
        self._front = self._told = 0

    @property
    def open(self) -> bool:
        """Whether there is a vector that is not whole."""
        return self._vector is not None

    def begin(self, vector: torch.Tensor) -> None:
        """From here on gradients go into this vector (E,)."""
        self._vector = vector
        self.broken = set()
        self._begun.clear()
        self._landed.clear()
        self._front = self._told = 0

    def __contains__(self, index: int) -> bool:
        return index in self._begun

    def write(self, index: int, gradient: torch.Tensor | None) -> None:
        """Puts a gradient of any floating dtype in its place; None is zeros. It stays as it is till `finish`.

        Raises:
            GradientError: its layout is sparse.
            UserCodeError: it comes once more, and what came first has left.
        """
        assert self._vector is not None
        start, stop = self._bounds[index]
        if start < self._told:
            raise UserCodeError(
                f"{self._names[index]} has got a gradient twice in one backward, and the first one has left "
                "already: use_reentrant=False makes a checkpoint that gives it once"
            )
        view = self._vector[start:stop]
        self._begun.add(index)
        if gradient is None:
            view.zero_()
            self._landed.add(index)
        elif gradient.layout != torch.strided:
            raise GradientError(
                f"the gradient of {self._names[index]} is sparse; a joint gradient is dense: make the layer "
                "with sparse=False"
            )
        elif gradient.device.type == "cpu" and self._streams_of is streams_of:
            view.view(gradient.shape).copy_(gradient.detach())
            self._land(index)
        else:
            self._under_way.append((index, self._copied(gradient.detach(), view)))
        while self._under_way and self._under_way[0][1].query():
            self._land(self._under_way.popleft()[0])
        self._advance()

    def finish(self) -> torch.Tensor:
        """Fills in zeros where nothing was written. Returns the vector, all of whose gradients are there."""
        assert self._vector is not None
        for index in range(len(self._bounds)):
            if index not in self._begun:
                self.write(index, None)
        while self._under_way:
            index, copied = self._under_way.popleft()
            copied.synchronize()
            self._land(index)
        vector, self._vector = self._vector, None
        return vector

    def _copied(self, gradient: torch.Tensor, view: torch.Tensor) -> Copied:
        assert self._vector is not None
        streams = self._streams.get(gradient.device)
        if streams is None:
            streams = self._streams[gradient.device] = self._streams_of(gradient.device)
        streams.pin(self._vector)
        return streams.to_host(gradient, view.view(gradient.shape))

    def _land(self, index: int) -> None:
        assert self._vector is not None
        start, stop = self._bounds[index]
        self.broken.discard(index)
        if not finite(self._vector[start:stop]):
            self._vector[start:stop].zero_()
            self.broken.add(index)
        self._landed.add(index)

    def _advance(self) -> None:
        while self._front < len(self._bounds) and self._front in self._landed:
            self._front += 1
        done = self._bounds[self._front - 1][1] if self._front else 0
        if done >= self._told + REPORT_ELEMS:
            self._told = done
            self._report(done)
