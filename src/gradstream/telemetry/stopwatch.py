"""Divides the time of a worker's step into computing, and waiting for each node."""

from __future__ import annotations

from typing import TypedDict

from gradstream.telemetry.wait_attribution import Interval, Kind, WaitAttribution


class StepTimes(TypedDict):
    """The time fields of `StepEvent`."""

    compute_s: float
    wait_s: float
    compute_at_s: float
    waited_for: dict[str, float]


class Stopwatch:
    """Times the steps of one worker. It reads no clock: callers pass the times.

    Args:
        me: name of this node.
        claims: waits that the client notes when answers arrive.
        now_ns: begin of the first step.
    """

    def __init__(self, me: str, claims: WaitAttribution, now_ns: int) -> None:
        self._me = me
        self._claims = claims
        self._begun_ns = now_ns
        self._computed: list[Interval] = []

    def begin(self, now_ns: int) -> None:
        """Begins a step."""
        self._begun_ns = now_ns
        self._computed.clear()

    def computed(self, begin_ns: int, end_ns: int) -> None:
        """Notes a gradient. The gradients of one worker do not overlap.

        The part of a gradient that lies before the step, because the previous step asked for it, is left out.
        """
        self._computed.append((max(begin_ns, self._begun_ns), end_ns))

    def worked(self, begin_ns: int, end_ns: int) -> None:
        """Notes other arithmetic of the worker for which it waited: a sum, a local step."""
        self._claims.note(Kind.OWN, self._me, begin_ns, end_ns)

    def times(self, now_ns: int) -> StepTimes:
        """The times of the step that ends now."""
        edges = [self._begun_ns, *(edge for interval in self._computed for edge in interval), now_ns]
        waiting = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        compute_ns = sum(end - begin for begin, end in self._computed)
        return StepTimes(
            compute_s=compute_ns / 1e9,
            wait_s=(now_ns - self._begun_ns - compute_ns) / 1e9,
            compute_at_s=(self._computed[0][0] - self._begun_ns) / 1e9 if self._computed else 0.0,
            waited_for={who: ns / 1e9 for who, ns in sorted(self._claims.take(waiting).items())},
        )
