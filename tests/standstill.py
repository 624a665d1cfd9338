"""Suspends a node of a simulation for some time, as SIGSTOP suspends a process."""

from __future__ import annotations

from typing import Self

from gradstream.runtime import VirtualCluster


class Standstill:
    """A context manager that suspends one node of a simulation from `begin_s` to `end_s`.

    While the node is suspended, its timers do not fire, its computations do not end, and the frames that it
    receives stay unread. When it continues, first the expired timers fire, then it reads the frames. Run the
    simulation inside the context; one in which nothing was delayed raises AssertionError at its end.

    Args:
        cluster: machines of the simulation.
        node: name of the node.
        begin_s, end_s: begin and end of the suspension, in seconds of virtual time.
        noticed: whether the node's `runtime.stalls` records the suspension. If not, the node believes that the
            other nodes were silent during this time.
    """

    def __init__(
        self, cluster: VirtualCluster, node: str, begin_s: float, end_s: float, *, noticed: bool = True
    ) -> None:
        self._suspension = suspension = cluster.runtime(node).suspension
        cluster.clock.call_at(round(begin_s * 1e9), suspension.begin)
        cluster.clock.call_at(round(end_s * 1e9), lambda: suspension.end(noticed=noticed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._suspension.num_held:
            raise AssertionError("nothing was delayed: the node had no timers, and got no frames")
