"""Staleness of a run as a table: by worker and shard.

τ = version of the chunk when the gradient is applied − version on which it was computed

τ is counted for each chunk, since each chunk has its own version. If workers update one vector in shared memory,
there
are no versions: τ then counts the minibatches of others that entered the vector during one of a worker's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from gradstream.report.charts import count_text, histogram
from gradstream.telemetry.events import EventDict

# ---- staleness ---------------------------------------------------------------------------

By = Literal["link", "worker", "shard", "run"]

ALL = "all"

MEMORY = "memory"
"""Takes the place of a shard's name if workers share the vector."""


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """The staleness of one worker at one shard, or of all workers or shards.

    Args:
        worker, shard: names; "all" for all of them, "memory" if workers share the vector.
        histogram: τ -> number of chunks (of minibatches, in shared memory), by ascending τ.
    """

    worker: str
    shard: str
    histogram: Mapping[int, int]

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Mean τ; NaN without chunks."""
        total = sum(tau * count for tau, count in self.histogram.items())
        return total / self.chunks if self.chunks else math.nan

    @property
    def p50(self) -> int:
        """Half of the chunks have this τ or less."""
        return quantile(self.histogram, 0.5)

    @property
    def p99(self) -> int:
        """99 of 100 chunks have this τ or less."""
        return quantile(self.histogram, 0.99)

    @property
    def largest(self) -> int:
        """The largest τ."""
        return max(self.histogram, default=0)

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}, p50 {self.p50}, p99 {self.p99}, largest {self.largest}"


class Staleness(tuple[StalenessRow, ...]):
    """Rows of staleness, by worker and then by shard, displayed as a table at a prompt and in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "Staleness: none, workers exchanged without a parameter server or shared memory"
        head = f"{'worker':<12}{'shard':<12}{'chunks':>9}{'mean':>8}{'p50':>6}{'p99':>6}{'largest':>9}"
        lines = [
            f"{row.worker:<12}{row.shard:<12}{row.chunks:>9,}{row.mean:>8.2f}{row.p50:>6}{row.p99:>6}"
            f"{row.largest:>9}"
            for row in self
        ]
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        """The table with a histogram in each row."""
        if not self:
            return f"<p>{escape(repr(self))}</p>"
        names = ("worker", "shard", "chunks", "mean", "p50", "p99", "largest", "")
        head = "".join(f"<th>{name}</th>" for name in names)
        body = ""
        for row in self:
            drawn = histogram(row.histogram, title=f"Staleness of {row.worker} at {row.shard}: {row}")
            cells = [escape(row.worker), escape(row.shard), f"{row.chunks:,}", f"{row.mean:.2f}"]
            cells += [str(row.p50), str(row.p99), str(row.largest), drawn]
            body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        style = (
            ".gradstream .fill { fill: #4c8fd0; } .gradstream .axis { stroke: currentColor; opacity: .5; }"
        )
        return (
            f'<div class="gradstream"><style>{style}</style><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )


def staleness_by(events: Iterable[EventDict], by: By = "link") -> Staleness:
    """The staleness of a run's pushes.

    Args:
        events: events of the run: "link" events, or "exchange" events if there are no shards.
        by: "link" makes a row for each worker at each shard, "worker" and "shard" one for each, "run" one for all.
    """
    events = [event for event in events if event["event"] in ("link", "exchange") and event["staleness"]]
    name = "link" if any(event["event"] == "link" for event in events) else "exchange"
    counts: dict[tuple[str, str], Counter[int]] = {}
    for event in events:
        if event["event"] == name:
            key = (
                event["node"] if by in ("link", "worker") else ALL,
                event.get("shard", MEMORY) if by in ("link", "shard") else ALL,
            )
            counts.setdefault(key, Counter()).update(
                {int(tau): int(count) for tau, count in event["staleness"].items()}
            )
    keys = sorted(counts, key=lambda key: [(len(name), name) for name in key])
    return Staleness(StalenessRow(*key, dict(sorted(counts[key].items()))) for key in keys)


def quantile(counts: Mapping[int, int], share: float) -> int:
    """The smallest value that at least this share of all counts does not exceed; 0 without counts."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 1e-9:
            return value
    return 0


# ---- uneven ------------------------------------------------------------------------------
# The tables of a report on uneven machines: shares by measured speed, and contributions that came too late.

MOST = 12
"""Most changes to show, the newest ones."""

Row = Sequence[str]


def shares_table(events: Iterable[EventDict]) -> tuple[Row, list[Row]]:
    """Head and rows of the shares of rounds: every change, and the speeds that were measured last.

    Both are empty if shares are not measured.
    """
    measured = [event for event in events if event["event"] == "shares"]
    if not measured:
        return [], []
    last = measured[-1]
    head = ["from", *(f">worker-{rank}" for rank in range(len(last["samples"])))]
    changes = [event for event in measured if event["changed"]]
    rows = [
        _row(f"epoch {change['epoch']}, round {change['batch']}", change["samples"])
        for change in changes[-MOST:]
    ]
    if len(changes) > MOST:
        rows.insert(0, [f"{len(changes) - MOST} changes before", *[""] * len(last["samples"])])
    if not changes:
        rows.append(_row("as at first", last["samples"]))
    speeds = [f"{count_text(per_s)}/s" if per_s else "–" for per_s in last["per_s"]]
    return head, [*rows, ["speed, measured last", *speeds]]


def quorums(events: Sequence[EventDict]) -> tuple[Row, list[Row]]:
    """Head and rows: by worker, how many gradients are in updates, came late, or were skipped.

    Both are empty if every update takes all workers.
    """
    rounds = [event for event in events if event["event"] == "round"]
    if not rounds:
        return [], []
    accepted = Counter(rank for event in rounds for rank in event["accepted"])
    late = Counter(e["rank"] for e in events if e["event"] == "step" and e.get("late"))
    rows: list[Row] = []
    for rank in sorted({*rounds[0]["accepted"], *rounds[0]["left_out"]}):
        taken, skipped = accepted[rank], max(0, len(rounds) - accepted[rank] - late[rank])
        counts = [f"{taken:,}", f"{taken / len(rounds):.0%}", f"{late[rank]:,}", f"{skipped:,}"]
        rows.append([escape(f"worker-{rank}"), *counts])
    return ["worker", ">in updates", ">of all", ">late", ">skipped"], rows


def _row(what: str, numbers: Iterable[int]) -> Row:
    return [escape(what), *(f"{number:,}" for number in numbers)]
