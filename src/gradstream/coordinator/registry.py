"""`leads_of`: the leads of a run, in the order in which their hooks are called.

The order is the priority: of the contents of a beat, and of their consequences. When something ends the run,
the leads after it are no longer called. A new feature adds its lead here; `Lead` lists the hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradstream.checkpoint.folder import Policy
from gradstream.checkpoint.manifest import JobPhase, Resume
from gradstream.coordinator.admission import Admission
from gradstream.coordinator.assignment import AssignmentReplies, BatchAssignment, ShareBalance, Shares
from gradstream.coordinator.growing_batches import GrowingBatches, VarianceTest
from gradstream.coordinator.lead import Lead
from gradstream.coordinator.lifecycle import Boundary, Lifecycle, LossTolerance
from gradstream.coordinator.link_choice import ExchangeChoice, LinkChoice
from gradstream.coordinator.lost_work import OrphanedPushes, SkippedParts, StandIns
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.own_loops import EpochParts, OwnLoops
from gradstream.coordinator.progress import QuorumDecisions, RefusedGradients, SampleProgress
from gradstream.coordinator.resharding import Resharding
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.coordinator.stopping import EarlyEnds, Until
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import PhaseEvent, StartedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPlan:
    """The coordinator's part of the plan of a run.

    Args:
        started: the run as planned; `workers` and `servers` say which nodes are expected. The registered
            model fills in `num_parameters` and `chunk_elems`.
        ledger: records which minibatches are in the model.
        losses: which lost nodes the run survives.
        balance: decides the shares of a round by measured speed; None leaves them as planned.
        assignment: hands out minibatches to workers that ask; None if workers go through rounds, or bring
            their own data.
        policy: when checkpoints are made; None makes none, not even when the run is stopped.
        deadlines: among others, how long workers may be paused while a snapshot for a checkpoint is taken.
        resume: the checkpoint from which a resumed run continues; None for a new run.
        parts: number of processes of each worker's replica; if one is lost, all of them are replaced.
        until: what may end the run early.
        until_here: what may end this plan of it early.
        boundary: the one after which this plan begins.
        present: what the checkpoints of this plan name it.
        successor: what the last of them says of where the run goes on; None: the run ends with this plan.
        opening: reported when its training begins; None in a run that has but one plan.
        variance_test: makes the batches of this plan grow; None if nothing does.
        link_choice: chooses how the next plan exchanges; None if the job says that.
    """

    started: StartedEvent
    ledger: Ledger | OpenLedger
    losses: LossTolerance
    balance: ShareBalance | None = None
    assignment: BatchAssignment | None = None
    policy: Policy | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    resume: Resume | None = None
    parts: int = 1
    until: Until | None = None
    until_here: Until | None = None
    boundary: Boundary = field(default_factory=Boundary)
    present: JobPhase = field(default_factory=JobPhase)
    successor: JobPhase | None = None
    opening: PhaseEvent | None = None
    variance_test: VarianceTest | None = None
    link_choice: LinkChoice | None = None


def leads_of(plan: CoordinatorPlan) -> Sequence[Lead]:
    """Makes the leads of a run."""
    started, losses, ledger, test = plan.started, plan.losses, plan.ledger, plan.variance_test
    planned = isinstance(ledger, Ledger)
    alike = losses.regroups_after_loss
    nodes = Nodes(
        started.workers, started.servers, plan.parts, plan.boundary.before, alike=alike, grows=losses.grows
    )
    # Vectors of users' own loops are others under another strategy.
    is_other = not planned and plan.resume is not None and plan.resume.strategy != started.strategy
    admission = Admission(nodes, None if is_other else plan.resume)
    progress = SampleProgress(ledger, started.num_samples, plan.resume, in_rounds=started.in_rounds)
    orphans = OrphanedPushes(progress, nodes, redoes=losses.redoes and planned)
    snapshots = SnapshotRounds(
        progress,
        nodes,
        plan.policy,
        orphans,
        deadlines=plan.deadlines,
        by_decisions=losses.quorum is not None,
    )
    life = Lifecycle(started, nodes, progress, snapshots, losses, plan.boundary, plan.successor)
    leads: list[Lead | None] = [
        # New shards first: if every snapshot were due at once, the shards would never change.
        Resharding(
            nodes,
            snapshots,
            orphans,
            plan.deadlines,
            obstacle=losses.keeps_shards,
            fewest=2 if losses.acknowledge == "replicated" else 1,
        ),
        # Whether the run survives a loss is decided before anybody replaces the lost node.
        life,
        # A refused gradient counts before its receipt.
        RefusedGradients(
            progress,
            nodes,
            losses.quarantine_after,
            life.abort,
            whole_rounds=started.in_rounds and not started.servers and not losses.skips_lost,
        ),
        OwnLoops(ledger, life),
        EpochParts(ledger, life),
        progress,
        orphans,
        StandIns(nodes, progress, hands_over=not losses.regroups) if losses.stands_in else None,
        SkippedParts(ledger) if losses.skips_lost and isinstance(ledger, Ledger) else None,
        QuorumDecisions(progress, started.workers) if losses.quorum is not None else None,
        nodes,
        admission,
        # After everything that puts minibatches into the model.
        snapshots,
        AssignmentReplies(plan.assignment, ledger, nodes, life, snapshots),
        Shares(plan.balance, ledger, nodes),
        None if plan.link_choice is None else ExchangeChoice(plan.link_choice, life, admission),
        None if test is None else GrowingBatches(test, plan.present, life, progress, nodes),
        EarlyEnds(plan.until, plan.until_here, life, progress, snapshots),
    ]
    return [lead for lead in leads if lead is not None]
