"""Kills workers of a user's own loop, on one machine and on three, and reads from the model what became of each sample.

    python studies/own_loop_kills/own_loop_kills.py  # six strategies, one machine and three, a run of each
    python studies/own_loop_kills/own_loop_kills.py --rounds 3 --keep  # 300 kills and more, kept in record.json
    python studies/own_loop_kills/own_loop_kills.py --strategies gossip --machines 3

A run begins with three workers. One after the other is killed by SIGKILL, any of them, as long as another one trains.
The launcher starts each again, and two more workers join. Machines are network namespaces, with TLS between them.
Each use of a sample has an element of the parameters of its own (`own.py`), so they tell how many uses of each sample
they contain: as many as epochs, if none is lost or doubled. Not seen: one gradient that is applied twice, and a use
lost in one epoch beside another of the same sample that is doubled.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import gradstream as gs

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, origin
from kit.machines import Machine, Machines, unavailable

SCRIPT, RESULT = Path(__file__).with_name("own.py"), Path(__file__).with_name("record.json")
STRATEGIES = "synchronous,allreduce,local-sgd,diloco,downpour,gossip"
SAMPLES, EPOCHS, WORKERS = 120, 60, 3
PAUSE_S, FURTHER_S, LIMIT_S = (0.5, 2.5), (5.0, 20.0), 400.0


class Command:
    """A command of gradstream on a machine; what it says is in a file."""

    def __init__(self, machine: Machine, folder: Path, name: str, words: Sequence[str]) -> None:
        self.said = folder / f"{name}.txt"
        (folder / name).mkdir()
        shutil.copy(SCRIPT, folder / name)
        variables = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        words = [sys.executable, "-m", *words]
        with open(self.said, "w") as output:
            self.process = machine.start(
                words, cwd=folder / name, env=variables, stdout=output, stderr=subprocess.STDOUT
            )

    def until(self, pattern: str) -> str:
        """The group of the first match of a pattern in what it says. Raises RuntimeError if it ends before."""
        while not (found := re.search(pattern, self.said.read_text())):
            if self.process.poll() is not None:
                raise RuntimeError(self.said.read_text())
            time.sleep(0.05)
        return found[1]


def run_once(strategy: str, machines: Machines, spread: bool, seed: int, folder: Path) -> Counter[str]:
    """One run: kills, workers that came, and samples by what became of them."""
    rng = random.Random(seed)
    there = [machines[index if spread else 0] for index in range(WORKERS)]
    told = folder / "told"
    told.mkdir()
    arguments = ("gradstream", "train", SCRIPT.name, "--strategy", strategy, "--listen", there[0].address)
    number = ("--wait", str(WORKERS)) if spread else ("--wait", "1", "--workers", str(WORKERS))
    options = ("--run-dir", "run", "--set", "max_restarts=1000", "--", str(told), str(SAMPLES), str(EPOCHS))
    launcher = Command(there[0], folder, "launcher", [*arguments, *number, *options])
    join = shlex.split(launcher.until(r"(gradstream join .*)"))

    def come(index: int, name: str) -> Command:
        return Command(there[index], folder, name, [*join[:3], "--name", name, *join[3:]])

    others = [come(index, f"other-{index}") for index in range(1, WORKERS)] if spread else []
    found: Counter[str] = Counter()
    due = [time.monotonic() + rng.uniform(*FURTHER_S) for _ in range(2)]
    limit = time.monotonic() + LIMIT_S
    while launcher.process.poll() is None:
        if time.monotonic() > limit:
            raise RuntimeError(f"hangs; see {folder}")
        time.sleep(0.1)
        if not _living(told):
            continue
        time.sleep(rng.uniform(*PAUSE_S))
        if due and time.monotonic() > min(due) and launcher.process.poll() is None:
            due.remove(min(due))
            others.append(come(rng.randrange(WORKERS), f"further-{len(due)}"))
        living = _living(told)
        if len(living) > 1:
            os.kill(rng.choice(living), signal.SIGKILL)
            found["kills"] += 1
    found["failed"] = sum(one.process.wait(60) != 0 for one in [launcher, *others])
    found["joined"] = len(others) - (WORKERS - 1 if spread else 0)
    found.update(audit(folder))
    return found


def _living(told: Path) -> list[int]:
    """The processes that have trained and have not ended."""
    found = []
    for path in told.glob("alive-*"):
        pid = int(path.name.partition("-")[2])
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return sorted(found)


def audit(folder: Path) -> Counter[str]:
    """What became of the uses of samples: "lost", "doubled", or "torn" where one half of the model has them."""
    samples = np.fromfile(folder / "told" / "uses", dtype=np.int32)
    # It is on another machine, if the first one has no worker left.
    (model,) = folder.glob("**/final/model.safetensors")
    there = load_file(model)["uses"][:, : len(samples)] != 0
    counts = np.bincount(samples[there.any(axis=0)], minlength=SAMPLES) - EPOCHS
    return Counter(
        lost=int(-counts[counts < 0].sum()),
        doubled=int(counts[counts > 0].sum()),
        torn=int((there[0] != there[1]).sum()),
        accounted=gs.Run.load(folder / "launcher" / "run").summary["samples_accounted"],
        processes=len(list((folder / "told").glob("alive-*"))),
    )


def main() -> None:
    """Prints a line for each run, and the sums."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--machines", default="1,3")
    parser.add_argument("--keep", action="store_true", help="keeps the sums in record.json")
    given = parser.parse_args()
    if reason := unavailable():
        parser.error(reason)
    rows: dict[str, Counter[str]] = {}
    for seed in range(given.first_seed, given.first_seed + given.rounds):
        for strategy in given.strategies.split(","):
            for number in given.machines.split(","):
                folder = Path(tempfile.mkdtemp(prefix=f"kills-{strategy}-{number}-"))
                begun_s = time.perf_counter()
                with Machines(WORKERS if number != "1" else 1) as machines:
                    found = run_once(strategy, machines, number != "1", seed, folder)
                rows.setdefault(f"{strategy}/{number}", Counter()).update(found)
                took_s = time.perf_counter() - begun_s
                print(f"{strategy} {number} seed {seed}: {dict(found)}, {took_s:.0f} s, {folder}", flush=True)
    total = sum(rows.values(), Counter[str]())
    print(dict(total))
    if given.keep:
        keep(RESULT, {**origin(), "samples_a_run": SAMPLES * EPOCHS, "total": total, "rows": rows})


if __name__ == "__main__":
    main()
