"""What peers and strangers may have of a node at most, in one place.

A *stranger* has not proved yet that it knows the run's secret; an *identity* is a sender, by name, that has.
Whoever goes beyond a limit is refused or hung up on; nobody else is slowed down for it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one endpoint.

    Args:
        connections: that an endpoint holds in all, strangers' included.
        strangers: connections that have not proved to know the secret, at a time; the oldest goes first.
        handshake_s: how long a stranger has for that.
        greeting_bytes: of what a stranger may say.
        sessions: connections of one identity, counting each priority and each start of its process.
        streams: open streams of one identity; of all who have not joined yet together, and one for each node.
        request_bytes: of the request that opens a stream, unless its method may have more.
        free_body_bytes: a longer Body needs credit as a Chunk does.
        unread_bytes: Chunks and Bodies of one identity that its handlers have not taken, beyond what credit
            for the registered model's chunks amounts to.
        others_unread_bytes: the same of all together who know the secret and are no members.
        turned_away_s: how long who is turned away waits for the word, `strangers` of them at a time. So one
            who tries again and again is slowed down, and costs next to nothing.
        refusals: of one identity, or of strangers in all, within `refusals_s`; more, and its connections are
            closed, and new ones turned away until `refusals_s` have passed.
        event_bytes: of one event that a member reports.
        beat_events_bytes: of all events in one beat; a member that has more sends more beats.
        events_bytes_s: of one member's events a second, once `events_burst_bytes` have come.
    """

    connections: int = 4096
    strangers: int = 256
    handshake_s: float = 10.0
    greeting_bytes: int = 4 * _KIB
    sessions: int = 16
    streams: int = 512
    request_bytes: int = 64 * _KIB
    free_body_bytes: int = 64 * _KIB
    unread_bytes: int = 4 * _MIB
    others_unread_bytes: int = _MIB
    turned_away_s: float = 0.25
    refusals: int = 32
    refusals_s: float = 10.0
    event_bytes: int = 64 * _KIB
    beat_events_bytes: int = _MIB
    events_bytes_s: int = _MIB
    events_burst_bytes: int = 16 * _MIB


LIMITS = Limits()
"""Those of every node."""
