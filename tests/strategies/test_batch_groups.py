"""Batch methods in a group of workers without servers: the same iterates, through deaths, stops and newcomers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from batch_problems import Softmax, naive_lbfgs
from batch_runs import INPUTS, ITERATIONS, METHOD, at, end_of, model_of, run_of, squares
from gradstream.errors import ConfigError, GradientError, Interrupted
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.procedure import BLOCK, FEW, add, dot, perform
from gradstream.testing.runs import kill_at, replace_at
from gradstream.worker.group.peers import GroupPeers
from gradstream.worker.group.replica import GroupReplica

pytestmark = pytest.mark.sim

NEAR = 1e-13
"""Relative distance of ends that differ by the rounding of sums alone."""

JITTERY = gs.sim.Network(link=gs.sim.Link(latency_s=1e-4, jitter_s=2e-3))


def distance(one: Any, other: Any) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.fixture(scope="module")
def right() -> Any:
    return end_of(run_of(Softmax(), servers=0))


@pytest.mark.parametrize(("kind", "accumulate"), [("softmax", 1), ("ridge", 3)])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_iterates_are_those_of_one_process(kind: str, workers: int, accumulate: int) -> None:
    """Over links of random delay and with a slow worker; with one minibatch a round, and with several."""
    problem = Softmax(kind)
    naive = naive_lbfgs(problem.objective, problem.start, m=3, iterations=ITERATIONS)[-1]
    run = run_of(problem, workers=workers, servers=0, network=JITTERY, accumulate=accumulate)
    assert distance(end_of(run), naive) <= 1e-10
    assert run.summary["reason"] == f"{ITERATIONS} iterations"
    assert run.summary["servers"] == 0


def test_bits_of_one_worker_are_those_with_a_server() -> None:
    """Of vectors that are one chunk: dot products are summed chunk by chunk."""
    ends = [end_of(run_of(Softmax(), workers=1, servers=n, chunk_elems=None)) for n in (0, 1)]
    assert ends[0].tobytes() == ends[1].tobytes()


@pytest.mark.parametrize("script", [kill_at, replace_at], ids=["dies", "dies and comes back"])
@pytest.mark.parametrize(
    ("worker", "seconds"), [("worker-0", 0.02), ("worker-0", 0.23), ("worker-1", 0.4), ("worker-2", 0.35)]
)
def test_a_worker_that_dies_in_a_pass_changes_nothing(
    script: Any, worker: str, seconds: float, right: Any
) -> None:
    deadlines = gs.Deadlines(silence_s=1.0)
    run = run_of(Softmax(), servers=0, script=script(worker, seconds), deadlines=deadlines)
    assert any(event["event"] == "left" and event["lost"] for event in run.events)
    assert distance(end_of(run), right) <= NEAR
    assert run.summary["reason"] == f"{ITERATIONS} iterations"


def test_planted_faults_after_a_death_are_seen(monkeypatch: pytest.MonkeyPatch, right: Any) -> None:
    """A newcomer without the group's note; and a round that is in a sum twice, since its vectors are kept."""
    deadlines, problem = gs.Deadlines(silence_s=1.0), Softmax()

    async def nothing(self: GroupPeers, note: bytes, root: int) -> bytes:
        return note

    with monkeypatch.context() as patched:
        patched.setattr(GroupPeers, "pass_note", nothing)
        wrong = run_of(problem, servers=0, script=replace_at("worker-1", 0.23), deadlines=deadlines)
        assert distance(end_of(wrong), right) > 1e-6

    add = GroupReplica.catch_up

    async def twice(self: GroupReplica) -> None:
        await add(self)
        self.setup.updater.state["sum"].tensor.mul_(1.5)

    monkeypatch.setattr(GroupReplica, "catch_up", twice)
    wrong = run_of(problem, servers=0, script=kill_at("worker-1", 0.23), deadlines=deadlines)
    assert distance(end_of(wrong), right) > 1e-6


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_a_run_that_is_stopped_goes_on_in_the_middle_of_a_pass(
    seconds: float, workers: int, right: Any
) -> None:
    """With as many workers to the bit."""
    problem, storage = Softmax(), MemoryStorage()
    with pytest.raises(Interrupted):
        run_of(problem, servers=0, script=at(seconds, lambda cluster: cluster.stop()), storage=storage)
    run = run_of(problem, servers=0, workers=workers, storage=storage, resume=True)
    assert [event["event"] for event in run.events].count("resumed") == 1
    assert distance(end_of(run), right) <= (0.0 if workers == 3 else NEAR)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        (
            {"servers": 2},
            r"has the state of LBFGS in a group \(x, g, .*\), and the run would go on with LBFGS \(x, g",
        ),
        ({"strategy": gs.LBFGS(history_size=7)}, "resume it with the strategy and the vectors that it had"),
        ({"strategy": gs.strategies.ConjugateGradient()}, "go on with ConjugateGradient in a group"),
    ],
)
def test_another_method_does_not_go_on_in_the_middle(changed: dict[str, Any], wanted: str) -> None:
    problem, storage = Softmax(), MemoryStorage()
    with pytest.raises(Interrupted):
        run_of(problem, servers=0, script=at(0.2, lambda cluster: cluster.stop()), storage=storage)
    with pytest.raises(ConfigError, match=wanted):
        run_of(problem, **{"servers": 0, "storage": storage, "resume": True, **changed})


LONG = gs.strategies.GradientDescent(lr=1e3)
"""Its first trials are too long, so most passes end in one that is not accepted."""
STILL = gs.Phase(steps=1, strategy="synchronous", optimizer=gs.optim.SGD(lr=1e-30))


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize(
    ("epochs", "until"), [(3, None), (5, None), (8, gs.until(samples=180)), (8, gs.until(samples=330))]
)
def test_a_phase_behind_a_method_begins_at_the_accepted_iterate(
    servers: int, epochs: int, until: Any
) -> None:
    """And not at the trial whose pass is under way."""
    problem = Softmax()
    alone = run_of(problem, LONG, servers=servers, epochs=epochs, until=until)
    phases = [gs.Phase(epochs=epochs, strategy=LONG, servers=servers, until=until), STILL]
    run = run_of(problem, "synchronous", servers=1, epochs=None, phases=phases)
    loss = problem.objective(end_of(alone))[0]
    assert loss <= problem.objective(problem.start)[0]
    assert problem.objective(end_of(run))[0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize(
    ("epochs", "until"), [(3, None), (5, None), (8, gs.until(samples=180)), (8, gs.until(samples=330))]
)
def test_a_run_that_ended_goes_on_with_more_epochs(servers: int, epochs: int, until: Any) -> None:
    problem, storage = Softmax(), MemoryStorage()
    whole = run_of(problem, LONG, servers=servers, epochs=8)
    run_of(problem, LONG, servers=servers, epochs=epochs, until=until, storage=storage, checkpoint_every=1)
    run = run_of(problem, LONG, servers=servers, epochs=8, storage=storage, resume=True)
    assert end_of(run).tobytes() == end_of(whole).tobytes()


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("second", [gs.LBFGS(history_size=5), gs.strategies.ConjugateGradient(), METHOD])
def test_one_method_may_follow_another(servers: int, second: Any) -> None:
    problem = Softmax()
    phases = [
        gs.Phase(epochs=4, strategy=METHOD, servers=servers),
        gs.Phase(epochs=20, strategy=second, servers=servers),
    ]
    run = run_of(problem, "allreduce", servers=None, epochs=None, phases=phases)
    first = run_of(problem, METHOD, servers=servers, epochs=4)
    assert problem.objective(end_of(run))[0] < problem.objective(end_of(first))[0]


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(
    "first", [{"max_iter": 3}, {"max_eval": 5}, {"tolerance_change": 0.1}, {"lr": 1e3}], ids=str
)
def test_a_method_begins_anew_in_each_phase(servers: int, first: dict[str, Any]) -> None:
    """What has ended one phase does not end the next one, and a search of one is not that of the next."""
    problem = Softmax()
    phases = [
        gs.Phase(epochs=10, strategy=gs.LBFGS(**first), servers=servers),
        gs.Phase(epochs=20, strategy=gs.LBFGS(line_search_fn="armijo", max_iter=4), servers=servers),
    ]
    run = run_of(problem, "allreduce", servers=None, epochs=None, phases=phases)
    alone = run_of(problem, gs.LBFGS(**first), servers=servers, epochs=10)
    assert run.summary["reason"] == "4 iterations"
    assert problem.objective(end_of(run))[0] < problem.objective(end_of(alone))[0]


@pytest.mark.parametrize("servers", [0, 1])
def test_evaluations_are_of_accepted_iterates(servers: int) -> None:
    """Held-out samples are those of the training here, so no loss is above the one before; trials have huge ones."""
    targets = INPUTS @ np.array([1.0, 2.0, 3.0])
    run = gs.simulate(
        model_of(squares),
        gs.from_arrays(INPUTS, targets, test_inputs=INPUTS, test_targets=targets),
        strategy=gs.strategies.GradientDescent(lr=1e6),
        workers=2,
        servers=servers,
        batch_size=8,
        epochs=20,
        evaluate_every=4,
        until=gs.until(test_loss=0.5),
    )
    losses = [event["loss"] for event in run.events if event["event"] == "evaluated"]
    assert len(losses) > 5 and losses == sorted(losses, reverse=True)
    assert losses[-1] <= 0.5 < losses[0]


@pytest.mark.parametrize("spoilt", [True, False], ids=["a sample is not finite", "no loss"])
@pytest.mark.parametrize("epochs", [2, 5])
def test_a_method_that_cannot_begin_ends_the_run(spoilt: bool, epochs: int) -> None:
    targets = INPUTS @ np.array([1.0, 2.0, 3.0])
    if spoilt:
        targets[5] = np.nan
    model = model_of(squares if spoilt else lambda *at: squares(*at)[1])
    options: dict[str, Any] = {"strategy": gs.LBFGS(), "workers": 2, "servers": 0, "batch_size": 16}
    with pytest.raises(GradientError, match="where the method begins, the loss or the gradient"):
        gs.simulate(model, (INPUTS, targets), epochs=epochs, **options)


@pytest.mark.parametrize("batch_size", [64, 8])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_where_the_loss_has_no_value_is_shortened(workers: int, batch_size: int) -> None:
    def barrier(at: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
        w = at["w"]
        with np.errstate(invalid="ignore"):
            return float((10 * w - np.log(w)).sum()), {"w": 10 - 1 / w}

    run = gs.simulate(
        model_of(barrier, (3.0, 0.01)),
        (INPUTS[:, :2], INPUTS[:, 0]),
        strategy=gs.LBFGS(),
        workers=workers,
        servers=0,
        batch_size=batch_size,
        epochs=60,
    )
    assert np.allclose(run.parameters["w"], 0.1, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elems", [1, 33, 1000, 2 * BLOCK + 77])
def test_arithmetic_is_rounded_as_on_any_processor(dtype: torch.dtype, elems: int) -> None:
    """Products and sums one by one: NumPy has no fused ones. `torch.add` with a factor may fuse them."""
    x, y = (torch.randn(elems, generator=torch.Generator().manual_seed(n), dtype=dtype) for n in (1, 2))
    products = np.zeros(min(BLOCK, elems))
    for start in range(0, elems, BLOCK):
        some = x[start : start + BLOCK].double().numpy() * y[start : start + BLOCK].double().numpy()
        products[: len(some)] += some
    while len(products) > FEW:
        half = -(-len(products) // 2)
        products = np.concatenate(
            [products[: len(products) - half] + products[half:], products[len(products) - half : half]]
        )
    factor = x.numpy().dtype.type(0.3)
    scaled = y.numpy() + x.numpy() * factor
    assert perform([dot("x", "y"), add("y", 0.3, "x")], {"x": x, "y": y}) == [math.fsum(products)]
    assert y.numpy().tobytes() == scaled.tobytes()


@pytest.mark.parametrize("servers", [0, 2])
def test_an_ended_method_passes_nothing_over(servers: int) -> None:
    """Workers wait for the end of the run: its figures count the portions that were computed."""
    run = run_of(Softmax(), servers=servers)
    computed = 7 * 120  # samples: a pass at the beginning, and one for each iteration
    assert computed <= run.summary["samples_accounted"] <= computed + 3 * 10


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"optimizer": gs.optim.SGD(lr=0.1)}, "makes its own steps"),
        ({"clip_norm": 0.5}, "clip_norm would clip each portion"),
        ({"codec": "float16"}, "a line search needs the exact sum"),
        ({"noise_scale": True}, "of which a batch method makes no step"),
        ({"strategy": "downpour"}, "expected at least 1"),
        ({"epochs": 1}, "the first pass over the data has the loss and the gradient where the method begins"),
        ({"record": True}, "LBFGS in a group"),
    ],
)
def test_what_a_batch_method_cannot_do_is_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        run_of(Softmax(), **{"servers": 0, **options})
