"""What does recording cost, and how long does a replay take? One Downpour job without and with `record=True`.

    python studies/replay_cost/replay_cost.py  # 304 k parameters, 2 workers, 2 shards
    python studies/replay_cost/replay_cost.py --elems 20000000 --steps 60

Baseline: the same job without a recording, in the same call; the runs alternate, so that what changes on the
machine meanwhile changes both. `step_ratio` is the median time of a recorded run over that of a plain one.
`bytes_per_update` is the size of the recording over the number of pushes; `share_of_traffic` that over what
was pushed and fetched. Ends with a replay, which has to have the same bits. Keeps a record in bench/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import gradstream as gs
from gradstream.cli.replaying import same_bits
from gradstream.job.files import load_job
from gradstream.recording import FOLDER
from gradstream.run.local.environment import node_environment

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import keep, origin

WIDTH, CLASSES = 256, 10
SIZES = Path(tempfile.gettempdir()) / "gradstream-replay-cost.json"
"""Nodes read this file again: what they are told lies beside."""


def build(elems: int) -> nn.Module:
    """Two layers of about so many parameters."""
    hidden = max(1, round(elems / (WIDTH + CLASSES + 1)))
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def job() -> gs.Job:
    """The job of every node."""
    told = json.loads(SIZES.read_text())
    rng = np.random.default_rng(0)
    data = gs.from_arrays(
        rng.standard_normal((4096, WIDTH), dtype=np.float32), rng.integers(0, CLASSES, 4096)
    )
    model = gs.from_torch(lambda: build(told["elems"]), nn.functional.cross_entropy)
    return gs.Job(
        model,
        data,
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=1e-3),
        workers=told["workers"],
        servers=2,
        batch_size=32,
        steps=told["steps"],
        chunk_elems=told["chunk_elems"],
        checkpoint_every=None,
    )


def measure(folder: Path, *, record: bool) -> tuple[gs.Run, dict[str, Any]]:
    """One run."""
    chosen = load_job(f"{Path(__file__).resolve()}:job")
    run = gs.train(chosen, record=record, run_dir=folder)
    figures = run.summary
    size_bytes = sum(file.stat().st_size for file in (folder / FOLDER).rglob("*.rec")) if record else 0
    traffic_bytes = figures["pushed_bytes"] + figures["fetched_bytes"]
    return run, {
        "record": record,
        "train_s": figures["train_s"],
        "step_ms": 1e3 * figures["train_s"] * chosen.workers / figures["steps"],
        "updates": figures["pushes"] - 1,  # the first brings initial parameters
        "recording_bytes": size_bytes,
        "bytes_per_update": size_bytes / (figures["pushes"] - 1),
        "share_of_traffic": size_bytes / traffic_bytes,
        "staleness_mean": figures["staleness_mean"],
    }


def main() -> None:
    """Plain and recorded by turns, then the last recorded one replayed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elems", type=int, default=304_389)
    parser.add_argument("--steps", type=int, default=400, help="of each worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunk-elems", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=3, help="a plain and a recorded run each")
    given = parser.parse_args()
    told = {name: getattr(given, name) for name in ("elems", "steps", "workers", "chunk_elems")}
    SIZES.write_text(json.dumps(told))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(given.rounds):
            for record in (False, True):
                run, row = measure(Path(scratch) / f"{number}-{record}", record=record)
                rows.append(row)
        begun_s = time.monotonic()
        assert run.path is not None
        with gs.replay.replay(run.path, keep=False) as again:
            updates = sum(1 for _ in again)
        replay_s = time.monotonic() - begun_s
        same = same_bits(again.parameters, run.parameters)
    plain, recorded = ([row for row in rows if row["record"] is which] for which in (False, True))
    typical = {name: statistics.median(row[name] for row in recorded) for name in recorded[0]}
    result = {
        **told,
        "step_ratio": typical["train_s"] / statistics.median(row["train_s"] for row in plain),
        "spread_of_the_plain_runs": max(row["train_s"] for row in plain)
        / min(row["train_s"] for row in plain),
        "bytes_per_update": typical["bytes_per_update"],
        "share_of_traffic": typical["share_of_traffic"],
        "replay_s": replay_s,
        "replay_over_run": replay_s / rows[-1]["train_s"],
        "updates_replayed": updates,
        "same_bits": same,
        "rows": rows,
        **origin(node_environment(given.workers)),
    }
    if given.elems == parser.get_default("elems"):
        keep(Path(__file__).with_name("record.json"), result)
    for name in ("step_ratio", "bytes_per_update", "share_of_traffic", "replay_over_run", "same_bits"):
        print(f"{name:<20} {result[name]}")


if __name__ == "__main__":
    main()
