"""Question: what does `kill -9` cost a loop of one's own, here, with torchft, and with `torchrun --max-restarts`?

    python -m venv VENV && VENV/bin/pip install "torch==2.13.0" torchft-nightly==2026.10.26 numpy
    python bench/own_loops.py --python VENV/bin/python                     # 5 minutes for each system, by turns
    python bench/own_loops.py --systems gradstream --seconds 60 --no-record
    python bench/own_loops.py --systems gradstream --every 0 --no-record   # without kills

Three workers run `bench/own_loop.py` on this machine; a random one is killed every `--every` seconds. Each system
starts it again by its own means: gradstream's launcher; torchrun's agent, which ends the other workers first; for
torchft this program, at once, which is quicker than the torchrun for each replica in its torchx component.

steps       in the model at the end of the time, since all workers have first taken part
committed   from a kill until each other worker has committed a step that it began after it
back        from a kill until the new process has committed a step with samples of its own in it
lost        samples that the model has less often than there were epochs; doubled: more often

Afterwards nobody is killed, and the epochs are finished. Keeps what it finds in bench/results/own-loops.json.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from common import ONE_THREAD, RESULTS, Record, command_line, keep, kept, origin, table, where

RESULT, SCRIPT = RESULTS / "own-loops.json", Path(__file__).with_name("own_loop.py")
REPLICAS, ALL, PATIENCE_S = 3, 24, 240.0
SYSTEMS = {  # and the words of torchft's lighthouse
    "gradstream": "",
    "torchft, as in its README": "--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000",
    "torchft, quick": "--min_replicas 1 --quorum_tick_ms 20 --join_timeout_ms 1000 --heartbeat_timeout_ms 500",
    "torchrun": "",
}


class Commit(NamedTuple):
    """A line of the log: see `bench/own_loop.py`."""

    rank: int
    begun_s: float
    ended_s: float
    step: int
    samples: int
    own: bool

    @classmethod
    def of(cls, rank: str, _: str, begun_s: str, ended_s: str, step: str, samples: str, own: str) -> Commit:
        """From the words of a line."""
        return cls(int(rank), float(begun_s), float(ended_s), int(step), int(samples), own == "1")


class Rig:
    """The workers of one system. A context manager, at whose end they are gone.

    Args:
        name: one of `SYSTEMS`.
        folder: for their log.
        python: interpreter of the environment that has the system.
    """

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self.system, self.folder = name.partition(",")[0], folder
        self._python, self._settings, self._read = python, SYSTEMS[name].split(), 0
        self._stack = ExitStack()
        self._replicas: list[subprocess.Popen[bytes]] = []
        self._environment: dict[str, str] = {**os.environ, **ONE_THREAD}
        self.lines: list[list[str]] = []
        self.pids: dict[int, int] = {}  # by rank, of its newest process

    def __enter__(self) -> Rig:
        own = [str(SCRIPT), self.system, str(self.folder)]
        if self.system == "gradstream":
            options = ["--workers", str(REPLICAS), "--run-dir", str(self.folder / "run")]
            words = [sys.executable, "-m", "gradstream", "train", own[0], *options, "--", *own[1:]]
            self._start(words)
        elif self.system == "torchrun":
            # Else torch 2.13 keeps one store for all restarts: gloo finds addresses of the dead, and each one fails.
            self._environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            options = ["--standalone", "--nproc-per-node", str(REPLICAS), "--max-restarts", "1000"]
            self._start([self._python, "-m", "torch.distributed.run", *options, *own])
        else:
            lighthouse, port = Path(self._python).with_name("torchft_lighthouse"), _free_port()
            self._start([str(lighthouse), "--bind", f"[::]:{port}", *self._settings])
            self._environment["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
            self._own = [self._python, *own]
            self._replicas = [self._replica(rank) for rank in range(REPLICAS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        said = self._stack.enter_context((self.folder / "said").open("ab"))
        process = subprocess.Popen(
            words, env=self._environment, stdout=said, stderr=said, start_new_session=True
        )
        self._stack.callback(_end, process)
        return process

    def _replica(self, rank: int) -> subprocess.Popen[bytes]:
        self._environment["REPLICA_GROUP_ID"] = str(rank)
        return self._start(self._own)

    def look(self) -> None:
        """Reads what the workers have logged; starts torchft's replicas that have died again."""
        for rank, process in enumerate(self._replicas):
            if process.poll() not in (None, 0):
                self._replicas[rank] = self._replica(rank)
        log = self.folder / "log"
        text = log.read_bytes()[self._read :] if log.exists() else b""
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for line in text.decode().splitlines():
            self.lines.append(line.split())
            if line.startswith("start"):
                self.pids[int(self.lines[-1][1])] = int(self.lines[-1][2])

    def alive(self) -> list[int]:
        """Ranks that have a process."""
        return [rank for rank, pid in sorted(self.pids.items()) if Path(f"/proc/{pid}/exe").exists()]

    def until(self, holds: Callable[[], bool], seconds: float, what: str = "") -> None:
        """Looks until something holds, or for so long. Raises TimeoutError where `what` is given and does not hold."""
        end_s = time.monotonic() + seconds
        while not holds() and time.monotonic() < end_s:
            self.look()
            time.sleep(0.01)
        if what and not holds():
            said = (self.folder / "said").read_text(errors="replace")[-4000:]
            raise TimeoutError(f"{what} did not come within {seconds:g} s:\n{said}")


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started: with SIGTERM first, as a launcher ends its workers."""
    for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def measured(name: str, python: str, seconds: float, every_s: float, seed: int) -> dict[str, Any]:
    """One run of a system: figures of each kill, steps, and what the counters say."""
    rng, kills = random.Random(seed), list[tuple[int, float]]()
    with tempfile.TemporaryDirectory() as folder, Rig(name, Path(folder), python) as rig:
        rig.until(lambda: bool(_all_there(rig.lines)), PATIENCE_S, "a step of all workers")
        zero_s = _all_there(rig.lines)
        while every_s and (at_s := zero_s + every_s * (len(kills) + 1)) < zero_s + seconds - every_s / 2:
            rig.until(lambda: False, at_s - time.monotonic())
            rig.until(lambda: bool(rig.alive()), PATIENCE_S, "a process to kill")
            kills.append((rng.choice(rig.alive()), time.monotonic()))
            os.kill(rig.pids[kills[-1][0]], signal.SIGKILL)
        rig.until(lambda: False, zero_s + seconds - time.monotonic())
        last = 2 + max(int(one[3]) for one in rig.lines if one[0] == "epoch")
        (new := rig.folder / "new").write_text(str(last))
        new.rename(rig.folder / "last")
        counters = [rig.folder / f"used-{rank}.json" for rank in range(REPLICAS)]
        try:
            rig.until(lambda: all(map(Path.exists, counters)), PATIENCE_S, "the end")
            used = max((json.loads(path.read_text()) for path in counters), key=sum)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            used = [math.nan]
    commits = sorted(
        (Commit.of(*one[1:]) for one in rig.lines if one[0] == "commit"), key=lambda one: one.ended_s
    )
    inside = [one for one in commits if zero_s <= one.ended_s <= zero_s + seconds]
    newest = {one.step: one.samples for one in inside}  # a step may be made again
    return {
        "seconds": seconds,
        "steps": inside[-1].step - inside[0].step,
        "samples": sum(samples for step, samples in newest.items() if step <= inside[-1].step),
        "epochs": last + 1,
        "lost": sum(max(last + 1 - one, 0) for one in used),
        "doubled": sum(max(one - last - 1, 0) for one in used),
        "kills": [after(commits, kills, index) for index in range(len(kills))],
    }


def _all_there(lines: Sequence[Sequence[str]]) -> float:
    """When a step of all workers was first committed; 0 before."""
    return next((float(one[4]) for one in lines if one[0] == "commit" and one[6] == str(ALL)), 0.0)


def after(
    commits: Sequence[Commit], kills: Sequence[tuple[int, float]], index: int
) -> tuple[float | None, float | None]:
    """Seconds from a kill until the others commit, and until the new process takes part; None: killed before."""
    who, at_s = kills[index]
    until_s = next((next_s for rank, next_s in kills[index + 1 :] if rank == who), math.inf)
    first: dict[int, float] = {}
    for one in commits:
        if one.begun_s >= at_s and (one.rank != who or one.own):
            first.setdefault(one.rank, one.ended_s - at_s)
    back = first.pop(who, math.inf)
    others = max(first.values()) if len(first) == REPLICAS - 1 else None
    return others, back if at_s + back < until_s else None


# ---- figures and their table -----------------------------------------------------------------------


def figures(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of all rounds of a system: steps a minute, p50 and p99 of seconds, samples lost and doubled."""
    minutes = sum(one["seconds"] for one in rounds) / 60
    found = {f"{what} a minute": sum(one[what] for one in rounds) / minutes for what in ("steps", "samples")}
    for at, what in enumerate(("the others commit after", "a new process takes part after")):
        values = sorted(math.inf if kill[at] is None else kill[at] for one in rounds for kill in one["kills"])
        for part in (50, 99) if values else ():
            found[f"{what}, p{part}"] = values[-(-part * len(values) // 100) - 1]
    return found | {f"samples {what}": sum(one[what] for one in rounds) for what in ("lost", "doubled")}


def own_loops_table(record: Record) -> str:
    """By figure: each system's, and the best of the peers' over gradstream's."""
    found = {name: figures(rounds) for name, rounds in record["rounds"].items()}
    rows = []
    for what in next(iter(found.values())):
        own, *others = (found[name][what] for name in found)
        digits = 2 if "after" in what else 0
        best = (max if "a minute" in what else min)(others, default=math.nan)
        cells = [NUMBERS.get(str(one)) or f"{one:,.{digits}f}" for one in (own, *others)]
        rows.append([what, *cells, f"{best / own:.2f}" if own and math.isfinite(best) else ""])
    kills = (
        f"{sum(len(one['kills']) for one in rounds)} of {name}" for name, rounds in record["rounds"].items()
    )
    state = f"Seconds. Kills: {', '.join(kills)}. Measured by turns {where(record)}, commit {record['commit'][:8]}, "
    load = f"that others used as well: {min(record['loads']):.0f} to {max(record['loads']):.0f} threads wanted one."
    return f"{table(['', *found, 'best of the others / gradstream'], rows)}\n\n{state}{load}"


NUMBERS = {"inf": "not before the next kill", "nan": "not ended"}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--systems", default="; ".join(SYSTEMS), help="separated by semicolons, in this order"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the peers' environment")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills; 0: none")
    parser.add_argument("--rounds", type=int, default=1, help="of all systems, by turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anew", action="store_true", help="forgets earlier rounds")
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process stays
    names = [name.strip() for name in given.systems.split(";")]
    record: dict[str, Any] = {"rounds": {}} | ({} if given.anew or given.no_record else kept(RESULT))
    loads = [*record.get("loads", ())]
    for number in range(given.rounds):
        for name in names:
            loads.append(round(os.getloadavg()[0], 1))
            found = measured(name, given.python, given.seconds, given.every, given.seed + number)
            record["rounds"].setdefault(name, []).append(found)
            print(name, json.dumps(figures([found])), flush=True)
            record |= {**origin(), "loads": loads}
            if not given.no_record:
                keep(RESULT, record)
    print(own_loops_table(record))


if __name__ == "__main__":
    main()
