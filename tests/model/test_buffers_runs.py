"""A CNN with BatchNorm trained by several workers: one model comes of it, the one worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

import gradstream as gs
from gradstream.data import BatchRef, RoundPlan
from gradstream.job.files import load_job
from gradstream.model import TorchModel, average_buffers, from_torch
from gradstream.run import simulated
from gradstream.runtime.virtual import VirtualCluster
from gradstream.worker.replica import Replica

SIZES = (6, 2)  # minibatches of the two workers: averages must be weighted


def cnn() -> nn.Module:
    parts = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )
    return parts.double()


def pictures(num_samples: int = 64, num_test: int = 40) -> Any:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, num_samples + num_test)
    x = rng.standard_normal((len(y), 1, 6, 6)) * (1 + y[:, None, None, None]) + 3
    return gs.from_arrays(x[:num_samples], y[:num_samples], x[num_samples:], y[num_samples:])


def score(model: TorchModel, flat: torch.Tensor, data: Any) -> tuple[float, float]:
    """(accuracy, mean of the outputs): a wrong buffer changes both."""
    outputs = model.outputs(flat, data.test_inputs)
    return float((outputs.argmax(1).numpy() == data.test_targets).mean()), float(outputs.mean())


def by_hand(data: Any, steps: int, lr: float, weights: tuple[int, ...]) -> list[Any]:
    """After each step: (parameters by name, averaged buffers, score). One model for each worker, in turn."""
    workers = [from_torch(cnn, F.cross_entropy) for _ in SIZES]
    flat = torch.empty(workers[0].layout.elems, dtype=torch.float64)
    workers[0].init(0, flat)
    plan = RoundPlan(data.num_samples, SIZES, len(SIZES), seed=0)
    history = []
    for step in range(steps):
        epoch, batch = divmod(step, plan.batches_per_epoch(0))
        joined = torch.zeros_like(flat)
        for rank, model in enumerate(workers):
            gradient = torch.empty_like(flat)
            samples = data.batch(plan.ids(BatchRef(epoch, rank, batch)))
            model.gradient(flat, samples, gradient, seed=0, report=lambda n: None)
            joined += gradient * (SIZES[rank] / sum(SIZES))
        flat -= lr * joined
        buffers = average_buffers(
            [(weight, model.buffers()) for weight, model in zip(weights, workers, strict=True)]
        )
        judge = from_torch(cnn, F.cross_entropy)
        judge.load_buffers(buffers)
        parameters = {name: array.copy() for name, array in judge.tree(flat).items()}
        history.append((parameters, buffers, score(judge, flat, data)))
    return history


def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.parametrize("slow", ["worker-0", "worker-1"])
def test_evaluation_and_saved_model_are_those_of_the_average_by_hand(slow: str) -> None:
    data = pictures()
    config = gs.sim.SimulationConfig(
        costs={"gradient": gs.sim.Cost(per_sample_s=1e-3)},
        network=gs.sim.Network(bandwidth_bytes_s=1e6, link=gs.sim.Link(latency_s=2e-3)),
        speeds={slow: 0.3},
    )
    run = gs.simulate(
        from_torch(cnn, F.cross_entropy),
        data,
        optimizer=gs.optim.SGD(lr=0.05),
        workers=2,
        batch_size=SIZES,
        steps=7,
        chunk_elems=64,
        config=config,
        evaluate_every=3,
        metrics={"mean": mean_output},
    )
    expected = by_hand(data, 7, 0.05, SIZES)
    parameters, buffers, (accuracy, mean) = expected[-1]
    for name, array in {**parameters, **buffers}.items():
        np.testing.assert_allclose(run.parameters[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
    assert run.parameters["1.num_batches_tracked"] == 7
    found = run.evaluate()
    assert found.accuracy == accuracy
    assert found.metrics["mean"] == pytest.approx(mean, rel=1e-9)
    on_the_way = {e["step"]: e["metrics"]["mean"] for e in run.events if e["event"] == "evaluated"}
    assert list(on_the_way) == [3, 6, 7]
    for step, value in on_the_way.items():
        assert value == pytest.approx(expected[step - 1][2][1], rel=1e-9), step
    # the check sees weights, and the step that the buffers are of
    unweighted = by_hand(data, 7, 0.05, (1, 1))
    assert abs(unweighted[-1][2][1] - mean) > 1e-6
    assert abs(expected[3][2][1] - on_the_way[3]) > 1e-6


def evaluations(strategy: str | gs.Strategy, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What three workers find whose messages overtake each other: who hears last of a round's end is drawn."""
    monkeypatch.setattr(simulated, "VirtualCluster", lambda _, *more: VirtualCluster(seed, *more))
    config = gs.sim.SimulationConfig(
        costs={"gradient": gs.sim.Cost(per_sample_s=1e-3)},
        network=gs.sim.Network(link=gs.sim.Link(latency_s=2e-3, jitter_s=2e-2)),
    )
    run = gs.simulate(
        from_torch(cnn, F.cross_entropy),
        pictures(),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=0.05),
        workers=3,
        batch_size=4,
        steps=6,
        config=config,
        evaluate_every=2,
        metrics={"mean": mean_output},
    )
    return [event["metrics"]["mean"] for event in run.events if event["event"] == "evaluated"]


@pytest.mark.parametrize(
    "strategy",
    ["synchronous", gs.strategies.AllReduce("ring"), gs.strategies.LocalSGD(every=2)],
    ids=["synchronous", "ring", "local-sgd"],
)
def test_a_worker_that_hears_late_of_a_rounds_end_changes_no_average(
    strategy: str | gs.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [evaluations(strategy, seed, monkeypatch) for seed in range(6)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-12)
    if (
        strategy == "synchronous"
    ):  # the check sees a minibatch that does not count before its worker has heard
        monkeypatch.setattr(Replica, "seen_samples", property(lambda self: self.samples))
        planted = [evaluations(strategy, seed, monkeypatch) for seed in range(6)]
        assert any(other != pytest.approx(found[0], rel=1e-9) for other in planted)


def test_a_model_that_was_evaluated_trains_again_from_the_beginning() -> None:
    model, data = from_torch(cnn, F.cross_entropy), pictures()
    runs = []
    for _ in range(2):
        run = gs.simulate(model, data, optimizer=gs.optim.SGD(lr=0.05), workers=2, steps=2)
        run.evaluate()
        runs.append(run)
    for name, array in runs[0].parameters.items():
        assert array.tobytes() == runs[1].parameters[name].tobytes(), name


JOB = """
import torch
import gradstream as gs

def build():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(784), torch.nn.Linear(784, 10))

def job():
    model = gs.from_torch(build, torch.nn.functional.cross_entropy)
    return gs.Job(model, gs.data.fashion_mnist(), strategy="downpour", optimizer=gs.optim.SGD(lr=0.1), workers=2,
                  batch_size=50, epochs=1)
"""


def test_real_workers_leave_one_model_that_torch_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("norm.py").write_text(JOB)
    run = gs.train(load_job("norm.py"), run_dir=tmp_path / "run")
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
    module.load_state_dict(load_file(tmp_path / "run/checkpoints/final/model.safetensors"))
    tracked = module.state_dict()["1.num_batches_tracked"].item()
    assert 50 <= tracked <= 100  # the larger of the two workers', which have 100 together
    data = gs.data.fashion_mnist()
    with torch.no_grad():
        outputs = module.eval()(torch.as_tensor(data.test_inputs))
    accuracy = float((outputs.argmax(1).numpy() == data.test_targets).mean())
    assert run.evaluate().accuracy == accuracy
    assert accuracy > 0.5
