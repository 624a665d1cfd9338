"""Reports of evaluations that counted samples twice, or saw another model than the one that was trained."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from acted_loops import DEADLINES, alone, close, flat, joined, line, part, samples, sgd, step
from gradstream._simulate import simulate
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.testing.sessions import loop_in_threads

WORLD = SimulationConfig(costs={"gradient": Cost(base_s=0.01), "evaluate": Cost(base_s=0.001)})


def classified(held_out: int, **options: Any) -> tuple[gs.Run, float, float]:
    """A run of two classes, with (accuracy, loss) of its final model on the held-out samples, by torch alone."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(24 + held_out, 3)).astype("float32")
    classes = (inputs.sum(1) + generator.normal(size=24 + held_out) > 0).astype("int64")
    data = gs.from_arrays(inputs[:24], classes[:24], inputs[24:], classes[24:])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 2)

    given: dict[str, Any] = {
        "workers": 4,
        "batch_size": 2,
        "epochs": 2,
        "evaluate_every": "epoch",
        "config": WORLD,
    }
    given |= {"optimizer": gs.optim.SGD(lr=0.1), "strategy": "synchronous"}
    run = simulate(gs.from_torch(build, nn.functional.cross_entropy), data, **(given | options))
    weights = {name: torch.as_tensor(np.asarray(value)) for name, value in run.parameters.items()}
    outputs = torch.as_tensor(inputs[24:]) @ weights["weight"].T + weights["bias"]
    targets = torch.as_tensor(classes[24:])
    right = (outputs.argmax(1) == targets).double().mean()
    return run, float(right), float(nn.functional.cross_entropy(outputs, targets))


class Seen:
    """A metric that gets its samples batch by batch, as those of torchmetrics: how many there were."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.count += len(outputs)

    def compute(self) -> float:
        return float(self.count)


@pytest.mark.parametrize("held_out", [3, 13])
def test_each_held_out_sample_counts_once_whatever_the_number_of_workers(held_out: int) -> None:
    """pytorch/pytorch#25162: to give all processes as many, a sampler repeated samples, also of a validation."""
    run, accuracy, loss = classified(held_out, metrics={"seen": lambda outputs, targets: float(len(outputs))})
    final = run.evaluations[-1]
    assert final["held_out"] == final["metrics"]["seen"] == held_out
    assert final["accuracy"] == pytest.approx(accuracy)
    assert final["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_metric_that_is_updated_batch_by_batch_sees_no_filling() -> None:
    """mosaicml/composer#2218: samples that filled up the last minibatches went into metrics like others."""
    run, accuracy, loss = classified(300, metrics={"seen": Seen})  # 256 and 44
    assert run.evaluations[-1]["metrics"]["seen"] == 300
    found = run.evaluate(batch_size=7)  # 42 of 7, and 6
    assert found.metrics["seen"] == 300
    assert found.accuracy == run.evaluations[-1]["accuracy"] == pytest.approx(accuracy)
    assert found.loss == pytest.approx(loss, rel=1e-5)


def test_a_result_does_not_depend_on_the_number_of_workers() -> None:
    """pytorch/pytorch#22584: a validation had other results with other numbers of processes, on the same model."""
    still = {"optimizer": gs.optim.SGD(lr=1e-30)}
    found = [classified(13, workers=workers, **still)[0].evaluations[-1] for workers in (1, 2, 3)]
    assert len({(one["accuracy"], one["loss"], one["held_out"]) for one in found}) == 1


def test_fewer_held_out_samples_than_workers_are_evaluated() -> None:
    """pytorch/pytorch#45324: a data set of less than half as many samples as processes could not be divided."""
    run, accuracy, _ = classified(1, workers=6)
    assert run.evaluations[-1]["held_out"] == 1
    assert run.evaluations[-1]["accuracy"] == accuracy


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce"])
def test_the_statistics_of_all_workers_are_in_the_final_model(strategy: str) -> None:
    """mlcommons/training#289: an evaluation had the running means of one process, which had seen few of the samples."""
    data = samples(24)
    sizes = [5, 3]  # of each worker's minibatches

    def mine(rank: int, number: int) -> torch.Tensor:
        start = 8 * number + (0 if rank == 0 else 5)
        return part(data, start, start + sizes[rank])[0] + rank

    def loop(session: gs.Session) -> tuple[torch.Tensor, torch.Tensor]:
        made = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        model, optimizer = session.wrap(made, torch.optim.SGD(made[1].parameters(), lr=0.1))
        for number in range(3):
            x = mine(session.rank, number)
            step(model, optimizer, (x, x.sum(1, keepdim=True)))
        session.close()
        made.eval()
        return made[0].running_mean.clone(), made(data[0]).detach()  # type: ignore[operator]

    found = loop_in_threads(loop, strategy=strategy, deadlines=DEADLINES)
    assert torch.equal(found[0][1], found[1][1])  # each worker evaluates alike
    means = []
    for rank in range(2):
        norm = nn.BatchNorm1d(3).double()
        for number in range(3):
            norm(mine(rank, number))
        assert norm.running_mean is not None
        means.append(norm.running_mean * sizes[rank] / 8)
    torch.testing.assert_close(found[0][0], means[0] + means[1])


def test_others_wait_for_a_validation_of_worker_0_alone() -> None:
    """huggingface/accelerate#3861: while one process validated, the others' next exchange ran into its time limit."""
    data = samples(24)
    deadlines = gs.Deadlines(join_s=60, silence_s=0.5, lease_s=0.5, retry_s=0.5)

    def batch(number: int, rank: int) -> Any:
        return part(data, 8 * number + 4 * rank, 8 * number + 4 * rank + 4)

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        for number in range(3):
            if session.is_main and number == 1:
                made.eval()
                with torch.no_grad():
                    model(data[0][:3])
                time.sleep(0.8)  # longer than any of the deadlines
                made.train()
            step(model, optimizer, batch(number, session.rank))
        session.close()
        return flat(made)

    found = loop_in_threads(loop, strategy="allreduce", deadlines=deadlines)
    close(found, alone(joined(batch(number, 0), batch(number, 1)) for number in range(3)))
