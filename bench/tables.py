"""Question: do the pages say what was measured?

    python bench/tables.py    # writes their tables anew from the records: a second

After a measurement. Words around a table are not rewritten: read them again.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradstream.pipeline.schedule import make_schedule
from gradstream.pipeline.timing import pipeline_times

sys.path.append(str(Path(__file__).resolve().parents[1] / "studies" / "large_batch_study"))
from common import RESULTS, ROOT, command_line, kept, put, table
from large_batch import page as large_batch
from pipeline_layers import chain_of_layers
from recovery_tables import recovery_table, storm_table, tax_table

STUDIES = ROOT / "studies"
Record = Mapping[str, Any]
Places = dict[str, str]


def main() -> None:
    command_line(__doc__).parse_args()
    for name, places in PAGES.items():
        print(f"{name}: {'written anew' if put(ROOT / name, places()) else 'as it was'}")


def recorded(name: str) -> Record:
    """What a benchmark or a study has written; the part of a record behind a slash."""
    name, _, part = name.partition("/")
    study = STUDIES / name / "record.json"
    found = kept(study if study.is_file() else RESULTS / f"{name}.json")
    return found[part] if part else found


def where(record: Record) -> str:
    """The machine and the day of a record."""
    machine = record["machine"]
    machine = machine.get("machine", machine)
    return f"on {machine['cores']} cores of an {machine['processor']}, {record['date'][:10]}"


def milliseconds(seconds: float) -> str:
    """With three decimals where it is less than one."""
    return f"{1e3 * seconds:.{3 if seconds < 1e-3 else 1}f}"


# ---- carriers ------------------------------------------------------------------------------------

CARRIERS = {
    "grpc unary": "gRPC, unary",
    "grpc": "`grpc`",
    "tcp": "`tcp`",
    "shm": "`shm`",
    "socket": "blocking socket",
    "zeromq": "ZeroMQ",
    "flight": "Arrow Flight",
}
MESSAGES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}


def carriers() -> Places:
    """A round trip by its size."""
    record = recorded("carriers")
    rows = []
    for carrier, title in CARRIERS.items():
        times_ms = [1e3 * record["median_s"][carrier][str(size)] for size in MESSAGES.values()]
        rows.append([title, *(f"{time:.{2 if time < 10 else 0}f}" for time in times_ms)])
    state = f"Medians of {record['repeats']}, {where(record)}."
    return {"carriers": f"{table(['a round trip, ms', *MESSAGES], rows)}\n\n{state}"}


def benchmarks() -> Places:
    """Carriers and recovery."""
    return {"recovery": recovery_table(recorded("recovery")), **carriers()}


# ---- collectives ---------------------------------------------------------------------------------

IN_PLACE = {
    "as called": "as called",
    "core": "core",
    "only read": "only read",
    "only move": "only move",
    "gloo": "gloo",
    "openmpi": "OpenMPI",
    "mpich": "MPICH",
    "intel mpi": "Intel MPI",
}


def collectives() -> Places:
    """In shared memory, as messages, and between machines."""
    return {
        "in-place": in_place(recorded("allreduce-shared")),
        "messages": messages(recorded("collectives")),
        "network": network(recorded("collectives")),
    }


def in_place(record: Record) -> str:
    """Processes of one host, beside gloo and three kinds of MPI."""
    rows = []
    for ranks, found in record["by_ranks"].items():
        for row in found["rows"]:
            times = [milliseconds(row["median_s"][name]) for name in IN_PLACE]
            ratios = (f"{row[name]:.2f}" for name in ("ratio", "of_reading", "of_moving"))
            rows.append([f"{ranks}, {row['elems']:,}", *times, *ratios])
    head = ["ranks, elements", *IN_PLACE.values(), "the fastest peer over ours", "of reading", "of moving"]
    peers = ", ".join(f"{IN_PLACE[name]} {version}" for name, version in record["peers"].items())
    return f"{table(head, rows)}\n\nMedians of {record['rounds']}, {where(record)}; {peers}."


def messages(record: Record) -> str:
    """Over TCP: the group's own choice, the best algorithm by name, gloo."""
    rows = []
    for row in record["loopback"]:
        over_tcp = {name: time_s for name, time_s in row["median_s"].items() if name.startswith("tcp ")}
        chosen_s = over_tcp.pop("tcp messages")
        best = min(over_tcp, key=lambda name: over_tcp[name])
        by_name = f"{milliseconds(over_tcp[best])}, {best.removeprefix('tcp ')}"
        what = f"{row['ranks']}, {row['elements']:,}"
        rows.append([what, milliseconds(chosen_s), by_name, milliseconds(row["gloo_s"])])
    head = ["ranks, elements", "as chosen", "the best by name", "gloo"]
    return f"{table(head, rows)}\n\nMedians, {where(record)}."


def network(record: Record) -> str:
    """By rate and number of machines: the part of what a ring's bytes allow."""
    found = {(row["rate"], row["machines"]): row["part"] for row in record["network"]}
    counts = sorted({machines for _, machines in found})
    rows = [
        [title, *(f"{found[rate, machines]:.2f}" for machines in counts)]
        for rate, title in (("1gbit", "1 Gbit/s"), ("100mbit", "100 Mbit/s"))
    ]
    return table(["", *(f"{machines} machines" for machines in counts)], rows)


# ---- HOGWILD! ------------------------------------------------------------------------------------

PROBLEMS = {"sparse": "of 2²⁰", "sparser": "of 2²⁴", "dense": "dense"}
UPDATES = ("plain", "atomic", "lock", "short_lock", "component_locks", "round_robin")
OTHERS = ("lock", "short_lock", "round_robin")


def hogwild() -> Places:
    """Updates a second, and what `plain` by two makes of others."""
    record = recorded("hogwild/latest")
    return {
        "updates": f"{updates(record)}\n\nMedians of {record['rounds']} rounds, {where(record)}.",
        "of-others": of_others({"": record, ", earlier": recorded("hogwild/earlier")}),
    }


def updates(record: Record) -> str:
    """Thousands a second, by one process and by two."""

    def thousands(problem: str, way: str) -> str:
        return f"{record[problem]['rows'][way]['updates_per_s'] / 1e3:,.0f}"

    rows = []
    for update in UPDATES:
        cells = [f"`{update}`"]
        for problem in PROBLEMS:
            cells.append(", ".join(thousands(problem, f"{update}, {count}") for count in (1, 2)))
            cells.append(f"{record[problem]['ratios'][f'{update}, 2 processes / 1']:.2f}×")
        rows.append(cells)
    sklearn = [cell for problem in PROBLEMS for cell in (thousands(problem, "SGDClassifier"), "")]
    rows.append(["`SGDClassifier`", *sklearn])
    return table(["", *(cell for title in PROBLEMS.values() for cell in (f"{title}: 1, 2", ""))], rows)


def of_others(records: Mapping[str, Record]) -> str:
    """What `plain` by two processes makes of one process, and of two with other updates."""
    rows = []
    for when, record in records.items():
        ratios = {"`plain` by one": "plain, 2 processes / 1"}
        ratios |= {f"`{other}`": f"plain / {other}, 2 processes each" for other in OTHERS}
        for title, ratio in ratios.items():
            found = (record[problem]["ratios"][ratio] for problem in PROBLEMS)
            rows.append([f"{title}{when}", *(f"{value:.2f}" for value in found)])
    return table(["`plain` by two over", *PROBLEMS.values()], rows)


# ---- shards on machines of their own -------------------------------------------------------------


def shards_apart() -> Places:
    """What a shard on each machine brings."""
    rows, kept = [], recorded("shards-apart")["rows"]
    for row in sorted(kept, key=lambda one: (one["carrier"] != "tcp", -one["mbit"])):
        rows.append(
            [
                f"{row['strategy']}, {row['shards']}",
                f"`{row['carrier']}`" + ("" if row["insecure"] else ", TLS"),
                f"{row['mbit']:,}",
                f"{row['samples_per_s']:,.0f}",
                *(f"{100 * row[name]:.0f} %" for name in ("of_bound", "bare_of_bound", "simulated_of_bound")),
                f"{row['cores_used']:.1f}",
            ]
        )
    head = [
        "strategy, shards",
        "carrier",
        "Mbit/s",
        "samples/s",
        "of the bound",
        "plain sockets",
        "simulated",
        "cores used",
    ]
    last = max(kept, key=lambda one: str(one["date"]))
    state = f"Four machines; the newest row {where(last)}."
    return {"shards-apart": f"{table(head, rows)}\n\n{state}"}


ROWS = {
    "plain": "plain loop, 2 threads",
    "side-by-side": "two loops side by side that exchange nothing",
    "allreduce": "`allreduce`, 2 × 256 a round",
    "synchronous": "`synchronous`, 2 × 256 a round",
    "allreduce-half": "`allreduce`, 2 × 128 a round (the plain loop's batch)",
    "synchronous-half": "`synchronous`, 2 × 128 a round",
    "downpour-10": "`downpour`, period 10",
    "downpour-1": "`downpour`, period 1",
}


def caltech() -> Places:
    """The smaller dense network on this machine, and the large one on four of them."""
    small, four = recorded("caltech101/small, seed 0"), recorded("four_machines")
    plain = small["rows"]["plain"]["samples_per_s"]
    rows = [
        [
            title,
            f"{row['samples_per_s']:,.0f}",
            f"{row['samples_per_s'] / plain:.2f}",
            f"{row['train_s']:.0f}",
            f"{100 * row['accuracy']:.1f} %",
        ]
        for name, title in ROWS.items()
        for row in [small["rows"][name]]
    ]
    head = ["10,805,651 parameters, batch 256", "samples/s", "of plain", "seconds", "test accuracy"]
    asked = four["asked"]
    said = (
        f"{asked['epochs']} epochs on {asked['machines']} machines, each with a worker and a shard, cards of "
        f"{asked['rate']}, TLS, Downpour that talks every {asked['period']} steps: "
        f"{four['samples_per_s']:,.0f} samples/s, {four['train_s']:.0f} s, {100 * four['accuracy']:.1f} % of "
        f"the test images; {four['pushed_bytes'] / 1e9:.1f} GB pushed and as much fetched. "
        f"The machines share two cores; {where(four)}."
    )
    return {
        "caltech-small": f"{table(head, rows)}\n\nOne run each {where(small)}.",
        "four-machines": said,
    }


def scaling() -> Places:
    """Machines that are not simulated."""
    return {**shards_apart(), **caltech()}


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


def pipelines() -> Places:
    """Idle time, computed here on virtual time; accuracy and what was held, from the record."""
    counts, parts = (1, 4, 8, 16, 32), 4
    idle = []
    for name, rounds in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero-bubble", 1),
    ):
        plan, cells = chain_of_layers([1] * (parts * rounds + 1), parts * rounds), []
        plan = replace(
            plan, parts=parts, stages=tuple(replace(s, part=s.number % parts) for s in plan.stages)
        )
        for count in counts:
            if name == "interleaved" and count % parts:
                cells.append("–")
                continue
            whole_s = 1.0 if name == "zero-bubble" else 2.0
            times = pipeline_times(
                plan,
                make_schedule(name, plan, count),
                lambda step, whole_s=whole_s: whole_s if step.kind == "backward" else 1.0,
            )
            cells.append(f"{100 * max(times.idle):.1f}")
        idle.append([name if rounds == 1 else f"{name}, {rounds} stages a part", *cells])
    record, accuracy = recorded("pipeline_accuracy"), []
    for name, row in record["found"].items():
        means = [f"{one['mean']:.1f} ± {one['sd']:.1f}" for one in row["rates"].values()]
        held = (", ".join(map(str, row[key])) for key in ("activations", "versions"))
        accuracy.append([name, *means, *held])
    head = [
        "",
        *(f"accuracy in %, lr {lr}" for lr in record["found"]["gpipe"]["rates"]),
        "micro-batches in flight",
        "versions of weights",
    ]
    return {
        "idle": table(["", *(f"M = {count}" for count in counts)], idle),
        "accuracy": table(head, accuracy),
        "stages": table(
            ["", "seconds of a minibatch, divided by torch's"],
            [[name, f"{row['ratio']:.2f}"] for name, row in recorded("pipeline-stages")["found"].items()],
        ),
        "runs": table(
            [
                "",
                "ms of a minibatch",
                "ms that the slower part computes",
                "allowed time, divided by that of a minibatch",
                "the same without the update",
                "torch's time, divided by that of a minibatch",
            ],
            [
                _pipeline_row(name, row)
                for name, row in recorded("pipeline-runs/256 samples")["found"].items()
            ],
        ),
        "long-runs": table(
            [
                "1,024 samples",
                "ms of a minibatch",
                "ms that the slower part computes",
                "allowed time, divided by that of a minibatch",
                "the same without the update",
                "torch's time, divided by that of a minibatch",
            ],
            [
                _pipeline_row(name, row)
                for name, row in recorded("pipeline-runs/1024 samples")["found"].items()
            ],
        ),
    }


def _pipeline_row(name: str, row: dict[str, float]) -> list[str]:
    milliseconds = [f"{1e3 * row[key]:.0f}" for key in ("minibatch_s", "slowest_s")]
    return [name, *milliseconds, *(f"{row[key]:.2f}" for key in ("share", "share_of_passes", "torch_ratio"))]


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
    exchanges = {
        "split": "split",
        "gradients": "data parallel, gradients",
        "factors": "data parallel, factors",
    }
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


# ---- codecs --------------------------------------------------------------------------------------


def codecs() -> Places:
    """Speeds beside those of torch, and below which link each pays."""
    record = recorded("codec-speed")
    rows = [
        [
            f"`{row['codec']}`" if "," not in row["codec"] else row["codec"],
            f"{100 * row['share']:.3g} %",
            f"{row['encode_gb_s']:.2f}",
            f"{row['decode_gb_s']:.2f}",
            f"{row['pays_below_mbit_s'] / 1e3:.1f} Gbit/s",
        ]
        for row in record["codecs"]
    ]
    head = ["codec", "of the bytes", "encode", "decode", "pays below"]
    peers = ", ".join(f"{name} {speed:.2g}" for name, speed in record["torch_gb_s"].items())
    state = f"Medians of {record['repeats']}, one thread {where(record)}. Beside them: {peers}."
    return {"codec-speed": f"{table(head, rows)}\n\n{state}"}


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


PAGES: dict[str, Callable[[], Places]] = {
    "docs/benchmarks.md": benchmarks,
    "docs/codecs.md": codecs,
    "docs/collectives.md": collectives,
    "docs/guide/split.md": split,
    "studies/large_batch_study/README.md": large_batches,
    "studies/same_batch/README.md": same_batch,
    "docs/scaling.md": scaling,
    "docs/strategies/hogwild.md": hogwild,
    "studies/hybrid/README.md": hybrid,
    "docs/strategies/pipelines.md": pipelines,
    "docs/strategies/ssp.md": ssp,
    "studies/synthetic_gradients/README.md": synthetic_gradients,
    "studies/slow_links/README.md": slow_links,
    "studies/link_bytes/README.md": link_bytes,
    "studies/uneven_links/README.md": uneven_links,
    "studies/storm/README.md": lambda: {"storm": storm_table(recorded("storm"))},
    "studies/tax/README.md": lambda: {"tax": tax_table(recorded("tax"))},
}

if __name__ == "__main__":
    main()
