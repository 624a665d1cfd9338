"""`WarmStart`: one worker of an asynchronous strategy trains alone, until so many samples are in the model.

The others have joined, and wait for their first minibatch: none is assigned to them before. So nobody is ever stopped
in the middle, and no checkpoint is needed. If the worker is lost, the next one takes its place.
"""

from __future__ import annotations

from gradstream.coordinator.lead import Emit, Instruction, Lead, Lost, Notify
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.data.leases import Leases
from gradstream.telemetry.events import WarmStartEvent
from gradstream.wire import v1


class WarmStart(Lead):
    """Says which worker trains alone.

    Args:
        samples: the warm start ends when so many are in the model.
        progress: counts them, those before a resume included.
        nodes: the members.
        leases: minibatches of workers that wait are for the one that trains.
    """

    KEPT = ("alone",)
    """See `durable.state`."""

    def __init__(self, samples: float, progress: SampleProgress, nodes: Nodes, leases: Leases) -> None:
        self.alone = ""
        self._samples = samples
        self._progress = progress
        self._nodes = nodes
        self._leases = leases

    def lets(self, worker: v1.Node) -> bool:
        """Whether a worker takes part now."""
        return self.alone in ("", worker.name)

    def notice(self, notice: v1.Notice) -> None:
        """Adds the name of the worker that trains alone."""
        notice.alone = self.alone

    def on_begin(self, at_s: float) -> list[Instruction]:
        """Begins with the worker of the lowest rank; not in a run that is resumed behind its warm start."""
        return [] if self._is_over else self._next()

    def on_lost(self, lost: Lost, at_s: float) -> list[Instruction]:
        """Lets the next worker take the place of the one that trains alone."""
        return [*self._next(), Notify()] if lost.worker and lost.worker == self.alone else []

    def on_join(self, node: v1.Node, at_s: float) -> list[Instruction]:
        """Lets a worker that comes in the place of a lost one wait, too."""
        if node.role == "worker":
            self._let(node)
        return []

    def on_progress(self, at_s: float) -> list[Instruction]:
        """Ends the warm start, unless nothing is left for the others."""
        ends = self.alone and self._is_over and not self._progress.ledger.finished
        return [*self._next(), Notify()] if ends else []

    @property
    def _is_over(self) -> bool:
        return (self._progress.num_samples or 0) >= self._samples

    def _next(self) -> list[Instruction]:
        """Lets the first worker that is there train alone; or all, if it is time."""
        workers = self._nodes.workers
        self.alone = workers[0].name if workers and not self._is_over else ""
        for node in workers:
            self._let(node)
        waiting = [node.name for node in workers if not self.lets(node)]
        return [Emit(WarmStartEvent(alone=self.alone, waiting=waiting, samples=self._progress.num_samples))]

    def _let(self, worker: v1.Node) -> None:
        """Lets a worker have minibatches, or leaves those of its own sequence to the others."""
        self._leases.open(worker.rank, to_all=not self.lets(worker))
