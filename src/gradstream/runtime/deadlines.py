"""How long a run waits before it gives up, and every time that follows from that.

Whatever decides about silence takes its time from here: membership, the streams of all carriers, and the
carriers themselves. A carrier's own time-outs (`connection_s`) are longer than every bound of the rules above
it: so a rule decides that a peer is lost, and never a connection that was cut first.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Deadlines"]

BEATS_PER_LEASE = 40
NOTICES_PER_LEASE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a run waits before it gives up, in seconds. All are bounds of silence, not of work.

    Args:
        join_s: for all nodes to have joined; building models and reading data included.
        silence_s: for a peer that has an answer to give.
        lease_s: for a sign of life of a node, before it counts as lost.
        retry_s: for a push or fetch to succeed, over all its retries.
        cut_s: that workers stand still for a checkpoint, the minibatches that they are in included.
        coordinator_s: for a sign of life of the coordinator, before the other nodes give the run up. Training
            goes on without it meanwhile. A coordinator whose process ended is noticed at once.

    Example:
        >>> deadlines = gs.Deadlines(lease_s=30.0)  # for machines that pause
        >>> job = gs.Job(model, data, strategy="downpour", workers=2, epochs=2, deadlines=deadlines)
    """

    join_s: float = 60.0
    silence_s: float = 30.0
    lease_s: float = 10.0
    retry_s: float = 120.0
    cut_s: float = 120.0
    coordinator_s: float = 120.0

    @property
    def beat_s(self) -> float:
        """The longest time between two signs of life of a node, and between two tries to give one."""
        return self.lease_s / BEATS_PER_LEASE

    @property
    def notice_s(self) -> float:
        """The longest time between two signs of life of the coordinator: it has one to give to each node."""
        return self.lease_s / NOTICES_PER_LEASE

    @property
    def patience_s(self) -> float:
        """The silence after which a node gives up on the coordinator: never before it would be given up."""
        return max(self.coordinator_s, self.lease_s)

    @property
    def connection_s(self) -> float:
        """The silence, of the peer's system and not of its process, after which a carrier ends a connection.

        The other bounds end a stream before. This one ends what nobody waits for: connections to a machine
        that is gone. Carriers probe after half of it, and wait for the answer for the other half, which is
        still longer than the other bounds.
        """
        return 3 * max(self.silence_s, self.patience_s)
