"""Ranks of a group on virtual time. Each runs the same coroutine; a test can kill one of them at any chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Group, GroupMembers
from gradstream.runtime.simulation import SimulationConfig
from gradstream.runtime.virtual import VirtualCluster
from gradstream.transport.base import Identity
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

RankWork = Callable[[Group], Awaitable[Any]]
"""Work that each rank does with its group."""


class VirtualRanks:
    """A group of `size` ranks, "worker-0" and so on, each on its own machine.

    Args:
        size: number of ranks.
        seed: seed of the schedule and of the network.
        config: durations and network.

    Attributes:
        outcomes: result or error of each rank's work; None for a rank that was killed.
        ended_s: virtual time at which each rank's work ended, in seconds.
        killed: (rank, virtual time in seconds) of the kill; None before it.
        num_chunks: number of chunks that have arrived so far, at all ranks.
    """

    def __init__(self, size: int, *, seed: int = 0, config: SimulationConfig | None = None) -> None:
        self.cluster = VirtualCluster(seed, config)
        self.network = MemoryNetwork(self.cluster)
        self.names = [f"worker-{rank}" for rank in range(size)]
        self.outcomes: list[Any] = [None] * size
        self.ended_s: list[float] = [0.0] * size
        self.killed: tuple[int, float] | None = None
        self.num_chunks = 0
        self._doomed: tuple[int, int] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self.cluster.clock.now_ns / 1e9

    def kill_at_chunk(self, rank: int, number: int) -> None:
        """Kills a rank as by SIGKILL when the `number`-th chunk (from 1) arrives at any rank, before it is read."""
        self._doomed = (rank, number)

    def run(
        self,
        work: RankWork,
        *,
        how: str = "ring",
        hosts: Sequence[str] = (),
        absent: Sequence[int] = (),
        silence_s: float = 30.0,
        **options: Any,
    ) -> list[Any]:
        """Forms the group, does `work` at all ranks, and closes the group; returns the outcomes.

        Args:
            work: work of each rank.
            how: see `form_group`.
            hosts: host of each rank; by default each has its own.
            absent: ranks that never start.
            silence_s: see `GroupMembers`.
            options: further arguments of `form_group`.
        """
        hosts = hosts or self.names

        async def live(rank: int, endpoint: MemoryEndpoint) -> None:
            runtime, host = self.cluster.runtime(self.names[rank]), hosts[rank]
            members = GroupMembers(self.names, rank, 1, silence_s)
            group: Group | None = None
            try:
                group = await form_group(runtime, endpoint, members, how, host=host, **options)
                self.outcomes[rank] = await work(group)
            except Exception as error:
                self.outcomes[rank] = error
            self.ended_s[rank] = self.now_s
            if group is not None:
                await group.close()

        async def main() -> None:
            endpoints = [self._endpoint(name) for name in self.names]
            for endpoint in endpoints:
                await endpoint.start()
            for endpoint in endpoints:
                for other in endpoints:
                    endpoint.know(other.identity.name, other.address)
            loop = asyncio.get_running_loop()
            self._tasks = {
                rank: loop.create_task(live(rank, endpoint), name=self.names[rank])
                for rank, endpoint in enumerate(endpoints)
                if rank not in absent
            }
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

        self.cluster.run(main())
        return self.outcomes

    def _endpoint(self, name: str) -> MemoryEndpoint:
        ranks = self

        class Counting(MemoryEndpoint):
            """Counts each chunk before it is read."""

            def _keep(self, stream: StreamCore) -> None:
                super()._keep(stream)
                arrived = stream.arrived

                def counted(frame: v1.Frame, payload: Any, **how: Any) -> None:
                    if frame.HasField("chunk"):
                        ranks._count()
                    arrived(frame, payload, **how)

                stream.arrived = counted  # type: ignore[method-assign]

        identity = Identity("job", name, 1, members=dict.fromkeys(self.names, 1))
        return Counting(identity, self.cluster.runtime(name), self.network)

    def _count(self) -> None:
        self.num_chunks += 1
        if self._doomed is not None and self.num_chunks == self._doomed[1]:
            self._kill(self._doomed[0])

    def _kill(self, rank: int) -> None:
        self.killed = (rank, self.now_s)
        self.network.kill(self.names[rank])
        self.cluster.runtime(self.names[rank]).kill()
        director = self.cluster.runtime("director")
        director.spawn(self._bury(self._tasks[rank]), name=f"burial of {self.names[rank]}")

    async def _bury(self, task: asyncio.Task[None]) -> None:
        """Cancels a task until it has ended: clean-up code of a dead node waits for timers that never fire."""
        director = self.cluster.runtime("director")
        while not task.done():
            task.cancel()
            await director.sleep(1e-3)
