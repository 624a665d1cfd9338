"""Learning-rate schedules: their values, what they depend on, and how they travel."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError
from gradstream.job.code import find_function, load_module, place_of
from gradstream.job.descriptions import describe
from gradstream.job.registry import find_optimizer
from gradstream.optim.schedules import Position, Rate, nominal_rate, rate_at
from gradstream.strategies import Strategy
from gradstream.testing.runs import QUICK, Tokens, kill_at, least_squares, numbered

STEPS, PER_EPOCH = 40, 8


def rates(lr: Rate, steps: int = STEPS) -> list[float]:
    return [rate_at(lr, Position(step, steps, PER_EPOCH)) for step in range(steps)]


def torch_rates(make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


lr_scheduler = torch.optim.lr_scheduler
SAME_AS_TORCH = [
    pytest.param(
        gs.schedules.Cosine(0.5, end=0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, 0.1),
        id="cosine",
    ),
    pytest.param(
        gs.schedules.StepDecay(0.5, 7, unit="steps"), lambda o: lr_scheduler.StepLR(o, 7), id="steps"
    ),
    pytest.param(
        gs.schedules.StepDecay(0.5, 2), lambda o: lr_scheduler.StepLR(o, 2 * PER_EPOCH), id="epochs"
    ),
    pytest.param(
        gs.schedules.Linear(0.5, 0.25), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.5, STEPS), id="linear"
    ),
    pytest.param(
        gs.schedules.InverseRoot(0.5, over=3),
        lambda o: lr_scheduler.LambdaLR(o, lambda t: (1 + t / 3) ** -0.5),
        id="root",
    ),
    pytest.param(gs.schedules.Constant(0.5), lambda o: lr_scheduler.ConstantLR(o, 1.0), id="constant"),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME_AS_TORCH)
def test_values_are_those_of_torch(ours: Rate, theirs: Any) -> None:
    assert rates(ours) == pytest.approx(torch_rates(theirs))


def test_one_cycle_goes_up_and_down() -> None:
    found = rates(gs.schedules.OneCycle(1.0, rise=0.25))
    assert found[0] == pytest.approx(1 / 25)
    assert found[10] == max(found) == 1.0
    assert found == sorted(found[:11]) + sorted(found[11:], reverse=True)
    assert found[-1] < 0.01


def test_warmup_and_chain_compose() -> None:
    assert rates(gs.schedules.Warmup(0.5, 5))[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert rates(gs.schedules.Warmup(0.5, 0.5, "epochs"))[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    chained = rates(gs.schedules.Chain(0.5, 2, gs.schedules.Cosine(0.4)))
    assert chained[:16] == [0.5] * 16
    assert chained[16:] == rates(gs.schedules.Cosine(0.4), STEPS - 16)  # what is left of the run is its run
    assert nominal_rate(gs.schedules.Warmup(gs.schedules.Chain(gs.schedules.Cosine(0.4), 1, 0.1), 3)) == 0.4


def test_gradual_warmup_is_the_closed_form_in_every_iteration() -> None:
    """Goyal 2017: from η = 0.1 by equal steps to kη = 0.1 · kn/256, during the first epochs."""
    target = gs.schedules.linear_scaling(0.1, samples=256 * 32)
    assert target == 3.2
    found = rates(gs.schedules.Warmup(target, 2, "epochs", start=0.1))
    assert found[:16] == [0.1 + (target - 0.1) * t / 16 for t in range(16)]
    assert found[16:] == [target] * (STEPS - 16)
    assert rates(gs.schedules.Warmup(0.5, 5, start=0.5)) == [0.5] * STEPS


def test_back_off_falls_as_one_over_t() -> None:
    rate = gs.schedules.BackOff(0.5, first=4, factor=0.5, unit="steps")
    rates = [rate_at(rate, Position(step, 100, 10)) for step in range(29)]
    assert rates == [0.5] * 4 + [0.25] * 8 + [0.125] * 16 + [0.0625]
    slow = gs.schedules.BackOff(1.0)  # an epoch, then 1/0.9 epochs, then 1/0.81
    for epochs in (10, 100, 1000):
        now = rate_at(slow, Position(10 * epochs, 10_000, 10))
        assert now == pytest.approx(1 / (1 + epochs * (1 / 0.9 - 1)), rel=0.12)


BAD: list[tuple[Any, str]] = [
    (lambda: gs.optim.SGD(lr=gs.schedules.Cosine(-1.0)), "Cosine: lr is -1.0"),
    (lambda: gs.optim.SGD(lr=0.0), "SGD: lr is 0.0"),
    (lambda: gs.schedules.StepDecay(0.1, 0), "every is 0"),
    (lambda: gs.schedules.StepDecay(0.1, 1, unit="weeks"), "unit is 'weeks'; expected 'steps' or 'epochs'"),  # type: ignore[arg-type]
    (lambda: gs.schedules.OneCycle(0.1, rise=1.5), "rise is 1.5"),
    (lambda: gs.schedules.InverseRoot(0.1, over=0), "over is 0"),
    (lambda: gs.schedules.BackOff(0.1, factor=1.0), "factor is 1.0"),
    (lambda: gs.schedules.Warmup(gs.schedules.Cosine(0.1), 0), "length is 0"),
    (lambda: gs.schedules.Warmup(math.nan, 5), "then is nan"),
    (lambda: gs.schedules.Warmup(0.1, 5, start=0.0), "start is 0.0"),
    (lambda: gs.schedules.linear_scaling(0.1, 0), "samples is 0"),
    (lambda: gs.schedules.Chain(0.1, -1, 0.2), "at is -1"),
    (lambda: rate_at(lambda _: -0.5, Position(3, 10, 10)), r"returned -0.5 at step 3 of 10"),
    (lambda: rate_at(lambda _: "x", Position(3, 10, 10)), r"returned 'x'"),  # type: ignore[arg-type,return-value]
    (lambda: nominal_rate(lambda _: 0.5), "a function without this field"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_values_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


SCHEDULE = gs.schedules.Warmup(gs.schedules.Cosine(2.0**-6), 4)


@pytest.mark.parametrize("servers", [1, 3])
def test_synchronous_rounds_have_the_rate_of_their_number(servers: int) -> None:
    """The same bits as one process that counts its own steps, with any number of shards."""
    model, data = least_squares(60, 300, whole=False)
    plan, w = RoundPlan(60, 10, 2, seed=1), torch.zeros(300, dtype=torch.float64)
    rule = gs.optim.SGD(lr=0.1)
    for step in range(9):
        epoch, batch = divmod(step, 3)
        parts = [torch.zeros_like(w) for _ in range(2)]
        for rank, part in enumerate(parts):
            ids = plan.ids(BatchRef(epoch, rank, batch))
            model.gradient(w, data.batch(ids), part, seed=0, report=lambda _: None)
        total = torch.mul(parts[0], 1 / 20).add_(parts[1], alpha=1 / 20)
        rule.apply(w, total, {}, lr=SCHEDULE(Position(step, 9, 3)), step=step + 1)
    run = simulate(
        model, data, strategy="synchronous", optimizer=gs.optim.SGD(lr=SCHEDULE), workers=2, servers=servers,
        batch_size=10, epochs=3, seed=1, chunk_elems=64,
    )  # fmt: skip
    assert np.array_equal(run.parameters["w"], w.numpy())
    rates = {(row["rank"], row["step"]): row["lr"] for row in run.history}
    assert rates == {(rank, step): SCHEDULE(Position(step, 9, 3)) for rank in (0, 1) for step in range(9)}


def test_a_minibatch_keeps_its_rate_whoever_computes_it() -> None:
    """A dead worker's minibatches are taken over with the rates of their own place in the run."""
    planned = {gs.schedules.Linear(1.0, 0.5)(Position(step, 48, 16)) for step in range(48)}
    lr = gs.schedules.Linear(1.0, 0.5)
    events: list[Any] = []
    config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.01)})
    simulate(
        Tokens(2), numbered(64), strategy="downpour", optimizer=gs.optim.SGD(lr=lr), workers=2, batch_size=2,
        epochs=3, chunk_elems=64, deadlines=QUICK, config=config, script=kill_at("worker-1", 0.1),
        on_event=events.append,
    )  # fmt: skip
    steps = [event for event in events if event["event"] == "step"]
    assert sum(step["rank"] == 0 for step in steps) > 60  # some of them were worker 1's
    # A minibatch of worker 1 that was in the model when it died is in no event, and is not computed again.
    assert {step["lr"] for step in steps} <= planned
    assert len({step["lr"] for step in steps}) >= len(planned) - 2
    assert min(step["lr"] for step in steps) == min(planned)


@pytest.mark.parametrize("local_lr", [None, 2.0**-5])
def test_local_steps_scale_along(local_lr: float | None) -> None:
    """Downpour's local rate keeps its ratio to the schedule's: here the worker never fetches again."""
    model, data = least_squares(16, 64, grid=2.0**-10)
    strategy = gs.Downpour(push_every=4, fetch_every=8, overlap=False, local_lr=local_lr)
    lr = gs.schedules.StepDecay(2.0**-6, 4, 0.5, unit="steps")
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=lr), workers=1, batch_size=2, steps=8,
        chunk_elems=64,
    )  # fmt: skip
    local, w = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    plan, ratio = RoundPlan(16, 2, 1), 1.0 if local_lr is None else local_lr * 2**6
    for step in range(8):
        gradient = torch.zeros_like(w)
        ids = plan.ids(BatchRef(0, 0, step))
        model.gradient(local, data.batch(ids), gradient, seed=0, report=lambda _: None)
        gradient /= 2
        rate = lr(Position(step, 8, 8))
        local -= ratio * rate * gradient
        w -= rate * gradient  # pushes are sums of four of one rate
    assert np.array_equal(run.parameters["w"], w.numpy())


def a_rate(position: Position) -> float:
    return 0.1 / (1 + position.epoch)


def test_a_function_has_no_rate_for_local_steps() -> None:
    model, data = least_squares(16, 4)
    strategy: Strategy = gs.Downpour(fetch_every=2, local_lr=0.1)
    with pytest.raises(ConfigError, match="a function without this field"):
        simulate(
            model,
            data,
            strategy=strategy,
            optimizer=gs.optim.SGD(lr=a_rate),
            workers=1,
            batch_size=2,
            steps=2,
        )


def test_schedules_travel_as_classes_and_places() -> None:
    rule = gs.optim.Adam(lr=gs.schedules.Warmup(gs.schedules.Chain(a_rate, 1.5, gs.schedules.Cosine(0.1)), 3))
    described = json.loads(json.dumps(describe(rule)["fields"]))
    assert described["lr"]["class"] == "gradstream.optim.schedules:Warmup"
    assert find_optimizer("adam", described) == rule


def test_a_function_of_a_job_file_is_found_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("count = []\ncount.append(1)\ndef rate(position):\n    return 0.25\n")
    module = load_module(path, "__gradstream_test_job__")
    place = place_of(module.rate)
    assert place == f"{path}:rate"
    assert find_function(place) is module.rate  # the file is not run again
    assert module.count == [1]
    with pytest.raises(ConfigError, match="did you mean 'rate'"):
        find_function(f"{path}:ratte")
    with pytest.raises(ConfigError, match="top level"):
        place_of(lambda position: 0.5)


def test_a_function_without_a_place_is_refused_before_processes_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = gs.optim.SGD(lr=gs.schedules.Warmup(lambda position: 0.5, 3))
    assert describe(rule)["fields"]["lr"]["fields"]["then"] == {"function": ""}
    (tmp_path / "job.py").write_text("")
    job = gs.Job(*least_squares(8, 3), optimizer=rule, epochs=1, spec=str(tmp_path / "job.py"))
    with pytest.raises(ConfigError, match="define it at the top level of a file"):
        gs.train(job)
    assert not (tmp_path / "runs").exists()
    assert gs.simulate(job, workers=1).history  # which needs no places
