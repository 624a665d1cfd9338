"""Question: do the pages say what was measured?

    python bench/tables.py    # writes their tables anew from the records: a second

After a measurement. Words around a table are not rewritten: read them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common import ROOT, Places, Record, command_line, put, recorded, table, where
from gradstream.pipeline.schedule import make_schedule
from kit.pipeline_timing import pipeline_times
from own_loops import own_loops_table
from pipeline_layers import chain_of_layers
from recovery_tables import recovery_table
from study_tables import STUDY_PAGES


def main() -> None:
    command_line(__doc__).parse_args()
    for name, places in PAGES.items():
        print(f"{name}: {'written anew' if put(ROOT / name, places()) else 'as it was'}")


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


def milliseconds(seconds: float) -> str:
    """With three decimals where it is less than one."""
    return f"{1e3 * seconds:.{3 if seconds < 1e-3 else 1}f}"


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
    """Carriers, recovery, and loops of one's own beside those of others."""
    tables = {"recovery": recovery_table, "own-loops": own_loops_table}
    return {**carriers(), **{name: make(recorded(name)) for name, make in tables.items()}}


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


def hogwild() -> Places:
    """Updates a second, and what `plain` by two makes of others."""
    record = recorded("hogwild/latest")
    return {"updates": f"{updates(record)}\n\nMedians of {record['rounds']} rounds, {where(record)}."}


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


def caltech() -> Places:
    """The large network on four machines."""
    four = recorded("four_machines")
    asked = four["asked"]
    said = (
        f"{asked['epochs']} epochs on {asked['machines']} machines, each with a worker and a shard, cards of "
        f"{asked['rate']}, TLS, Downpour that talks every {asked['period']} steps: "
        f"{four['samples_per_s']:,.0f} samples/s, {four['train_s']:.0f} s, {100 * four['accuracy']:.1f} % of "
        f"the test images; {four['pushed_bytes'] / 1e9:.1f} GB pushed and as much fetched. "
        f"The machines share two cores; {where(four)}."
    )
    return {
        "four-machines": said,
    }


def scaling() -> Places:
    """Machines that are not simulated."""
    return {**shards_apart(), **caltech()}


def pipelines() -> Places:
    """Idle time, computed here on virtual time; accuracy, from the record."""
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
        accuracy.append([name, *means])
    head = ["", *(f"accuracy in %, lr {lr}" for lr in record["found"]["gpipe"]["rates"])]
    return {
        "idle": table(["", *(f"M = {count}" for count in counts)], idle),
        "accuracy": table(head, accuracy),
        "runs": table(
            [
                "",
                "ms of a minibatch",
                "ms that the slower part computes",
                "allowed time, divided by that of a minibatch",
                "torch's time, divided by that of a minibatch",
            ],
            [
                _pipeline_row(name, row)
                for name, row in recorded("pipeline-runs/256 samples")["found"].items()
            ],
        ),
    }


def _pipeline_row(name: str, row: dict[str, float]) -> list[str]:
    milliseconds = [f"{1e3 * row[key]:.0f}" for key in ("minibatch_s", "slowest_s")]
    return [name, *milliseconds, *(f"{row[key]:.2f}" for key in ("share", "torch_ratio"))]


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


PAGES: dict[str, Callable[[], Places]] = {
    **STUDY_PAGES,
    "docs/benchmarks.md": benchmarks,
    "docs/codecs.md": codecs,
    "docs/collectives.md": collectives,
    "docs/scaling.md": scaling,
    "docs/strategies/hogwild.md": hogwild,
    "docs/strategies/pipelines.md": pipelines,
}

if __name__ == "__main__":
    main()
