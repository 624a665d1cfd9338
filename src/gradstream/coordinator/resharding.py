"""`Resharding`: leads a run from one placement of its shards to another, as a pure state machine.

    asked ──▶ PREPARING ──all new shards are in──▶ HOLDING ──each has its chunks──▶ switched
                  │                                    │
                  └──── a new shard is lost, late ─────┴── any node is lost, late, cannot ──▶ failed

While it prepares, training goes on. While it holds, the old shards begin no update, so that a chunk has one state,
and the new shards fetch the whole state of each chunk: elements, versions, and which pushes it has. A push that was
under way stays whole: its worker sends the unanswered chunks to the new shards, and those know the others.

The switch is one change of the coordinator's state, which is durable before any node learns of it. Until then the
old shards have everything, so a failure costs nothing but time; from then on the new ones have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from gradstream.coordinator.lead import SHARDS, Emit, Instruction, Lead, Lost, Notify
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.errors import ConfigError
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import ReshardEvent
from gradstream.untrusted import escaped
from gradstream.wire import v1
from gradstream.wire.chunks import Placement

MOST_SHARDS = 1024
"""Most shards of a placement."""

ERROR_BYTES = 1024
"""Most bytes to keep of a shard's error."""


class Resharding(Lead):
    """Changes the shards of a run, one change at a time.

    Args:
        nodes: the members, and which shards hold the parameters.
        snapshots: no snapshot is made while the shards hand over, nor the other way round.
        orphans: torn pushes of lost workers are settled first.
        deadlines: `join_s` bounds the preparation, `cut_s` the time without updates.
        obstacle: why this run cannot change its shards, with the remedy; "" if it can.
        fewest: smallest number of shards.
    """

    KEPT = ("_token", "_next", "_ready", "_began_s", "_held_from_s")
    """See `durable.state`."""

    REPORTS: ClassVar = {"resharded": SHARDS}

    def __init__(
        self,
        nodes: Nodes,
        snapshots: SnapshotRounds,
        orphans: OrphanedPushes,
        deadlines: Deadlines,
        *,
        obstacle: str,
        fewest: int,
    ) -> None:
        self._nodes = nodes
        self._snapshots = snapshots
        self._orphans = orphans
        self._deadlines = deadlines
        self._obstacle = obstacle
        self._fewest = fewest
        self._token = ""
        self._next = nodes.placement.shards  # rank of the next new shard
        self._ready: set[str] = set()  # new shards that have all of their chunks
        self._began_s = 0.0
        self._held_from_s = 0.0

    def begin(self, servers: int, token: str, at_s: float) -> list[Instruction]:
        """Begins to prepare for another number of shards.

        Raises:
            ConfigError: this run cannot change its shards, or not now.
        """
        nodes = self._nodes
        why = self._obstacle
        if not why and not self._fewest <= servers <= MOST_SHARDS:
            why = f"expected {self._fewest} to {MOST_SHARDS}"
        if not why and servers == nodes.placement.shards:
            why = "the run has this number of shards already"
        if not why and nodes.newcomers is not None:
            why = f"the run changes to {nodes.newcomers.shards} shards at present; ask again when it has"
        if not why and (self._snapshots.stopping or self._snapshots.finishing):
            why = "the run is at its end; resume it with this number of servers"
        if why:
            raise ConfigError(f"reshard: servers={servers}: {why}")
        nodes.newcomers = Placement(self._next, servers)
        self._next += servers
        self._token, self._began_s = token, at_s
        self._ready.clear()
        return [self._event("preparing", at_s), Notify()]

    def on_report(self, node: v1.Node, kind: str, report: v1.Resharded, at_s: float) -> list[Instruction]:
        """Notes that a new shard has its chunks, or cannot get them. A late report changes nothing."""
        target, who = self._nodes.newcomers, node.name
        if not self._nodes.handing_over or target is None or report.first != target.first:
            return []
        if not self._nodes.awaits(who):
            return []
        if report.error:
            return self._fail(who, escaped(report.error, ERROR_BYTES), at_s)
        self._ready.add(who)
        return self.proceed(at_s)

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Continues if this was the last new shard."""
        return self.proceed(at_s) if node.role == "shard" else []

    @property
    def keeps_out(self) -> bool:
        """See `Lead`: a newcomer fetches the parameters, which are being handed over."""
        return self._nodes.handing_over

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Fails if the lost node was needed for it."""
        nodes, who = self._nodes, lost.node.name
        if nodes.newcomers is None or not (nodes.handing_over or self._nodes.awaits(who)):
            return []
        doing = "were handed their chunks" if nodes.handing_over else "were prepared"
        return self._fail(who, f"was lost while the new shards {doing}", at_s)

    def proceed(self, at_s: float) -> list[Instruction]:
        """Continues if nothing is missing any more, and fails if something has been missing for too long."""
        nodes, deadlines = self._nodes, self._deadlines
        target = nodes.newcomers
        if target is None:
            return []
        if nodes.handing_over:
            awaited = [name for name in target.names if name not in self._ready]
            if not awaited:
                event = self._event("switched", at_s)
                nodes.switch()
                return [event, Notify()]
            took_s, limit_s = at_s - self._held_from_s, deadlines.cut_s
            return self._check_time(awaited, "had not taken its chunks", took_s, limit_s, at_s)
        if self._snapshots.stopping or self._snapshots.finishing:
            return self._fail("coordinator", "the run is at its end", at_s)
        awaited = [name for name in (*nodes.placement.names, *target.names) if nodes.get(name) is None]
        if awaited or not self._orphans.settled or self._snapshots.current is not None:
            awaited = awaited or self._orphans.awaited
            return self._check_time(awaited, "was not ready", at_s - self._began_s, deadlines.join_s, at_s)
        nodes.handing_over, self._held_from_s = True, at_s
        return [self._event("holding", at_s), Notify()]

    def _check_time(
        self, awaited: Sequence[str], what: str, took_s: float, limit_s: float, at_s: float
    ) -> list[Instruction]:
        if took_s <= limit_s:
            return []
        names = ", ".join(awaited) or "a checkpoint"
        return self._fail(names, f"{what} within {limit_s:g} s", at_s)

    def _fail(self, who: str, why: str, at_s: float) -> list[Instruction]:
        event = self._event("failed", at_s, who, why)
        self._nodes.dismiss()
        return [event, Notify()]

    def _event(
        self,
        state: Literal["preparing", "holding", "switched", "failed"],
        at_s: float,
        who: str = "",
        message: str = "",
    ) -> Emit:
        target = self._nodes.newcomers
        assert target is not None
        return Emit(
            ReshardEvent(
                state=state,
                token=self._token,
                servers=target.shards,
                shards=target.names,
                held_s=at_s - self._held_from_s if self._nodes.handing_over else 0.0,
                who=who,
                message=message,
            )
        )

    def notice(self, notice: v1.Notice) -> None:
        """Adds the shards that are about to hold the parameters, during a change."""
        if self._nodes.newcomers is not None:
            to, holds = self._nodes.newcomers.as_message(), self._nodes.handing_over
            notice.resharding.CopyFrom(v1.Resharding(to=to, holds=holds))
