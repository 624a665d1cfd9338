"""Between the flat vectors in main memory, which are exchanged, and a device that computes.

    parameters (E,)  ── one copy ──▶  flat on the device; the module's parameters are views of it
    gradient (E,)    ◀── a copy as often as enough of it is ready, while backprop goes on ──  flat there

A copy out goes by a stream of its own, behind the computations that it needs and beside those that follow.
What it brings is reported once its event says that it has arrived, and not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from gradstream.model.devices import Copied, Streams
from gradstream.runtime.base import Report

__all__ = ["COPY_ELEMS", "Landing", "Staging"]

COPY_ELEMS = 1 << 16
"""A gradient is copied out in pieces of at least so many elements: a copy costs some microseconds."""


class Staging:
    """The flat vectors of one model on its device.

    Args:
        elems: E.
        dtype: of the parameters.
        streams: of the device.
    """

    def __init__(self, elems: int, dtype: torch.dtype, streams: Streams) -> None:
        self.streams = streams
        self.parameters = torch.empty(elems, dtype=dtype, device=streams.device)
        self._gradient = torch.empty_like(self.parameters)

    def show(self, parameters: torch.Tensor) -> None:
        """What is computed from here on sees these (E,). They may change when that is done."""
        self.parameters.copy_(parameters, non_blocking=True)

    @contextmanager
    def landing(self, gradient: torch.Tensor, report: Report) -> Iterator[Landing]:
        """A gradient's way into main memory. No copy is under way any more when this is left.

        Args:
            gradient: (n,) in main memory, n <= E; written.
            report: told the length of the prefix that has arrived, as it grows.
        """
        self.streams.pin(gradient)
        landing = Landing(self.streams, self._gradient[: len(gradient)], gradient, report)
        try:
            yield landing
        finally:
            landing.abandon()


class Landing:
    """One gradient on its way from the device into main memory.

    Args:
        streams: make the copies.
        source: (n,) on the device: where backprop writes it.
        gradient: (n,) in main memory.
        report: told what has arrived.
    """

    def __init__(
        self, streams: Streams, source: torch.Tensor, gradient: torch.Tensor, report: Report
    ) -> None:
        self.source = source
        self._streams = streams
        self._gradient = gradient
        self._report = report
        self._asked = 0  # elements whose copies were asked for
        self._under_way: deque[tuple[Copied, Callable[[], None]]] = deque()

    def scalar(self, value: torch.Tensor, then: Callable[[float], None]) -> None:
        """Has `then` called with a number of the device: not now, but before what follows is reported."""
        host = self._streams.pinned_like(value)
        copied = self._streams.to_host(value, host)
        self._under_way.append((copied, lambda: then(float(host))))

    def ready(self, elems: int) -> None:
        """A `Report` for backprop: so many elements from the front are written there, or will be."""
        if elems - self._asked >= COPY_ELEMS or elems == len(self.source):
            piece = slice(self._asked, elems)
            copied = self._streams.to_host(self.source[piece], self._gradient[piece])
            self._under_way.append((copied, partial(self._report, elems)))
            self._asked = elems
        self._tell(wait=False)

    def finish(self) -> None:
        """Reports the rest, piece by piece as it arrives."""
        self._tell(wait=True)

    def abandon(self) -> None:
        """Returns once nothing is under way; reports nothing."""
        while self._under_way:
            self._under_way.popleft()[0].synchronize()

    def _tell(self, *, wait: bool) -> None:
        while self._under_way:
            copied, then = self._under_way[0]
            if wait:
                copied.synchronize()
            elif not copied.query():
                return
            self._under_way.popleft()
            then()
