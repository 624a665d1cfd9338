"""`Deadlines`: how long a run waits before it gives up, and all times that follow from these.

Membership, the streams of all carriers, and the carriers themselves take their time-outs from here. The
time-out of a connection (`connection_s`) is longer than all others: so membership or a stream decides that a
peer is lost, and no carrier cuts the connection before.
"""

from __future__ import annotations

from dataclasses import dataclass

BEATS_PER_LEASE = 40
NOTICES_PER_LEASE = 4

STILL = (
    "its process stands still (stopped, swapping, or in code that lets no other thread run), or its machine or the "
    "network is gone"
)
"""Why a node is silent."""


def to_wait_longer(setting: str) -> str:
    """What a user sets who wants a longer deadline, as it is typed in Python and on a command line."""
    return f"to wait longer: deadlines=gradstream.Deadlines({setting}=...), or --set deadlines.{setting}="


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a run waits before it gives up, in seconds. All bound silence, not work.

    Args:
        join_s: time until all nodes have joined, including the time to build models and read data.
        silence_s: the longest silence of a peer that owes an answer.
        lease_s: the longest silence of a node before it counts as lost.
        retry_s: time until a push or fetch succeeds, over all its retries.
        cut_s: the longest pause of workers for a checkpoint, including the minibatches that they finish.
        coordinator_s: the longest silence of the coordinator before the other nodes end the run. Training
            continues without it meanwhile. The end of the coordinator's process is noticed at once.

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
        """The longest time between two heartbeats, or attempts to send one, from a node to the coordinator."""
        return self.lease_s / BEATS_PER_LEASE

    @property
    def notice_s(self) -> float:
        """The longest time between two messages of the coordinator to a node; without news it sends a heartbeat."""
        return self.lease_s / NOTICES_PER_LEASE

    @property
    def patience_s(self) -> float:
        """How long the coordinator may be silent before a node counts it as lost, in seconds.

        It is at least `lease_s`, so that the coordinator gives up the node first.
        """
        return max(self.coordinator_s, self.lease_s)

    @property
    def connection_s(self) -> float:
        """The silence of the peer's system (not of its process) after which a carrier ends a connection.

        The other bounds end a stream earlier. This one ends connections to a lost machine for which no stream
        waits. Carriers send a probe after half of the time, and wait for the answer during the other half,
        which is still longer than the other bounds.
        """
        return 3 * max(self.silence_s, self.patience_s)
