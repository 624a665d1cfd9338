"""The tables of pages that rest on studies, by place. `tables.py` writes them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "studies" / "large_batch_study"))
from common import Places, Record, recorded, table, where
from large_batch import page as large_batch
from recovery_tables import storm_table, tax_table


def ssp() -> Places:
    """On virtual time: what each clock of lead wins, all alike and with one slow worker."""
    found = recorded("ssp_bound")["found"]
    alike, slow = found["alike"], found["one of half the speed"]
    rows = [
        [
            name.removeprefix("ssp, ").replace("downpour", "`downpour`, `overlap=False`"),
            f"{1e3 * row['step_s']:.0f}",
            f"{row['fetches']:.2f}",
            f"{row['staleness']:.1f}",
            f"{1e3 * slow[name]['step_s']:.0f}",
            f"{slow[name]['fetches']:.2f}",
        ]
        for name, row in alike.items()
    ]
    head = ["", "all alike: ms a step", "fetches a step", "staleness", "one of half the speed: ms a step"]
    return {"bound": table([*head, "fetches a step"], rows)}


# ---- hybrid --------------------------------------------------------------------------------------


def hybrid() -> Places:
    """Speedups and bytes of two networks, and the share of weights at which the hybrid turns."""
    record = recorded("hybrid")
    speedups, sent = [], []
    for name, network in record["networks"].items():
        for row in network["rows"]:
            head, best = [name, str(row["workers"])], max(row["speedup"].values())
            cells = [f"{one:.2f}" for one in row["speedup"].values()]
            marked = [f"**{cell}**" if cell == f"{best:.2f}" else cell for cell in cells]
            speedups.append([*head, row["link"], *marked])
            cells = [f"{one:,.1f}" for way, one in row["sent_mb"].items() if not way.endswith("behind")]
            if row["link"] == next(iter(record["parameters"]["links_bytes_s"])):
                sent.append([*head, *cells[:3]])
    ways = network["rows"][0]["speedup"]
    return {
        "hybrid-speedup": table(["", "K", "network", *ways], speedups),
        "hybrid-bytes": table(["", "K", "data parallel", "model parallel", "hybrid"], sent),
        "hybrid-turning": _turning(record),
    }


def _turning(record: Record) -> str:
    rows, links = [], record["parameters"]["links_bytes_s"]
    cases = sorted({(row["workers"], row["samples"]) for row in record["turning"]})
    for workers, samples in cases:
        own = [row for row in record["turning"] if (row["workers"], row["samples"]) == (workers, samples)]
        by_link = {link: [row for row in own if row["link"] == link] for link in links}
        some = next(iter(by_link.values()))
        cells = [
            _between(some, lambda row: row["sent_mb"]["hybrid"] < row["sent_mb"]["data parallel, behind"])
        ]
        for way in ("behind", "beside"):
            name = f"data parallel, {way}"
            for one in by_link.values():
                cells.append(
                    _between(one, lambda row, name=name: row["seconds"]["hybrid"] < row["seconds"][name])
                )
        rows.append([str(workers), str(samples), *cells])
    than = [f"quicker than {way}, {link}" for way in ("behind", "beside") for link in links]
    return table(["K", "samples each", "fewer bytes", *than], rows)


def _between(rows: list[Record], wins: Callable[[Record], bool]) -> str:
    """The shares of the last network that loses, and of the first that wins, in %."""
    shares = [f"{100 * row['linear_share']:.0f}" for row in rows]
    won = [wins(row) for row in rows]
    if not any(won):
        return f"not at {shares[-1]}"
    first = won.index(True)
    return f"{shares[first - 1]} to {shares[first]}" if first else f"below {shares[0]}"


def split() -> Places:
    """Losses of split models beside those of the unsplit ones, and steps on two machines."""
    record, rows = recorded("split_models"), []
    titles = {"transformer": "transformer", "resnet": "ResNet", "resnet64": "ResNet, float64"}
    for name, title in titles.items():
        ways = [record[f"{name}, {parts}"] for parts in (1, 2, 4)]
        rows.append(
            [
                title,
                f"{ways[0]['first']:.3f}",
                *(f"{way['last']:.4f}" for way in ways),
                f"{max(way['apart_10'] for way in ways):.0e}",
                f"{max(way['apart'] for way in ways):.0e}",
            ]
        )
    head = ["", "first loss", "1 process", "2", "4", "apart in 10 steps", f"in {record['steps']}"]
    exchanges = {"split": "split", "gradients": "data parallel"}
    steps = [[title, f"{record[way]:.2f}"] for way, title in exchanges.items()]
    return {
        "split-models": table(head, rows),
        "split-apart": table(["two machines, cards of 100 Mbit/s", "seconds a step"], steps),
    }


# ---- synthetic gradients -------------------------------------------------------------------------


def synthetic_gradients() -> Places:
    """Accuracy of parts that train apart, and the time that they wait."""
    record, accuracy = recorded("synthetic_gradients"), []
    for method, by_rate in record["found"].items():
        for rate, one in by_rate.items():
            below = "{:.1f} ± {:.1f}".format(*one["below"]) if "below" in one else "–"
            *curve, last = (f"{value:.1f}" for value in one["curve"])
            accuracy.append([method, rate, *curve, f"{last} ± {one['sd']:.1f}", below])
    waits = {(row["schedule"], row["latency"]): row for row in record["waiting"]}
    latencies = sorted({latency for _, latency in waits})
    names = list(dict.fromkeys(name for name, _ in waits))
    waiting = []
    for name in names:
        rows = [waits[name, latency] for latency in latencies]
        cells = ([", ".join(f"{share:.0f}" for share in row["wait"]), f"{row['speed']:.1f}"] for row in rows)
        waiting.append([name, *(cell for pair in cells for cell in pair)])
    heads = [[f"% of waiting, latency {latency:g}", "speed"] for latency in latencies]
    epochs = [f"epoch {epoch}" for epoch in range(1, record["epochs"] + 1)]
    return {
        "accuracy": table(["accuracy in %", "rate", *epochs, "below backpropagation"], accuracy),
        "waiting": table(["", *(cell for pair in heads for cell in pair)], waiting),
    }


def link_bytes() -> Places:
    """What four cards send for an accuracy."""
    record = recorded("link_bytes")
    rows = [
        [
            name,
            f"{100 * one['accuracy']:.1f} %",
            f"{one['lost_points']:+.2f} ± {one['error_points']:.2f}",
            f"{one['sent_mb']:,.1f}",
            f"{one['fewer']:,.0f}",
        ]
        for name, one in record["compared"].items()
    ]
    seeds = len(next(iter(record["rows"].values())))
    head = ["", "accuracy", "points lost", "MB", "times fewer"]
    state = f"Means of {seeds} seeds, {record['epochs']} epochs, {where(record)}."
    return {"link-bytes": f"{table(head, rows)}\n\n{state}"}


SLOW_LINKS = {"slow-links": "100mbit, 0 ms", "slow-links-10mbit": "10mbit, 50 ms"}
FAST_LINK = "10gbit, 0 ms"
PEERS = ("torch", "hivemind")
"""How the names of what is not gradstream begin."""

TimesTo = dict[tuple[str, str], list[Record]]
"""By task and method: a row for each seed."""


def uneven_links() -> Places:
    """Times with one machine that is another way, over those that the machines' speeds allow."""
    record = recorded("uneven_links")
    titles = {
        "slow": "a quarter of the speed",
        "cut": "cut off for 30 s",
        "leaves": "leaves",
        "joins": "joins",
    }
    lines = []
    for name, row in record["rows"].items():
        equal = row["equal, seconds"]["mean"]
        times = [f"{row[one]['mean']:.2f} ± {row[one]['deviation']:.2f}" for one in titles]
        lines.append([name, f"{equal:.0f} s", *times])
    text = table(["one machine of four", "as the others", *titles.values()], lines)
    seeds = len(next(iter(record["rows"].values()))["slow"]["all"])
    return {"uneven-links": f"{text}\n\nMeans and deviations of {seeds} seeds, {record['date'][:10]}."}


def slow_links() -> Places:
    """Seconds until four machines have a network at its accuracy, by task; and the best of ours and of the others."""
    rows = recorded("slow_links/links")["rows"]
    by_link = {link: _times_to(rows, link) for link in (FAST_LINK, *SLOW_LINKS.values())}
    places = {place: _all_times(by_link[link]) for place, link in SLOW_LINKS.items()}
    beside = recorded("slow_links/auto")["rows"]
    auto = {link: _times_to(beside, link) for link in SLOW_LINKS.values()}
    return {**places, "slow-links-best": _best_times(by_link), "slow-links-auto": _auto_times(auto)}


def _times_to(rows: Mapping[str, Record], link: str) -> TimesTo:
    found: TimesTo = {}
    for key, row in rows.items():
        task, here, name = key.partition(f", {link}, ")
        if here:
            found.setdefault((task, name.rpartition(", ")[0]), []).append(row)
    return found


def _all_times(found: TimesTo) -> str:
    tasks, names = dict.fromkeys(task for task, _ in found), dict.fromkeys(name for _, name in found)
    cells = [[name, *(_time_to(found.get((task, name), [])) for task in tasks)] for name in names]
    lines = sorted(cells, key=lambda line: line[0].startswith(PEERS))
    one = next(iter(found.values()))[0]
    state = (
        f"Seconds (MB sent by all machines; seeds, where there are several: it is their median), {where(one)}. "
        "> : cut there, without the accuracy. Empty: not measured."
    )
    return f"{table(['', *(f'`{task}`' for task in tasks)], lines)}\n\n{state}"


def _best_times(by_link: Mapping[str, TimesTo]) -> str:
    """The quickest of ours and of the others, by link, and what is between them."""
    tasks = dict.fromkeys(task for task, _ in by_link[SLOW_LINKS["slow-links"]])
    lines = [["without a limit: gradstream", *(_seconds(_best(by_link[FAST_LINK], task)) for task in tasks)]]
    for link in SLOW_LINKS.values():
        free = {task: _best(by_link[FAST_LINK], task) for task in tasks}
        ours = {task: _best(by_link[link], task) for task in tasks}
        theirs = {task: _best(by_link[link], task, others=True) for task in tasks}
        lines += [
            [f"{_title(link)}: gradstream", *(_seconds(ours[task]) for task in tasks)],
            ["… over that without a limit", *(_ratio(ours[task], free[task], 2) for task in tasks)],
            ["… best of the others", *(_seconds(theirs[task]) for task in tasks)],
            ["… over gradstream", *(_ratio(theirs[task], ours[task], 1) for task in tasks)],
        ]
    return table(["", *(f"`{task}`" for task in tasks)], lines)


def _auto_times(by_link: Mapping[str, TimesTo]) -> str:
    """Strategy "auto" beside a row that was chosen by hand, and made in the same hour."""
    tasks, lines = dict.fromkeys(task for found in by_link.values() for task, _ in found), []
    for link, found in by_link.items():
        auto = {task: rows for (task, name), rows in found.items() if name == "auto"}
        hand = {task: rows for (task, name), rows in found.items() if name != "auto"}
        ratios = (f"{_median_s(auto[task]) / _median_s(hand[task]):.2f}" for task in tasks)
        lines += [
            [f"{_title(link)}: auto", *(_time_to(auto[task], seeds=False) for task in tasks)],
            ["… by hand", *(_time_to(hand[task], seeds=False) for task in tasks)],
            ["… auto over that", *ratios],
        ]
    one = next(iter(found.values()))
    state = f"Seconds (MB sent by all machines), medians of {len(one)} seeds, {where(one[0])}."
    return f"{table(['', *(f'`{task}`' for task in tasks)], lines)}\n\n{state}"


def _best(found: TimesTo, task: str, *, others: bool = False) -> tuple[float, bool] | None:
    """Seconds, and whether they are from a row that reached its goal; None without rows.

    Of ours only those with most seeds count: a lucky one may be quicker than any median.
    """
    rows = [rows for (of, name), rows in found.items() if of == task and name.startswith(PEERS) is others]
    seeds = max(map(len, rows), default=0)
    rows = [one for one in rows if others or len(one) == seeds]
    reached = [seconds for seconds in map(_median_s, rows) if not math.isinf(seconds)]
    cut = [max(row["limit_s"] for row in one) for one in rows]
    return (min(reached), True) if reached else (min(cut), False) if cut else None


def _title(link: str) -> str:
    return link.replace("mbit", " Mbit/s").replace(", 0 ms", "")


def _seconds(best: tuple[float, bool] | None) -> str:
    return "" if best is None else f"{'' if best[1] else '> '}{best[0]:.0f} s"


def _ratio(above: tuple[float, bool] | None, below: tuple[float, bool] | None, digits: int) -> str:
    if above is None or below is None:
        return ""
    return f"{'' if above[1] else '> '}{above[0] / below[0]:.{digits}f}"


def _median_s(rows: list[Record]) -> float:
    return statistics.median(row["reached_s"] or math.inf for row in rows)


def _time_to(rows: list[Record], *, seeds: bool = True) -> str:
    """The median of some runs, with their number if it is to be said."""
    if not rows:
        return ""
    sent = f"{statistics.median(row['sent_bytes'] for row in rows) / 1e6:,.0f}"
    number = f"; {len(rows)}" if seeds and len(rows) > 1 else ""
    median_s = _median_s(rows)
    time = f"> {max(row['limit_s'] for row in rows):.0f}" if math.isinf(median_s) else f"{median_s:.0f}"
    return f"{time} ({sent}{number})"


# ---- large batches -------------------------------------------------------------------------------


def large_batches() -> Places:
    """Minima, starts, growing batches, saddles and updates."""
    record = recorded("large_batch_study")
    return {f"study-{place}": text for place, text in large_batch.tables(record).items()}


def same_batch() -> Places:
    """A batch of 1,024 in more parts, and more workers with 32 samples each."""
    record = recorded("same_batch")
    networks = record["virtual"]["networks"]
    rows = [
        (f"{name} weights, `{way}`", networks[name][way])
        for name in networks
        for way in ("synchronous", "allreduce")
    ]
    parts, counts = ("1", "16", "64", "256", "1024"), ("32", "40", "64", "120", "128", "256")

    def step(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"

    def times(each: Mapping[str, float], count: str) -> str:
        return f"{int(count) * each['1'] / each[count]:.3g}" if count in each else ""

    real = record["real"]["networks"]
    return {
        "same-batch": table(
            ["a step, ms", *(f"{int(count):,} × {1024 // int(count):,}" for count in parts)],
            [[name, *(step(row["parts_s"].get(count)) for count in parts)] for name, row in rows],
        ),
        "same-batch-real": table(
            [
                "ms a step",
                *(f"{count} × {1024 // int(count):,}" for count in real["few"]),
                "test accuracy in %",
            ],
            [
                [
                    f"{name} weights",
                    *(f"{1e3 * row['step_s']:.1f}" for row in by_count.values()),
                    ", ".join(f"{100 * row['accuracy']:.1f}" for row in by_count.values()),
                ]
                for name, by_count in real.items()
            ],
        ),
        "same-batch-more": table(
            ["workers", *counts],
            [[name, *(times(row["each_s"], count) for count in counts)] for name, row in rows],
        ),
    }


STUDY_PAGES: dict[str, Callable[[], Places]] = {
    "docs/guide/split.md": split,
    "docs/strategies/ssp.md": ssp,
    "studies/large_batch_study/README.md": large_batches,
    "studies/same_batch/README.md": same_batch,
    "studies/hybrid/README.md": hybrid,
    "studies/synthetic_gradients/README.md": synthetic_gradients,
    "studies/slow_links/README.md": slow_links,
    "studies/link_bytes/README.md": link_bytes,
    "studies/uneven_links/README.md": uneven_links,
    "studies/storm/README.md": lambda: {"storm": storm_table(recorded("storm"))},
    "studies/tax/README.md": lambda: {"tax": tax_table(recorded("tax"))},
}
