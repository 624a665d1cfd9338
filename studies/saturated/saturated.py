"""Question: how long do heartbeats take on saturated links of 10 Mbit/s, and is anybody taken for lost?

Three machines (network namespaces) sum gradients of 4.9 million parameters all the time, so that every card has more to
send than it can. Then again where the second and the third cannot be dialled, so that what they send each other goes
through the first. Every node times a call to the coordinator, over the connection of its heartbeats, as often as it
beats. Goals: 99 of 100 take less than half the lease, and nobody is lost. Takes root, `ip` and `tc`.

    python studies/saturated/saturated.py  # ten minutes each way
    python studies/saturated/saturated.py --seconds 60 --out ""
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gradstream.runtime.deadlines import Deadlines

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, origin, run_on
from kit.machines import Machine, Machines, unavailable

JOB = Path(__file__).with_name("beats.py").resolve()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run")
    parser.add_argument("--rate", default="10mbit", help="of each network card")
    parser.add_argument("--only", choices=["direct", "relayed"], help="one of the runs")
    parser.add_argument(
        "--out", default=str(Path(__file__).with_name("record.json")), help='the record; "" for nowhere'
    )
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    out = Path(given.out) if given.out else None
    record: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {"rows": {}}
    for how in [given.only] if given.only else ["direct", "relayed"]:
        with (
            tempfile.TemporaryDirectory() as folder,
            Machines(3, rate=given.rate) as machines,
            ExitStack() as walls,
        ):
            for index in (1, 2) if how == "relayed" else ():
                walls.enter_context(machines.wall(index))
            row = measured(machines, Path(folder), given.seconds)
        print(how, json.dumps(row))
        record["rows"][how] = {"rate": given.rate, "seconds": given.seconds, **row, **origin()}
        if out is not None:
            keep(out, record)


def measured(machines: Machines, folder: Path, seconds: float) -> dict[str, Any]:
    """What a run has shown: round trips in seconds, lost nodes, and how full the cards were."""
    (folder / "beats").mkdir()
    os.environ["BEATS"] = str(folder / "beats")
    run = run_on(machines, folder, str(JOB), "--set", f"until.seconds={seconds:g}", "--json")
    nodes = {}
    for path in sorted((folder / "beats").iterdir()):
        trips = sorted(json.loads(line)[1] for line in path.read_text().splitlines())
        nodes[path.stem] = {
            "beats": len(trips),
            "p50_s": round(trips[len(trips) // 2], 4),
            "p99_s": round(trips[len(trips) * 99 // 100], 4),
            "longest_s": round(trips[-1], 4),
        }
    return {
        "lease_s": Deadlines().lease_s,
        "nodes": nodes,
        "lost": run.summary["workers_lost"],
        "sums": run.summary["steps"] // 3,
        "sent_bytes": {machine.name: sent_bytes(machine) for machine in machines.machines},
        "relayed": run.summary["relayed"],
    }


def sent_bytes(machine: Machine) -> int:
    """Bytes that a machine's card has sent."""
    reading = machine.start(["cat", "/proc/net/dev"], cwd=ROOT, stdout=subprocess.PIPE)
    lines = reading.communicate()[0].splitlines()
    return int(next(line for line in lines if "eth0:" in line).split()[9])


if __name__ == "__main__":
    main()
