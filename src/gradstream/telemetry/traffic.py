"""What passes between a worker and the shards, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["LinkTraffic", "Traffic", "Transfer"]


@dataclass(slots=True)
class LinkTraffic:
    """What has passed between a client and one shard so far. `staleness` counts chunks of gradients.

    `whole_pushed_bytes` and `whole_fetched_bytes` are what it would have been with all of every chunk.
    """

    pushed_bytes: int = 0
    fetched_bytes: int = 0
    whole_pushed_bytes: int = 0
    whole_fetched_bytes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Traffic:
    """What a client has moved so far, by shard. Bytes count again where an exchange was retried."""

    links: dict[str, LinkTraffic]
    pushes: int = 0
    fetches: int = 0
    retries: int = 0

    @property
    def pushed_bytes(self) -> int:
        """To all shards."""
        return sum(link.pushed_bytes for link in self.links.values())

    @property
    def fetched_bytes(self) -> int:
        """From all shards."""
        return sum(link.fetched_bytes for link in self.links.values())

    @property
    def whole_pushed_bytes(self) -> int:
        """To all shards, had all of every chunk been sent."""
        return sum(link.whole_pushed_bytes for link in self.links.values())

    @property
    def whole_fetched_bytes(self) -> int:
        """From all shards, likewise."""
        return sum(link.whole_fetched_bytes for link in self.links.values())

    @property
    def staleness(self) -> Counter[int]:
        """At all shards."""
        return sum((link.staleness for link in self.links.values()), Counter[int]())


@dataclass(frozen=True, slots=True)
class Transfer:
    """A push or a fetch that is done."""

    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int
