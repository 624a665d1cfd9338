"""The tables of a report on uneven machines: shares by measured speed, and contributions that came too late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from gradstream.report.units import count_text
from gradstream.telemetry.events import EventDict

MOST = 12
"""Most changes that are shown, the newest ones."""

Row = Sequence[str]


def shares_table(events: Iterable[EventDict]) -> tuple[Row, list[Row]]:
    """Head and rows of the shares of rounds: each change of them, and the speeds that were measured last.

    Both are empty if shares are not measured.
    """
    measured = [event for event in events if event["event"] == "shares"]
    if not measured:
        return [], []
    last = measured[-1]
    head = ["from", *(f">worker-{rank}" for rank in range(len(last["samples"])))]
    changes = [event for event in measured if event["changed"]]
    rows = [_row(f"epoch {one['epoch']}, round {one['batch']}", one["samples"]) for one in changes[-MOST:]]
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
        left_out = len(rounds) - accepted[rank]
        rows.append(
            [
                escape(f"worker-{rank}"),
                f"{accepted[rank]:,}",
                f"{accepted[rank] / len(rounds):.0%}",
                f"{late[rank]:,}",
                f"{max(0, left_out - late[rank]):,}",
            ]
        )
    return ["worker", ">in updates", ">of all", ">late", ">skipped"], rows


def _row(what: str, numbers: Iterable[int]) -> Row:
    return [escape(what), *(f"{number:,}" for number in numbers)]
