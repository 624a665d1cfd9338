"""Loops of one's own in phases: allreduce first and local SGD after it, in place, at the edge of a step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.session.bridge import LoopBridge
from gradstream.session.roster import Roster
from gradstream.testing.sessions import loop_in_threads
from small_loops import DEADLINES, INPUTS, TARGETS, momentum, net

SOURCE = str(Path(gs.__file__).resolve().parents[1])

Told = dict[str, Any]
FIRST, EVERY, STEPS = 6, 3, 14
POST_LOCAL = [gs.Phase(steps=FIRST), gs.Phase(strategy="local-sgd", strategy_options={"every": EVERY})]


def falls(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Told:
    moved = {
        f"momentum {number}": one["momentum_buffer"]
        for number, one in optimizer.state_dict()["state"].items()
    }
    return {
        name: value.detach().clone() for name, value in {**dict(model.named_parameters()), **moved}.items()
    }


def loop(session: gs.Session, num_steps: int = STEPS, make: Any = momentum) -> list[Told]:
    """The state after each step, on this worker."""
    model, told = net(), list[Told]()
    loader = session.shard(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4, shuffle=True))
    _, optimizer = session.wrap(model, make(model))
    scheduler = falls(optimizer)
    session.register(scheduler=scheduler)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            told.append({**state(model, optimizer), "inputs": inputs.clone(), "targets": targets.clone()})
            assert session.step == len(told)
            if len(told) == num_steps:
                session.close()
                return [*told, state(model, optimizer)]


def by_hand(workers: Sequence[list[Told]]) -> list[nn.Sequential]:
    """Local SGD of torch alone, on the same minibatches, begun from the state after the first phase."""
    models: list[nn.Sequential] = []
    made = []
    for told in workers:
        model = net()
        optimizer = momentum(model)
        scheduler = falls(optimizer)
        for _ in range(FIRST):
            scheduler.step()
        begin = told[FIRST - 1]
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.data.copy_(begin[name])
            optimizer.state[parameter]["momentum_buffer"] = begin[f"momentum {number}"].clone()
        models.append(model)
        made.append((optimizer, scheduler))
    for step in range(FIRST, STEPS):
        for told, model, (optimizer, scheduler) in zip(workers, models, made, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(told[step]["inputs"]), told[step]["targets"]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
        if (step + 1 - FIRST) % EVERY == 0 or step + 1 == STEPS:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([one.detach() for one in same]).mean(0)
                    for one in same:
                        one.copy_(mean)
    return models


def test_a_loop_goes_from_joint_steps_to_local_ones_with_its_optimizers_state() -> None:
    both = loop_in_threads(loop, phases=POST_LOCAL, deadlines=DEADLINES)
    plain = loop_in_threads(lambda session: loop(session, FIRST), deadlines=DEADLINES)
    for found, expected in zip(both, plain, strict=True):
        for one, other in zip(found[:FIRST], expected, strict=False):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
    for found, expected_model in zip(both, by_hand(both), strict=True):
        for name, value in expected_model.named_parameters():
            torch.testing.assert_close(found[-1][name], value.detach(), rtol=1e-9, atol=1e-12)
    local = both[0][FIRST]["0.weight"], both[1][FIRST]["0.weight"]
    assert not torch.equal(*local)  # each has made a step of its own


def test_local_phases_may_follow_one_another_and_a_loop_may_end_before_a_phase_does() -> None:
    longer = gs.Phase(strategy="local-sgd", strategy_options={"every": 5})
    phases = [
        gs.Phase(steps=3),
        gs.Phase(steps=4, strategy="local-sgd", strategy_options={"every": 3}),
        longer,
    ]
    first, second = loop_in_threads(loop, phases=phases, deadlines=DEADLINES)
    equal = [
        all(torch.equal(one[name], other[name]) for name in dict(net().named_parameters()))
        for one, other in zip(first, second, strict=True)
    ]
    # Together in steps 1 to 3; rounds end with steps 6 and 7, where the phase does, and with 12; and at the end.
    assert [number + 1 for number, same in enumerate(equal) if same] == [1, 2, 3, 6, 7, 12, 15]
    short = loop_in_threads(lambda session: loop(session, 2), phases=phases, deadlines=DEADLINES)
    plain = loop_in_threads(lambda session: loop(session, 2), deadlines=DEADLINES)
    assert all(torch.equal(value, plain[0][-1][name]) for name, value in short[0][-1].items())


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([gs.Phase(steps=6), gs.Phase(steps=2)], "the last one lasts as long as the loop"),
        ([gs.Phase(), gs.Phase()], "each phase but the last one has steps"),
        ([gs.Phase(epochs=1), gs.Phase()], "give each phase but the last one steps"),
        ([gs.Phase(steps=6), gs.Phase(batch_size=8)], "leave it out of the phases"),
        ([gs.Phase(steps=6), gs.Phase(strategy="downpour")], "take 'allreduce' and 'local-sgd'"),
        ([gs.Phase(steps=6, strategy="local-sgd"), gs.Phase()], "put phases of 'allreduce' before"),
        ([gs.Phase(steps=6), gs.Phase(strategy=gs.LocalSGD(delay=1))], "leave delay out"),
        ([gs.Phase(steps=6), gs.Phase(strategy=gs.AllReduce(sharded=True))], "leave sharded out"),
    ],
)
def test_what_phases_of_a_loop_cannot_do_is_refused_with_the_remedy(
    phases: list[gs.Phase], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loop_in_threads(loop, phases=phases, deadlines=DEADLINES)


SCRIPT = """
import os, signal
import torch
import gradstream

phases = [gradstream.Phase(steps=6), gradstream.Phase(strategy="local-sgd", strategy_options={"every": 3})]
session = gradstream.join(checkpoint_every=None, phases=phases)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
loader = session.shard(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
session.register(scheduler=scheduler)
for epoch in session.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if session.step == int(os.environ.get("AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)  # as all others do
session.close()
figures = torch.cat([one.detach().flatten().double() for one in (*model.parameters(), *model.buffers())])
print("ends with", session.step, figures.sum().item(), figures.square().sum().item())
"""


@pytest.mark.limit_s(200)
def test_a_run_goes_on_from_the_checkpoint_between_two_phases_with_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)

    def run(*words: str, **environment: str) -> str:
        said = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, "-m", "gradstream", *words]
        done = subprocess.run(
            command, env=said, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=90
        )
        return done.stdout + done.stderr

    ends = re.search(r"ends with .*", run("train", "own.py", "--workers", "2", "--run-dir", "whole"))
    assert ends is not None
    assert "no worker is left" in run("train", "own.py", "--workers", "2", "--run-dir", "run", AT="8")
    again = run("resume", "run")
    assert "the run goes on from checkpoints/" in again
    assert ends[0] in again


def test_two_optimizers_are_refused_in_phases() -> None:
    def two(session: gs.Session) -> None:
        model, other = net(), net()
        session.wrap([model, other], [momentum(model), momentum(other)])

    with pytest.raises(ConfigError, match="got 2 optimizers, expected one"):
        loop_in_threads(two, phases=POST_LOCAL, deadlines=DEADLINES)


def test_a_loss_after_the_last_round_of_a_phase_counts_from_the_first_round_of_the_next() -> None:
    bridge = LoopBridge(None, roster=(roster := Roster(3)))
    bridge.members([0, 1, 2], 0)
    bridge.counts.batches = 7
    bridge._is_between = True
    bridge.members([0, 2], 8)  # in a round in which the ended loops have only met one another
    assert [roster.of(number) for number in (6, 7)] == [(0, 1, 2), (0, 2)]
