"""`Gathering`: the beginning of the training of a run, or of a phase of its job. A pure state machine.

nodes join ──▶ all are in ───────────────────────────────────▶ begin
the rest was lost in the phase before ────────▶ begin without it, if the run survives that
the rest may come later (`Listening.least`) ──▶ the same
`join_s` is over, in a phase that follows ────▶ the same
`join_s` is over, in a run that begins ───────▶ abort, and name those that are missing
"""

from __future__ import annotations

from dataclasses import replace

from gradstream.coordinator.admission import Admission
from gradstream.coordinator.instructions import Emit, Instruction, Notify
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.phases import Phases
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.stand_ins import StandIns
from gradstream.runtime.deadlines import to_wait_longer
from gradstream.telemetry.events import Event, LeftEvent, StartedEvent
from gradstream.wire import v1


class Gathering:
    """Begins the training when the nodes are there that it needs.

    Args:
        started: the run as planned.
        nodes: the members.
        admission: the model as the workers have registered it.
        progress: the minibatches in the model.
        phases: the phase of the run.
        stand_ins: which worker computes a lost worker's share of each round; None if nobody does.
        participation: which workers take part; None if all do.
        join_s: see `Deadlines`.
    """

    def __init__(
        self,
        started: StartedEvent,
        nodes: Nodes,
        admission: Admission,
        progress: SampleProgress,
        phases: Phases,
        stand_ins: StandIns | None,
        participation: ParticipationSchedule | None,
        join_s: float,
    ) -> None:
        self._join_s = join_s
        self._started = started
        self._nodes = nodes
        self._admission = admission
        self._progress = progress
        self._phases = phases
        self._stand_ins = stand_ins
        self._participation = participation

    def proceed(self, at_s: float) -> list[Instruction]:
        """Begins the training if nobody else is waited for."""
        missing = self._nodes.missing
        if not missing:
            return self._begin(at_s)
        enough = self._nodes.gone.issuperset(missing) and self._phases.can_begin
        return self._begin_without(missing, at_s) if enough else []

    def overdue(self, at_s: float) -> list[Instruction]:
        """Ends the wait when the deadline for joining has passed: see above."""
        missing, there = self._nodes.missing, self._nodes.names
        if self._phases.stretch.continues and self._phases.can_begin:
            return self._begin_without(missing, at_s)
        text = (
            f"did not join within {self._join_s:g} s: {', '.join(missing)} (in: {', '.join(there) or 'nobody'}). "
            "A worker joins when it has its data and its model, in a loop of your own at session.wrap: that takes "
            f"longer, or its process hangs; its log in the folder logs says where it is; {to_wait_longer('join_s')}"
        )
        return self._phases.abort(missing[0], "DeadlineError", text)

    def _begin(self, at_s: float) -> list[Instruction]:
        """Begins the training, and reports what is trained, and from where."""
        self._phases.phase = v1.Notice.TRAINING
        self._progress.begin(at_s)
        self._nodes.begin()
        started, resumed = self._admission.with_model(self._started), self._progress.resumed()
        stretch, events = self._phases.stretch, list[Event]()
        if not stretch.continues:
            events = [started] if resumed is None else [started, resumed]
        if stretch.announced is not None:
            samples = self._progress.num_samples if resumed is not None else 0
            events.append(replace(stretch.announced, optimizer=started.optimizer, samples=samples))
        return list(map(Emit, events))

    def _begin_without(self, missing: list[str], at_s: float) -> list[Instruction]:
        """Begins the training without workers that were lost in the phase before, or may come later."""
        out, reason = self._begin(at_s), "it did not come back for this phase of the job"
        ledger = self._progress.ledger
        for who in missing:
            rank = int(who.rpartition("-")[2])
            ledger.lost(rank)
            if self._stand_ins is not None:
                self._stand_ins.lost(rank)
            if self._participation is not None:
                self._participation.lost(who)
            if who not in self._nodes.gone:  # these were reported when they were lost
                out.append(Emit(LeftEvent(who=who, lost=True, reason=reason, epoch=self._nodes.epoch)))
        if self._stand_ins is not None:
            self._stand_ins.settle(ledger)
        return [*out, Notify()]
