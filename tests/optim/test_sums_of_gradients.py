"""Updates that are sums of gradients: each gradient has its own weight decay and its own rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan
from gradstream.errors import ConfigError, UserCodeError
from gradstream.model.base import Model
from gradstream.optim.base import Optimizer
from gradstream.optim.schedules import Position, Rate, rate_at
from gradstream.strategies import ServerWorker, Strategy

STEPS, SAMPLES, BATCH = 11, 44, 4
DECAY = 0.1
Array = np.ndarray[Any, Any]
Tree = Mapping[str, Array]


def regression() -> tuple[Model, ArrayDataset]:
    """Least squares in float64 with two parameters, each long enough for two chunks."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((SAMPLES, 200)), rng.standard_normal(SAMPLES)

    def gradients(parameters: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
        residual = inputs[:, :100] @ parameters["a"] + inputs[:, 100:] @ parameters["b"] - targets
        gradient = residual @ inputs / len(targets)
        return float(residual @ residual) / 2 / len(targets), {"a": gradient[:100], "b": gradient[100:]}

    model = gs.from_functions(
        init=lambda seed: {"a": np.full(100, 0.5), "b": np.full(100, -0.25)},
        outputs=lambda parameters, inputs: inputs[:, :100] @ parameters["a"],
        gradients=gradients,
        dtype="float64",
    )
    return model, gs.from_arrays(x, y)


def batches(data: ArrayDataset) -> list[tuple[Array, Array]]:
    """The minibatches of the only worker."""
    plan = PartitionPlan(SAMPLES, BATCH, 1, seed=3)
    places = [divmod(step, plan.batches_per_epoch(0)) for step in range(STEPS)]
    found = [data.batch(plan.ids(BatchRef(epoch, 0, batch))) for epoch, batch in places]
    return [(one.inputs, one.targets) for one in found]


def run_of(strategy: Strategy, optimizer: Optimizer, **options: Any) -> Tree:
    model, data = regression()
    options = {"workers": 1, "batch_size": BATCH, "steps": STEPS, "chunk_elems": 64, "seed": 3, **options}
    return simulate(model, data, strategy=strategy, optimizer=optimizer, **options).parameters


def rates(lr: Any) -> list[float]:
    return [rate_at(lr, Position(step, STEPS, SAMPLES // BATCH)) for step in range(STEPS)]


def gradient_of(w: Tree, batch: tuple[Array, Array]) -> Tree:
    inputs, targets = batch
    residual = inputs[:, :100] @ w["a"] + inputs[:, 100:] @ w["b"] - targets
    gradient = residual @ inputs / len(targets)
    return {"a": gradient[:100], "b": gradient[100:]}


def local_sgd(lr: Any, momentum: float = 0.0, decays: Any = None, scales: Any = None) -> Tree:
    """The reference: SGD by one node, as numpy has it."""
    decays, scales = decays or {"a": DECAY, "b": DECAY}, scales or {"a": 1.0, "b": 1.0}
    w = {"a": np.full(100, 0.5), "b": np.full(100, -0.25)}
    velocity = {name: np.zeros(100) for name in w}
    for rate, batch in zip(rates(lr), batches(regression()[1]), strict=True):
        gradient = gradient_of(w, batch)
        for name in w:
            velocity[name] = momentum * velocity[name] + gradient[name] + decays[name] * w[name]
            w[name] = w[name] - rate * scales[name] * velocity[name]
    return w


def check_close(got: Tree, expected: Tree) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-13)


def from_rest(position: Position) -> float:
    """Rates that begin, end and pause at 0."""
    return 0.0 if position.step in (0, 1, 5, 10) else 0.02


LRS: dict[str, Rate] = {
    "constant": 0.02,
    "falling": gs.schedules.Linear(0.04),
    "steps": gs.schedules.StepDecay(0.04, 3, 0.5, unit="steps"),
    "pausing": from_rest,
}


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("periods", [(1, 1), (4, 4), (1, 4), (2, 4)], ids=str)
def test_downpour_by_one_worker_is_local_sgd_with_decay_and_schedule(
    periods: tuple[int, int], lr: str, momentum: float
) -> None:
    strategy = gs.Downpour(*periods, overlap=False, local_momentum=momentum)
    got = run_of(strategy, gs.optim.SGD(LRS[lr], weight_decay=DECAY), servers=2)
    check_close(got, local_sgd(LRS[lr], momentum))


def test_groups_have_decay_and_rate_of_their_own_in_local_steps() -> None:
    groups = [{"match": "a", "weight_decay": 0.0}, {"match": "b", "lr_scale": 0.5}]
    strategy = gs.Downpour(4, 4, overlap=False, local_momentum=0.5)
    got = run_of(strategy, gs.optim.SGD(gs.schedules.Linear(0.04), weight_decay=DECAY), groups=groups)
    check_close(got, local_sgd(gs.schedules.Linear(0.04), 0.5, {"a": 0.0, "b": DECAY}, {"a": 1.0, "b": 0.5}))


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("lr", LRS)
def test_ssp_by_one_worker_is_sgd_with_decay_and_schedule(lr: str, bound: int) -> None:
    check_close(run_of(gs.SSP(bound), gs.optim.SGD(LRS[lr], weight_decay=DECAY)), local_sgd(LRS[lr]))


@pytest.mark.parametrize("lr", LRS)
def test_asysg_applies_each_gradient_at_its_own_rate_and_with_its_own_decay(lr: str) -> None:
    """One worker: M gradients of one version, each of the regularised loss, make an update."""
    w = {"a": np.full(100, 0.5), "b": np.full(100, -0.25)}
    step = {name: np.zeros(100) for name in w}
    for index, (rate, batch) in enumerate(zip(rates(LRS[lr]), batches(regression()[1]), strict=True)):
        gradient = gradient_of(w, batch)
        step = {name: step[name] + rate * (gradient[name] + DECAY * w[name]) for name in w}
        if (index + 1) % 4 == 0 or index + 1 == STEPS:
            w = {name: w[name] - step[name] for name in w}
            step = {name: np.zeros(100) for name in w}
    check_close(run_of(gs.strategies.AsySG(4), gs.optim.SGD(LRS[lr], weight_decay=DECAY)), w)


def by_adagrad(total: Array, state: Array, rate: float) -> Array:
    state += total**2
    return -rate * total / (np.sqrt(state) + 1e-10)


def test_a_rule_with_state_makes_one_update_a_push_of_gradients_with_their_decay() -> None:
    """Adagrad: at the rate of the push's first gradient, of Σ η_i/η·(g_i + λ·w_i), w_i by local steps."""
    lr = gs.schedules.StepDecay(0.04, 3, 0.5, unit="steps")
    server = {"a": np.full(100, 0.5), "b": np.full(100, -0.25)}
    state = {name: np.zeros(100) for name in server}
    todo = list(zip(rates(lr), batches(regression()[1]), strict=True))
    for start in range(0, STEPS, 4):
        period = todo[start : start + 4]
        w, total = dict(server), {name: np.zeros(100) for name in server}
        for rate, batch in period:
            gradient = gradient_of(w, batch)
            for name in w:
                decayed = gradient[name] + DECAY * w[name]
                total[name] = total[name] + rate / period[0][0] * decayed
                w[name] = w[name] - rate * decayed
        for name in server:
            server[name] = server[name] + by_adagrad(total[name], state[name], period[0][0])
    got = run_of(gs.Downpour(4, 4, overlap=False), gs.optim.Adagrad(lr, weight_decay=DECAY))
    check_close(got, server)


def test_adamw_takes_its_decay_off_the_parameters_once_a_push() -> None:
    """With local steps of rate 0 all gradients of a period are computed on the server's parameters."""
    server = {"a": np.full(100, 0.5), "b": np.full(100, -0.25)}
    mean, square = ({name: np.zeros(100) for name in server} for _ in range(2))
    todo = batches(regression()[1])
    for push, start in enumerate(range(0, STEPS, 4), 1):
        gradients = [gradient_of(server, batch) for batch in todo[start : start + 4]]
        for name, w in server.items():
            total = sum((one[name] for one in gradients), np.zeros(100))
            mean[name] = 0.9 * mean[name] + 0.1 * total
            square[name] = 0.999 * square[name] + 0.001 * total**2
            moved = (mean[name] / (1 - 0.9**push)) / (np.sqrt(square[name] / (1 - 0.999**push)) + 1e-8)
            server[name] = w * (1 - 0.01 * DECAY) - 0.01 * moved
    strategy = gs.Downpour(4, 4, overlap=False, local_lr=0.0)
    check_close(run_of(strategy, gs.optim.AdamW(0.01, weight_decay=DECAY)), server)


def test_decay_is_refused_where_only_rows_travel_and_where_nobody_would_add_it() -> None:
    class Soon(gs.Downpour):
        """Pushes gradients as they come, which have no decay."""

        async def train(self, worker: ServerWorker) -> None:
            async for batch in worker.batches():
                await worker.pull()
                await worker.server.push_soon(worker.update(worker.gradient_soon(batch)))

    optimizer = gs.optim.SGD(0.01, weight_decay=DECAY)
    with pytest.raises(ConfigError, match="moves every parameter at every update"):
        run_of(gs.Downpour(4, 4, significance=0.1), optimizer)
    with pytest.raises(UserCodeError, match=r"only gradient\(\) adds the decay"):
        run_of(Soon(fetch_every=2), optimizer)


@pytest.mark.parametrize("overlap", [False, True])
def test_significance_keeps_the_sum_of_changes_when_the_rate_changes(overlap: bool) -> None:
    """The rest of a sum keeps its rate: all pushes add up to Σ η_i·g_i, as without significance."""
    lr = gs.schedules.StepDecay(0.04, 3, 0.5, unit="steps")
    options: dict[str, Any] = {"overlap": overlap, "local_lr": 0.0, "fetch_every": 100}
    plain = run_of(gs.Downpour(push_every=2, **options), gs.optim.SGD(lr))
    for significance in (0.01, 100.0):
        strategy = gs.Downpour(push_every=2, significance=significance, **options)
        check_close(run_of(strategy, gs.optim.SGD(lr)), plain)
