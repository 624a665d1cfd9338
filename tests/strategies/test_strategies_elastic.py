"""Elastic averaging: one side of an exchange gains exactly the other's loss, and all meet at the optimum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan
from gradstream.errors import ConfigError
from gradstream.job.files import load_job
from gradstream.model.base import Model
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.strategies.together import Barrier
from gradstream.testing import check_strategy
from gradstream.testing.properties import BrokenPropertyError, Property, complete, deaths, resumes
from gradstream.testing.runs import Sized, Tokens, kill_at, least_squares, numbered
from gradstream.testing.trials import token_run
from gradstream.worker.server.exchange import ServerExchange
from gradstream.worker.server.next_update import ElasticPull

LR = 2.0**-7
FEATURES = 200  # 4 chunks of 64 elements
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01, jitter=Exponential())},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)
JOB = Path(__file__).resolve().parents[2] / "examples" / "linear_regression.py"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """The workers' own parameters when their strategy has come to its end, by rank."""
    found: dict[int, torch.Tensor] = {}
    flush = ServerExchange.flush

    async def noted(self: ServerExchange) -> None:
        await flush(self)
        found[self.replica.rank] = self.replica.parameters.tensor.clone()

    monkeypatch.setattr(ServerExchange, "flush", noted)
    return found


# ---- the arithmetic ---------------------------------------------------------------------------


def exchange(x: torch.Tensor, y: torch.Tensor, share: float, pull: Any = ElasticPull) -> torch.Tensor:
    """Both sides of one exchange; x is changed in place, y comes back."""
    difference = y.clone()
    pull(share)(x, difference)
    return y + difference


class PulledTwice(ElasticPull):
    """The common bug: the second line takes the x that the first has changed already."""

    def __call__(self, parameters: torch.Tensor, fetched: torch.Tensor) -> None:
        parameters.sub_(parameters - fetched, alpha=self.share)
        torch.sub(parameters, fetched, out=fetched).mul_(self.share)


def test_an_exchange_keeps_the_sum_of_both_sides_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    elems = (1 << 17) + 100  # more than a block
    x, y = (torch.from_numpy(rng.integers(-1000, 1000, elems).astype(np.float32)) for _ in range(2))
    before, moved = x + y, x.clone()
    y_after = exchange(moved, y, 0.5)
    assert torch.equal(moved + y_after, before)
    assert torch.equal(moved, y_after)  # half of the way from both sides
    wrong = x.clone()
    assert not torch.equal(wrong + exchange(wrong, y, 0.5, PulledTwice), before)


# ---- runs ---------------------------------------------------------------------------------------

LAWFUL = gs.ElasticAveraging(every=2)


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(LAWFUL).broken


@pytest.mark.parametrize("law", [resumes, deaths])
def test_in_step_it_obeys_those_that_waiting_could_break(law: Property) -> None:
    assert law(gs.ElasticAveraging(every=2, synchronous=True))


@pytest.mark.parametrize("synchronous", [False, True])
def test_all_sides_together_keep_what_was_found_to_the_bit(
    synchronous: bool, own: dict[int, torch.Tensor]
) -> None:
    """With α = 1/2 a count is divided by powers of 2 only: x̃ + Σ x_i counts each sample exactly."""
    strategy = gs.ElasticAveraging(every=3, moving_rate=0.5, synchronous=synchronous)
    outcome = token_run(strategy, workers=2, epochs=2)
    assert outcome.run is not None
    total = torch.from_numpy(outcome.run.parameters["tokens"]).flatten() + sum(own.values())
    assert torch.equal(total.view(4, 64)[:, :24], torch.full((4, 24), 2.0))


def test_the_common_bug_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(LAWFUL)
    monkeypatch.setattr(ElasticPull, "__call__", PulledTwice.__call__)
    with pytest.raises(BrokenPropertyError, match="takes from a worker it must add"):
        complete(LAWFUL)


def shares_of(
    data: ArrayDataset, workers: int, steps: int
) -> Iterator[tuple[int, list[np.ndarray[Any, Any]]]]:
    """Each worker's minibatches of 4, by rank."""
    plan = PartitionPlan(data.num_samples, 4, workers, seed=3)
    for rank in range(workers):
        places = [divmod(step, plan.batches_per_epoch(rank)) for step in range(steps)]
        yield rank, [plan.ids(BatchRef(epoch, rank, batch)) for epoch, batch in places]


def gradient_of(model: Model, w: torch.Tensor, data: ArrayDataset, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    gradient = torch.zeros_like(w)
    model.gradient(w, data.batch(ids), gradient, seed=0, report=lambda _: None)
    return gradient


def descend(w: torch.Tensor, gradient: torch.Tensor) -> None:
    gs.optim.SGD(lr=LR).apply(w, gradient, {}, lr=LR, step=1)


@pytest.mark.parametrize("synchronous", [False, True])
def test_without_a_spring_workers_are_on_their_own(synchronous: bool, own: dict[int, torch.Tensor]) -> None:
    """α = 0: each x_i is SGD on the worker's own data, bit for bit, and x̃ never moves."""
    model, data = least_squares(96, FEATURES, whole=False, reduction="mean")
    strategy = gs.ElasticAveraging(every=2, moving_rate=0.0, synchronous=synchronous)
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=LR), workers=3, servers=2, batch_size=4,
        steps=11, seed=3, chunk_elems=64, assignment="partitions", config=UNEVEN if synchronous else SimulationConfig(),
    )  # fmt: skip
    assert not run.parameters["w"].any()
    for rank, batches in shares_of(data, 3, 11):
        w = torch.zeros(FEATURES, dtype=torch.float64)
        for ids in batches:
            descend(w, gradient_of(model, w, data, ids))
        assert torch.equal(own[rank], w)


def test_synchronous_is_the_papers_formula(own: dict[int, torch.Tensor]) -> None:
    """x̃ ← (1 - β)·x̃ + β·mean(x_i), by one node that has all x_i; the same bits on any network."""
    model, data = least_squares(96, FEATURES, whole=False, reduction="mean")
    alpha, centre = 0.2, torch.zeros(FEATURES, dtype=torch.float64)
    x = [centre.clone() for _ in range(3)]
    for step in range(12):
        gradients = [gradient_of(model, x[r], data, ids[step]) for r, ids in shares_of(data, 3, 12)]
        if step and step % 3 == 0:
            centre = meet(x, centre, alpha)
        for w, gradient in zip(x, gradients, strict=True):
            descend(w, gradient)
    centre = meet(x, centre, alpha)
    options: dict[str, Any] = {"workers": 3, "batch_size": 4, "steps": 12, "seed": 3, "chunk_elems": 64}
    strategy = gs.ElasticAveraging(every=3, moving_rate=alpha, synchronous=True)
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=LR), servers=2, config=UNEVEN, **options
    )
    assert np.array_equal(run.parameters["w"], centre.numpy())
    assert all(torch.equal(own[rank], x[rank]) for rank in range(3))


def meet(x: list[torch.Tensor], centre: torch.Tensor, alpha: float) -> torch.Tensor:
    """One exchange of all with the same centre, summed by rank."""
    differences = [alpha * (w - centre) for w in x]
    for w, difference in zip(x, differences, strict=True):
        w.sub_(difference)
    return centre + (differences[0] + differences[1] + differences[2])


@pytest.mark.parametrize("synchronous", [False, True])
def test_all_meet_at_the_optimum_of_a_quadratic(synchronous: bool, own: dict[int, torch.Tensor]) -> None:
    """Without noise x_i and x̃ go to x* linearly: as many steps again divide the distance as much again."""
    optimum = np.array([1.0, -2.0, 3.0])
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(3)},
        outputs=lambda p, x: x,
        gradients=lambda p, x, y: {"w": np.array([1.0, 0.5, 2.0]) * (p["w"] - optimum)},
        dtype="float64",
    )
    strategy = gs.ElasticAveraging(every=4, synchronous=synchronous)
    distances = []
    for steps in (40, 80, 120):
        run = simulate(
            model, numbered(12), strategy=strategy, optimizer=gs.optim.SGD(lr=0.2), workers=3, batch_size=4,
            steps=steps, config=UNEVEN,
        )  # fmt: skip
        places = [run.parameters["w"], *(own[rank].numpy() for rank in range(3))]
        distances.append([np.linalg.norm(place - optimum) for place in places])
    for place in range(4):
        first, second = (distances[i + 1][place] / distances[i][place] for i in range(2))
        assert second < 0.1
        assert 0.5 < second / first < 2.0


def test_alone_with_nesterovs_momentum_it_is_torchs_rule() -> None:
    """EAMSGD of one worker that meets the centre once, at the end, and wholly: δ = 0.99, bit for bit."""
    model, data = least_squares(64, FEATURES, whole=False, reduction="mean")
    w = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    rule = torch.optim.SGD([w], lr=0.001, momentum=0.99, nesterov=True, fused=True)
    ((_, batches),) = shares_of(data, 1, 11)
    for ids in batches:
        w.grad = gradient_of(model, w.detach(), data, ids)
        rule.step()
    strategy = gs.strategies.EAMSGD(every=100, moving_rate=1.0)
    run = simulate(model, data, strategy=strategy, workers=1, batch_size=4, steps=11, seed=3, chunk_elems=64)
    assert np.array_equal(run.parameters["w"], w.detach().numpy())


def algorithm_2(model: Model, data: ArrayDataset, *, ahead: bool) -> torch.Tensor:
    """The centre of one worker's EAMSGD in the paper's letters, α = 0.5, τ = 3, δ = 0.9.

    Args:
        ahead: the spring pulls at x + δv; else at x, as it is printed.
    """
    x, v, centre = (torch.zeros(FEATURES, dtype=torch.float64) for _ in range(3))
    ((_, batches),) = shares_of(data, 1, 11)
    for step, ids in enumerate(batches):
        taken_at = x + 0.9 * v
        if step and step % 3 == 0:
            difference = 0.5 * ((taken_at if ahead else x) - centre)
            x, centre = x - difference, centre + difference
        v = 0.9 * v - 0.01 * gradient_of(model, taken_at, data, ids)
        x = x + v
    return centre + 0.5 * ((x + 0.9 * v if ahead else x) - centre)  # at the end, once more


def test_with_nesterovs_momentum_the_spring_pulls_where_the_gradient_is_taken() -> None:
    model, data = least_squares(64, FEATURES, whole=False, reduction="mean")
    found = simulate(
        model, data, strategy=gs.strategies.EAMSGD(every=3, moving_rate=0.5), optimizer=gs.optim.Nesterov(0.01, 0.9),
        workers=1, batch_size=4, steps=11, seed=3, chunk_elems=64,
    ).parameters["w"]  # fmt: skip
    assert np.allclose(found, algorithm_2(model, data, ahead=True).numpy(), rtol=0, atol=1e-13)
    assert not np.allclose(found, algorithm_2(model, data, ahead=False).numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_checkpoint_is_an_exchange_and_training_goes_on(
    synchronous: bool, own: dict[int, torch.Tensor]
) -> None:
    strategy = gs.ElasticAveraging(every=3, moving_rate=0.5, synchronous=synchronous)
    run = simulate(
        Tokens(num_chunks=4), numbered(24), strategy=strategy, optimizer=gs.optim.SGD(lr=1.0), workers=2,
        batch_size=2, epochs=4, chunk_elems=64, checkpoint_every=10, storage=MemoryStorage(), config=UNEVEN,
    )  # fmt: skip
    assert sum(event["event"] == "checkpoint" for event in run.events) >= 2
    total = torch.from_numpy(run.parameters["tokens"]).flatten() + sum(own.values())
    assert torch.allclose(total.view(4, 64)[:, :24], torch.full((4, 24), 4.0), atol=1e-5)


def test_a_lost_worker_stops_nobody() -> None:
    model, data = least_squares(240, 8, whole=False, reduction="mean")
    for synchronous in (False, True):
        strategy = gs.ElasticAveraging(every=2, synchronous=synchronous)
        run = simulate(
            model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=0.02), workers=3, servers=2, batch_size=8,
            epochs=6, chunk_elems=64, config=UNEVEN, script=kill_at("worker-1", 0.2),
        )  # fmt: skip
        assert run.summary["workers_lost"] == ["worker-1"]
        assert run.summary["samples_accounted"] == 6 * 240


def test_whom_an_exchange_waits_for() -> None:
    rule = Barrier(frozenset({0, 1, 2}))
    assert rule.awaited(0, ()) == ["worker-0", "worker-1", "worker-2"]
    assert rule.among(frozenset({2})).awaited(0, ()) == ["worker-2"]
    assert rule.due(0, ()) == ()


def test_bytes_of_an_exchange_are_those_of_a_push_and_a_fetch() -> None:
    """4N up and 4N down in τ steps, in a world that holds no parameters at all."""
    elems, config = 1 << 20, SimulationConfig(shape_only=True, costs={"gradient": Cost(base_s=0.1)})
    for strategy in (gs.ElasticAveraging(every=5), gs.strategies.EAMSGD(every=5)):
        run = simulate(
            Sized([elems]), numbered(160), strategy=strategy, workers=2, batch_size=4, epochs=1, config=config
        )
        exchanges = 2 * 20 // 5
        assert run.summary["pushed_bytes"] == 4 * elems * (exchanges + 1)  # and the initial parameters
        assert run.summary["fetched_bytes"] == 4 * elems * (exchanges + 2 + 1)  # to begin with; the result


def test_real_processes() -> None:
    options: dict[str, Any] = {"strategy": "elastic-averaging", "strategy_options": {"every": 2}}
    run = gs.train(load_job(str(JOB)), epochs=8, workers=2, **options)
    assert np.allclose(run.parameters["weights"], [2.0, -1.0, 0.5], atol=0.2)


@pytest.mark.parametrize("options", [{"every": 0}, {"moving_rate": 1.5}, {"moving_rate": -0.1}], ids=str)
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"EAMSGD\((every|moving_rate)="):
        gs.strategies.EAMSGD(**options)
