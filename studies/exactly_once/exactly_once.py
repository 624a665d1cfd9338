"""Real SIGKILLs of workers or shards, and what the model has of every sample afterwards: lost, doubled, torn.

    python studies/exactly_once/exactly_once.py  # every carrier and strategy, one run of each
    python studies/exactly_once/exactly_once.py --rounds 8  # 8 runs of each: 7 kills a run
    python studies/exactly_once/exactly_once.py --strategies allreduce  # no servers; shared memory whatever the carrier
    python studies/exactly_once/exactly_once.py --rounds 4 --keep  # 420 kills, kept in record.json
    python studies/exactly_once/exactly_once.py --shards replicated  # shards in place of workers; or "logged"
    python studies/exactly_once/exactly_once.py --split 2 --strategies downpour,ssp  # a part of a replica of two

Of eight workers seven are killed, one after the other, at random times; the last one ends the run. Of two shards one is
killed again and again, whenever the backups are whole. Each sample adds 1 to its own element of every chunk
(`gradstream.testing.runs`), so the final parameters are the count.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.testing import TokenAudit, Tokens, numbered
from gradstream.testing.runs import token_layers
from gradstream.wire.chunks import member_name

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, now

RESULT = Path(__file__).with_name("record.json")
WORKERS, SAMPLES, EPOCHS, CHUNKS = 8, 512, 40, 8
BATCH = 2
STRATEGIES: dict[str, gs.Strategy] = {
    "downpour": gs.Downpour(),
    "ssp": gs.SSP(bound=3),
    "synchronous": gs.Synchronous(),
    "allreduce": gs.AllReduce(),
    "allreduce-ring": gs.AllReduce(algorithm="ring"),
}


def job() -> gs.Job:
    """The run, whatever its carrier and strategy."""
    return gs.Job(
        Tokens(CHUNKS, SAMPLES),
        numbered(SAMPLES),
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=1.0),
        workers=WORKERS,
        servers=2,
        batch_size=BATCH,
        epochs=EPOCHS,
        chunk_elems=SAMPLES,
        max_restarts=0,
    )


def job_of_rounds() -> gs.Job:
    """The same in rounds: a round is the mean over its samples, so the rate is their number."""
    model = Tokens(CHUNKS, SAMPLES)
    model.reduction = "sum"
    rate = gs.optim.SGD(lr=float(WORKERS * BATCH))
    return replace(job(), model=model, strategy="synchronous", optimizer=rate)


def job_of_layers() -> gs.Job:
    """The same for replicas that are split."""
    return replace(job(), model=token_layers(4, CHUNKS // 4, SAMPLES), servers=1)


class Killer:
    """Kills all workers but one at random steps of the run, or a process of each of their replicas.

    Args:
        cluster: the nodes.
        seed: of the steps, and of the order of the workers.
        epochs: length of the run.
        split: number of processes of a replica.
    """

    def __init__(self, cluster: LocalCluster, seed: int, epochs: int, split: int) -> None:
        rng = random.Random(seed)
        self._cluster = cluster
        self._victims = [
            member_name(rng.randrange(split) if split > 1 else 0, rank)
            for rank in rng.sample(range(WORKERS), WORKERS - 1)
        ]
        total = SAMPLES * epochs // BATCH
        self._at = sorted(rng.randrange(50, total * 3 // 4) for _ in self._victims)
        self._steps = 0.0
        self.kills = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Counts minibatches, and kills whoever is due."""
        self._steps += event["samples"] / BATCH if event["event"] == "step" else 0
        while self.kills < len(self._at) and self._steps >= self._at[self.kills]:
            self._cluster.signal(self._victims[self.kills], signal.SIGKILL)
            self.kills += 1


class ShardKiller:
    """Kills one of the shards every `EVERY` minibatches, or when the backups are whole again if that is later.

    Args:
        cluster: the nodes.
        seed: of the shards.
        whole: event of a run in which all backups are whole again.
    """

    EVERY = 300

    def __init__(self, cluster: LocalCluster, seed: int, whole: str) -> None:
        self._rng = random.Random(seed)
        self._cluster = cluster
        self._whole = whole
        self._waits = False
        self._steps = 0
        self.kills = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Counts minibatches, and kills when it is time."""
        self._steps += event["event"] == "step"
        self._waits = self._waits and event["event"] != self._whole
        if self._steps >= self.EVERY and not self._waits:
            self._cluster.signal(f"shard-{self._rng.randrange(2)}", signal.SIGKILL)
            self._steps, self._waits = 0, True
            self.kills += 1


def run_once(
    carrier: str,
    strategy: str,
    seed: int,
    folder: Path,
    shards: Any = "applied",
    epochs: int = EPOCHS,
    split: int = 1,
) -> tuple[int, TokenAudit, Counter[str]]:
    """One run: number of kills, audit, and what became of the minibatches without a receipt."""
    chosen = STRATEGIES[strategy]
    rounds = isinstance(chosen, gs.AllReduce | gs.Synchronous)
    which = "job_of_layers" if split > 1 else "job_of_rounds" if rounds else "job"
    given = load_job(f"{Path(__file__).resolve()}:{which}")
    changed = replace(
        given, strategy=chosen, carrier=carrier, seed=seed, acknowledge=shards, epochs=epochs, split=split
    )
    if isinstance(chosen, gs.AllReduce):
        changed = replace(changed, servers=None)
    if shards != "applied":
        changed = replace(changed, workers=3, max_restarts=100)
    spec = plan_run(changed, f"{carrier}-{strategy}-{seed}")
    with LocalCluster(folder / "logs", node_environment(WORKERS)) as cluster:
        killer: Killer | ShardKiller = Killer(cluster, seed, epochs, split)
        if shards != "applied":
            killer = ShardKiller(cluster, seed, "backed_up" if shards == "replicated" else "restored")
        with patch("gradstream.run.restarts.CALM_S", 0.0):  # each restart counts as the first one
            run = launch(spec, folder, cluster=cluster, on_event=killer)
    settled: Counter[str] = Counter()
    for event in run.events:
        if event["event"] == "settled":
            settled.update(in_model=event["in_model"], redone=event["torn"], again=event["again"])
    return killer.kills, TokenAudit.of(run, SAMPLES, epochs), settled


def main() -> None:
    """Prints a line for each run, and the sums."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--split", type=int, default=1, help="processes of a replica; not in rounds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--carriers", default="shm,tcp,grpc")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--keep", action="store_true", help="keeps the sums in record.json")
    parser.add_argument(
        "--shards", default="applied", help="acknowledgement: kills shards in place of workers"
    )
    given = parser.parse_args()
    total: Counter[str] = Counter()
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(given.first_seed, given.first_seed + given.rounds):
        for carrier in given.carriers.split(","):
            for strategy in given.strategies.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    begun_s = time.perf_counter()
                    kills, audit, settled = run_once(
                        carrier, strategy, seed, Path(folder), given.shards, given.epochs, given.split
                    )
                found = {"kills": kills, "lost": audit.lost, "doubled": audit.doubled, "torn": audit.torn}
                total.update(found | settled)
                rows[f"{strategy}, {carrier}"].update(found)
                took_s = time.perf_counter() - begun_s
                print(
                    f"{carrier} {strategy} {seed}: {kills} kills, {audit}, {dict(settled)}, {took_s:.0f} s",
                    flush=True,
                )
    print(dict(total))
    if given.keep:
        when = now()
        record = {"rows": rows, "all": total, "date": when, "commit": git_commit(ROOT)}
        record |= {"load": os.getloadavg()[0], "machine": describe_machine({})["machine"]}
        keep(RESULT, record)


if __name__ == "__main__":
    main()
