"""Properties of strategies: the built-in ones have them, and each check finds a strategy that lacks its one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream.cli import main
from gradstream.data.base import Partitioning
from gradstream.model.base import Reduction
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryPush, PushHeader
from gradstream.strategies import ServerStrategy, ServerWorker, Strategy
from gradstream.strategies.synchronous import SynchronousRound
from gradstream.testing import BrokenPropertiesError, check_strategy, properties
from gradstream.testing.properties import BrokenPropertyError, Property
from gradstream.worker.server.replica import ServerReplica


@pytest.mark.parametrize(
    ("strategy", "seeds"),
    [(gs.Synchronous(), 2), (gs.Downpour(push_every=5, fetch_every=3), properties.SEEDS)],
    ids=str,
)
def test_built_in_strategies_have_all_properties(
    strategy: Strategy, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(properties, "SEEDS", seeds)
    report = check_strategy(strategy)
    assert [result.name for result in report.results] == [check.__name__ for check in properties.PROPERTIES]
    assert not report.broken
    assert str(report).count("holds") == len(properties.PROPERTIES)


# ---- planted: one strategy for each property ---------------------------------------------------------


@dataclass(frozen=True)
class Silent(gs.Downpour):
    pass


@dataclass(frozen=True)
class Pair(gs.Downpour):
    """A tuple comes out of JSON as a list."""

    periods: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Bag(gs.Downpour):
    """JSON has no sets."""

    bag: frozenset[int] = field(default_factory=frozenset)


class Undecorated(gs.Downpour):
    """Its fields are its parent's."""


def hidden() -> Strategy:
    @dataclass(frozen=True)
    class Hidden(gs.Downpour):
        """Nobody finds it in here."""

    return Hidden()


@dataclass(frozen=True, slots=True)
class Factor(EveryPush):
    factor: float

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        return (self.factor,)


@dataclass(frozen=True)
class Halved(gs.Downpour):
    """Takes half of each push, at any setting."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return Factor(0.5)


@dataclass(frozen=True)
class Uphill(gs.Downpour):
    """Climbs."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return Factor(-1.0)


@dataclass(frozen=True)
class MeansOnly(gs.Synchronous):
    """Takes every gradient for a mean."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return SynchronousRound(num_workers, "mean")


@dataclass(frozen=True)
class Plain(ServerStrategy):
    """A push for each gradient, a fetch for each push: what the faults below are planted in."""

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True

    def optimizer(self) -> Optimizer:
        return gs.optim.SGD(lr=0.01)

    async def train(self, worker: ServerWorker) -> None:
        async for batch in worker.batches():
            await worker.pull()
            gradient = await worker.gradient(batch)
            await self.push(worker, gradient)
            await worker.server.flush()

    async def push(self, worker: ServerWorker, gradient: Any) -> None:
        await worker.accumulate(gradient)
        await worker.server.push_soon(worker.take_accumulated())

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return EveryPush()


@dataclass(frozen=True)
class Twice(Plain):
    """Pushes one gradient of three once more."""

    async def push(self, worker: ServerWorker, gradient: Any) -> None:
        if worker.step % 3 == 2:
            await worker.server.push_soon(worker.update(gradient))
            await worker.server.flush()
        await worker.server.push_soon(worker.update(gradient))


@dataclass(frozen=True)
class Forgetful(Plain):
    """Pushes nothing but zeros once in three steps."""

    async def push(self, worker: ServerWorker, gradient: Any) -> None:
        if worker.step % 3 == 2:
            gradient.vector.tensor.zero_()
        await super().push(worker, gradient)


@dataclass(frozen=True)
class Never(Plain):
    """Keeps one gradient of three to itself."""

    async def push(self, worker: ServerWorker, gradient: Any) -> None:
        if worker.step % 3 != 2:
            await worker.server.push_soon(worker.update(gradient))


@dataclass(frozen=True)
class Anxious(Plain):
    """Pushes again where the first push had to be tried again."""

    async def push(self, worker: ServerWorker, gradient: Any) -> None:
        assert isinstance(worker, ServerReplica)
        before = worker.server.traffic.retries
        await worker.server.push_soon(worker.update(gradient))
        await worker.server.flush()
        if worker.server.traffic.retries > before:
            await worker.server.push_soon(worker.update(gradient))


class Moody(EveryPush):
    asked = 0

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        Moody.asked += 1
        return (1.0 / (1 + Moody.asked % 2),)


@dataclass(frozen=True)
class Counting(Plain):
    """Its rule counts how often it is asked."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return Moody()


class Crowd(EveryPush):
    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        return (0.5, 0.5)


@dataclass(frozen=True)
class TooManyWeights(Plain):
    """Two weights for one contribution."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return Crowd()


@dataclass(frozen=True)
class Rolling(Plain):
    """Throws dice that are not the runtime's."""

    async def push(self, worker: ServerWorker, gradient: Any) -> None:
        gradient.vector.tensor.mul_(random.random())
        await super().push(worker, gradient)


@dataclass(frozen=True)
class Deaf(ServerStrategy):
    """Workers take turns, and nothing of what they push counts."""

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = False

    def optimizer(self) -> Optimizer:
        return gs.optim.SGD(lr=0.01)

    async def train(self, worker: ServerWorker) -> None:
        async for batch in worker.batches():
            turn = worker.step * worker.num_workers + worker.rank
            await worker.swap_in(worker.server.fetch_soon(min_version=turn))
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())
            await worker.server.flush()

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return Factor(0.0)


class InPairs(EveryPush):
    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        return parked[:2] if len(parked) >= 2 else ()

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        return (1.0, 1.0)

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        return ["another worker"]


@dataclass(frozen=True)
class Sociable(Plain):
    """Waits for a second contribution, though it may be alone."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return InPairs()


@dataclass(frozen=True)
class Hidden(gs.Synchronous):
    """Keeps a momentum on each worker, of which nobody else knows."""

    async def train(self, worker: ServerWorker) -> None:
        await worker.swap_in(worker.server.fetch_soon())
        velocity: Any = 0.0
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            await gradient.done()
            velocity = 0.5 * velocity + gradient.vector.tensor
            gradient.vector.tensor.copy_(velocity)
            await worker.server.push_soon(worker.update(gradient))
            await worker.swap_in(worker.server.fetch_soon(min_version=worker.version + 1))


@dataclass(frozen=True)
class Boastful(gs.AllReduce):
    """Says that others can stand in, but its `train` cannot begin anew."""

    async def train(self, worker: Any) -> None:
        assert worker.step == 0
        await gs.AllReduce.train(self, worker)


PLANTED: tuple[tuple[Property, Strategy, str], ...] = (
    (properties.documented, Silent(), "class Silent has no docstring"),
    (properties.travels, Pair(), r"come out of JSON as .*\[1, 2\]"),
    (properties.travels, Bag(), "do not survive JSON"),
    (properties.travels, Undecorated(), "is no frozen dataclass"),
    (properties.travels, hidden(), "other processes do not find .*Hidden: define it at the top of a file"),
    (properties.plain, Halved(), r"none of 1 settings .* away from it"),
    (properties.plain, MeansOnly(), r"none of 8 settings .* away from it"),
    (properties.converges, Uphill(), r"the loss goes from 12.*; expected below"),
    (properties.complete, Twice(), r"seed 0: .* too many"),
    (properties.complete, Forgetful(), r"seed 0: .* lost"),
    (properties.complete, Never(), "seed 0: UserCodeError: worker-.* minibatches were never pushed"),
    (properties.exactly_once, Anxious(), r"on a bad network: .* too many"),
    (properties.pure_rule, Counting(), r"weights answers \[.*\] and then \[.*\] to the same question"),
    (properties.pure_rule, TooManyWeights(), "weights are 2 for an update of 1 contributions"),
    (properties.repeatable, Rolling(), "two runs of seed 0 end with different parameters"),
    (properties.seeded, Deaf(), "4 seeds give one and the same history"),
    (properties.ends, Sociable(), "with workers=1, servers=1: .*waiting for another worker"),
    (
        properties.resumes,
        Hidden(),
        "resumed ends with other parameters .* loses its local variables",
    ),
    (properties.deaths, Boastful(), "is killed: .*AssertionError"),
)


@pytest.mark.parametrize(
    ("check", "strategy", "message"), PLANTED, ids=[type(one).__name__ for _, one, _ in PLANTED]
)
def test_a_planted_fault_is_found_by_its_check(check: Property, strategy: Strategy, message: str) -> None:
    with pytest.raises(BrokenPropertyError, match=message):
        check(strategy)


def test_an_event_that_only_one_of_two_runs_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, then = (
        SimpleNamespace(events=[{"event": "a"}]),
        SimpleNamespace(events=[{"event": "a"}, {"event": "b"}]),
    )
    runs = iter((first, then))
    monkeypatch.setattr(properties, "_learnt", lambda strategy, seed: next(runs))
    monkeypatch.setattr(properties, "_bytes_of", lambda outcome: b"")
    with pytest.raises(BrokenPropertyError, match=r"different events: \{'event': 'b'\}"):
        properties.repeatable(gs.Downpour())


def test_every_property_has_a_planted_fault() -> None:
    assert {check for check, _, _ in PLANTED} == set(properties.PROPERTIES)


def only(monkeypatch: pytest.MonkeyPatch, *checks: Property) -> None:
    monkeypatch.setattr("gradstream.testing.suites.PROPERTIES", checks)


@pytest.mark.usefixtures("few_seeds")
def test_the_strategy_without_faults_has_the_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose planted faults are planted in it."""
    only(monkeypatch, *{check: None for check, strategy, _ in PLANTED if isinstance(strategy, Plain)})
    report = check_strategy(Plain)
    assert report.strategy == "Plain()"
    assert len(report.results) == 5


@pytest.mark.usefixtures("few_seeds")
def test_all_broken_properties_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, properties.plain, properties.converges, properties.complete)
    with pytest.raises(
        BrokenPropertiesError, match=r"(?s)breaks 2 of 3 properties.*plain: .*But: .*converges: .*But: "
    ) as e:
        check_strategy(Uphill)
    assert [result.name for result in e.value.report.broken] == ["plain", "converges"]


# ---- the command -------------------------------------------------------------------------------

FILE = '''
from dataclasses import dataclass

import gradstream as gs


@dataclass(frozen=True)
class Mine(gs.Downpour):
    """Downpour, of mine."""


@dataclass(frozen=True)
class Nameless(gs.Downpour):
    pass
'''


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, properties.documented, properties.travels)
    (tmp_path / "mine.py").write_text(FILE)
    good = CliRunner().invoke(main, ["check", f"{tmp_path}/mine.py:Mine", "--json"])
    assert good.exit_code == 0, good.output
    assert all(result["holds"] for result in json.loads(good.stdout)["results"])
    bad = CliRunner().invoke(main, ["check", f"{tmp_path}/mine.py:Nameless"])
    assert bad.exit_code == 1
    assert "BROKEN  documented    class Nameless has no docstring" in bad.stdout
    assert "documented: Its class says what it is." in bad.stderr
    absent = CliRunner().invoke(main, ["check", f"{tmp_path}/mine.py:Min"])
    assert absent.exit_code == 2
    assert "did you mean 'Mine'" in absent.stderr
