"""Question: does anything grow when one worker of a run is killed and comes back, a thousand times?

On virtual time, what coordinator, shards and workers hold is counted: all Python objects and tensors that their state
machines, services, endpoints and open streams reach; and the coordinator's stored state. With processes, it is their
memory without file pages, as in their `memory` events; a launcher's pauses between two restarts of one worker are left
out.

    python studies/rejoins/rejoins.py virtual 1000
    python studies/rejoins/rejoins.py processes 240  # seconds of training

Keeps the figures in record.json. Growth is from the median of the second quarter of all looks to that of
the last quarter: by then caches and windows are full.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

import gradstream as gs
from gradstream._train import launch
from gradstream.coordinator.durable import StateStore
from gradstream.job.files import load_job
from gradstream.run import restarts
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.virtual import Clock, VirtualCluster
from gradstream.server.shard.service import ShardService
from gradstream.testing.runs import QUICK, UNSTEADY, Tokens, least_squares, numbered
from gradstream.transport.simulated import StreamQueue, VirtualNetwork

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep, kept, origin

RECORD = Path(__file__).with_name("record.json")
VICTIM = "worker-1"
SLOW = replace(UNSTEADY, costs={**UNSTEADY.costs, "gradient": gs.sim.Cost(base_s=0.08)})
FOREIGN = (
    *(ModuleType, type, BuiltinFunctionType, asyncio.Task, asyncio.AbstractEventLoop, StateStore),
    *(VirtualCluster, VirtualNetwork, StreamQueue, Clock),  # the simulation's own
)
OTHERS = (FunctionType, MethodType)
"""Kinds of objects whose size does not count, though what they reach does."""


def held_bytes(roots: Sequence[object], others: Iterable[object]) -> tuple[int, Counter[str]]:
    """Bytes of all that objects reach, and the number of objects by class; without what belongs to `others`."""
    seen, left, total, kinds = {id(one) for one in others}, [*roots], 0, Counter[str]()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, FOREIGN):
            continue
        seen.add(id(one))
        kinds[type(one).__qualname__] += 1
        if isinstance(one, torch.Tensor):
            total += one.nbytes
            continue
        if not isinstance(one, OTHERS):
            total += sys.getsizeof(one, 0)
        for other in gc.get_referents(one):
            left += [other] if not (isinstance(one, FunctionType) and other is one.__globals__) else []
    return total, kinds


class Rejoins:
    """A script that kills a worker and starts it again, and looks every `step` times at what the nodes hold."""

    def __init__(self, times: int, step: int) -> None:
        self.held: list[int] = []
        self.kinds: list[Counter[str]] = []
        self.state_bytes: list[int] = []
        self._times, self._step = times, step

    def store(self, job: str) -> StateStore:
        """The coordinator's store: what it holds is counted, too."""
        return StateStore(":memory:", job)

    async def __call__(self, cluster: SimulatedCluster) -> None:
        """See the class."""
        director = cluster.virtual.runtime("director")
        await director.sleep(0.5)
        for number in range(1, self._times + 1):
            cluster.kill(VICTIM)
            await director.sleep(0.01)
            await cluster.restart(VICTIM)
            assert cluster.coordinator is not None
            nodes = cluster.coordinator._membership.nodes
            while nodes.incarnations.get(VICTIM) != cluster._incarnations[VICTIM]:
                await director.sleep(0.01)
            await director.sleep(0.1)  # it takes part
            if number % self._step == 0:
                await director.sleep(1.0)  # receipts and reports that were on their way
                self._look(cluster)
                print(number, self.held[-1], self.state_bytes[-1], flush=True)
        for name in cluster.plan.node_names:
            cluster.kill(name)

    def _look(self, cluster: SimulatedCluster) -> None:
        gc.collect()
        shards = [one for one in gc.get_objects() if type(one) is ShardService]
        roots = [cluster.coordinator, *shards, *cluster._workers.values()]
        size, kinds = held_bytes(roots, [cluster, cluster.plan, self])
        self.held.append(size)
        self.kinds.append(kinds)
        assert cluster.store is not None
        (stored,) = cluster.store._database.execute("SELECT sum(length(value)) FROM state").fetchone()
        self.state_bytes.append(stored)


def growth(values: list[int]) -> float:
    """By which part the last quarter is more than the second quarter."""
    quarter = max(1, len(values) // 4)
    return round(
        statistics.median(values[-quarter:]) / statistics.median(values[quarter : 2 * quarter] or values) - 1,
        4,
    )


def virtual(times: int, strategy: gs.Strategy) -> dict[str, Any]:
    """Rejoins on virtual time."""
    script = Rejoins(times, max(1, times // 80))
    job = gs.Job(
        Tokens(num_chunks=3),
        numbered(48),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=1e-6),
        workers=3,
        servers=2,
        batch_size=2,
        epochs=1_000_000,
        chunk_elems=64,
        deadlines=QUICK,
        max_restarts=10**6,
    )
    plan = plan_run(job, "rejoins")
    cluster = SimulatedCluster(plan, Tokens(num_chunks=3), SLOW, lambda lines: None)
    cluster.run(script)
    if growth(script.held) > 0.05:
        more = script.kinds[-1] - script.kinds[len(script.kinds) // 4]
        print(f"more than before: {more.most_common(12)}")
    return {
        "rejoins": times,
        "held_bytes": script.held,
        "state_bytes": script.state_bytes,
        "growth": {"held": growth(script.held), "state": growth(script.state_bytes)},
    }


def job() -> gs.Job:
    """Three workers that do little, for ever."""
    model, data = least_squares(4000, 2000)
    return gs.Job(
        model,
        data,
        strategy="downpour",
        workers=3,
        batch_size=40,
        epochs=1_000_000,
        optimizer=gs.optim.SGD(lr=1e-9),
        max_restarts=10**6,
        checkpoint_every=None,
    )


def _anonymous_bytes(folder: Path, node: str) -> list[int]:
    """Resident memory of a node without file pages: the coordinator reports its own at the end alone."""
    log = (folder / "logs" / f"{node}.log").read_text()
    pid = re.findall(rf"^{node}: pid (\d+)", log, re.MULTILINE)[-1]
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return [int(found[1]) << 10] if found else []


def processes(seconds: float) -> dict[str, Any]:
    """Rejoins of real processes, as many as there are in so many seconds of training."""
    restarts.FIRST_WAIT_S = restarts.MOST_WAIT_S = 0.0
    own: dict[str, list[int]] = {"coordinator": [], "shard-0": [], "worker-0": []}
    struck: set[float] = set()
    rejoined: list[float] = []
    given = load_job(f"{Path(__file__).resolve()}:job")
    spec = plan_run(replace(given, until=gs.until(seconds=seconds)), "rejoins")
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(Path(folder) / "logs", node_environment(3)) as cluster,
    ):

        def on_event(event: Mapping[str, Any]) -> None:
            node = event["node"]
            if event["event"] == "memory" and node in ("shard-0", "worker-0") and event["own_bytes"]:
                own[node].append(event["own_bytes"])
            elif event["event"] == "joined" and event["who"] == VICTIM:
                rejoined.append(event["time_s"])
                own["coordinator"] += _anonymous_bytes(Path(folder), "coordinator")
            elif event["event"] == "step" and node == VICTIM and rejoined[-1] not in struck:
                struck.add(rejoined[-1])  # each process once, when it has taken part
                cluster.signal(VICTIM, signal.SIGKILL)

        launch(spec, Path(folder), cluster=cluster, on_event=on_event)
    return {
        "rejoins": len(rejoined) - 1,
        "own_bytes": {name: held[:: max(1, len(held) // 40)] for name, held in own.items()},
        "growth": {name: growth(held) for name, held in own.items()},
    }


def main() -> None:
    """Prints and keeps the figures."""
    parser = command_line(__doc__)
    parser.add_argument("how", choices=["virtual", "processes"])
    parser.add_argument("much", type=int, help="number of rejoins, or seconds of training")
    given = parser.parse_args()
    found = virtual(given.much, gs.Downpour()) if given.how == "virtual" else processes(given.much)
    record = kept(RECORD)
    record |= {given.how: found, **origin({})}
    keep(RECORD, record)
    print(json.dumps(found["growth"]))


if __name__ == "__main__":
    main()
