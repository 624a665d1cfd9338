"""Leads the nodes of a run from one phase of its job to the next, in the same processes and on the same connections.

    coordinator   phase 0 ─ checkpoint ─▶ phase 1 ─ checkpoint ─▶ …          tells everybody which phase it is
    other nodes   ask ─ join ─ train ─ leave ─▶ ask ─ join ─ train ─ leave ─▶ …

For each phase a node makes the plan again, from the job and from the checkpoint that ends the phase before, and builds
its coordinator, shard or worker of that plan. A node that a phase does not need waits for the next one. A run without
phases is one phase, of which nobody asks.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial

from gradstream.checkpoint.manifest import STATE, Manifest, Resume
from gradstream.coordinator.client.member import PhaseOverError
from gradstream.coordinator.coordinator import Coordinator, RunOutcome
from gradstream.coordinator.durable.keeper import Keeper
from gradstream.coordinator.lifecycle import PhasePlace
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.phase_service import PhaseService, phase_to_join
from gradstream.coordinator.relay import RunClock
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.errors import RefusedError
from gradstream.job.plan import RunPlan
from gradstream.run.nodes import build_coordinator, clock_of
from gradstream.run.planning import plan_at
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint

Build = Callable[[RunPlan, RunClock], Callable[[], Awaitable[None]]]
"""Builds a node's part of a phase; what it returns runs that to its end."""


class PhaseLeader:
    """The coordinator's process: one `Coordinator` after the other.

    Args:
        plan: plan of the run's first phase, or of the one in which it is resumed.
        runtime, endpoint, keeper, spread: as for `build_coordinator`.
        on_coordinator: called with each coordinator before it begins.

    Attributes:
        coordinator: the present one.
    """

    def __init__(
        self,
        plan: RunPlan,
        runtime: Runtime,
        endpoint: Endpoint,
        keeper: Keeper,
        *,
        spread: bool = False,
        on_coordinator: Callable[[Coordinator], None] = lambda _: None,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._keeper = keeper
        self._spread = spread
        self._on_coordinator = on_coordinator
        self._asked = False
        self._service: PhaseService | None = None
        self._place: PhasePlace | None = None
        self._plan = plan
        if plan.whole is not None:
            self._service = PhaseService(runtime, endpoint)
            kept: str = keeper.row("job_phase.resume") or ""  # an earlier process led that phase
            if kept:
                self._plan = plan_at(plan, Resume.of_json(json.loads(kept)))
            self._place = PhasePlace(clock_of(plan, runtime), None, kept)
        self.coordinator = self._build()

    def _build(self) -> Coordinator:
        coordinator = build_coordinator(
            self._plan, self._runtime, self._endpoint, self._keeper, spread=self._spread, place=self._place
        )
        self._on_coordinator(coordinator)
        return coordinator

    def stop(self) -> None:
        """Asks the run to stop, also between two phases."""
        self._asked = True
        self.coordinator.stop()

    def reshard(self, servers: int, token: str = "") -> list[str]:
        """See `Coordinator.reshard`."""
        return self.coordinator.reshard(servers, token)

    async def run(self) -> RunOutcome:
        """Leads the run through the phases that are left. Returns how the last of them ended."""
        while True:
            self._tell()
            outcome = await self.coordinator.run()
            if not outcome.notice.next_boundary:
                break
            await self._go_on(self.coordinator.membership.lead(SnapshotRounds).kept)
        if self._service is not None:
            await self._service.end(outcome.notice, self._plan.job.deadlines.lease_s)
        return outcome

    def _tell(self) -> None:
        if self._service is not None:
            resume = self._plan.resume
            text = "" if resume is None else json.dumps(resume.as_json())
            self._service.enter(self._plan.phase.boundary, text)

    async def _go_on(self, folder: str) -> None:
        """Builds the coordinator of the next phase, which goes on from the checkpoint of the one before."""
        before, storage = self.coordinator, self._runtime.storage
        data = await self._runtime.beside(partial(storage.read, f"{folder}/{STATE}"), work=Work("read"))
        resume = Resume.at(folder, Manifest.decode(data), time_s=before.clock.time_s())
        self._plan = plan_at(self._plan, resume)
        self._place = PhasePlace(before.clock, before.membership.nodes, json.dumps(resume.as_json()))
        self.coordinator = self._build()
        if self._asked:
            self.coordinator.stop()


async def run_phases(
    plan: RunPlan, runtime: Runtime, endpoint: Endpoint, build: Build, *, zero_ns: int | None = None
) -> None:
    """Runs a shard or a worker through all phases that need it, until the run is over.

    Args:
        plan: plan of the run's first phase, or of the one in which it is resumed.
        runtime, endpoint: of this node.
        build: see `Build`.
        zero_ns: as for `RunClock`.

    Raises:
        Exception: as the node's `run`; and as `phase_to_join`.
    """
    clock = clock_of(plan, runtime, zero_ns)
    if plan.whole is None:
        await build(plan, clock)()
        return
    least, deadlines = plan.phase.boundary, plan.job.deadlines
    while (joined := await phase_to_join(runtime, endpoint, deadlines, least)) is not None:
        number, text = joined
        plan = plan_at(plan, Resume.of_json(json.loads(text)) if text else None)
        least = number + 1
        if clock.zero_ns is None:  # this node has been in no phase yet
            clock = clock_of(plan, runtime, zero_ns)
        if runtime.node in plan.own_nodes:
            try:
                await build(plan, clock)()
                return
            except PhaseOverError as over:
                least = over.next_boundary
            except RefusedError as error:
                if (error.peer, error.code) != (COORDINATOR, "STALE_EPOCH"):
                    raise
                least = number  # the run has gone on meanwhile
