"""Question: are groups that send messages as fast as gloo, and as the bytes of a network allow?

    python bench/collectives.py              # all of it: about ten minutes
    python bench/collectives.py --virtual    # only the plot of formulas and virtual time: seconds

Three parts, each with its figures in bench/results/collectives.json and a plot beside it:

* virtual: every algorithm by size and by number of ranks, as the formulas say and as virtual time finds;
* loopback: every algorithm over tcp and gRPC, 2 and 4 processes, beside gloo's allreduce in the same
  run, rounds of both alternating;
* network: a ring between network namespaces with cards of 1 Gbit/s and 100 Mbit/s (`tc tbf`), against the
  time that its bytes take at that rate. Takes root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, ROOT, command_line, keep, now
from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.group import Group
from gradstream.machine.description import describe_machine, git_commit
from gradstream.preflight.allreduce import AllreducePlan, AllreduceResult, measure_here, result_of
from gradstream.run.local.environment import node_environment
from gradstream.runtime import Cost, Link, Network, SimulationConfig
from kit.group_runs import VirtualRanks
from kit.machines import Machines, unavailable

SIZES = (1_000, 250_000, 11_000_000)
ROUNDS = 3  # of processes, alternating with gloo's
TIMES = 7  # in each
ALPHA_S, BYTES_S, GAMMA_S_BYTE = 50e-6, 1.25e9, 1e-10  # of the virtual network: 10 Gbit/s


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--virtual", action="store_true", help="only the plot of formulas and virtual time")
    parser.add_argument("--gloo", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.gloo:
        gloo_rank(Path(given.gloo[0]), *map(int, given.gloo[1:]))
        return
    RESULTS.mkdir(exist_ok=True)
    figures: dict[str, Any] = {"virtual": virtual()}
    plot_virtual(figures["virtual"], RESULTS / "collectives-virtual.png")
    if given.virtual:
        return
    figures["loopback"] = loopback()
    figures["network"] = network()
    figures |= {
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine(node_environment(4)),
        "load_average": os.getloadavg(),
    }
    keep(RESULTS / "collectives.json", figures)


# ---- virtual time ----------------------------------------------------------------------------


def virtual_seconds(size: int, num_bytes: int, how: str) -> float:
    """One allreduce in whole messages, begun by all ranks at once."""
    link = Link(latency_s=ALPHA_S)
    config = SimulationConfig(
        costs={"reduce": Cost(per_elem_s=4 * GAMMA_S_BYTE)},
        network=Network(bandwidth_bytes_s=BYTES_S, link=link, header_bytes=0),
        shape_only=True,
    )

    async def work(group: Group) -> float:
        runtime = ranks.cluster.runtime(group.names[group.rank])
        await runtime.sleep(1.0 - ranks.now_s)
        await group.allreduce(group.allocate(num_bytes // 4, torch.float32, "gradient").all)
        return ranks.now_s - 1.0

    ranks = VirtualRanks(size, config=config)
    found: list[float] = ranks.run(work, how=how, piece_bytes=4 << 20)
    return max(found)


def virtual() -> dict[str, Any]:
    """By size among 16 ranks, and by number of ranks for 4 MB: (x, formula, virtual time)."""
    by_bytes: dict[str, Any] = {}
    by_ranks: dict[str, Any] = {}
    for how, algorithm in ALGORITHMS.items():
        by_bytes[how], by_ranks[how] = [], []
        for exponent in range(8, 27, 2):
            formula = algorithm.cost(16).seconds(1 << exponent, ALPHA_S, 1 / BYTES_S, GAMMA_S_BYTE)
            found = virtual_seconds(16, 1 << exponent, how) if exponent <= 22 else None
            by_bytes[how].append((1 << exponent, formula, found))
        for size in (2, 4, 8, 16, 32, 64):
            formula = algorithm.cost(size).seconds(1 << 22, ALPHA_S, 1 / BYTES_S, GAMMA_S_BYTE)
            found = virtual_seconds(size, 1 << 22, how) if size <= 32 else None
            by_ranks[how].append((size, formula, found))
    return {"alpha_s": ALPHA_S, "bytes_s": BYTES_S, "by_bytes": by_bytes, "by_ranks": by_ranks}


def plot_virtual(figures: dict[str, Any], path: Path) -> None:
    """Lines are formulas, dots are virtual time."""
    pyplot = pyplot_without_a_screen()
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, what, base, label in (
        (panels[0], "by_bytes", 10, "bytes of the vector, 16 ranks"),
        (panels[1], "by_ranks", 2, "ranks, 4 MiB"),
    ):
        for how, points in figures[what].items():
            (line,) = axes.plot([x for x, _, _ in points], [formula for _, formula, _ in points], label=how)
            dots = [(x, found) for x, _, found in points if found is not None]
            axes.plot(*zip(*dots, strict=True), "o", color=line.get_color(), markersize=4)
        axes.set_xscale("log", base=base)
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("seconds")
    panels[1].legend(fontsize=8)
    figure.suptitle("Allreduce, latency 50 µs, 10 Gbit/s: lines are formulas, dots virtual time")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ---- loopback --------------------------------------------------------------------------------


def loopback() -> list[dict[str, Any]]:
    """Medians of the slowest rank, beside gloo's."""
    rows = []
    for ranks in (2, 4):
        for elements in SIZES:
            ours: dict[str, list[float]] = {}
            predicted: dict[str, float | None] = {}
            gloo_s: list[float] = []
            names = ["messages", *ALGORITHMS] if elements < SIZES[-1] else ["messages", "ring", "direct"]
            for round_ in range(ROUNDS):
                gloo_s += gloo(ranks, elements)
                for carrier in ("tcp", "grpc"):
                    for name in names if round_ == 0 or carrier == "tcp" else ["messages"]:
                        plan = AllreducePlan(
                            ranks=ranks, elements=elements, algorithm=name, carrier=carrier, times=TIMES
                        )
                        found = measure_here(plan)
                        ours.setdefault(f"{carrier} {name}", []).extend(found.times_s)
                        predicted[f"{carrier} {name}"] = found.predicted_s
            row = {
                "ranks": ranks,
                "elements": elements,
                "gloo_s": statistics.median(gloo_s),
                "median_s": {name: statistics.median(times) for name, times in ours.items()},
                "predicted_s": predicted,
            }
            rows.append(row)
            best = min((row["median_s"][name], name) for name in row["median_s"] if name.startswith("tcp"))
            chosen = row["median_s"]["tcp messages"]
            print(
                f"{ranks} ranks, {elements:>10,} elements: gloo {row['gloo_s'] * 1e3:.3g} ms; over tcp as "
                f"chosen {chosen * 1e3:.3g} ms, {row['gloo_s'] / chosen:.2f} times as fast; best {best[1]} "
                f"{best[0] * 1e3:.3g} ms, {row['gloo_s'] / best[0]:.2f}",
                flush=True,
            )
    return rows


def gloo(ranks: int, elements: int) -> list[float]:
    """Times of torch.distributed's allreduce over gloo, of the slowest rank each."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--gloo", folder]
        environment = {**os.environ, **node_environment(ranks)}
        started = [
            subprocess.Popen([*command, str(rank), str(ranks), str(elements)], env=environment)
            for rank in range(ranks)
        ]
        if sum(abs(process.wait(300)) for process in started):
            raise SystemExit("gloo failed")
        times = [json.loads((Path(folder) / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    return [max(column) for column in zip(*times, strict=True)]


def gloo_rank(folder: Path, rank: int, ranks: int, elements: int) -> None:
    """One rank of it."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    vector, times_s = torch.zeros(elements), []
    for _ in range(2 + TIMES):
        begun = time.perf_counter()
        distributed.all_reduce(vector)
        times_s.append(time.perf_counter() - begun)
    (folder / f"times-{rank}.json").write_text(json.dumps(times_s[2:]))
    distributed.destroy_process_group()


def pyplot_without_a_screen() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# ---- between machines ------------------------------------------------------------------------


def network() -> list[dict[str, Any]]:
    """The part of what the bytes of a ring allow."""
    if reason := unavailable():
        print(f"between machines: not measured, {reason}")
        return []
    rows = []
    for rate, bytes_s, elements in (("1gbit", 125e6, 11_000_000), ("100mbit", 12.5e6, 1_500_000)):
        for count in (2, 4):
            with tempfile.TemporaryDirectory() as folder, Machines(count, rate=rate) as machines:
                found = between(machines, Path(folder), elements)
            possible_s = 2 * (count - 1) / count * 4 * elements / bytes_s
            row = {"rate": rate, "machines": count, "elements": elements, "median_s": found.median_s}
            row |= {"possible_s": possible_s, "part": possible_s / found.median_s, "times_s": found.times_s}
            rows.append(row)
            print(f"{count} machines at {rate}: {row['part']:.3f} of what the bytes allow", flush=True)
    return rows


def between(machines: Machines, folder: Path, elements: int) -> AllreduceResult:
    """A rank on each machine."""
    listen = [machine.address for machine in machines.machines]
    names = [machine.name for machine in machines.machines]
    plan = AllreducePlan(
        ranks=len(listen),
        elements=elements,
        algorithm="ring",
        carrier="tcp",
        times=TIMES,
        listen=listen,
        hosts=names,
    )
    plan.save(folder)
    command = [sys.executable, "-m", "gradstream.preflight.allreduce_rank", str(folder)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**node_environment(len(listen)), "PYTHONPATH": paths}
    ranks = [
        machine.start([*command, str(rank)], cwd=folder, env=environment)
        for rank, machine in enumerate(machines.machines)
    ]
    if sum(abs(rank.wait(600)) for rank in ranks):
        raise SystemExit("a rank failed")
    return result_of(folder)


if __name__ == "__main__":
    main()
