"""What `wrap` takes, and refuses before the first step."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, DeadlineError
from gradstream.job.job import Job
from gradstream.run.planning import plan_run
from gradstream.session import joining
from gradstream.session.node import job as session_job
from gradstream.session.rules import description_of
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
MOVING = (gs.Downpour(overlap=False), "diloco")


class Named:
    """Has no text of its own."""


def is_vector(p: torch.Tensor) -> bool:
    return p.ndim == 1


# ---- options of optimizers --------------------------------------------------------------


def described(**options: Any) -> str:
    class Made(torch.optim.Optimizer):
        pass

    return description_of(Made([nn.Parameter(torch.zeros(1))], {"lr": 0.1, **options}))


def test_functions_and_objects_among_options_are_the_same_in_every_process() -> None:
    def options() -> dict[str, Any]:
        def inner(p: Any) -> bool:
            return True

        own = Named()
        return {
            "of the module": is_vector,
            "inner": inner,
            "partial": functools.partial(inner, p=own),
            "object": own,
            "method": own.__init__,  # type: ignore[misc]
            "nested": {"a": [own, (inner, 1)]},
            "tensor": torch.ones(3),
        }

    assert described(**options()) == described(**options())
    assert "0x" not in described(**options())
    assert described(names={"b", "a"}) == described(names={"a", "b"})
    for one, other in (
        ({"a": 1}, {"a": 2}),
        (is_vector, print),
        (torch.ones(2), torch.zeros(2)),
        ((1,), (2,)),
    ):
        assert described(option=one) != described(option=other)


def test_a_loop_whose_options_have_a_function_trains() -> None:
    class Filtered(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, keep: Any) -> None:
            super().__init__(params, lr=lr)
            self.param_groups[0]["keep"] = keep

    def loop(session: gs.Session) -> torch.Tensor:
        model = nn.Linear(2, 1)
        optimizer = Filtered(model.parameters(), 0.1, lambda p: p.ndim == 1)  # each worker makes its own
        session.wrap(model, optimizer)
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach()

    one, other = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    assert torch.equal(one, other)


# ---- modules ----------------------------------------------------------------------------


def tied(how: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    first, last = model[0].get_parameter("weight"), model[2].get_parameter("weight")
    if how == "transposed":
        last.data = first.data.T
    elif how == "buffer":
        model.register_buffer("kept", first.data)
    else:
        last.data = first.data
    if how == "frozen":
        last.requires_grad_(False)
    return model


@pytest.mark.parametrize("strategy", MOVING)
def test_strategies_that_move_parameters_refuse_common_memory(strategy: Any) -> None:
    def loop(session: gs.Session) -> None:
        for how in ("same", "transposed", "buffer", "frozen"):
            model = tied(how)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            with pytest.raises(ConfigError, match=r"'0\.weight'.* share memory .*\"synchronous\""):
                session.wrap(model, optimizer)
        model[2] = nn.Linear(4, 1)
        session.wrap(model, torch.optim.SGD(model[2].parameters(), lr=0.1))

    loop_in_threads(loop, workers=1, strategy=strategy, deadlines=DEADLINES)


@pytest.mark.parametrize("how", ["same", "transposed", "buffer"])
def test_others_train_them_as_torch_does(how: str) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        torch.manual_seed(session.rank)
        model = tied(how)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                if session.rank == 0:
                    parameter.copy_(torch.eye(4) * 0.5 + number)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        session.wrap(model, optimizer)
        mine = inputs if session.world_size == 1 else inputs[session.rank :: 2]
        for _ in range(3):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
        session.close()
        return dict(model.state_dict())

    alone = loop(gs.Session())
    for found in loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("strategy", ["synchronous", MOVING[0]])
def test_lazy_layers_are_refused_until_they_are_made(strategy: Any) -> None:
    def loop(session: gs.Session) -> None:
        refused = r"'1\.\w+' is lazy.*call the model on a minibatch before session.wrap"
        for layer in (nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False)):
            model = nn.Sequential(nn.Linear(3, 3), layer)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(ConfigError, match=refused):
                session.wrap(model, optimizer)
        model(torch.ones(3, 3))
        session.wrap(model, optimizer)

    loop_in_threads(loop, workers=1, strategy=strategy, deadlines=DEADLINES)


# ---- before `wrap` ----------------------------------------------------------------------


def test_workers_wait_for_one_another_before_wrap() -> None:
    told: list[str] = []

    def loop(session: gs.Session) -> None:
        model = nn.Linear(2, 1)
        for number in range(2):
            if session.rank == number:
                time.sleep(0.3)
                told.append(f"made {number}")
            session.barrier()
            told.append(f"read {number}")
        session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.barrier()

    loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    assert told == ["made 0", "read 0", "read 0", "made 1", "read 1", "read 1"]


def test_a_worker_that_does_not_come_to_the_barrier_is_named() -> None:
    def loop(session: gs.Session) -> None:
        if session.rank == 0:
            session.barrier()

    with pytest.raises(DeadlineError, match=r"worker-1.*did not call session.barrier\(\).*join_s"):
        loop_in_threads(loop, strategy="allreduce", deadlines=gs.Deadlines(join_s=1, lease_s=3, retry_s=5))


def test_a_worker_that_does_not_come_to_wrap_is_named_with_the_setting() -> None:
    def loop(session: gs.Session) -> None:
        model = nn.Linear(2, 1)
        if session.rank == 0:
            session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(DeadlineError, match=r"worker-1.*session\.wrap.*join_s"):
        loop_in_threads(loop, strategy="allreduce", deadlines=gs.Deadlines(join_s=1, lease_s=3, retry_s=5))


def test_loops_have_half_an_hour_until_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(joining, "intercept", jobs.append)
    gs.join()
    gs.join(deadlines=gs.Deadlines(join_s=7))
    assert [job.deadlines.join_s for job in jobs] == [1800, 7]


def test_a_loop_that_names_no_strategy_has_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(joining, "intercept", jobs.append)
    gs.join()
    assert jobs[0].strategy == "allreduce"
    with pytest.raises(
        ConfigError, match=r"^servers=2 .* average whole gradients among themselves, .*'downpour'"
    ):
        loop_in_threads(lambda session: None, servers=2)


def test_synchronous_is_allreduce_in_a_loop_of_ones_own() -> None:
    def strategy(strategy: Any, **options: Any) -> Any:
        return plan_run(dataclasses.replace(session_job(), strategy=strategy, **options), "run").strategy

    assert strategy("synchronous") == gs.AllReduce()
    assert strategy(gs.Synchronous(overlap=False), servers=0, codec="int8") == gs.AllReduce(overlap=False)
    for refused, remedy in (
        (gs.Synchronous(backup=1), "leave out backup"),
        (gs.Synchronous(aggregate="median"), "aggregate='median': .* leave aggregate out, or pass a model"),
        (gs.Synchronous(sparse=True), "leave sparse out"),
        (gs.Synchronous(worker_momentum=0.5), "your optimizer may have a momentum"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            strategy(refused)
    for options in ({"servers": 2}, {"acknowledge": "replicated"}):
        with pytest.raises(ConfigError, match=f"leave {next(iter(options))} out, or take a strategy"):
            strategy("synchronous", **options)
    with pytest.raises(ConfigError, match=r"exchange='torch' .* expected strategy='allreduce'"):
        gs.join("synchronous", exchange="torch")
