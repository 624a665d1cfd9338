"""Staleness of a run as a table: by worker and shard.

    τ = version of the chunk when the gradient is applied − version that it was computed on

Counted chunk by chunk, as chunks are applied each for itself. Where workers update one vector in shared
memory there are no versions: τ counts the minibatches that others have put in during one of a worker's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, overload

from gradstream.report.charts import histogram
from gradstream.report.summary import EventDict

__all__ = ["MEMORY", "By", "Staleness", "StalenessRow", "quantile", "staleness_by"]

By = Literal["link", "worker", "shard", "run"]

ALL = "all"

MEMORY = "memory"
"""In the place of a shard, where workers share the vector."""


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """Of one worker at one shard, or of all of them.

    Args:
        worker, shard: names; "all" where it is not told apart, "memory" where workers share the vector.
        histogram: τ -> how many chunks had it, by growing τ; minibatches in shared memory.
    """

    worker: str
    shard: str
    histogram: Mapping[int, int]

    @property
    def chunks(self) -> int:
        """How many there were."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Mean τ; NaN of none."""
        total = sum(tau * count for tau, count in self.histogram.items())
        return total / self.chunks if self.chunks else math.nan

    @property
    def p50(self) -> int:
        """Half of the chunks had this τ or less."""
        return quantile(self.histogram, 0.5)

    @property
    def p99(self) -> int:
        """99 of 100 had this τ or less."""
        return quantile(self.histogram, 0.99)

    @property
    def largest(self) -> int:
        """The largest τ."""
        return max(self.histogram, default=0)

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}, p50 {self.p50}, p99 {self.p99}, largest {self.largest}"


class Staleness(Sequence[StalenessRow]):
    """Rows, and how they look at a prompt and in a notebook.

    Args:
        rows: by worker, then by shard.
    """

    def __init__(self, rows: Sequence[StalenessRow]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> StalenessRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StalenessRow]: ...

    def __getitem__(self, index: int | slice) -> StalenessRow | Sequence[StalenessRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StalenessRow]:
        return iter(self._rows)

    def __repr__(self) -> str:
        if not self._rows:
            return "Staleness: none, workers exchanged without a parameter server or shared memory"
        head = f"{'worker':<12}{'shard':<12}{'chunks':>9}{'mean':>8}{'p50':>6}{'p99':>6}{'largest':>9}"
        lines = [
            f"{row.worker:<12}{row.shard:<12}{row.chunks:>9,}{row.mean:>8.2f}{row.p50:>6}{row.p99:>6}"
            f"{row.largest:>9}"
            for row in self._rows
        ]
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        """With a bar for each τ."""
        if not self._rows:
            return f"<p>{escape(repr(self))}</p>"
        names = ("worker", "shard", "chunks", "mean", "p50", "p99", "largest", "")
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(
            "<tr>"
            + "".join(
                f"<td>{cell}</td>"
                for cell in (
                    escape(row.worker),
                    escape(row.shard),
                    f"{row.chunks:,}",
                    f"{row.mean:.2f}",
                    row.p50,
                    row.p99,
                    row.largest,
                    histogram(row.histogram, title=f"Staleness of {row.worker} at {row.shard}: {row}"),
                )
            )
            + "</tr>"
            for row in self._rows
        )
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
        events: of the run; those of kind "link" tell, or "exchange" where there are no shards.
        by: a row for each worker and shard, for each worker, for each shard, or one for all.
    """
    told = [event for event in events if event["event"] in ("link", "exchange") and event["staleness"]]
    through = "link" if any(event["event"] == "link" for event in told) else "exchange"
    counts: dict[tuple[str, str], Counter[int]] = {}
    for event in told:
        if event["event"] == through:
            key = (
                event["node"] if by in ("link", "worker") else ALL,
                event.get("shard", MEMORY) if by in ("link", "shard") else ALL,
            )
            counts.setdefault(key, Counter()).update(
                {int(tau): int(count) for tau, count in event["staleness"].items()}
            )
    keys = sorted(counts, key=lambda key: [(len(name), name) for name in key])
    return Staleness([StalenessRow(*key, dict(sorted(counts[key].items()))) for key in keys])


def quantile(counts: Mapping[int, int], share: float) -> int:
    """The smallest value that so large a share of all reaches or stays below; 0 of none."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 1e-9:
            return value
    return 0
