"""Where the time of a worker's step goes: computing, and waiting, for whom."""

from __future__ import annotations

from typing import TypedDict

from gradstream.telemetry.wait_attribution import Interval, Kind, WaitAttribution

__all__ = ["StepTimes", "Stopwatch"]


class StepTimes(TypedDict):
    """The fields of `StepEvent` that tell of time."""

    compute_s: float
    wait_s: float
    compute_at_s: float
    waited_for: dict[str, float]


class Stopwatch:
    """Times the steps of one worker. Reads no clock: instants are handed in.

    Args:
        me: this node's name.
        claims: where the client notes whose answers came when.
        now_ns: the first step begins.
    """

    def __init__(self, me: str, claims: WaitAttribution, now_ns: int) -> None:
        self._me = me
        self._claims = claims
        self._begun_ns = now_ns
        self._computed: list[Interval] = []

    def begin(self, now_ns: int) -> None:
        """A step begins."""
        self._begun_ns = now_ns
        self._computed.clear()

    def computed(self, begin_ns: int, end_ns: int) -> None:
        """A gradient was computed. Gradients of one worker follow one another.

        What lies before this step, of a gradient that was asked for in the step before, is left out.
        """
        self._computed.append((max(begin_ns, self._begun_ns), end_ns))

    def worked(self, begin_ns: int, end_ns: int) -> None:
        """Other arithmetic of its own kept the worker waiting: a sum, a local step."""
        self._claims.note(Kind.OWN, self._me, begin_ns, end_ns)

    def times(self, now_ns: int) -> StepTimes:
        """Of the step that ends now."""
        edges = [self._begun_ns, *(edge for interval in self._computed for edge in interval), now_ns]
        waiting = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        compute_ns = sum(end - begin for begin, end in self._computed)
        return StepTimes(
            compute_s=compute_ns / 1e9,
            wait_s=(now_ns - self._begun_ns - compute_ns) / 1e9,
            compute_at_s=(self._computed[0][0] - self._begun_ns) / 1e9 if self._computed else 0.0,
            waited_for={who: ns / 1e9 for who, ns in sorted(self._claims.take(waiting).items())},
        )
