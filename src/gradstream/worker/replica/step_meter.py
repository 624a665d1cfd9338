"""Measures a worker's steps, and describes each as an event."""

from __future__ import annotations

import math

from gradstream.runtime.base import Runtime
from gradstream.telemetry.events import StepEvent
from gradstream.telemetry.stopwatch import Stopwatch
from gradstream.telemetry.wait_attribution import WaitAttribution
from gradstream.worker.computed import Result, SampleBatch


class StepMeter:
    """Times a worker's steps, and keeps the figures that are reported with each.

    Args:
        runtime: runtime of the worker's node.
        attribution: notes from the exchange: for which nodes this worker had to wait.

    Attributes:
        result: figures of the gradient that was computed last.
        late: a shard dropped the present step's update, which came after its round.
    """

    def __init__(self, runtime: Runtime, attribution: WaitAttribution) -> None:
        self.result = Result(math.nan)
        self.late = False
        self._runtime = runtime
        self._stopwatch = Stopwatch(runtime.node, attribution, runtime.now())

    def now(self) -> int:
        """The node's clock, in nanoseconds."""
        return self._runtime.now()

    def begin(self, begun_ns: int | None = None) -> None:
        """A step begins, or began at `begun_ns`."""
        self._stopwatch.begin(self._runtime.now() if begun_ns is None else begun_ns)

    def computed(self, begun_ns: int, result: Result) -> None:
        """A gradient has been computed since `begun_ns`."""
        self.result = result
        self._stopwatch.computed(begun_ns, self._runtime.now())

    def worked(self, begun_ns: int) -> None:
        """Other arithmetic has kept the worker waiting since `begun_ns`: a sum, a local step."""
        self._stopwatch.worked(begun_ns, self._runtime.now())

    def event(self, rank: int, step: int, batch: SampleBatch, lr: float) -> StepEvent:
        """The report of a step that ends now.

        Args:
            rank: rank of the worker.
            step: number of the step.
            batch: the minibatch of the step.
            lr: its learning rate.
        """
        late, self.late = self.late, False
        *parts, square = self.result.squares or (None,)
        now_ns = self._runtime.now()
        times = self._stopwatch.times(now_ns)
        self._stopwatch.begin(now_ns)  # unless `begin` is called, the next step begins here
        return StepEvent(
            rank=rank,
            step=step,
            epoch=batch.ref.epoch,
            samples=batch.num_samples,
            loss=self.result.loss,
            lr=lr,
            gradient_norm=self.result.norm,
            part_squares=math.fsum(parts) / len(parts) if parts else None,
            square=square,
            late=late,
            read_s=batch.read_s + (self.result.read_s if batch.num_samples else 0.0),
            **times,
        )
