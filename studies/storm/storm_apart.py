"""Question: the same storm on four machines over TLS, whose links are cut, one way too: is a sample lost or doubled?

    python studies/storm/storm_apart.py  # about 8 minutes; takes root, `ip` and `tc`

Machines are network namespaces of this one, with cards of 1 Gbit/s, each with a worker; the first two have a shard
each, with backups. Every `GAP_S` a fault is drawn: packets from a machine, to it, or both ways are dropped for half
or one and a half times `lease_s`; a worker, the shard of the second machine, or the coordinator is killed (SIGKILL);
all processes of a machine stand still (SIGSTOP), or are killed, and somebody types its `gradstream join` again until
it is in. The launcher's machine is cut off as well, for half of `lease_s`, but neither stopped nor killed. A cut counts
if it has dropped packets.

Each sample of each epoch adds 1 to its own element of every chunk, so the final parameters say what is lost, doubled
or torn. Keeps what it finds in record.json, beside `storm.py`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream.machine.description import describe_machine, git_commit
from gradstream.testing.runs import TokenAudit

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept, now
from kit.machines import Machine, Machines, unavailable

RESULT = Path(__file__).with_name("record.json")
MACHINES, SAMPLES, LEASE_S = 4, 512, 3.0
GAP_S = (8.0, 16.0)
STEPS_S = 60.0
"""About so many minibatches a second the machines make together: what a number of minutes is in epochs."""
JOIN_S = 120.0
JOB = f"""
import sys
import time
import gradstream as gs
from gradstream.testing import Tokens, numbered

class Slow(Tokens):
    def gradient(self, *given, **options):
        time.sleep(0.03)
        return super().gradient(*given, **options)

def job():
    return gs.Job(
        Slow(4, {SAMPLES}), numbered({SAMPLES}), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0), batch_size=2,
        epochs=int(sys.argv[1]), chunk_elems={SAMPLES}, servers=2, acknowledge="replicated", max_restarts=100_000,
        deadlines=gs.Deadlines(lease_s={LEASE_S}, coordinator_s={2 * LEASE_S}),
    )
"""


class Command:
    """A command line of gradstream on a machine, and what it has printed."""

    def __init__(self, machine: Machine, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
        self.process = machine.start(
            [sys.executable, "-m", "gradstream", *arguments],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(self.process.stdout)

    def found(self, pattern: str, *, within_s: float = JOIN_S) -> re.Match[str] | None:
        """The first match in what it prints; None if it ends without one, or none comes in time."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            over = self.process.poll() is not None
            if match := re.search(pattern, "".join(self.said)):
                return match
            if over:
                return None
            time.sleep(0.1)
        return None


class Storm:
    """Machines, what runs on them, and the faults.

    Attributes:
        happened: number of faults by kind.
    """

    def __init__(self, machines: Machines, folder: Path, epochs: int, seed: int) -> None:
        self.happened = Counter[str]()
        self._machines, self._folder, self._rng = machines, folder, random.Random(seed)
        self._count = 0
        options = ("--listen", machines[0].address, "--wait", str(MACHINES), "--run-dir", "run")
        self.launcher = Command(machines[0], folder / "a", "train", "job.py", *options, "--", str(epochs))
        line = self.launcher.found(r"gradstream (join .*)")
        assert line is not None, "".join(self.launcher.said)
        self._words = shlex.split(line[1])
        self._joined = {index: self._join(index) for index in range(1, MACHINES)}

    def rage(self) -> None:
        """Strikes until the launcher has ended."""
        assert self.launcher.found(r"step \d+"), "".join(self.launcher.said)
        kinds: list[tuple[str, Callable[[], bool]]] = [
            *((f"cut, {way}", lambda way=way: self._cut(way)) for way in ("from", "to", "both")),
            ("kill a worker", lambda: self._kill("worker", range(MACHINES))),
            ("kill a shard", lambda: self._kill("shard-1", range(MACHINES))),
            ("kill the coordinator", lambda: self._kill("coordinator", [0])),
            ("stop a machine", self._stop),
            ("kill a machine", self._kill_machine),
        ]
        bag: list[tuple[str, Callable[[], bool]]] = []
        while not self._over(self._rng.uniform(*GAP_S)):
            bag = bag or self._rng.sample(kinds, len(kinds))
            name, fault = bag.pop()
            happened = fault()
            self.happened[name] += happened
            print(f"{name}: {'' if happened else 'did not happen'}", flush=True)
        for index in self._joined:
            self._machines[index].signal(signal.SIGCONT)

    def _over(self, wait_s: float) -> bool:
        try:
            self.launcher.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _join(self, index: int) -> Command:
        self._count += 1
        machine = self._machines[index]
        words = [*self._words[:1], "--name", machine.name, *self._words[1:]]
        return Command(machine, self._folder / f"{machine.name}-{self._count}", *words)

    def _cut(self, way: str) -> bool:
        index, seconds = self._rng.randrange(MACHINES), LEASE_S * self._rng.choice([0.5, 1.5])
        if not index:
            seconds = 0.5 * LEASE_S  # nobody rules over the others for as long
        with ExitStack() as stack:
            for one in ("from", "to") if way == "both" else (way,):
                stack.enter_context(self._machines.cut(index, one))  # type: ignore[arg-type]
            self._over(seconds)
        return True

    def _pids(self, index: int, name: str) -> list[int]:
        """The processes of a machine's nodes of a name, from the logs of its commands."""
        found = []
        for log in self._folder.glob(f"{self._machines[index].name}*/**/logs/{name}*.log"):
            found += re.findall(rf"^{name}[-\d]*: pid (\d+)", log.read_text(), re.MULTILINE)
        return [int(pid) for pid in found if _is_node(int(pid), name)]

    def _kill(self, name: str, machines: Any) -> bool:
        pids = [pid for index in machines for pid in self._pids(index, name)]
        if not pids:
            return False
        os.kill(self._rng.choice(pids), signal.SIGKILL)
        return True

    def _stop(self) -> bool:
        machine = self._machines[self._rng.randrange(1, MACHINES)]
        stopped = machine.signal(signal.SIGSTOP)
        self._over(LEASE_S * self._rng.choice([0.5, 1.5]))
        machine.signal(signal.SIGCONT)
        return stopped > 0

    def _kill_machine(self) -> bool:
        index = self._rng.randrange(1, MACHINES)
        killed = self._machines[index].signal(signal.SIGKILL)
        until_s = time.monotonic() + JOIN_S
        while time.monotonic() < until_s and self.launcher.process.poll() is None:
            self._joined[index] = self._join(index)
            if self._joined[index].found(r"in as "):
                break
        return killed > 0


def _is_node(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(name)
    except OSError:
        return False


def measured(minutes: float, seed: int) -> dict[str, Any]:
    """One run, its faults, and the audit."""
    epochs = max(1, round(60 * minutes * STEPS_S * 2 / SAMPLES))
    with Machines(MACHINES) as machines, tempfile.TemporaryDirectory() as name:
        storm = Storm(machines, Path(name), epochs, seed)
        storm.rage()
        status, said = storm.launcher.process.wait(), "".join(storm.launcher.said)
        assert not status, said[-5000:]
        run = gs.Run.load(Path(name) / "a" / "run")
    audit = TokenAudit.of(run, SAMPLES, epochs)
    length_s = next(event["time_s"] for event in run.events if event["event"] == "finished")
    lost = Counter(event["who"] for event in run.events if event["event"] == "left" and event["lost"])
    return {
        "minutes": round(length_s / 60, 2),
        "faults": dict(sorted(storm.happened.items())),
        "faults_h": round(3600 * storm.happened.total() / length_s, 1),
        "lost_nodes": dict(sorted(lost.items())),
        "samples": epochs * SAMPLES,
        "audit": {"lost": audit.lost, "doubled": audit.doubled, "torn": audit.torn},
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    found = measured(given.minutes, given.seed)
    found |= {"commit": git_commit(ROOT), "machine": describe_machine({})["machine"]}
    found["date"] = now()
    print(json.dumps(found), flush=True)
    record = {"strategies": {}} | kept(RESULT)
    record["apart"] = found
    keep(RESULT, record)


if __name__ == "__main__":
    main()
