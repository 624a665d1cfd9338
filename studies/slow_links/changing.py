"""Question: how soon do loops of one's own reach the goal of `text`, if a machine dies and another joins on the way?

Three machines of `slow_links.py` begin to train, with a link of 100 Mbit/s each. The third is killed after `KILL_S`, a
fourth joins after `JOIN_S`. The loops are those of `peer.py`: gradstream's five lines with local SGD, hivemind's
Optimizer, torchft's DiLoCo and LocalSGD. The first machine, which has the coordinator, the first peer of hivemind's DHT
or torchft's lighthouse, stays. Takes root, `ip` and `tc`.

    python studies/slow_links/changing.py --peers VENV/bin/python    # three seeds, by turns
    python studies/slow_links/changing.py --only gradstream --seeds 1 --no-record
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, invitation, keep_part, kept, origin, start
from kit.machines import Machine, Machines, unavailable
from slow_links import (
    PEER,
    RECORD,
    TASKS,
    WORLD,
    Peer,
    followed,
    rate,
    sent,
    shown,
    start_lighthouse,
    start_peer,
)

TASK, LEAST, KILL_S, JOIN_S = "text", WORLD - 1, 20.0, 40.0
ROWS = {
    "gradstream, local-sgd, one-bit": Peer("local", "gradstream", 20),
    "hivemind, local updates": Peer("local", "hivemind", 20),
    "torchft DiLoCo, delay 10": Peer("outer", "torchft", 20, 10),
    "torchft DiLoCo": Peer("outer", "torchft", 20),
    "torchft LocalSGD": Peer("local", "torchft-local", 20),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rate", default="100mbit", help="of each network card")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="of a row, at most")
    parser.add_argument("--only", default="", help="rows whose names begin so")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter of the peers")
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    record: dict[str, Any] = {"rows": {}} | kept(RECORD).get("changing", {})
    for seed in range(given.seeds):
        for name in filter(lambda name: name.startswith(given.only), ROWS):
            row = measured(ROWS[name], seed, given.rate, given.seconds, given.peers)
            print(f"{name}, {seed}: {shown(row)}", flush=True)
            record["rows"][f"{TASK}, {given.rate}, 0 ms, {name}, {seed}"] = row | origin()
            if not given.no_record:
                keep_part(RECORD, "changing", record)


def measured(row: Peer, seed: int, link: str, seconds: float, python: str) -> dict[str, Any]:
    """One run: see `slow_links.measured`."""
    with tempfile.TemporaryDirectory() as name, Machines(WORLD, rate=link) as machines:
        folder, begin = Path(name), _Beginning(row, seed, machines, Path(name), python)
        for rank in range(LEAST):
            begin(rank)
        acts = [(KILL_S, machines[LEAST - 1].kill), (JOIN_S, lambda: begin(LEAST))]
        curve = followed(machines, folder, TASKS[TASK], seconds, acts)
        sent_bytes = sum(sent(machine, folder) for machine in machines.machines)
    last_s, steps, _ = curve[-1] if curve else (1.0, 0, 0.0)
    return {
        "reached_s": next((second for second, _, found in curve if TASKS[TASK].reached(found)), None),
        "steps": steps,
        "steps_per_s": steps / last_s,
        "best": min((found for *_, found in curve), default=0.0),
        "sent_bytes": sent_bytes,
        "curve": curve,
    }


class _Beginning:
    """Starts ranks: the first one with what the others need to find it."""

    def __init__(self, row: Peer, seed: int, machines: Machines, folder: Path, python: str) -> None:
        self._machines, self._folder, self._python, self._method = machines, folder, python, row.method
        self._asked = {
            "task": TASK,
            "method": row.method,
            "rank": -1,
            "seed": seed,
            "addresses": [machine.address for machine in machines.machines],
            "folder": str(folder),
            "lr": rate(TASK, row.family),
            "period": row.period,
            "delay": row.delay,
            "least": LEAST,
        }
        self._words: list[str] = []

    def __call__(self, rank: int) -> None:
        machine = self._machines[rank]
        if self._method == "gradstream":
            self._own(machine, rank)
            return
        if self._method.startswith("torchft") and rank == 0:
            start_lighthouse(machine, self._folder, self._python, LEAST - 1)
        start_peer(machine, self._folder, self._python, self._asked | {"rank": rank})

    def _own(self, machine: Machine, rank: int) -> None:
        if rank:
            own = ["--name", machine.name, "--run-dir", str(self._folder / machine.name)]
            start(machine, self._folder, *self._words[:2], *own, str(PEER), *self._words[3:])
            return
        options = ["--listen", machine.address, "--wait", str(LEAST), "--run-dir", str(self._folder / "run")]
        launcher = start(machine, self._folder, "train", str(PEER), *options, "--", json.dumps(self._asked))
        self._words = shlex.split(invitation(launcher))


if __name__ == "__main__":
    main()
