"""The nodes of a recorded run once more, in this process, on virtual time: the very code of a run.

There is no coordinator: who is in, and what it had said, is known. Nothing takes time; what happens when
is for the shards' scripts to say.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from gradstream.coordinator.client.member import Member
from gradstream.errors import DivergedError
from gradstream.model.base import Model
from gradstream.recording import Closed, FetchAsked, LogPart, Pushed
from gradstream.replay.membership import ReplayedMember, ReplayedMembers
from gradstream.replay.schedule import ReplayListener, ReplaySchedule
from gradstream.replay.update import ReplayedUpdate
from gradstream.replay.update_assembler import UpdateAssembler
from gradstream.run.nodes import worker_config
from gradstream.run.plan import RunPlan, shard_name, worker_name
from gradstream.run.shard import shard_config
from gradstream.runtime.base import Storage
from gradstream.runtime.simulation import Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.runtime.virtual import VirtualCluster, VirtualRuntime
from gradstream.server.shard.event_schedule import UpdateDue
from gradstream.server.shard.node import ShardNode
from gradstream.transport.simulated.endpoint import MemoryEndpoint, MemoryNetwork
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.node import WorkerNode

__all__ = ["ReplayCluster"]

INSTANT = SimulationConfig(costs={}, network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=1e-6)))
"""Nothing takes time: order is all."""

LOOK_EVERY_S = 5.0
STUCK_S = 30.0
"""Of virtual time, in which all that can happen has happened a million times over."""


class ReplayCluster(ReplayListener):
    """A replay that is under way.

    Args:
        plan: of the run, without its evaluations.
        model: copied for each worker.
        parts: of the recording, by node.
        ids: the samples of a minibatch.
        storage: where the run goes on from a checkpoint: its directory, which is not written.
        keep: parameters before and after each update.
    """

    def __init__(
        self,
        plan: RunPlan,
        model: Model,
        parts: Mapping[str, LogPart],
        ids: Callable[..., Any],
        storage: Storage | None,
        *,
        keep: bool,
    ) -> None:
        self._plan, self._model, self._parts = plan, model, parts
        self._virtual = VirtualCluster(plan.job.seed, INSTANT, _Overlay(storage))
        self._network = MemoryNetwork(self._virtual)
        layout = model.layout
        self._chunk_map = ChunkMap(layout.elems, plan.chunk_elems_of(layout), plan.servers)
        self._book = UpdateAssembler(self._chunk_map, layout.dtype, model.tree, ids, keep=keep)
        self._scripts = [ReplaySchedule(parts[shard_name(rank)], self) for rank in range(plan.servers)]
        self._shards: list[ShardNode] = []
        self._num_moved = 0
        self._news = asyncio.Event()
        self._stack = ExitStack()
        self._run: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
        self.failures: dict[str, BaseException] = {}
        self.over = False
        self.stuck = False

    # ---- from outside -------------------------------------------------------------------

    def next(self) -> ReplayedUpdate | None:
        """The next update; None when there is none left.

        Raises:
            DivergedError: this is another run than the one that was recorded.
        """
        if self._run is None and not self.over:
            self._run = self._stack.enter_context(self._virtual.looping())
            self._run(self._begin())
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # the bits of a sum depend on how many there are
        try:
            while not self._book.whole and not self.over:
                assert self._run is not None
                self._news.clear()
                self._run(self._news.wait())
        finally:
            torch.set_num_threads(threads)
        return self._book.whole.popleft() if self._book.whole else None

    def close(self) -> None:
        """Ends all nodes. Idempotent."""
        run, self._run, self.over = self._run, None, True
        if run is not None:
            run(self._bury())
        self._stack.close()

    @property
    def threads(self) -> int:
        """Of the arithmetic, on each node."""
        return max((int(part.header["threads"]) for part in self._parts.values()), default=1)

    @property
    def is_whole(self) -> bool:
        """Whether every shard has recorded up to the end of the run."""
        return all(
            any(isinstance(entry, Closed) for entry in self._parts[script.node].entries[-1:])
            for script in self._scripts
        )

    @property
    def num_left(self) -> int:
        """Contributions that were recorded and have not happened."""
        return sum(script.num_left for script in self._scripts)

    def parameters(self) -> torch.Tensor:
        """As they are now on the shards: (E,)."""
        flat = torch.zeros(self._chunk_map.elems, dtype=self._model.layout.dtype)
        for rank, shard in enumerate(self._shards):
            for chunk in self._chunk_map.chunks_of(rank):
                start, stop = self._chunk_map.bounds(chunk)
                flat[start:stop] = shard.parameters_of(chunk)
        return flat

    # ---- what shards tell ---------------------------------------------------------------

    def moved(self) -> None:
        """See `ReplayListener`."""
        self._num_moved += 1
        if all(script.over for script in self._scripts):
            self._end()

    def updates(self, updating: UpdateDue) -> None:
        """See `ReplayListener`."""
        self._book.begins(updating)

    def updated(self, updating: UpdateDue) -> None:
        """See `ReplayListener`."""
        self._book.done(updating)
        if self._book.whole:
            self._news.set()

    def diverged(self, error: DivergedError) -> None:
        """See `ReplayListener`."""
        self.failures.setdefault("", error)
        self._end()
        raise error

    def _end(self) -> None:
        self.over = True
        self._news.set()

    # ---- nodes --------------------------------------------------------------------------

    async def _begin(self) -> None:
        roster = ReplayedMembers(self._notice())
        for rank in range(self._plan.servers):
            name = shard_name(rank)
            config = replace(shard_config(self._plan, rank, self._model), schedule=self._scripts[rank])
            runtime, endpoint, member = await self._place(name, roster)
            shard = ShardNode(runtime, endpoint, member, config)
            self._shards.append(shard)
            runtime.spawn(self._live(name, shard.run()), name=name)
        for node in roster.notice.nodes:
            if node.role == "worker":
                config_of_worker = replace(
                    worker_config(self._plan, node.rank, copy.deepcopy(self._model)),
                    watch=self._book,
                )
                runtime, endpoint, member = await self._place(node.name, roster)
                worker = WorkerNode(runtime, endpoint, member, config_of_worker)
                runtime.spawn(self._live(node.name, worker.run()), name=node.name)
        director = self._virtual.runtime("director")
        director.spawn(self._watch(director), name="watch")

    async def _bury(self) -> None:
        """Kills every node, and cancels until all tasks have ended: clean-up waits for what never comes."""
        names = [name for name in self._plan.node_names if self._network.at(f"memory:{name}") is not None]
        for name in names:
            self._network.kill(name)
            self._virtual.runtime(name).kill()
        director = self._virtual.runtime("director")
        mine = asyncio.current_task()
        while rest := [task for task in asyncio.all_tasks() if task is not mine]:
            for task in sorted(rest, key=lambda task: task.get_name()):
                task.cancel()
            await director.sleep(1e-3)

    async def _place(
        self, name: str, roster: ReplayedMembers
    ) -> tuple[VirtualRuntime, MemoryEndpoint, Member]:
        runtime = self._virtual.runtime(name)
        endpoint = MemoryEndpoint(self._plan.identity(name, incarnation=1), runtime, self._network)
        await endpoint.start()
        part = self._parts.get(name)
        entries = () if part is None else part.entries
        keeps = name == self._keeper
        member = ReplayedMember(runtime, endpoint, roster, entries, self._failed, keeps=keeps)
        return runtime, endpoint, member

    async def _live(self, name: str, node: Coroutine[Any, Any, None]) -> None:
        try:
            await node
        except Exception as error:
            self._failed(name, error)

    def _failed(self, name: str, error: BaseException) -> None:
        self.failures.setdefault(name, error)
        self._news.set()

    async def _watch(self, director: VirtualRuntime) -> None:
        """Ends what cannot go on: the recording, or the likeness, ends there."""
        moved, since_s = -1, 0.0
        while since_s < STUCK_S:
            since_s = 0.0 if moved != self._num_moved else since_s + LOOK_EVERY_S
            moved = self._num_moved
            await director.sleep(LOOK_EVERY_S)
        self.stuck = True
        self._end()

    def awaited(self) -> list[str]:
        """What would have to happen next, in words."""
        return [what for script in self._scripts for what in script.awaited()]

    def _notice(self) -> v1.Notice:
        """Who was in. Workers of a lower rank than the one that gave initial parameters had died before."""
        plan = self._plan
        names = [("shard", rank, shard_name(rank)) for rank in range(plan.servers)]
        first = min((rank for rank in self._assigners()), default=0)
        names += [("worker", rank, worker_name(rank)) for rank in range(first, plan.workers)]
        return v1.Notice(
            epoch=1,
            phase=v1.Notice.TRAINING,
            nodes=[
                v1.Node(name=name, role=role, rank=rank, address=f"memory:{name}", incarnation=1)
                for role, rank, name in names
            ],
        )

    @property
    def _keeper(self) -> str:
        """The worker that kept the final parameters: the last that asked for what sums held."""
        asked = [
            entry.rank
            for script in self._scripts
            for entry in self._parts[script.node].entries
            if isinstance(entry, FetchAsked)
        ]
        return worker_name(asked[-1]) if asked else ""

    def _assigners(self) -> set[int]:
        return {
            entry.rank
            for part in self._parts.values()
            for entry in part.entries
            if isinstance(entry, Pushed) and entry.assign
        }


class _Overlay(MemoryStorage):
    """Reads what is in another storage; what is written stays here.

    Args:
        under: None for nothing.
    """

    def __init__(self, under: Storage | None) -> None:
        super().__init__()
        self._under = under

    def read(self, path: str) -> bytes:
        """See `Storage`."""
        if path in self.files or self._under is None:
            return super().read(path)
        return self._under.read(path)

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """See `Storage`."""
        if path in self.files or self._under is None:
            return super().read_at(path, offset, size)
        return self._under.read_at(path, offset, size)
