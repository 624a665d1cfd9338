"""Objects of the user's own that a run keeps: what they are restored to, and which are refused."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.checkpoint.format import load, save
from gradstream.checkpoint.own_state import STATES
from gradstream.errors import ConfigError, DataError
from gradstream.session.registered import Registered


def carried(registered: Registered) -> Any:
    """The states on their way through a file."""
    return load(save(registered.saved()))


def scheduled(make: Any) -> Any:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    return SimpleNamespace(optimizer=optimizer, scheduler=make(optimizer))


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
            ],
            [4],
        ),
    ],
)
def test_a_scheduler_goes_on_with_the_rates_that_it_had(make: Any) -> None:
    whole, resumed = scheduled(make), scheduled(make)
    stopped = Registered()
    stopped.add({"scheduler": whole.scheduler})
    rates = []
    for step in range(12):
        if step == 6:
            later = Registered()
            later.load(carried(stopped))
            later.add({"scheduler": resumed.scheduler})
        for one in (whole, resumed)[: 1 + (step >= 6)]:
            one.optimizer.step()
            one.scheduler.step()
        rates.append([one.optimizer.param_groups[0] | {"params": ()} for one in (whole, resumed)])
    assert all(one == other for one, other in rates[6:])
    assert rates[5][0] != rates[5][1]


def test_objects_come_back_as_they_were() -> None:
    module = nn.BatchNorm1d(3)
    module(torch.randn(4, 3))
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    counts: dict[Any, Any] = {
        "seen": 3,
        7: (1.5, None, "text", {"set"}),
        "ints": Counter("aab"),
        "order": OrderedDict(b=1, a=2),
        "array": np.arange(3, dtype=np.uint32),
        "half": torch.ones(2, dtype=torch.bfloat16) / 3,
        "by class": defaultdict(int, a=1),
    }
    generators: list[Any] = [
        torch.Generator(),
        random.Random(3),
        np.random.default_rng(3),
        np.random.RandomState(3),
    ]
    objects = {"average": average, "scaler": scaler, "counts": counts, "rng": True}
    objects |= {f"own{number}": one for number, one in enumerate(generators)}
    stopped = Registered()
    stopped.add(objects)
    arrays = carried(stopped)

    def drawn() -> list[Any]:
        torch_own, python_own, numpy_own, old_own = generators
        process = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
        own = [
            torch.rand(1, generator=torch_own).item(),
            python_own.random(),
            numpy_own.random(),
            old_own.rand(),
        ]
        return process + own

    before, numbers = copy.deepcopy(average.state_dict()), drawn()
    module.weight.data.add_(1)
    average.update_parameters(module)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    counts["seen"], counts["late"] = 4, 1
    assert drawn() != numbers
    stopped.load(arrays)
    for name, value in average.state_dict().items():
        assert torch.equal(value, before[name])
    assert scaler.state_dict()["scale"] == 8.0
    assert drawn() == numbers
    assert "late" not in counts
    assert counts["seen"] == 3
    assert counts[7] == (1.5, None, "text", {"set"})
    assert [type(counts[name]) for name in ("ints", "order", "by class")] == [
        Counter,
        OrderedDict,
        defaultdict,
    ]
    assert counts["by class"]["b"] == 0
    assert list(counts["order"]) == ["b", "a"]
    assert counts["array"].dtype == np.uint32
    assert torch.equal(counts["half"], torch.ones(2, dtype=torch.bfloat16) / 3)


def test_a_mark_keeps_what_the_script_changes_after_it() -> None:
    registered, counts = Registered(), {"seen": torch.zeros(2), "steps": 0}
    registered.begin(keeps=True)
    registered.add({"counts": counts})
    for steps in range(3):
        registered.asks()
        registered.uses()
        registered.asks()  # a second minibatch of the same step
        counts["seen"] += 1  # type: ignore[operator]
        counts["steps"] = steps + 1
        if steps < 2:
            registered.stepped()
    registered.load(registered.marked())
    assert counts["steps"] == 2
    assert counts["seen"].tolist() == [2, 2]  # type: ignore[attr-defined]


class Odd:
    """Has a state that no file can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"when": [object()]}}

    def load_state_dict(self, state: Any) -> None:
        """Takes anything."""


class Broken(Odd):
    """Does not take its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {"size": 3}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("not this size")


def test_what_cannot_be_kept_is_refused_at_once_also_in_a_single_process() -> None:
    session = gs.Session()
    with pytest.raises(ConfigError, match=r"registered\.odd\.inner\.when\.0 is a object; expected a tensor"):
        session.register(odd=Odd())
    with pytest.raises(ConfigError, match="number is a int; expected an object with state_dict"):
        session.register(number=3)
    session.register(counts={"seen": 1})
    with pytest.raises(ConfigError, match="counts is registered already"):
        session.register(counts={})
    registered = Registered()
    registered.add({"broken": Broken()})
    with pytest.raises(DataError, match=r"broken, a Broken, does not take .* ValueError: not this size"):
        registered.load(registered.saved())


def test_names_that_nobody_registers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    stopped, resumed = Registered(), Registered()
    stopped.add({"a": {}, "b": {"x": 1}})
    assert STATES in stopped.saved()
    resumed.load(stopped.saved())
    own: dict[str, int] = {}
    resumed.add({"b": own})
    assert own == {"x": 1}
    assert STATES in resumed.saved()  # of a run that is stopped before its script has come so far
    resumed.uses()
    assert "the state of 'a', of the run so far, is dropped" in capsys.readouterr().err
    assert Registered().saved() == {}


def test_a_loader_is_restored_once_before_its_loop_begins() -> None:
    class Loader:
        loaded = 0

        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            return {"taken": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.loaded += 1

    before, resumed, loader, counts = Registered(), Registered(), Loader(), {"epoch": 1}
    before.add({"loader": Loader(), "counts": {"epoch": 2}})
    resumed.load(before.saved())
    resumed.add({"loader": loader, "counts": counts})
    resumed.begin(keeps=True)
    counts["epoch"] = 7  # on the way to the first step
    resumed.asks()  # within the iteration of the loader
    assert (loader.loaded, counts) == (1, {"epoch": 2})
