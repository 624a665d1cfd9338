"""`replay()` and the iterator that it returns, over the updates of a recorded run."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from gradstream.coordinator.client.member import Member
from gradstream.data.plan import ids_of
from gradstream.errors import DivergedError
from gradstream.ext.replay.membership import ReplayedMember, ReplayedMembers
from gradstream.ext.replay.recorded_run import RecordedRun, load_recorded_run
from gradstream.ext.replay.schedule import ReplaySchedule
from gradstream.ext.replay.update import ReplayedUpdate, UpdateAssembler
from gradstream.job.job import Job
from gradstream.job.plan import shard_name
from gradstream.run.nodes import worker_config
from gradstream.run.result import Run
from gradstream.run.shard import shard_config
from gradstream.runtime.base import Storage
from gradstream.runtime.simulation import Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.runtime.virtual import VirtualCluster, VirtualRuntime
from gradstream.server.shard.node import ShardNode
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.node import WorkerNode

# ---- cluster -----------------------------------------------------------------------------
# Runs the nodes of a recorded run again, in this process and on virtual time.
#
# Nodes run the same code as in a run. There is no coordinator: each `ReplayedMember` repeats its recorded answers.
# Nothing takes time; the `ReplaySchedule` of each shard sets the order of events.

INSTANT = SimulationConfig(costs={}, network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=1e-6)))
"""A simulation in which nothing takes time, since only the order matters."""

CHECK_EVERY_S = 5.0
STUCK_S = 30.0
"""Seconds of virtual time without a recorded event after which the replay is stuck; everything takes microseconds."""


class ReplayCluster:
    """Runs the nodes of a recorded run again, as far as updates are requested.

    The attributes show how the replay ended: `failures` by node, the first `divergence` from the recording,
    `over` once no update follows, and `stuck` if the replay waited for an event that did not come.

    Args:
        run: the run and its recording.
        keep: whether each update keeps the parameters before and after it.
    """

    def __init__(self, run: RecordedRun, *, keep: bool) -> None:
        self.run = run
        plan, layout = run.plan, run.model.layout
        self._virtual = VirtualCluster(plan.job.seed, INSTANT, _Overlay(run.storage))
        self._network = MemoryNetwork(self._virtual)
        self._chunks = ChunkMap(layout.elems, plan.chunk_elems_of(layout), plan.servers)
        samples_of = partial(ids_of, plan.batch_plan())
        self._assembler = UpdateAssembler(self._chunks, layout.dtype, run.model.tree, samples_of, keep=keep)
        self._schedules = [
            ReplaySchedule(part, self._assembler, self._event_happened, self._diverged)
            for part in run.shard_parts()
        ]
        self._shards: list[ShardNode] = []
        self._num_events = 0
        self._progress = asyncio.Event()  # an update is complete, or the replay is over
        self._stack = ExitStack()
        self._drive: Callable[[Coroutine[Any, Any, Any]], Any] | None = None  # runs the virtual event loop
        self.failures: dict[str, BaseException] = {}
        self.divergence: DivergedError | None = None
        self.over = False
        self.stuck = False

    # ---- for the iterator ---------------------------------------------------------------

    def next(self) -> ReplayedUpdate | None:
        """The next update; None if none is left.

        Raises:
            DivergedError: the replay differs from the recording.
        """
        if self._drive is None and not self.over:
            self._drive = self._stack.enter_context(self._virtual.looping())
            self._drive(self._start())
        complete = self._assembler.complete
        threads = torch.get_num_threads()
        torch.set_num_threads(self.run.threads)  # the bits of a sum depend on the number of threads
        try:
            while not complete and not self.over:
                assert self._drive is not None
                self._progress.clear()
                self._drive(self._progress.wait())
        finally:
            torch.set_num_threads(threads)
        return complete.popleft() if complete else None

    def close(self) -> None:
        """Ends all nodes. Idempotent."""
        drive, self._drive, self.over = self._drive, None, True
        if drive is not None:
            drive(self._kill_all())
        self._stack.close()

    @property
    def num_left(self) -> int:
        """Number of recorded contributions that have not arrived yet."""
        return sum(schedule.num_left for schedule in self._schedules)

    def awaited(self) -> list[str]:
        """The events that must happen next, in words."""
        return [event for schedule in self._schedules for event in schedule.awaited()]

    def parameters(self) -> torch.Tensor:
        """The parameters on the shards now, (E,)."""
        flat = torch.zeros(self._chunks.elems, dtype=self.run.model.layout.dtype)
        for rank, shard in enumerate(self._shards):
            for chunk in self._chunks.chunks_of(rank):
                start, stop = self._chunks.bounds(chunk)
                flat[start:stop] = shard.parameters_of(chunk)
        return flat

    # ---- for the schedules --------------------------------------------------------------

    def _event_happened(self) -> None:
        self._num_events += 1
        if self._assembler.complete:
            self._progress.set()
        if all(schedule.over for schedule in self._schedules):
            self._end()

    def _diverged(self, error: DivergedError) -> None:
        self.divergence = self.divergence or error
        self._end()

    def _end(self) -> None:
        self.over = True
        self._progress.set()

    # ---- nodes --------------------------------------------------------------------------

    async def _start(self) -> None:
        plan, model = self.run.plan, self.run.model
        members = ReplayedMembers(self.run.notice(), self.run.last_worker)
        for rank, schedule in enumerate(self._schedules):
            name = shard_name(rank)
            runtime, endpoint, member = await self._place(name, members)
            shard = ShardNode(
                runtime, endpoint, member, replace(shard_config(plan, rank, model), schedule=schedule)
            )
            self._shards.append(shard)
            runtime.spawn(self._supervise(name, shard.run()), name=name)
        for node in members.notice.nodes:
            if node.role == "worker":
                config = worker_config(plan, node.rank, copy.deepcopy(model))
                runtime, endpoint, member = await self._place(node.name, members)
                worker = WorkerNode(runtime, endpoint, member, replace(config, watch=self._assembler))
                runtime.spawn(self._supervise(node.name, worker.run()), name=node.name)
        director = self._virtual.runtime("director")
        director.spawn(self._watch_progress(director), name="watch")

    async def _place(
        self, name: str, members: ReplayedMembers
    ) -> tuple[VirtualRuntime, MemoryEndpoint, Member]:
        runtime = self._virtual.runtime(name)
        endpoint = MemoryEndpoint(self.run.plan.identity(name, incarnation=1), runtime, self._network)
        await endpoint.start()
        member = ReplayedMember(runtime, endpoint, members, self.run.entries_of(name), self._failed)
        return runtime, endpoint, member

    async def _supervise(self, name: str, node: Coroutine[Any, Any, None]) -> None:
        try:
            await node
        except Exception as error:
            self._failed(name, error)

    def _failed(self, name: str, error: BaseException) -> None:
        self.failures.setdefault(name, error)
        self._progress.set()

    async def _watch_progress(self, director: VirtualRuntime) -> None:
        """Ends a replay that cannot continue, because the recording ends there or the replay differs."""
        seen, since_s = -1, 0.0
        while since_s < STUCK_S:
            since_s = 0.0 if seen != self._num_events else since_s + CHECK_EVERY_S
            seen = self._num_events
            await director.sleep(CHECK_EVERY_S)
        self.stuck = True
        self._end()

    async def _kill_all(self) -> None:
        """Kills every node, and cancels tasks until none is left: a task that cleans up may wait for a dead peer."""
        for name in self.run.plan.node_names:
            if self._network.endpoints.get(f"memory:{name}") is not None:
                self._network.kill(name)
                self._virtual.runtime(name).kill()
        director = self._virtual.runtime("director")
        current = asyncio.current_task()
        while others := [task for task in asyncio.all_tasks() if task is not current]:
            for task in sorted(others, key=lambda task: task.get_name()):
                task.cancel()
            await director.sleep(1e-3)


class _Overlay(MemoryStorage):
    """Reads files of another storage, and writes files to memory.

    Args:
        under: the other storage, which is never written; None for none.
    """

    def __init__(self, under: Storage | None) -> None:
        super().__init__()
        self._under = under

    @override
    def read(self, path: str) -> bytes:
        if path in self.files or self._under is None:
            return super().read(path)
        return self._under.read(path)

    @override
    def read_at(self, path: str, offset: int, size: int) -> bytes:
        if path in self.files or self._under is None:
            return super().read_at(path, offset, size)
        return self._under.read_at(path, offset, size)


# ---- iterator ----------------------------------------------------------------------------


class Replay:
    """An iterator over the updates of a recorded run, which repeats the run as far as updates are requested.

    `ended` is "" until the last update, and then says why no more follows. `num_updates` counts the updates so far.

    Args:
        cluster: the nodes of the replay.
    """

    def __init__(self, cluster: ReplayCluster) -> None:
        self._cluster = cluster
        self._final: Mapping[str, np.ndarray[Any, Any]] | None = None
        self.num_updates = 0
        self.ended = ""

    def __iter__(self) -> Iterator[ReplayedUpdate]:
        return self

    def __next__(self) -> ReplayedUpdate:
        """The next update.

        Raises:
            StopIteration: no update is left; `ended` says why.
            DivergedError: the replay differs from the recording; the message says where. No update follows.
        """
        if self.ended:
            raise StopIteration
        update = self._cluster.next()
        if update is not None:
            self.num_updates = update.number
            return update
        self.ended = "diverged"
        try:
            self.ended = self._conclusion()
        finally:
            self._final = self._named()
            self._cluster.close()
        raise StopIteration

    def _conclusion(self) -> str:
        """Why no update follows."""
        cluster = self._cluster
        if cluster.divergence is not None:
            raise cluster.divergence
        complete = cluster.run.is_complete
        if complete and not cluster.stuck:
            return "the run is over"
        if complete and not cluster.failures:
            awaited = "; ".join(cluster.awaited()[:3])
            raise DivergedError(
                f"after {self.num_updates} updates the replay cannot continue: {cluster.num_left} recorded "
                f"pushes did not arrive. It waits for {awaited}: has a module that the job file imports changed?"
            )
        for name, error in cluster.failures.items():
            return f"the recording ends here: {name} could not go on: {type(error).__name__}: {error}"
        cut_off = ", ".join(cluster.run.cut_off)
        return (
            f"the recording ends here: {f'{cut_off} was cut off' if cut_off else 'the run was interrupted'}"
        )

    @property
    def failures(self) -> Mapping[str, BaseException]:
        """Errors of nodes, by the node's name: among them the error that ended the run, if one did."""
        return self._cluster.failures

    @property
    def parameters(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The parameters on the shards now, by their names in the model."""
        return self._named() if self._final is None else self._final

    def _named(self) -> Mapping[str, np.ndarray[Any, Any]]:
        tree = self._cluster.run.model.tree(self._cluster.parameters())
        return {name: np.array(array) for name, array in tree.items()}

    def close(self) -> None:
        """Ends the replay. Idempotent."""
        if not self.ended:
            self.ended = "closed"
            self._final = self._named()
        self._cluster.close()

    def __del__(self) -> None:
        """Closes a replay whose loop was left early."""
        with suppress(Exception):
            self._cluster.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def replay(
    run: str | Path | Run, *, job: Job | None = None, keep: bool = True, anyway: bool = False
) -> Replay:
    """Repeats a recorded run bit for bit, and yields its updates one after the other.

    All nodes run in this process, on virtual time. They run the strategy, the rules and the arithmetic of the run;
    each shard handles its events in the recorded order. Between two updates the caller can inspect anything. For a
    resumed run, the replay repeats the part that was recorded last, from its checkpoint on.

    A running event loop, as in a notebook, is blocked while an update is computed. Ctrl-C raises KeyboardInterrupt;
    after it the replay can only be closed.

    Args:
        run: run directory, or result of a run; made with `record=True`.
        job: the job, if the run was not made from a file.
        keep: whether each update keeps the parameters before and after it, two vectors of the model's size.
        anyway: whether to replay although packages or the processor differ from those of the recording. Recorded
            hashes of the parameters show whether that changes results.

    Returns:
        An iterator. Its `parameters` are those of the run so far, and at the end the final ones.

    Raises:
        ConfigError: the run has no recording; or the job file, a package or the processor differs, which the
            message names.
        DataError: the recording was altered.

    Example:
        >>> for update in replay("runs/20261120-101500-net"):  # doctest: +SKIP
        ...     if not update.finite:
        ...         print(update.worker, update.steps, update.samples, update.staleness)
        ...         break
    """
    return Replay(ReplayCluster(load_recorded_run(run, job, anyway=anyway), keep=keep))
