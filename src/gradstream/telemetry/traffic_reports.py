"""Traffic as events: what has passed since the account before, in all and by link."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping

from gradstream.telemetry.events import Event, ExchangeEvent, LinkEvent
from gradstream.telemetry.traffic import LinkTraffic, Traffic

__all__ = ["TrafficReports"]


class TrafficReports:
    """Keeps what was accounted for, and says what is new.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before = Traffic({})

    def since_last(self, traffic: Traffic) -> list[Event]:
        """One `exchange` record, and a `link` record for each shard that something passed to or from."""
        before, self._before = self._before, copy.deepcopy(traffic)
        total = ExchangeEvent(
            rank=self._rank,
            pushed_bytes=traffic.pushed_bytes - before.pushed_bytes,
            fetched_bytes=traffic.fetched_bytes - before.fetched_bytes,
            pushes=traffic.pushes - before.pushes,
            fetches=traffic.fetches - before.fetches,
            retries=traffic.retries - before.retries,
            whole_pushed_bytes=traffic.whole_pushed_bytes - before.whole_pushed_bytes,
            whole_fetched_bytes=traffic.whole_fetched_bytes - before.whole_fetched_bytes,
            staleness=_histogram(traffic.staleness, before.staleness),
        )
        links = [self._link(name, link, before.links) for name, link in traffic.links.items()]
        return [total, *(link for link in links if link.pushed_bytes or link.fetched_bytes or link.staleness)]

    def _link(self, shard: str, now: LinkTraffic, before: Mapping[str, LinkTraffic]) -> LinkEvent:
        then = before.get(shard) or LinkTraffic()
        return LinkEvent(
            rank=self._rank,
            shard=shard,
            pushed_bytes=now.pushed_bytes - then.pushed_bytes,
            fetched_bytes=now.fetched_bytes - then.fetched_bytes,
            staleness=_histogram(now.staleness, then.staleness),
        )


def _histogram(now: Counter[int], before: Counter[int]) -> dict[str, int]:
    """What has been added, by growing staleness; keys as JSON has them."""
    return {str(tau): count for tau, count in sorted((now - before).items())}
