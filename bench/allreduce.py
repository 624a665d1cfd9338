"""How fast is an allreduce between processes of one host, beside gloo, OpenMPI, MPICH and Intel MPI?

Each has a team of processes of its own, started as its maker says; the teams take turns on float32 vectors,
in place, and who has no turn sleeps. The slowest rank counts. A round of small vectors is many calls in a
row, of which the first few do not count: caches are cold by then, and cores asleep.

    pip install -e '.[bench]'
    python bench/allreduce.py                    # prints ratios, writes bench/results/allreduce-shared.json
    python bench/allreduce.py --ranks 2 --elems 1000 250000 --no-record

"as called" is what a strategy calls, `SharedGroup.allreduce`, on an event loop, with the environment of
nodes; it is what the ratios are of. "core" is the part of it that blocks. The result of both is a view that
all ranks read until the next operation on it. Peers have the environment that they are started in, with the
system's allocator. Two bounds, which are no allreduce: to "only read", each rank reads its part of all ranks'
vectors once, where they lie, and writes nothing; to "only move", it also writes as many bytes as its part of
the sum has, by `memcpy`. Every sum that lies in memory afterwards moves that much.

MPI comes from PyPI, each in an environment of its own (`--peers`, made when it is missing): their packages
bring launchers of the same name, and mpi4py takes the library that it finds first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from common import RESULTS, ROOT, command_line, keep, origin
from gradstream.run.local.environment import node_environment

RANK = Path(__file__).with_name("allreduce_rank.py")
SIZES = (1_000, 250_000, 11_000_000, 74_770_901)
CALLED, CORE, READ, MOVE = "as called", "core", "only read", "only move"
OURS = {CALLED: "call", CORE: "core", READ: "read", MOVE: "move"}
GLOO = "gloo"
MPI = {"openmpi": "openmpi", "mpich": "mpich", "intel mpi": "impi-rt"}  # the packages of each
PEERS = (GLOO, *MPI)
BATCH_ELEMS = 10_000_000  # about so many in a round, in 100 calls at most
START_S, ANSWER_S = 60.0, 120.0

# As their makers say for more ranks than cores; OpenMPI is told so, and that root may start it.
LAUNCH = {"openmpi": ("--allow-run-as-root", "--oversubscribe"), "mpich": (), "intel mpi": ()}


class Team:
    """The ranks of one contender, which wait for what they are asked.

    Args:
        name: of the contender.
        ranks: their sockets.
    """

    def __init__(self, name: str, ranks: Sequence[TextIO]) -> None:
        self.name = name
        self._ranks = ranks

    def seconds(self, way: str, elems: float, repeats: int = 1) -> list[float]:
        """Of each rank."""
        for rank in self._ranks:
            print(json.dumps([way, elems, repeats]), file=rank, flush=True)
        lines = [rank.readline() for rank in self._ranks]
        if not all(lines):
            raise SystemExit(f"{self.name}: a rank has ended")
        return [json.loads(line) for line in lines]


@contextmanager
def started(name: str, size: int, peers: Path) -> Iterator[Team]:
    """The team of a contender; it ends with the block."""
    with ExitStack() as stack:
        meet = stack.enter_context(tempfile.TemporaryDirectory(prefix="allreduce-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{meet}/ranks")
        listener.listen(size)
        listener.settimeout(START_S)
        commands, environment = starts(name, size, peers, f"{meet}/ranks")
        processes = [subprocess.Popen(command, env={**os.environ, **environment}) for command in commands]
        try:
            ranks = []
            for _ in range(size):
                connection, _ = listener.accept()
                connection.settimeout(ANSWER_S)
                ranks.append(stack.enter_context(connection.makefile("rw")))
                connection.close()  # the file keeps it
            for rank in ranks:
                rank.readline()
            yield Team(name, ranks)
            for rank in ranks:
                rank.close()
            for process in processes:
                process.wait(START_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def starts(name: str, size: int, peers: Path, meet: str) -> tuple[list[list[str]], Mapping[str, str]]:
    """The commands of a team, and what is added to their environment."""
    if name in MPI:
        folder = peers / MPI[name] / "bin"
        launch = [str(folder / "mpiexec"), *LAUNCH[name], "-n", str(size), str(folder / "python")]
        return [[*launch, str(RANK), meet, "mpi"]], {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    team = "gloo" if name == GLOO else "gradstream"
    command = [sys.executable, str(RANK), meet, team]
    environment = {} if name == GLOO else node_environment(size)
    return [[*command, str(rank), str(size)] for rank in range(size)], environment


def made(peers: Path) -> list[str]:
    """The kinds of MPI whose environments are there, or could be made."""
    found = []
    for name, package in MPI.items():
        folder = peers / package
        if not (folder / "bin" / "mpiexec").exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [
                str(folder / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "numpy",
                "mpi4py",
                package,
            ]
            try:
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
                subprocess.run(pip, check=True)
            except subprocess.CalledProcessError:
                print(f"no {name} here: {package} could not be installed")
                continue
        found.append(name)
    return found


def versions(peers: Path, names: Sequence[str]) -> dict[str, str]:
    """Of the packages of MPI."""
    found = {}
    for name in names:
        code = f"from importlib.metadata import version; print(version({MPI[name]!r}))"
        python = str(peers / MPI[name] / "bin" / "python")
        found[name] = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    return found


def measured(given: argparse.Namespace, size: int, names: Sequence[str]) -> dict[str, Any]:
    """Medians over the rounds, by contender and elements; and what a rank that waits takes of a core."""
    times: dict[str, dict[int, list[float]]] = {}
    with ExitStack() as stack:
        ours, *others = (
            stack.enter_context(started(name, size, given.peers)) for name in ("gradstream", *names)
        )
        turns: list[tuple[str, Callable[[int, int], list[float]]]] = [
            (name, lambda elems, repeats, way=way: ours.seconds(way, elems, repeats))
            for name, way in OURS.items()
        ]
        turns += [
            (team.name, lambda elems, repeats, team=team: team.seconds("call", elems, repeats))
            for team in others
        ]
        for elems in given.elems:
            repeats = max(1, min(100, BATCH_ELEMS // elems))
            for counts in [False] + [True] * given.rounds:
                for name, seconds in turns:
                    slowest = max(seconds(elems, repeats))
                    if counts:
                        times.setdefault(name, {}).setdefault(elems, []).append(slowest)
        waiting = ours.seconds("waits", given.wait)[0] if given.wait else 0.0
    medians = {
        name: {elems: statistics.median(values) for elems, values in by_elems.items()}
        for name, by_elems in times.items()
    }
    return {"rows": rows_of(medians), "waiting": waiting}


def rows_of(medians: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """By elements: the medians, the best peer over ours as called, and the two bounds over ours."""
    rows = []
    for elems, called_s in medians[CALLED].items():
        peers = {name: medians[name][elems] for name in PEERS if name in medians}
        rows.append(
            {
                "elems": elems,
                "median_s": {name: medians[name][elems] for name in medians},
                "best": min(peers, key=lambda name: peers[name]) if peers else None,
                "ratio": min(peers.values(), default=float("nan")) / called_s,
                "of_reading": medians[READ][elems] / called_s,
                "of_moving": medians[MOVE][elems] / called_s,
            }
        )
    return rows


def show(size: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of one number of ranks, ms."""
    names = rows[0]["median_s"]
    print(
        f"{size} ranks{'':8s}"
        + "".join(f"{name:>12s}" for name in names)
        + "   best peer  of reading  of moving"
    )
    for row in rows:
        times = "".join(f"{1e3 * seconds:12.4f}" for seconds in row["median_s"].values())
        print(
            f"{row['elems']:15,d}{times}{row['ratio']:11.2f}x{row['of_reading']:12.2f}{row['of_moving']:11.2f}"
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--elems", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wait", type=float, default=10.0, help="seconds that ranks wait for the last one")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers", help="environments of MPI")
    parser.add_argument("--no-record", action="store_true", help="write no file")
    given = parser.parse_args()
    kinds = made(given.peers)
    found = {}
    for size in given.ranks:
        found[str(size)] = measured(given, size, [GLOO, *kinds])
        show(size, found[str(size)]["rows"])
        if given.wait:
            print(f"a rank that waits for {given.wait:g} s takes {found[str(size)]['waiting']:.2%} of a core")
    if not given.no_record:
        record = {
            **origin(node_environment(2)),
            "peers": versions(given.peers, kinds),
            "rounds": given.rounds,
            "by_ranks": found,
        }
        path = RESULTS / "allreduce-shared.json"
        keep(path, record)


if __name__ == "__main__":
    main()
