"""The tables of recovery, of a storm and of the tax on docs/benchmarks.md, from the records of their benches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import table

STRATEGIES = ("downpour", "synchronous", "allreduce")
SHARDS = ("shard, downpour", "shard, synchronous", "shard, downpour, logged")

ROWS = [  # what, its figure, and pieces of the record
    ("a killed worker is noticed", "noticed_s", [f"worker, {name}" for name in STRATEGIES]),
    ("the others train on", "committed_s", [f"worker, {name}" for name in STRATEGIES]),
    ("a new worker takes part", "back_s", [f"worker, {name}" for name in STRATEGIES]),
    ("a new coordinator serves", "back_s", ["coordinator, downpour", "coordinator, synchronous"]),
    ("steps meanwhile", "steps_meanwhile", ["coordinator, downpour", "coordinator, synchronous"]),
    ("a shard serves again", "back_s", SHARDS),
    ("all workers train on", "committed_s", SHARDS),
    ("a stopped worker is noticed", "noticed_s", ["silent worker, downpour"]),
    ("the others train on", "committed_s", ["silent worker, downpour"]),
    ("a new worker takes part", "back_s", ["silent worker, downpour"]),
]


def recovery_table(record: Mapping[str, Any]) -> str:
    """Percentiles by figure and piece, and how loaded the machine was."""
    rows, pieces = [], record["pieces"]
    for title, name, some in ROWS:
        for piece in some:
            who = f"`{piece.partition(', ')[2]}`"
            found = pieces[piece]["figures"].get(name) if piece in pieces else None
            if found is not None:
                digits = 0 if name == "steps_meanwhile" else 2
                numbers = [f"{found[part]:,.{digits}f}" for part in ("p50", "p90", "largest")]
                rows.append([title, who, *numbers])
            elif piece in pieces and pieces[piece]["ended"]:
                rows.append([title, who, "the run ends", "", ""])
    load = [pieces[piece][when] for piece in pieces for when in ("load_before", "load_after")]
    state = (
        f"Seconds, {record['date'][:10]}, on {record['machine']['cores']} cores of an {record['machine']['processor']} "
        f"that others used as well: {min(load):.0f} to {max(load):.0f} threads wanted one. The lease is "
        f"{record['lease_s']:g} s."
    )
    for hog in (found for piece, found in pieces.items() if piece.startswith("hog")):
        state += (
            f" Beside {hog['hogs']} processes that compute without end, at loads of {hog['load_before']:.0f} to "
            f"{hog['load_after']:.0f} and a lease of {hog['lease_s']:g} s, a run of {hog['seconds']:.0f} s lost "
            f"{len(hog['false_evictions'])} of its nodes."
        )
    return f"{table(['after a kill', '', 'p50', 'p90', 'largest'], rows)}\n\n{state}"


def storm_table(record: Mapping[str, Any]) -> str:
    """By run: its length, its faults, the audit, and what they have cost."""
    rows = []
    for name, found in {**record["strategies"], "`downpour`, four machines": record["apart"]}.items():
        audit, title = found["audit"], name if " " in name else f"`{name}`"
        counted = (
            ("the same bits" if audit["same_bits"] else "**other bits**")
            if "same_bits" in audit
            else " · ".join(str(audit[what]) for what in ("lost", "doubled", "torn"))
        )
        cost = [
            f"{100 * found[what]:.1f} %" if what in found else "" for what in ("participation", "throughput")
        ]
        faults = sum(found["faults"].values())
        rows.append(
            [title, f"{found['minutes']:.0f}", f"{faults}", f"{found['faults_h']:.0f}", counted, *cost]
        )
    head = ["", "minutes", "faults", "an hour", "lost · doubled · torn", "participation", "throughput"]
    state = f"{record['date'][:10]}, on {record['machine']['cores']} cores of an {record['machine']['processor']}."
    return f"{table(head, rows)}\n\n{state}"


def tax_table(record: Mapping[str, Any]) -> str:
    """By carrier, the share of each kind of protection, and runs with and without them."""
    rows: list[list[str]] = []
    for carrier, row in record["carriers"].items():
        kinds = [found["share"] for found in row["protections"].values()]
        cells = [f"{100 * share:.1f} %" for share in [*kinds, sum(kinds)]]
        for figure in ("cpu_s", "step_s"):
            low, high = row[figure]["interval"]
            cells.append(f"{row[figure]['ratio']:.2f} ({low:.2f} to {high:.2f})")
        rows.append([f"`{carrier}`", *cells])
    kinds = list(next(iter(record["carriers"].values()))["protections"])
    names = {"finite": "finite checks", "ledger": "receipts"}
    head = ["", *(names.get(kind, kind) for kind in kinds), "all", "CPU time, with over without", "step time"]
    rounds = min(row["rounds"] for row in record["carriers"].values())
    state = (
        f"Shares of all CPU time, and {rounds} rounds with and without, {record['date'][:10]}, on "
        f"{record['machine']['cores']} cores of an {record['machine']['processor']} that others used as well: "
        f"{min(record['load']):.1f} to {max(record['load']):.1f} threads wanted one."
    )
    return f"{table(head, rows)}\n\n{state}"
