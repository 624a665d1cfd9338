"""Runs all nodes of a plan inside one process, on virtual time; a script can kill nodes."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import torch

from gradstream.checkpoint.snapshot import Carried
from gradstream.coordinator import Coordinator, RunOutcome
from gradstream.coordinator.durable import Keeper, StateKeeper, StateStore, Unkept
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.relay import RunClock
from gradstream.job.plan import RunPlan
from gradstream.model.base import Model
from gradstream.run.nodes import build_replica
from gradstream.run.plans import RunLeader, run_plans
from gradstream.runtime.base import Storage
from gradstream.runtime.simulation import SimulationConfig
from gradstream.runtime.virtual import DeadlockError, VirtualCluster
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork
from gradstream.worker.node import WorkerNode
from gradstream.worker.parts.node import PartNode

EVENTS_AGAIN = 1 << 14
"""Lines of events that a new coordinator process can see."""


EACH_OBJECTS = 50
"""New objects per node between two garbage collections."""


class SimulatedCluster:
    """The nodes of a run on a virtual network.

    Args:
        model: copied for each worker, except in a shape-only simulation, which never runs it.
        config: machines and network.
        on_events: called with events, as JSON lines, when they happen.
        storage: the disk of all nodes; None makes an empty one.

    Attributes:
        coordinator: the coordinator, once it has started.
        store: the coordinator's durable state, from which `restart` continues; None keeps none.
        successor_due: whether the script will restart the coordinator; until then the run continues without any
            node.
    """

    def __init__(
        self,
        plan: RunPlan,
        model: Model,
        config: SimulationConfig,
        on_events: Callable[[bytes], None],
        storage: Storage | None = None,
    ) -> None:
        self.plan = plan
        self.coordinator: Coordinator | None = None
        self.store: StateStore | None = None
        self.virtual = VirtualCluster(plan.job.seed, config, storage)
        self.network = MemoryNetwork(self.virtual)
        self.outcomes: dict[str, BaseException | None] = {}  # how each node ended
        self._model = model
        self._on_events = on_events
        self._written = deque[bytes](maxlen=EVENTS_AGAIN)
        self._address = ""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._incarnations: defaultdict[str, int] = defaultdict(lambda: 1)
        self._workers: dict[str, WorkerNode | PartNode] = {}
        self._outcome: RunOutcome | None = None
        self.successor_due = False
        self._stop: Callable[[], None] = lambda: None

    def run(self, script: Script | None = None) -> RunOutcome | None:
        """Runs until every node has ended.

        Args:
            script: runs beside the nodes, on virtual time, for example to kill some. If it has an attribute
                `store`, this makes the coordinator's store for the id of the run, with which `restart` continues.

        Returns:
            The outcome according to the coordinator; None if it was killed.
        """
        make_store: Callable[[str], StateStore] | None = getattr(script, "store", None)
        if make_store is not None:
            self.store = make_store(self.plan.id)
        threads, collected = torch.get_num_threads(), gc.get_threshold()
        torch.set_num_threads(1)  # results must not depend on this machine's cores
        # Each garbage collection walks the objects of all nodes: with 2,000 of them that took half of the time.
        gc.set_threshold(
            collected[0] and max(collected[0], EACH_OBJECTS * len(self.plan.node_names)), *collected[1:]
        )
        try:
            self.virtual.run(self._main(script))
        finally:
            torch.set_num_threads(threads)
            gc.set_threshold(*collected)
        return self._outcome

    def kill(self, name: str) -> None:
        """Kills a node, as SIGKILL does, at this instant of virtual time."""
        self.network.kill(name)
        self.virtual.runtime(name).kill()
        director = self.virtual.runtime("director")
        director.spawn(self._bury(self._tasks[name]), name=f"burial of {name}")

    @property
    def over(self) -> bool:
        """Whether the coordinator has come to its end, and was not killed."""
        return self._tasks[COORDINATOR].done() and not self.virtual.runtime(COORDINATOR).dead

    def is_running(self, name: str) -> bool:
        """Whether a node has started and not ended."""
        return not self._tasks[name].done() and not self.virtual.runtime(name).dead

    async def ended(self, name: str) -> None:
        """Returns once the current process of a node has ended, or was killed."""
        if self.is_running(name):
            await asyncio.wait([self._tasks[name]])  # noqa: TID251  # one task: there is no order

    def drain(self, name: str) -> None:
        """Asks a worker to hand in what it has computed and to leave, as SIGTERM does."""
        self._workers[name].drain()

    async def restart(self, name: str) -> None:
        """Starts a node again, or a further worker, as a new process at this instant of virtual time."""
        self.virtual.replace(name)
        self._incarnations[name] += 1
        if name == COORDINATOR:
            await self._start(name, self._coordinator)
            return
        shard = partial(self._shard, int(name.rpartition("-")[2]))
        await self._start(name, shard if name.startswith("shard") else self._replica)

    def reshard(self, servers: int) -> list[str]:
        """Asks the run to change its number of shards, and starts the new shards; "reshard" events report the outcome.

        Returns:
            Names of the new shards.

        Raises:
            ConfigError: the run cannot do that, or not now.
        """
        assert self.coordinator is not None
        names = self.coordinator.reshard(servers)
        director = self.virtual.runtime("director")
        for name in names:
            start = self._start(name, partial(self._shard, int(name.rpartition("-")[2])))
            director.spawn(start, name=f"start of {name}")
        return names

    def stop(self) -> None:
        """Asks the run to stop with a checkpoint, as Ctrl-C does."""
        self._stop()

    async def _bury(self, task: asyncio.Task[None]) -> None:
        """Cancels a task until it ends: clean-up code of a dead node waits for timers that never fire."""
        director = self.virtual.runtime("director")
        while not task.done():
            task.cancel()
            await director.sleep(1e-3)

    async def _main(self, script: Script | None) -> None:
        await self._start(COORDINATOR, self._coordinator)
        for name in self.plan.node_names[1:]:
            shard = partial(self._shard, int(name.rpartition("-")[2]))
            await self._start(name, shard if name.startswith("shard") else self._replica)
        director = self.virtual.runtime("director")
        if script is not None:
            director.spawn(script(self), name="script")
        while (running := [task for task in self._tasks.values() if not task.done()]) or self.successor_due:
            await asyncio.gather(*running, return_exceptions=True)
            if not running:
                await director.sleep(1e-3)

    async def _start(self, name: str, run: Callable[[MemoryEndpoint], Coroutine[Any, Any, None]]) -> None:
        runtime = self.virtual.runtime(name)
        endpoint = MemoryEndpoint(self.plan.identity(name, self._incarnations[name]), runtime, self.network)
        await endpoint.start()
        if name == COORDINATOR:
            self._address = endpoint.address
        endpoint.know(COORDINATOR, self._address)

        async def live() -> None:
            outcome: BaseException | None = None
            try:
                await run(endpoint)
            except BaseException as error:
                outcome = error
                if isinstance(error, DeadlockError) or not isinstance(error, Exception):
                    raise  # Ctrl-C, which is not the end of a node
            finally:
                if self._tasks[name] is asyncio.current_task():  # no new process has replaced it
                    self.outcomes[name] = outcome
                if not runtime.dead:
                    await endpoint.close()

        self._tasks[name] = asyncio.get_running_loop().create_task(live(), name=name)

    async def _coordinator(self, endpoint: MemoryEndpoint) -> None:
        runtime = self.virtual.runtime(COORDINATOR)
        keeper: Keeper = Unkept(self._on_events)
        if self.store is not None:
            keeper = StateKeeper(
                runtime, self.store, self._write, lambda: b"".join(self._written), lambda text, stored: None
            )
        leader = RunLeader(self.plan, runtime, endpoint, keeper, on_coordinator=self._note_coordinator)
        self._stop = leader.stop
        outcome = await leader.run()
        await leader.coordinator.close()
        self._outcome = outcome

    def _note_coordinator(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def _write(self, lines: bytes) -> None:
        self._written.extend(lines.splitlines(keepends=True))
        self._on_events(lines)

    @property
    def _zero_ns(self) -> int | None:
        return self.coordinator.clock.zero_ns if self.coordinator is not None else None

    async def _shard(self, rank: int, endpoint: MemoryEndpoint) -> None:
        from gradstream.run.shard import build_shard  # not imported by a run without servers

        runtime, model = self.virtual.runtime(endpoint.identity.name), self._model

        def build(plan: RunPlan, clock: RunClock) -> Callable[[], Awaitable[None]]:
            return build_shard(plan, runtime, endpoint, rank, model, clock=clock).run

        await run_plans(self.plan, runtime, endpoint, build, zero_ns=self._zero_ns)

    async def _replica(self, endpoint: MemoryEndpoint) -> None:
        runtime = self.virtual.runtime(endpoint.identity.name)
        model = self._model if self.virtual.config.shape_only else copy.deepcopy(self._model)
        carried = Carried()

        def build(plan: RunPlan, clock: RunClock) -> Callable[[], Awaitable[None]]:
            worker = self._workers[runtime.node] = build_replica(
                plan, runtime, endpoint, model, clock=clock, carried=carried
            )
            return worker.run

        await run_plans(self.plan, runtime, endpoint, build, zero_ns=self._zero_ns)


Script = Callable[[SimulatedCluster], Coroutine[Any, Any, None]]
"""A coroutine function that acts on a simulated run from outside."""
