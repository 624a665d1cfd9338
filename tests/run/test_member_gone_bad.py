"""What one worker gone bad can do to a run: what the rules allow, and nothing else.

It has the credentials of worker-2 of three, and sends the whole protocol, drawn at random (`gone_bad.py`). What is
asserted is of values: each change of the parameters, the rate of each update, memory, and who is blamed.
"""

from __future__ import annotations

import random
import resource
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from google.protobuf.message import Message

import gone_bad
import gradstream as gs
from gone_bad import REQUESTS, GoneBad
from gradstream._simulate import simulate
from gradstream.coordinator.client.member import Member
from gradstream.errors import GradientError, GradstreamError, NonFiniteError
from gradstream.job.registry import STRATEGIES, find_strategy
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from gradstream.server.aggregation import Median, PushHeader, WholeRule
from gradstream.server.procedure import CommandRound, StepResult, dot
from gradstream.server.shard.inspection import MOST_PUSHES, Inspection
from gradstream.server.shard.pushes import PendingPush
from gradstream.server.shard.service import ShardService
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import Updates
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.base import ServerStrategy
from gradstream.strategies.batch import ProcedureRun
from gradstream.testing.runs import QUICK, least_squares
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.limits import METHODS
from gradstream.wire import v1

BAD, LR, FEATURES = 2, 0.05, 150
CONFIG = SimulationConfig(
    costs={"gradient": Cost(base_s=5e-3), "apply": Cost(base_s=1e-5)},
    network=Network(link=Link(latency_s=1e-4)),
)
ROBUST: dict[str, tuple[int, dict[str, Any]]] = {
    "median": (3, {}),
    "trimmed-mean": (3, {"faulty": 1}),
    "krum": (5, {"faulty": 1}),
    "clipped-mean": (3, {"radius": 0.5}),
    "centered-clipping": (3, {"radius": 0.5}),
}
"""By rule, the number of workers and its options."""

OPTIONS: dict[str, dict[str, Any]] = {
    "ssp": {"bound": 2},
    "diloco": {"every": 2},
    "parameter-averaging": {"every": 2},
}
SIMULATED = sorted(
    STRATEGIES.keys() - {"hogwild"}
)  # which is of one machine, in memory that its workers share


class Watch:
    """Compares every change of the parameters of every shard with what the rule allows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rule: str, options: dict[str, Any]) -> None:
        self.rule, self.options = rule, options
        self.updates = 0
        self.wrong: list[str] = []
        self.rates = Counter[float]()
        self.most_waiting = 0
        self._after: dict[tuple[int, int], torch.Tensor] = {}
        self._combine, self._update = Updates._combine, ShardStore.update
        watch = self

        def combine(updates: Updates, robust: Any, due: Any, present: Any, parts: Any, scales: Any) -> Any:
            return watch.combined(updates, robust, due, present, parts, scales)

        def update(store: ShardStore, chunk: int, *args: Any, **options: Any) -> Any:
            return watch.updated(store, chunk, *args, **options)

        took = PendingPush.took

        def counted(push: PendingPush, chunk: int, part: Any) -> None:
            took(push, chunk, part)
            watch.most_waiting = max(watch.most_waiting, max(push.waiting.values()))

        monkeypatch.setattr(Updates, "_combine", combine)
        monkeypatch.setattr(ShardStore, "update", update)
        monkeypatch.setattr(PendingPush, "took", counted)

    def combined(self, updates: Any, robust: Any, due: Any, present: Any, parts: Any, scales: Any) -> Any:
        """The result lies where the honest contributions allow it, whatever the bad one is."""
        store = updates.store
        centre = store.centre_span(due.chunk).tensor.clone() if getattr(robust, "centred", False) else 0.0
        total = self._combine(updates, robust, due, present, parts, scales)
        honest = [
            part * scale for one, part, scale in zip(present, parts, scales, strict=True) if one.rank != BAD
        ]
        if total is None or len(honest) < 2:
            return total
        stacked = torch.stack(honest)
        slack = 1e-9 + 1e-12 * float(stacked.abs().max())
        if not isinstance(robust, WholeRule):
            low, high = stacked.min(dim=0).values - slack, stacked.max(dim=0).values + slack
            self.check(
                bool(((low <= total) & (total <= high)).all()), f"{self.rule}: outside of the honest ones"
            )
        elif (
            self.rule == "krum"
        ):  # one contribution as it is, no farther from the honest ones than they may be apart
            spread = max(float((one - other).norm()) for one in honest for other in honest)
            away = min(float((total - one).norm()) for one in honest)
            self.check(
                away <= 2 * spread + slack, f"{self.rule}: {away} from the honest ones, {spread} apart"
            )
        else:
            moved = float((total - centre).norm())
            self.check(moved <= self.options["radius"] + slack, f"{self.rule}: moved by {moved}")
        return total

    def updated(
        self, store: ShardStore, chunk: int, parts: Sequence[torch.Tensor], weights: Any, **options: Any
    ) -> Any:
        """Nothing but updates changes parameters, and the rate of a robust one is the plan's."""
        key, now = (id(store), chunk), store.parameters_of(chunk)
        before = self._after.get(key)
        if before is not None:
            self.check(torch.equal(before, now), f"chunk {chunk} has changed between two updates")
        self.rates[options["lr"]] += 1
        try:
            return self._update(store, chunk, parts, weights, **options)
        finally:
            self.updates += 1
            self._after[key] = now.clone()

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


def attacked(
    monkeypatch: pytest.MonkeyPatch, bad: GoneBad, strategy: Any, *, epochs: int, **options: Any
) -> str:
    """Runs a job with a member gone bad. Returns how the run ended; "" if it ended well.

    Nobody but the bad one is lost or blamed, and the parameters are finite.
    """
    monkeypatch.setattr(
        EndpointCore, "_count_refusal", lambda self, caller: None
    )  # else it is shut out after 32
    monkeypatch.setattr(gone_bad, "SHARDS", [])
    register = ShardService.register

    def registered(service: ShardService, *args: Any, **options: Any) -> None:
        register(service, *args, **options)
        gone_bad.SHARDS.append(service.state)

    monkeypatch.setattr(ShardService, "register", registered)
    model, data = least_squares(60, FEATURES, whole=False, reduction="mean", dtype="float32")
    given: dict[str, Any] = {"workers": 3, "batch_size": 2, "chunk_elems": 64, "deadlines": QUICK}
    if issubclass(type(resolved := find_strategy(strategy)), ServerStrategy):
        given["servers"] = 2
    ended = ""
    try:
        run = simulate(
            model, data, strategy=resolved, epochs=epochs, config=CONFIG, script=bad, **(given | options)
        )
    except GradstreamError as error:
        ended = str(error)
    else:
        assert all(torch.isfinite(torch.as_tensor(one)).all() for one in run.parameters.values())
        assert {event["who"] for event in run.events if event["event"] == "left" and event["lost"]} <= {
            bad.worker
        }
    # Without a robust rule a finite contribution moves the model as far as it likes, and a step of a batch method is
    # taken as it is: the run ends then, and nobody is called guilty.
    nobody = ("the model has diverged", "the workers are not at the same point of the method")
    assert not ended or bad.worker in ended or any(text in ended for text in nobody), ended
    return ended


def robust(rule: str, bad: GoneBad, monkeypatch: pytest.MonkeyPatch, epochs: int) -> Watch:
    """Runs a job with a robust rule and a member gone bad, and looks at every update of every shard."""
    workers, options = ROBUST[rule]
    watch = Watch(monkeypatch, rule, options)
    strategy = gs.Synchronous(aggregate=rule, overlap=False, **options)
    ended = attacked(
        monkeypatch, bad, strategy, epochs=epochs, workers=workers, optimizer=gs.optim.Adam(lr=LR)
    )
    assert "diverged" not in ended
    assert not watch.wrong, watch.wrong[:5]
    assert set(watch.rates) <= {LR}, watch.rates
    assert watch.updates > 50
    assert watch.most_waiting <= MOST_PUSHES * 2
    return watch


def test_every_method_of_workers_is_drawn() -> None:
    assert set(REQUESTS) == {name for name, method in METHODS.items() if "worker" in method.callers}


@pytest.mark.parametrize("rule", ROBUST)
def test_a_robust_rule_holds_whatever_its_worker_sends(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = GoneBad(2000, seed=1)
    robust(rule, bad, monkeypatch, epochs=12)
    assert bad.sent > 1000
    assert {answer for _, answer in bad.answers} > {"BAD_REQUEST", "NON_FINITE"}


@pytest.mark.parametrize("strategy", SIMULATED)
def test_nobody_else_is_blamed_whatever_a_worker_sends(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = GoneBad(600, seed=2)
    attacked(monkeypatch, bad, strategy, epochs=4)
    assert bad.sent > 40


@pytest.mark.long
@pytest.mark.limit_s(1200)
@pytest.mark.parametrize("strategy", [*ROBUST, *SIMULATED])
def test_a_hundred_thousand_messages(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs with one seed each, until so many were sent; the memory of the process stays as it was."""
    sent, seed, before_kib = 0, 0, 0
    while sent < 100_000:
        seed += 1
        bad = GoneBad(100_000 - sent, seed, at_once=32)
        with monkeypatch.context() as patched:
            if strategy in ROBUST:
                robust(strategy, bad, patched, epochs=200)
            else:
                attacked(patched, bad, strategy, epochs=200)
        sent += bad.sent
        assert bad.sent > 10
        if not before_kib:
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300_000


@pytest.mark.parametrize("strategy", ["downpour", "synchronous", "allreduce", "gossip"])
def test_beats_with_fields_that_are_drawn(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its own process reports is the only thing that tells others of it: it may harm itself by that alone."""
    taken, spoilt = Member._take_beats, list[str]()

    def beats(member: Member) -> list[v1.Beat]:
        out = taken(member)
        if out and member._runtime.node == "worker-2" and draw.random() < 0.3:
            before = set(bad.fields)
            extra = v1.Beat()
            bad._fill(extra, depth=2)
            extra.ClearField("number")
            out[0].MergeFrom(extra)
            spoilt.append(",".join(sorted(bad.fields - before)))
        return out

    monkeypatch.setattr(Member, "_take_beats", beats)
    for seed in range(16):
        draw, bad = random.Random(seed), GoneBad(0, seed)
        with monkeypatch.context() as patched:
            attacked(patched, bad, strategy, epochs=3)
    assert len(spoilt) >= 4


# ---- what was tried by hand ---------------------------------------------------------------


def pushing(change: Callable[[Any], None], rank: int, base: type[gs.Strategy] = gs.Synchronous) -> Any:
    """A strategy of which one worker changes each update before it pushes it."""

    @dataclass(frozen=True, slots=True)
    class Changed(base):  # type: ignore[misc,valid-type]
        async def train(self, worker: ServerWorker) -> None:
            inner: Any = worker
            push = inner.server.push_soon

            async def push_soon(update: Any, **options: Any) -> None:
                if not update.assign:
                    change(update)
                await push(update, **options)

            if worker.rank == rank:
                inner.server.push_soon = push_soon
            await base.train(self, worker)

    return Changed


def test_a_rate_in_a_push_moves_nothing_under_a_robust_rule() -> None:
    """Rank 0 of 4 asks for a rate of 10⁶, with Adam, whose step is as long as the rate."""
    model, data = least_squares(60, FEATURES, whole=False, reduction="mean", dtype="float32")

    def final(rate: float) -> torch.Tensor:
        strategy = pushing(lambda update: setattr(update, "lr", rate), 0)(aggregate="median", overlap=False)
        adam = gs.optim.Adam(lr=LR)
        run = simulate(
            model, data, strategy=strategy, workers=4, batch_size=2, epochs=2, optimizer=adam, chunk_elems=64
        )
        return torch.as_tensor(run.parameters["w"])

    honest = final(LR)
    assert torch.equal(final(1e6), honest)
    assert torch.equal(final(-1e6), honest)
    assert torch.equal(final(0.0), honest)


@pytest.mark.parametrize(("strategy", "rate"), [(gs.Downpour, 1e38), (gs.Synchronous, 1e38)])
def test_who_makes_a_parameter_infinite_is_named_with_its_push(strategy: Any, rate: float) -> None:
    def overflow(update: Any) -> None:
        update.lr = rate
        if update.vector is not None:
            update.vector.tensor.fill_(1e9)

    model, data = least_squares(60, FEATURES, whole=False, reduction="mean", dtype="float32")
    options: dict[str, Any] = {"overlap": False} if strategy is gs.Synchronous else {}
    bad = pushing(overflow, BAD, strategy)(**options)
    with pytest.raises(NonFiniteError, match=r"update \d+, chunk .* push \d+ of worker-2 \(rate 1e\+38"):
        simulate(
            model,
            data,
            strategy=bad,
            workers=3,
            batch_size=2,
            epochs=2,
            optimizer=gs.optim.SGD(lr=LR),
            chunk_elems=64,
        )


def test_who_makes_a_parameter_infinite_by_a_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scales(GoneBad):
        def _request(self, method: str, cluster: SimulatedCluster) -> Message:
            scale = v1.Command(kind=v1.Command.SCALE, alpha=1e38)
            self._sequence += 1
            return v1.Command(
                kind=v1.Command.STEP,
                sequence=self._sequence,
                step=v1.Procedure(number=1 << 40),
                commands=[scale] * 2,
            )

    bad = Scales(8, methods=frozenset({"command"}))
    ended = attacked(monkeypatch, bad, "lbfgs", epochs=20)
    assert "step 1099511627776 of the procedure, sent by worker-2" in ended
    assert "the parameters NaN or infinite" in ended


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b'[{}, [], "x", 1, 0, 0]', b"[" * 3000])
def test_who_brings_a_step_that_nobody_can_continue_is_named(
    note: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Brings(GoneBad):
        def _request(self, method: str, cluster: SimulatedCluster) -> Message:
            self._sequence += 1
            step = v1.Procedure(number=(1 << 40) + self._sequence, note=note)
            return v1.Command(kind=v1.Command.STEP, sequence=self._sequence, step=step)

    ended = attacked(monkeypatch, Brings(8, methods=frozenset({"command"})), "lbfgs", epochs=20)
    assert "of LBFGS, brought by worker-2, cannot be continued" in ended


@pytest.mark.parametrize("scalars", [[(), ()], [(1.0,), ()], [(1.0, 2.0), (3.0, 4.0)]])
def test_who_brings_another_step_in_the_place_of_the_present_one_is_named(scalars: list[Any]) -> None:
    chunks = [
        v1.Procedure(number=7, scalars=one, portions=[v1.Portion(first=1, samples=4, loss=0.5)], chunk=chunk)
        for chunk, one in enumerate(scalars)
    ]
    result = StepResult.of(7, v1.CommandResult(chunks=chunks, by="worker-2"))
    run = ProcedureRun.__new__(ProcedureRun)
    run._at = SimpleNamespace(round=CommandRound((dot("x", "x"),)))  # type: ignore[assignment]
    run._procedure = gs.LBFGS()
    with pytest.raises(
        GradientError, match=r"step 7 of LBFGS, brought by worker-2, cannot be continued \(\d results"
    ):
        run._check_results(result)


@pytest.mark.parametrize(("before", "culprit"), [(1e36, "worker-2"), (40.0, "worker-1")])
def test_an_honest_push_into_parameters_that_are_too_large_is_not_to_blame(
    before: float, culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = Updates.__new__(Updates)
    honest, bad = (PushHeader(sender, 1, 1, 7, 4, lr=0.1, length=33.0) for sender in ("worker-1", "worker-2"))
    updates.store = SimpleNamespace(dtype=torch.float32)  # type: ignore[assignment]
    updates._largest = replace(bad, length=before)
    monkeypatch.setattr(Updates, "_weights", lambda self, due: [1.0])
    due: Any = SimpleNamespace(update=[SimpleNamespace(header=honest)])
    error = updates.blamed(due, NonFiniteError("update 44"))
    assert error.culprit == culprit
    assert ("worker-1" in str(error)) == (culprit == "worker-1")


# ---- the checks can fail --------------------------------------------------------------------


def test_a_rule_that_is_no_median_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Median, "of_sorted", lambda self, values: values.mean(dim=0))
    with pytest.raises(AssertionError, match="outside of the honest ones"):
        robust("median", GoneBad(2000, seed=1), monkeypatch, epochs=12)


def test_a_rate_that_one_worker_chooses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "median_low", max)

    def all_seeds() -> None:
        for seed in range(1, 9):  # not every one draws a larger rate that comes first
            with monkeypatch.context() as patched:
                robust("median", GoneBad(2000, seed=seed), patched, epochs=12)

    with pytest.raises(AssertionError, match="Counter"):
        all_seeds()


def test_a_command_that_is_carried_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they once were: whatever the strategy of the run uses."""
    init = Inspection.__init__

    def lenient(self: Inspection, *given: Any) -> None:
        init(self, *given)
        self._in_passes = True

    class Scales(GoneBad):
        def _request(self, method: str, cluster: SimulatedCluster) -> Message:
            self._sequence += 1
            scale = v1.Command(kind=v1.Command.SCALE, alpha=-1000.0)
            step = v1.Procedure(number=self._sequence)
            return v1.Command(kind=v1.Command.STEP, sequence=self._sequence, step=step, commands=[scale])

    monkeypatch.setattr(Inspection, "__init__", lenient)
    with pytest.raises(AssertionError, match=r"has changed between two updates"):
        robust("median", Scales(8, methods=frozenset({"command"})), monkeypatch, epochs=3)
