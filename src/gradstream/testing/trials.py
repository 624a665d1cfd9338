"""One strategy in many small simulated runs, with its rule under observation.

A trial cannot hang: after `LIMIT_S` of virtual time the coordinator is killed, and the outcome says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from typing_extensions import override

from gradstream._simulate import simulate
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.data.base import Dataset
from gradstream.errors import Interrupted
from gradstream.model.base import Model, Reduction
from gradstream.optim import SGD
from gradstream.run.result import Run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.strategies.base import GroupStrategy, PeerStrategy, ServerStrategy, Strategy
from gradstream.testing.runs import NUM_SAMPLES, QUICK, Tokens, numbered

LIMIT_S = 200.0

COSTS = {"gradient": Cost(base_s=0.01, jitter=Exponential()), "apply": Cost(base_s=1e-3)}
WORLD = SimulationConfig(costs=COSTS, network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)))
"""Computing takes random times; the network is reliable."""


def bad_world(workers: int, servers: int) -> SimulationConfig:
    """A network that loses frames between workers and shards, and delivers streams late, in any order or twice.

    Without servers, it delivers messages between workers late and in any order: a group that loses a message or
    gets one twice is broken, and says so.
    """
    ends = [(f"worker-{rank}", f"shard-{other}") for rank in range(workers) for other in range(servers)]
    ends = ends or list(itertools.combinations((f"worker-{rank}" for rank in range(workers)), 2))
    bad = Link(latency_s=1e-3, jitter_s=4e-3, loss=0.02, duplicate=0.5)
    if not servers:
        bad = Link(latency_s=1e-3, jitter_s=4e-3)
    links = {pair: bad for source, other in ends for pair in ((source, other), (other, source))}
    return SimulationConfig(costs=COSTS, network=Network(links=links))


@dataclass(slots=True)
class Record:
    """The questions to the rules of a run, and their answers.

    Args:
        unweighted: whether updates take every contribution with weight 1 and without outer momentum, whatever
            the strategy says, so that the samples in the model can be counted.
        arrivals: (sender, sequence) of every chunk that arrived, in order.
        dropped_samples: number of samples of the contributions that came too late, over all chunks.
        awaited: names of the workers that the next update waited for, when the rule was last asked.
        faults: errors of the rule, one line each.
        own: for strategies that push differences, the distance that each worker's own parameters have moved, by
            rank.
    """

    unweighted: bool = False
    arrivals: list[tuple[str, int]] = field(default_factory=list)
    dropped_samples: int = 0
    awaited: Sequence[str] = ()
    faults: list[str] = field(default_factory=list)
    own: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        """Notes a fault, once."""
        if text not in self.faults:
            self.faults.append(text)


class RecordedRule(AggregationRule):
    """Asks a rule everything twice, and records its answers."""

    def __init__(self, rule: AggregationRule, record: Record) -> None:
        self._rule = rule
        self._record = record

    @property
    @override
    def lockstep(self) -> bool:
        return self._rule.lockstep

    @property
    @override
    def by_round(self) -> bool:
        return self._rule.by_round

    @property
    @override
    def paced(self) -> bool:
        return self._rule.paced

    @override
    def among(self, present: frozenset[int]) -> AggregationRule:
        return RecordedRule(self._rule.among(present), self._record)

    @override
    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        answer, again = (self._rule.completes(version, summed, list(update)) for _ in range(2))
        self._same("completes", answer, again)
        return answer

    @override
    def drops(self, version: int, new: PushHeader) -> bool:
        answer = self._rule.drops(version, new)
        self._same("drops", answer, self._rule.drops(version, new))
        self._record.arrivals.append((new.sender, new.sequence))
        self._record.dropped_samples += new.samples if answer else 0
        return answer

    @override
    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        answer = list(self._rule.due(version, list(parked)))
        self._same("due", answer, list(self._rule.due(version, list(parked))))
        if len(set(answer)) < len(answer):
            self._record.fault("due chooses one contribution twice")
        strange = [rank for rank in answer if rank not in parked]
        if strange:
            self._record.fault(f"due chooses a contribution that is not parked: {strange[0]}")
        return [rank for rank in dict.fromkeys(answer) if rank in parked]

    @override
    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        answer = list(self._rule.weights(version, update))
        self._same("weights", answer, list(self._rule.weights(version, update)))
        if len(answer) != len(update):
            self._record.fault(f"weights are {len(answer)} for an update of {len(update)} contributions")
        if not all(math.isfinite(weight) for weight in answer):
            self._record.fault(f"weights are {answer}")
        if self._record.unweighted:
            return [1.0] * len(update)
        return answer

    @override
    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        self._record.awaited = answer = list(self._rule.awaited(version, parked))
        return answer

    def _same(self, verb: str, first: object, second: object) -> None:
        if first != second:
            self._record.fault(f"{verb} answers {first!r} and then {second!r} to the same question")


def observed(strategy: Strategy, record: Record) -> Strategy:
    """The same strategy, of a new class that records its rule's answers.

    A strategy without servers has no rule: the class records the weight of each gradient.
    """
    cls: Any = type(strategy)

    def rule(self: Strategy, num_workers: int, reduction: Reduction) -> AggregationRule:
        return RecordedRule(cls.rule(self, num_workers, reduction), record)

    def weight(self: Strategy, rank: int, samples: Sequence[int], reduction: Reduction) -> float:
        answer = cls.weight(self, rank, samples, reduction)
        if not math.isfinite(answer) or answer != cls.weight(self, rank, samples, reduction):
            record.fault(f"weight answers {answer} for worker {rank} of {samples}")
        record.arrivals.append((f"worker-{rank}", len(record.arrivals)))
        return 1.0 if record.unweighted else float(answer)

    async def train(self: Strategy, worker: Any) -> None:
        compute, began = worker.gradient, list[Any]()

        async def gradient(batch: Any) -> Any:
            if not began:  # not before training: a worker that joins late does not begin at zeros
                began.append(worker.parameters.tensor.numpy().copy())
            return await compute(batch)

        worker.gradient = gradient
        await cls.train(self, worker)
        record.own[worker.rank] = worker.parameters.tensor.numpy() - began[0] if began else np.zeros(1)

    own: dict[str, Any] = {"weight": weight} if isinstance(strategy, GroupStrategy) else {}
    if isinstance(strategy, ServerStrategy):
        own["rule"] = rule
        if record.unweighted:
            own["correction"] = lambda self: None
            if strategy.pushes == "outer_gradients":
                own["outer_optimizer"] = lambda self, inner: SGD(lr=1.0)
        if strategy.pushes == "differences":
            own["train"] = train
    made: Any = object.__new__(type(cls.__name__, (cls,), {**own, "__module__": cls.__module__}))
    plain = dict(strategy.plain or {}) if isinstance(strategy, PeerStrategy) and record.unweighted else {}
    plain.pop(
        "every", None
    )  # only outer steps are made plain, so that each worker's pseudo-gradient counts once
    for name in (entry.name for entry in dataclasses.fields(cast(Any, strategy))):
        object.__setattr__(made, name, plain.get(name, getattr(strategy, name)))
    return cast(Strategy, made)


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial.

    Args:
        run: the finished run; None if an error ended it.
        error: the error that ended it; None if it finished.
        events: events of the run.
        record: questions to the rules, and their answers.
    """

    run: Run | None
    error: BaseException | None
    events: list[Any]
    record: Record

    @property
    def hung(self) -> bool:
        """Whether it was still running after `LIMIT_S`."""
        return self.run is None and bool(self.events) and getattr(self.error, "peer", "") == COORDINATOR

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.run is not None:
            return "it came to its end"
        if self.hung:
            whom = f", the server waiting for {', '.join(self.record.awaited)}" if self.record.awaited else ""
            return f"it was still running after {LIMIT_S:g} s of virtual time{whom}"
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def lost(self) -> list[str]:
        """Names of the nodes whose death the coordinator noticed."""
        return [event["who"] for event in self.events if event["event"] == "left" and event["lost"]]

    def count(self, event: str) -> int:
        """Number of events of one name."""
        return sum(entry["event"] == event for entry in self.events)

    def total(self, event: str, field: str) -> int:
        """Sum of a field over all events of one name."""
        return sum(entry[field] for entry in self.events if entry["event"] == event)


def trial(
    strategy: Strategy,
    model: Model,
    data: Dataset,
    *,
    kill: tuple[str, float] | None = None,
    stop: float | None = None,
    unweighted: bool = False,
    **options: Any,
) -> TrialOutcome:
    """Simulates one run, and returns its result or its error.

    Args:
        strategy: the strategy to try.
        model, data, options: as for `simulate`; `config` is `WORLD` unless given.
        kill: name of a node, and the virtual time of its death, in seconds.
        stop: virtual time at which the run stops with a checkpoint, in seconds; it is resumed at once.
        unweighted: see `Record`.
    """
    record, events = Record(unweighted), list[Any]()
    options = {"config": WORLD, "chunk_elems": 64, "deadlines": QUICK, "on_event": events.append, **options}
    options |= {"strategy": observed(strategy, record), "script": partial(_direct, kill=kill, stop=stop)}
    if not isinstance(strategy, ServerStrategy):
        options["servers"] = None
    storage = None if stop is None else MemoryStorage()
    try:
        try:
            run = simulate(model, data, storage=storage, **options)
        except Interrupted:
            options["script"] = partial(_direct, kill=kill)
            run = simulate(model, data, storage=storage, resume=True, **options)
    except Exception as error:  # whatever a strategy does is an outcome
        return TrialOutcome(None, error, events, record)
    return TrialOutcome(run, None, events, record)


async def _direct(
    cluster: SimulatedCluster, *, kill: tuple[str, float] | None, stop: float | None = None
) -> None:
    director = cluster.virtual.runtime("director")
    if kill is not None:
        name, seconds = kill
        await director.sleep(seconds)
        cluster.kill(name)
    if stop is not None:
        await director.sleep(stop)
        cluster.stop()
    await director.sleep(LIMIT_S)
    cluster.kill(COORDINATOR)


def token_run(
    strategy: Strategy,
    *,
    workers: int = 3,
    servers: int = 2,
    epochs: int = 2,
    reduction: Reduction = "mean",
    **options: Any,
) -> TrialOutcome:
    """Runs a trial in which the samples in the model can be counted; see `Tokens`.

    If the model is the mean of W workers' parameters, each worker makes steps W times as long. `reduction` is the
    model's declaration about its gradients: whoever computes the parts of several workers adds sums, and weighs means.
    """
    model = Tokens(num_chunks=4)
    model.reduction = reduction
    averaged = isinstance(strategy, PeerStrategy) or (
        isinstance(strategy, ServerStrategy) and strategy.pushes == "parameters"
    )
    options = {"optimizer": SGD(lr=float(workers) if averaged else 1.0), "batch_size": 2, **options}
    return trial(
        strategy,
        model,
        numbered(NUM_SAMPLES),
        unweighted=not averaged or isinstance(strategy, PeerStrategy),
        workers=workers,
        servers=servers,
        epochs=epochs,
        **options,
    )
