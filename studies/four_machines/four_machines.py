"""Question: what does training on four machines in a network of 1 Gbit/s cost, with TLS on?

Makes the machines as network namespaces of this one: an address and a card of 1 Gbit/s each (`tc
tbf`), 6 GB of memory where cgroups are writable. They share its cores. Starts the launcher on the
first, joins the others by the line that it prints, and trains the 74,770,901-parameter Caltech-101
network with Downpour that talks every 10 steps. Takes root, `ip`, `tc` and GRADSTREAM_DATA.

    python studies/four_machines/four_machines.py --epochs 1

Prints figures, and keeps them with machine, commit and date in record.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradstream.job.files import load_job
from gradstream.run.result import Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, origin, run_on
from kit.machines import Machines, unavailable

JOB = ROOT / "examples" / "caltech101.py"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=["large", "small", "cnn"], default="large")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--period", type=int, default=10)
    parser.add_argument("--rate", default="1gbit", help="of each network card")
    parser.add_argument("--lr", type=float, default=0.005, help="of the server, which sums over workers")
    parser.add_argument("--insecure", action="store_true", help="plain text, to see what TLS costs")
    given = parser.parse_args()
    reason = unavailable()
    if reason:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, Machines(given.machines, rate=given.rate) as machines:
        figures = train(given, machines, Path(folder))
    figures |= {
        "asked": vars(given),
        **origin(),
    }
    print(json.dumps(figures, indent=2))
    keep(Path(__file__).with_name("record.json"), figures)


def train(given: argparse.Namespace, machines: Machines, folder: Path) -> dict[str, Any]:
    """Figures of the run."""
    options = ["--strategy", "downpour", "--optimizer", "sgd", "--lr", str(given.lr), "--json"]
    options += ["--epochs", str(given.epochs), "--batch-size", str(given.batch)]
    for setting in (
        f"push_every={given.period}",
        f"fetch_every={given.period}",
        "overlap=false",
        "local_lr=0.02",
    ):
        options += ["--set", f"strategy.{setting}"]
    options += ["--insecure"] if given.insecure else []
    job = load_job(f"{JOB}:{given.model}")
    run = run_on(machines, folder, f"{JOB}:{given.model}", *options)
    kept = (
        "steps",
        "samples",
        "samples_accounted",
        "train_s",
        "samples_per_s",
        "loss",
        "compute_s",
        "wait_s",
    )
    kept += ("pushed_bytes", "fetched_bytes", "pushes", "retries", "staleness_mean", "staleness_max", "cpu_s")
    return {
        "joined": [event["who"] for event in run.events if event["event"] == "machine"],
        **{name: run.summary[name] for name in kept},
        "accuracy": Run.load(folder / "run", model=job.model, data=job.data).evaluate().accuracy,
        "peak_own_bytes": run.summary["peak_own_bytes"],
        "peak_machine_bytes": {machine.name: machine.peak_memory_bytes() for machine in machines.machines},
    }


if __name__ == "__main__":
    main()
