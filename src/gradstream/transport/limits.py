"""The limits of what peers and strangers may use of a node, in one place.

A *stranger* has not yet proved that it knows the run's secret; an *identity* is the name of a sender that has.
A node beyond a limit is refused, or its connections are closed; this slows no other node down.
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one endpoint.

    Args:
        connections: connections of an endpoint, including those of strangers.
        strangers: concurrent connections of strangers; one more closes the oldest.
        handshake_s: seconds in which a stranger must prove that it knows the secret.
        greeting_bytes: length of a stranger's greeting.
        sessions: connections of one identity, counting each priority and each start of its process.
        streams: open streams of one identity; also of all nodes together that have not joined yet, and one
            more for each node of the run.
        request_bytes: length of the request that opens a stream, unless its method may have more.
        free_body_bytes: a longer Body needs credit, as a Chunk does.
        unread_bytes: bytes of Chunks and Bodies of one identity that its handlers have not taken, beyond the
            credit for the registered model's chunks.
        others_unread_bytes: the same for all nodes together that know the secret and are no members.
        turned_away_s: seconds before a refused caller gets its answer, for up to `strangers` callers at a
            time. So repeated tries are slow, and cost next to nothing.
        refusals: refusals of one identity, or of all strangers, within `refusals_s`; after more, the
            node closes its connections, and refuses new ones until `refusals_s` have passed.
        refusals_s: see `refusals`; seconds.
        event_bytes: length of one event that a member reports.
        beat_events_bytes: length of all events in one beat; a member with more sends more beats.
        events_bytes_s: bytes a second of one member's events, after the first `events_burst_bytes`.
        events_burst_bytes: see `events_bytes_s`.
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
"""The limits of every node."""
