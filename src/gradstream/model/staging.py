"""Copies flat vectors between main memory, where they are exchanged, and a device that computes.

    parameters (E,)  ── one copy ──▶  flat on the device; the module's parameters are views of it
    gradient (E,)    ◀── a copy as often as enough of it is ready, while backprop goes on ──  flat there

Copies to main memory run on a separate stream, after the computations that they need and beside those that
follow. Elements are reported when the event of their copy says that they have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from gradstream.model.devices import Copied, Streams
from gradstream.runtime.base import Report

COPY_ELEMS = 1 << 16
"""A gradient is copied in pieces of at least so many elements, since a copy costs some microseconds."""


class Staging:
    """The flat vectors of one model on its device.

    Args:
        elems: E.
        dtype: dtype of the parameters.
        streams: copy streams of the device.
    """

    def __init__(self, elems: int, dtype: torch.dtype, streams: Streams) -> None:
        self.streams = streams
        self.parameters = torch.empty(elems, dtype=dtype, device=streams.device)
        self._gradient = torch.empty_like(self.parameters)

    def show(self, parameters: torch.Tensor) -> None:
        """Copies parameters (E,) to the device, for the next computations; they may change once these have ended."""
        self.parameters.copy_(parameters, non_blocking=True)

    @contextmanager
    def landing(self, gradient: torch.Tensor, report: Report) -> Iterator[Landing]:
        """Copies a gradient to main memory as it is computed. On exit, all copies have ended.

        Args:
            gradient: (n,) in main memory, n <= E; written.
            report: called with the length of the prefix that has arrived, as it grows.
        """
        self.streams.pin(gradient)
        landing = Landing(self.streams, self._gradient[: len(gradient)], gradient, report)
        try:
            yield landing
        finally:
            landing.abandon()


class Landing:
    """Copies one gradient from the device to main memory, piece by piece.

    Args:
        streams: copy streams of the device.
        source: (n,) on the device, where the backward pass writes it.
        gradient: (n,) in main memory.
        report: called with the length of the prefix that has arrived.
    """

    def __init__(
        self, streams: Streams, source: torch.Tensor, gradient: torch.Tensor, report: Report
    ) -> None:
        self.source = source
        self._streams = streams
        self._gradient = gradient
        self._report = report
        self._asked = 0  # elements whose copies are queued
        self._under_way: deque[tuple[Copied, Callable[[], None]]] = deque()

    def scalar(self, value: torch.Tensor, then: Callable[[float], None]) -> None:
        """Copies a number, and calls `then` with it, before any element that is copied later is reported."""
        host = self._streams.pinned_like(value)
        copied = self._streams.to_host(value, host)
        self._under_way.append((copied, lambda: then(float(host))))

    def ready(self, elems: int) -> None:
        """Called by the backward pass when the device has written the first `elems` elements, or has queued that."""
        if elems - self._asked >= COPY_ELEMS or elems == len(self.source):
            piece = slice(self._asked, elems)
            copied = self._streams.to_host(self.source[piece], self._gradient[piece])
            self._under_way.append((copied, partial(self._report, elems)))
            self._asked = elems
        self._report_arrived(wait=False)

    def finish(self) -> None:
        """Reports the rest, piece by piece as it arrives."""
        self._report_arrived(wait=True)

    def abandon(self) -> None:
        """Waits for all copies, and reports nothing."""
        while self._under_way:
            self._under_way.popleft()[0].synchronize()

    def _report_arrived(self, *, wait: bool) -> None:
        while self._under_way:
            copied, then = self._under_way[0]
            if wait:
                copied.synchronize()
            elif not copied.query():
                return
            self._under_way.popleft()
            then()
