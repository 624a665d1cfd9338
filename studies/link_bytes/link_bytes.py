"""Question: how many bytes does local SGD with one bit send for the accuracy of synchronous float32?

Four machines, as network namespaces of this one, train 784-256-10 (203,530 parameters) on Fashion-MNIST's subset, eight
samples of each a step, for as many epochs each. Bytes are what the four network cards have sent from the first join to
the end: connections, first parameters, heartbeats and checkpoint are in it. Takes root, `ip` and `tc`.

    python studies/link_bytes/link_bytes.py  # some ten minutes; its times mean nothing
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

import gradstream as gs

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "slow_links"))
from common import command_line, keep, origin, run_on
from kit.machines import Machines, unavailable
from slow_links import sent

WORLD, BATCH, LR = 4, 8, 0.05
METHODS = {
    "allreduce, float32": ("allreduce", ()),
    **{
        f"local-sgd, one-bit, H = {every}": ("local-sgd", (f"strategy.every={every}", "codec=one-bit"))
        for every in (32, 64, 128)
    },
}


def network() -> nn.Module:
    """784-256-10, with ReLU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def job() -> gs.Job:
    """Strategy, codec and epochs come from the command line."""
    return gs.Job(
        gs.from_torch(network, nn.functional.cross_entropy),
        gs.data.fashion_mnist(),
        workers=WORLD,
        batch_size=BATCH,
        optimizer=gs.optim.SGD(lr=LR),
        epochs=1,
        checkpoint_every=None,
        record_machine=False,
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--out", default=str(Path(__file__).with_name("record.json")), help='the record; "" for nowhere'
    )
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for seed in range(given.seeds):
        for name, found in rows.items():
            found.append(measured(name, seed, given.epochs))
            print(f"{name:30s} {found[-1]}", flush=True)
    for name, found in compared(rows).items():
        print(f"{name:30s} {found}")
    if given.out:
        record = {
            "question": (__doc__ or "").splitlines()[0],
            "epochs": given.epochs,
            "rows": rows,
            "compared": compared(rows),
            **origin(),
        }
        keep(Path(given.out), record)


def compared(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Means over the seeds: megabytes, and the points of accuracy that are lost, with their standard error."""
    first, table = next(iter(rows.values())), {}
    for name, found in rows.items():
        lost = [100 * (one["accuracy"] - row["accuracy"]) for one, row in zip(first, found, strict=True)]
        sent_bytes, most_bytes = (
            statistics.mean(one["sent_bytes"] for one in all_) for all_ in (found, first)
        )
        table[name] = {
            "accuracy": statistics.mean(row["accuracy"] for row in found),
            "sent_mb": sent_bytes / 1e6,
            "fewer": most_bytes / sent_bytes,
            "lost_points": statistics.mean(lost),
            "error_points": statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else 0.0,
        }
    return table


def measured(name: str, seed: int, epochs: int) -> dict[str, Any]:
    """Accuracy of the final parameters on all held-back samples, and the bytes of all cards."""
    strategy, settings = METHODS[name]
    words = ["--strategy", strategy, "--epochs", str(epochs), "--seed", str(seed), "--json"]
    for setting in settings:
        words += ["--set", setting]
    with tempfile.TemporaryDirectory() as folder, Machines(WORLD, rate="1gbit") as machines:
        run = run_on(machines, Path(folder), f"{__file__}:job", *words)
        sent_bytes = sum(sent(machine, Path(folder)) for machine in machines.machines)
        whole = job()
        accuracy = gs.Run.load(Path(folder) / "run", model=whole.model, data=whole.data).evaluate().accuracy
    return {"accuracy": accuracy, "sent_bytes": sent_bytes, "steps": run.summary["steps"]}


if __name__ == "__main__":
    main()
