"""Batch methods in whole runs on virtual time: workers and shards, slow and doubled portions, deaths."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from batch_problems import OneProcess, Softmax, naive_lbfgs
from batch_runs import INPUTS, ITERATIONS, METHOD, ROUGH, at, end_of, model_of, run_of, squares
from gradstream.errors import ConfigError, GradientError, Interrupted
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import PushHeader
from gradstream.server.shard.passes import ChunkProcedure
from gradstream.testing.runs import kill_at
from gradstream.transport.stream import StreamCore

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def right() -> Any:
    """The end of a run in which nothing happens: other numbers of nodes have the same bits."""
    return end_of(run_of(Softmax()))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int, int]]:
    """How often each portion of each pass has joined the sum of a chunk: (chunk's procedure, pass, portion)."""
    counts: Counter[tuple[int, int, int]] = Counter()
    take = ChunkProcedure.take

    def counting(self: ChunkProcedure, new: PushHeader) -> None:
        if new.portion:
            counts[id(self), new.round, new.portion] += 1
        take(self, new)

    monkeypatch.setattr(ChunkProcedure, "take", counting)
    return counts


@pytest.mark.parametrize(("kind", "servers"), [("softmax", 8), ("ridge", 1)])
def test_iterates_are_those_of_one_process(
    kind: str, servers: int, taken: Counter[tuple[int, int, int]]
) -> None:
    """With a slow worker, whose portions others compute too, on a network that loses and doubles frames."""
    problem = Softmax(kind)
    naive = naive_lbfgs(problem.objective, problem.start, m=3, iterations=ITERATIONS)[-1]
    run = run_of(problem, servers=servers, network=ROUGH)
    assert np.linalg.norm(end_of(run) - naive) <= 1e-10 * np.linalg.norm(naive)
    assert set(taken.values()) == {1}
    passes = {number for _, number, _ in taken}
    portions = Counter((chunk, number) for chunk, number, _ in taken)
    assert set(portions.values()) == {12} and len(portions) == 9 * len(passes)


def test_bits_are_the_same_for_any_number_of_nodes(right: Any) -> None:
    for workers, servers in ((1, 1), (4, 3)):
        assert end_of(run_of(Softmax(), workers=workers, servers=servers)).tobytes() == right.tobytes()


def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the chunks take a portion as often as it comes."""
    monkeypatch.setattr(
        ChunkProcedure, "refuses", lambda self, new: bool(new.portion) and new.round + 1 != self.pass_number
    )


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the chunks take portions of an earlier pass, computed at other parameters."""
    monkeypatch.setattr(ChunkProcedure, "refuses", lambda self, new: new.portion in self.portions)


def test_last_portions_are_computed_twice_and_count_once(
    monkeypatch: pytest.MonkeyPatch, taken: Counter[tuple[int, int, int]]
) -> None:
    """The planted fault: without the check of the chunks, some portions of the slow worker are in twice."""
    problem = Softmax()
    right = end_of(run_of(problem))
    assert set(taken.values()) == {1}
    taken.clear()
    doubled(monkeypatch)
    wrong = end_of(run_of(problem))
    assert max(taken.values()) == 2
    assert np.linalg.norm(wrong - right) > 1e-6 * np.linalg.norm(right)


def test_a_gradient_at_earlier_parameters_is_refused(monkeypatch: pytest.MonkeyPatch, right: Any) -> None:
    """The planted fault: a slow worker's portions of an earlier pass stay out of the sum of this one."""
    stale(monkeypatch)
    wrong = end_of(run_of(Softmax(), workers=4))
    assert np.linalg.norm(wrong - right) > 1e-6 * np.linalg.norm(right)


@pytest.mark.parametrize(
    ("worker", "seconds"), [("worker-0", 0.02), ("worker-0", 0.23), ("worker-1", 0.1), ("worker-1", 0.4)]
)
def test_a_worker_that_dies_in_a_pass_changes_nothing(
    worker: str, seconds: float, right: Any, taken: Counter[tuple[int, int, int]]
) -> None:
    run = run_of(Softmax(), script=kill_at(worker, seconds), deadlines=gs.Deadlines(silence_s=1.0))
    assert any(event["event"] == "left" and event["lost"] for event in run.events)
    assert set(taken.values()) == {1}
    assert end_of(run).tobytes() == right.tobytes()


@pytest.mark.parametrize("servers", [3])
@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_a_run_that_is_stopped_goes_on_between_two_commands(
    seconds: float, servers: int, right: Any, taken: Counter[tuple[int, int, int]]
) -> None:
    """Also in the middle of a pass, and on another number of shards."""
    problem, storage = Softmax(), MemoryStorage()
    with pytest.raises(Interrupted):
        run_of(problem, script=at(seconds, lambda cluster: cluster.stop()), storage=storage)
    run = run_of(problem, storage=storage, resume=True, servers=servers)
    assert [event["event"] for event in run.events].count("resumed") == 1
    assert max(taken.values()) == 1
    assert end_of(run).tobytes() == right.tobytes()


def test_shards_may_change_and_die(right: Any) -> None:
    problem = Softmax()
    resharded = run_of(problem, script=at(0.2, lambda cluster: cluster.reshard(3)))
    assert end_of(resharded).tobytes() == right.tobytes()

    async def dies(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(0.05)
        cluster.kill("shard-1")
        await cluster.restart("shard-1")

    deadlines = gs.Deadlines(silence_s=1.0)
    run = run_of(problem, script=dies, acknowledge="replicated", deadlines=deadlines)
    assert any(event["event"] == "restored" for event in run.events)
    assert end_of(run).tobytes() == right.tobytes()


@pytest.mark.parametrize(
    "strategy",
    [
        gs.LBFGS(tolerance_change=1e-13),
        gs.LBFGS(tolerance_change=1e-13, vector_free=False),
        gs.strategies.ConjugateGradient(tolerance_change=1e-13),
    ],
)
def test_runs_end_at_the_optimum(strategy: Any) -> None:
    problem = Softmax(classes=3, features=20)
    twin = OneProcess(gs.LBFGS(tolerance_grad=1e-11, tolerance_change=0.0), problem.objective, problem.start)
    twin.run()
    run = run_of(problem, strategy, epochs=200, batch_size=60)
    finished = next(event for event in run.events if event["event"] == "finished")
    assert "at most" in finished["reason"]
    best = problem.objective(twin.vectors["x"])[0]
    assert problem.objective(end_of(run))[0] - best <= 1e-12


def test_a_run_that_ends_by_its_epochs_ends_at_the_last_iterate() -> None:
    """Gradient descent with too long first trials: most passes end in a trial that is not accepted."""
    problem = Softmax()
    strategy = gs.strategies.GradientDescent(lr=1e3)
    for epochs in (2, 3, 5, 8):
        twin = OneProcess(strategy, problem.objective, problem.start)
        twin.run(2)
        run = run_of(problem, strategy, epochs=epochs)
        losses = [problem.objective(w)[0] for w in twin.iterates]
        assert problem.objective(end_of(run))[0] <= losses[0]


def test_a_phase_may_go_before_a_method_and_behind_it() -> None:
    """It ends where the method ends by itself, and a later pass of the data is the method's first."""
    problem, method = Softmax(classes=3, features=20), gs.LBFGS(tolerance_grad=1e-4, tolerance_change=0.0)
    simple = gs.Phase(epochs=2, strategy="synchronous", workers=2, optimizer=gs.optim.SGD(lr=1e-9))
    phases = [simple, gs.Phase(epochs=200, strategy=method), simple]
    run = run_of(problem, "synchronous", epochs=None, phases=phases)
    alone = run_of(problem, method, epochs=200)
    assert [row["strategy"] for row in run.summary["phases"]] == ["synchronous", "lbfgs", "synchronous"]
    assert np.linalg.norm(end_of(run) - end_of(alone)) <= 1e-5 * np.linalg.norm(end_of(alone))
    assert alone.summary["reason"] == "the gradient is at most 0.0001"
    assert alone.history[-1]["loss"] is not None


@pytest.mark.parametrize("earlier", [gs.Phase(steps=2), gs.Phase(epochs=2, until=gs.until(samples=150))])
def test_passes_begin_with_a_data_epoch(earlier: gs.Phase) -> None:
    phases = [replace(earlier, strategy="synchronous"), gs.Phase(epochs=2, strategy=METHOD)]
    with pytest.raises(ConfigError, match=r"phases\[0\], which may end inside of a data epoch"):
        run_of(Softmax(), "synchronous", epochs=None, phases=phases)


def test_bytes_of_vectors_do_not_depend_on_m() -> None:
    problem = Softmax()

    def exchanged(m: int) -> list[int]:
        strategy = gs.LBFGS(history_size=m, line_search_fn=None, lr=0.5, max_iter=10, tolerance_change=0.0)
        run = run_of(problem, strategy, workers=1, epochs=11)
        links = [event for event in run.events if event["event"] == "link"]
        return [sum(event[name] for event in links) for name in ("pushed_bytes", "fetched_bytes")]

    few = exchanged(1)
    assert min(few) > 0
    assert few == exchanged(9)


@pytest.mark.parametrize("strategy", [gs.LBFGS(), gs.strategies.GradientDescent(line_search_fn=None, lr=0.1)])
@pytest.mark.parametrize("spoilt", [True, False], ids=["a sample is not finite", "no loss"])
@pytest.mark.parametrize("epochs", [2, 5])
def test_a_method_that_cannot_begin_ends_the_run(strategy: Any, spoilt: bool, epochs: int) -> None:
    targets = INPUTS @ np.array([1.0, 2.0, 3.0])
    if spoilt:
        targets[5] = np.nan
    model = model_of(squares if spoilt else lambda *at: squares(*at)[1])
    with pytest.raises(
        GradientError, match="where the method begins, the loss or the gradient of some samples"
    ):
        gs.simulate(model, (INPUTS, targets), strategy=strategy, workers=2, batch_size=16, epochs=epochs)


@pytest.mark.parametrize("batch_size", [64, 8])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", [gs.LBFGS(), gs.strategies.GradientDescent()], ids=str)
def test_a_trial_where_the_loss_has_no_value_is_shortened_however_many_portions_it_has(
    strategy: Any, workers: int, batch_size: int
) -> None:
    """Of 10w - log w, which is not a number below 0: the first trial is there."""

    def barrier(at: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
        w = at["w"]
        with np.errstate(invalid="ignore"):
            return float((10 * w - np.log(w)).sum()), {"w": 10 - 1 / w}

    data = INPUTS[:, :2], INPUTS[:, 0]
    run = gs.simulate(
        model_of(barrier, (3.0, 0.01)),
        data,
        strategy=strategy,
        workers=workers,
        batch_size=batch_size,
        epochs=60,
    )
    assert np.allclose(run.parameters["w"], 0.1, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"optimizer": gs.optim.SGD(lr=0.1)}, "makes its own steps"),
        ({"assignment": "partitions"}, "portions go to whoever is idle"),
        ({"clip_norm": 0.5}, "clip_norm would clip each portion"),
        ({"clip_value": 0.5}, "clip_value would clip each portion"),
    ],
)
def test_what_a_batch_method_cannot_do_is_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        run_of(Softmax(), **options)


@pytest.mark.parametrize("hasty", [False, True])
def test_workers_that_wait_hear_why_seldom(monkeypatch: pytest.MonkeyPatch, hasty: bool) -> None:
    """And not at each portion of the others: of 2,000 nodes that would be 2,000 messages. `hasty`: planted fault."""
    told = list[int]()
    waiting = StreamCore.waiting

    async def note(stream: StreamCore, on: Any) -> None:
        told.append(len(list(on)))
        await waiting(stream, on)

    monkeypatch.setattr(StreamCore, "waiting", note)
    if hasty:
        monkeypatch.setattr(Deadlines, "notice_s", property(lambda _: 2e-3))
    workers, problem = 12, Softmax()
    run_of(problem, workers=workers, batch_size=2)
    assert len(told) > workers
    assert (len(told) < workers * (ITERATIONS + 2)) is not hasty
