"""Question: for how long are workers held up when a run changes its number of shards?

    python studies/reshard_pause/reshard_pause.py  # a small model, 10 changes: about a minute
    python studies/reshard_pause/reshard_pause.py --chunks 285 --tokens 262144 --changes 4  # 299 MB of parameters

A run of real processes on this machine changes between two numbers of shards again and again. `held` is the time
without updates, as the coordinator counts it. `push` is the longest push of a worker in a change, and its ratio to the
median push of the same run, which was made between the changes: both suffer alike from other load. Keeps what it finds
in record.json.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.server.shard.config import Acknowledge
from gradstream.testing import Tokens, numbered

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep, kept

SCRIPT = Path(__file__).resolve()
RESULT = SCRIPT.with_name("record.json")
SAMPLES, SETTLE_S = 64, 0.5


def job() -> gs.Job:
    """Downpour on two workers, of the model that `sys.argv` names; its gradients cost next to nothing."""
    chunks, tokens = map(int, sys.argv[1:3])
    return gs.Job(
        Tokens(chunks, tokens),
        numbered(SAMPLES),
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=1.0),
        workers=2,
        servers=2,
        batch_size=2,
        epochs=100_000,
        chunk_elems=tokens,
        acknowledge=cast(Acknowledge, sys.argv[3]),
        checkpoint_every=None,
    )


def measured(run_dir: Path, options: Sequence[str], changes: int) -> Sequence[Mapping[str, Any]]:
    """The events of a run whose shards have changed so many times."""
    gs.train(load_job(f"{SCRIPT}:job", argv=[str(SCRIPT), *options]), run_dir=run_dir, detach=True)
    events: list[Mapping[str, Any]] = []
    begun = threading.Event()

    def on_event(event: Mapping[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step":
            begun.set()

    def follow() -> None:
        try:
            gs.runs.attach(run_dir, on_event=on_event)
        except gs.errors.GradstreamError:
            pass  # it was ended at once

    follower = threading.Thread(target=follow)
    follower.start()
    begun.wait(120.0)
    for number in range(changes):
        threading.Event().wait(SETTLE_S)
        print(gs.runs.reshard(run_dir, servers=3 - number % 2), flush=True)
    gs.runs.stop(run_dir, now=True)
    follower.join()
    return events


def main() -> None:
    """Measures, and prints quantiles."""
    parser = command_line(__doc__)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="elements of a chunk")
    parser.add_argument("--acknowledge", default="applied")
    parser.add_argument("--changes", type=int, default=10)
    given = parser.parse_args()
    options = [str(given.chunks), str(given.tokens), given.acknowledge]
    with tempfile.TemporaryDirectory() as folder:
        events = measured(Path(folder) / "run", options, given.changes)
    held = [
        event["held_s"] for event in events if event["event"] == "reshard" and event["state"] == "switched"
    ]
    pushes = [event for event in events if event["event"] == "transfer" and event["kind"] == "push"]
    usual = statistics.median(event["seconds"] for event in pushes)
    longest = []
    for event in events:
        if event["event"] == "reshard" and event["state"] == "switched":
            during = [
                one["seconds"]
                for one in pushes
                if one["time_s"] - one["seconds"] <= event["time_s"] <= one["time_s"] + event["held_s"]
            ]
            longest.append(max(during, default=0.0))
    found = {}
    for name, values in (("held", held), ("push", longest)):
        p50, p99 = (float(one) for one in np.quantile(values, [0.5, 0.99]))
        found[name] = {"p50_s": p50, "p99_s": p99, "usual_pushes": p50 / usual}
        print(f"{name:6} p50 {p50:.3f} s, p99 {p99:.3f} s, {p50 / usual:.1f} usual pushes of {usual:.4f} s")
    record = kept(RESULT)
    record |= {"date": datetime.date.today().isoformat(), "commit": git_commit(SCRIPT.parent)}
    record["machine"] = describe_machine({})["machine"]
    key = f"{4 * given.chunks * given.tokens:,} bytes, {given.acknowledge}"
    record["models"] = record.get("models", {}) | {key: {"changes": len(held), **found}}
    keep(RESULT, record)


if __name__ == "__main__":
    sys.exit(main())
