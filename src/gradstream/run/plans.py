"""Leads the nodes of a run from one plan to the next, in the same processes and on the same connections.

    coordinator   plan ─ checkpoint ─▶ plan ─ checkpoint ─▶ …                tells everybody which plan it is
    other nodes   ask ─ join ─ train ─ leave ─▶ ask ─ join ─ train ─ leave ─▶ …

The end of a plan that another one follows is a boundary. There each node makes the plan again, from the job and from
the checkpoint of the boundary, and builds its coordinator, shard or worker of that plan. A node that a plan does not
need waits for the next one. Where the job has no phases, the run is one plan, of which nobody asks.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial

from gradstream.checkpoint.manifest import STATE, Manifest, Resume
from gradstream.coordinator.client.member import BoundaryError, RunAbortedError, RunStoppedError
from gradstream.coordinator.client.presence import REDIAL_S
from gradstream.coordinator.coordinator import Coordinator, RunOutcome
from gradstream.coordinator.durable import Keeper
from gradstream.coordinator.lifecycle import Boundary
from gradstream.coordinator.nodes import COORDINATOR, Nodes
from gradstream.coordinator.relay import RunClock
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.job.plan import RunPlan
from gradstream.run.nodes import build_coordinator, clock_of
from gradstream.run.planning import plan_at
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.tasks import Wakeup
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

# ---- the coordinator's process -----------------------------------------------------------

LOOK_S = 1.0
"""Seconds between two signs of life to a node that waits for a later plan."""


class PlanService:
    """Tells nodes which plan to join, before each one. It serves "plan", through all plans of a run.

    Args:
        runtime: time.
        endpoint: endpoint of the coordinator.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint) -> None:
        self._runtime = runtime
        self._now: v1.PresentPlan | None = None
        self._asking: dict[Wakeup, None] = {}
        self._answered = Wakeup()  # rings when a node has its answer
        endpoint.serve("plan", self._serve, model=False)

    async def end(self, last: v1.Notice, wait_s: float) -> None:
        """Tells the nodes that wait that no plan follows, by the run's last notice; for up to `wait_s`."""
        self.tell(v1.PresentPlan(end=last.status, error=last.error, reason=last.reason, culprit=last.culprit))
        since_ns = self._runtime.now()
        while self._asking and (left_s := self._runtime.left_s(since_ns, wait_s)) > 0:
            await self._answered.rung(self._runtime, left_s)

    def tell(self, now: v1.PresentPlan) -> None:
        """Lets nodes join a plan."""
        self._now = now
        for wakeup in self._asking:
            wakeup.ring()

    async def _serve(self, stream: Stream) -> None:
        least, wakeup = v1.AskPlan.FromString(stream.opened.body).least, Wakeup()
        self._asking[wakeup] = None
        try:
            while (now := self._now) is None or not (now.end or now.boundary >= least):
                await stream.waiting([])
                await wakeup.rung(self._runtime, LOOK_S)
            await stream.send(v1.Frame(body=v1.Body(data=now.SerializeToString())))
        finally:
            del self._asking[wakeup]
            self._answered.ring()


class RunLeader:
    """The coordinator's process: one `Coordinator` after the other.

    Args:
        plan: the run's first plan, or that with which it is resumed.
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
        self._keeper = keeper
        self._build = partial(
            build_coordinator, runtime=runtime, endpoint=endpoint, keeper=keeper, spread=spread
        )
        self._on_coordinator = on_coordinator
        self._asked = False
        self._service = None if plan.whole is None else PlanService(runtime, endpoint)
        clock, kept = None, keeper.row("boundary.resume") or ""
        if kept:  # an earlier process led the plan after this boundary
            clock, plan = clock_of(plan, runtime), plan_at(plan, Resume.of_json(json.loads(kept)))
        self._begin(plan, clock, None, kept)

    def _begin(self, plan: RunPlan, clock: RunClock | None, before: Nodes | None, resume: str) -> None:
        """Builds the coordinator of a plan."""
        self._plan = plan
        boundary = Boundary(plan.phase.boundary, clock, before, resume)
        self.coordinator = self._build(plan, boundary=boundary)
        self._on_coordinator(self.coordinator)

    def stop(self) -> None:
        """Asks the run to stop, also at a boundary."""
        self._asked = True
        self.coordinator.stop()

    def reshard(self, servers: int, token: str = "") -> list[str]:
        """See `Coordinator.reshard`."""
        return self.coordinator.reshard(servers, token)

    async def run(self) -> RunOutcome:
        """Leads the run through the plans that are left. Returns how the last of them ended."""
        while True:
            if self._service is not None:
                resume = self._plan.resume
                text = "" if resume is None else json.dumps(resume.as_json())
                self._service.tell(v1.PresentPlan(boundary=self._plan.phase.boundary, resume=text))
            outcome = await self.coordinator.run()
            if not outcome.notice.next_boundary:
                break
            await self._go_on(self.coordinator.membership.lead(SnapshotRounds).kept)
        if self._service is not None:
            await self._service.end(outcome.notice, self._plan.job.deadlines.lease_s)
        return outcome

    async def _go_on(self, folder: str) -> None:
        """Builds the coordinator of the next plan, which goes on from the checkpoint of the boundary."""
        before, storage = self.coordinator, self._runtime.storage
        data = await self._runtime.beside(partial(storage.read, f"{folder}/{STATE}"), work=Work("read"))
        resume = Resume.at(folder, Manifest.decode(data), time_s=before.clock.time_s())
        plan, text = plan_at(self._plan, resume), json.dumps(resume.as_json())
        self._begin(plan, before.clock, before.membership.nodes, text)
        if self._asked:
            self.coordinator.stop()


# ---- the other nodes ---------------------------------------------------------------------

Build = Callable[[RunPlan, RunClock], Callable[[], Awaitable[None]]]
"""Builds a node's part of a plan; what it returns runs that to its end."""


async def run_plans(
    plan: RunPlan, runtime: Runtime, endpoint: Endpoint, build: Build, *, zero_ns: int | None = None
) -> None:
    """Runs a shard or a worker through all plans that need it, until the run is over.

    Args:
        plan: the run's first plan, or that with which it is resumed.
        runtime, endpoint: of this node.
        build: see `Build`.
        zero_ns: as for `RunClock`.

    Raises:
        Exception: as the node's `run`; and as `plan_to_join`.
    """
    clock = clock_of(plan, runtime, zero_ns)
    if plan.whole is None:
        await build(plan, clock)()
        return
    least, deadlines = plan.phase.boundary, plan.job.deadlines
    while (joined := await plan_to_join(runtime, endpoint, deadlines, least)) is not None:
        boundary, text = joined
        plan = plan_at(plan, Resume.of_json(json.loads(text)) if text else None)
        least = boundary + 1
        if clock.zero_ns is None:  # this node has had a part in no plan yet
            clock = clock_of(plan, runtime, zero_ns)
        if runtime.node in plan.own_nodes:
            try:
                await build(plan, clock)()
                return
            except BoundaryError as over:
                least = over.next_boundary
            except RefusedError as error:
                if (error.peer, error.code) != (COORDINATOR, "STALE_EPOCH"):
                    raise
                least = boundary  # the run has gone on meanwhile


async def plan_to_join(
    runtime: Runtime, endpoint: Endpoint, deadlines: Deadlines, least: int
) -> tuple[int, str] | None:
    """Asks the coordinator which plan to join, and waits for one that this node may be needed in.

    Args:
        runtime, endpoint: of this node.
        deadlines: `patience_s` bounds the time in which a new process of the coordinator has to answer.
        least: number of the boundary before that plan.

    Returns:
        The number of the boundary before the present plan, and where that goes on as JSON ("": the run begins). None:
        the run has finished.

    Raises:
        RunAbortedError, RunStoppedError: it has ended in another way.
        PeerLostError, DeadlineError: the coordinator cannot be reached.
    """
    request, lost_ns = v1.AskPlan(least=least), None
    while True:
        try:
            now = await endpoint.call(
                COORDINATOR,
                "plan",
                request,
                v1.PresentPlan,
                silence_s=deadlines.patience_s,
                new_connection=lost_ns is not None,
            )
            break
        except (PeerLostError, DeadlineError):
            lost_ns = lost_ns or runtime.now()
            if runtime.left_s(lost_ns, deadlines.patience_s) <= 0:
                raise
        await runtime.sleep(REDIAL_S)
    if now.end == v1.Notice.ABORTED:
        raise RunAbortedError(now.culprit, now.error, now.reason)
    if now.end == v1.Notice.STOPPED:
        raise RunStoppedError("the run was stopped; it can be resumed")
    return None if now.end else (now.boundary, now.resume)
