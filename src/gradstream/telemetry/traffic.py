"""Counts the bytes and the staleness between a worker and the shards, and reports them as events."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from gradstream.telemetry.events import Event, ExchangeEvent, LinkEvent


@dataclass(slots=True)
class LinkTraffic:
    """The traffic between a client and one shard so far. `staleness` counts chunks of gradients.

    `whole_pushed_bytes` and `whole_fetched_bytes` are the bytes that it would take to send every chunk whole.
    """

    pushed_bytes: int = 0
    fetched_bytes: int = 0
    whole_pushed_bytes: int = 0
    whole_fetched_bytes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def since(self, before: LinkTraffic) -> LinkTraffic:
        """The traffic since an earlier count."""
        return LinkTraffic(
            self.pushed_bytes - before.pushed_bytes,
            self.fetched_bytes - before.fetched_bytes,
            self.whole_pushed_bytes - before.whole_pushed_bytes,
            self.whole_fetched_bytes - before.whole_fetched_bytes,
            self.staleness - before.staleness,
        )

    @property
    def histogram(self) -> dict[str, int]:
        """The staleness for an event: by ascending staleness, with text as keys."""
        return {str(tau): count for tau, count in sorted(self.staleness.items())}


@dataclass(slots=True)
class Traffic:
    """The traffic of a client so far, by shard. Bytes of a retried exchange count again."""

    links: dict[str, LinkTraffic]
    pushes: int = 0
    fetches: int = 0
    retries: int = 0

    @property
    def total(self) -> LinkTraffic:
        """The traffic with all shards together."""
        links = self.links.values()
        return LinkTraffic(
            sum(link.pushed_bytes for link in links),
            sum(link.fetched_bytes for link in links),
            sum(link.whole_pushed_bytes for link in links),
            sum(link.whole_fetched_bytes for link in links),
            sum((link.staleness for link in links), Counter[int]()),
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """A push or a fetch that is done."""

    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int


class TrafficReports:
    """Reports the traffic of a worker since its previous report.

    Args:
        rank: rank of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before = Traffic({})

    def since_last(self, traffic: Traffic) -> list[Event]:
        """One `exchange` record, and a `link` record for each shard with traffic since the previous report."""
        before, self._before = self._before, copy.deepcopy(traffic)
        new = traffic.total.since(before.total)
        events: list[Event] = [
            ExchangeEvent(
                rank=self._rank,
                pushed_bytes=new.pushed_bytes,
                fetched_bytes=new.fetched_bytes,
                pushes=traffic.pushes - before.pushes,
                fetches=traffic.fetches - before.fetches,
                retries=traffic.retries - before.retries,
                whole_pushed_bytes=new.whole_pushed_bytes,
                whole_fetched_bytes=new.whole_fetched_bytes,
                staleness=new.histogram,
            )
        ]
        for shard, link in traffic.links.items():
            new = link.since(before.links.get(shard) or LinkTraffic())
            if new.pushed_bytes or new.fetched_bytes or new.staleness:
                events.append(
                    LinkEvent(
                        rank=self._rank,
                        shard=shard,
                        pushed_bytes=new.pushed_bytes,
                        fetched_bytes=new.fetched_bytes,
                        staleness=new.histogram,
                    )
                )
        return events
