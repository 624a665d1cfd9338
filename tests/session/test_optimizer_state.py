"""A loop that goes on from what its replica has saved makes the steps of one that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradstream.checkpoint.format import load, save
from gradstream.errors import ConfigError, DataError
from gradstream.session.replica import PLAIN, ReplicaBinding

INPUTS = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Counting(torch.optim.Optimizer):
    """Counts in its group, as D-Adaptation, Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(
            params, {"lr": lr, "k": 0, "seen": [0.0], "d": torch.tensor(0.1), "is_vector": callable}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["seen"].append(group["k"] / 8)
            group["d"].mul_(1.1)
            group["first"] = np.float64(0.5)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["seen"][-1] * float(group["d"]) * group["first"])


class Common(torch.optim.Optimizer):
    """Has a state that belongs to no parameter, and one with lists and dicts, as SOAP and Muon have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        common = state["all"]
        common["k"] = common.get("k", 0) + 1
        common.setdefault("sums", [torch.zeros(()), {"deep": (torch.zeros(()), None, "text")}])
        for p in self.param_groups[0]["params"]:
            common["sums"][0] += p.grad.sum()
            common["sums"][1]["deep"][0].add_(p.grad.square().sum())
            own = self.state[p].setdefault("own", [p.grad.clone(), torch.eye(2).to_sparse()])
            own[0].add_(p.grad)
            p.sub_(own[0], alpha=0.1 / common["k"] + 1e-3 * float(common["sums"][1]["deep"][0]))


class Outside(torch.optim.SGD):
    """Has something that only its own `state_dict` knows."""

    made = 0

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        self.param_groups[0]["lr"] = 0.1 / self.made
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.made = state.pop("made")
        super().load_state_dict(state)


MAKES: dict[str, Make] = {
    "counts in groups": Counting,
    "common state": Common,
    "own state dict": lambda params: Outside(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(INPUTS[number : number + 4]).square().mean().backward()
        optimizer.step()


def made(make: Make, dtype: torch.dtype = torch.float32) -> Any:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(INPUTS[:2])
        model.bias.fill_(0.5)
    model = model.to(dtype)
    optimizer = make(model.parameters())
    binding = ReplicaBinding([model], [optimizer])
    binding.states.watch(check=True)
    return SimpleNamespace(model=model, optimizer=optimizer, binding=binding)


@pytest.mark.parametrize("how", MAKES)
def test_a_resumed_optimizer_goes_on_where_it_was(how: str) -> None:
    whole, stopped, resumed = (made(MAKES[how]) for _ in range(3))
    steps(whole.model, whole.optimizer, range(12))
    steps(stopped.model, stopped.optimizer, range(6))
    tensors = load(save({**stopped.binding.saved(), **stopped.binding.extra()}))
    resumed.binding.load_fixed(tensors)
    again = made(MAKES[how])  # resumed twice, before it has made a step
    again.binding.load_fixed({**resumed.binding.saved(), **resumed.binding.extra()})
    for one in (resumed, again):
        steps(one.model, one.optimizer, range(6, 12))
        for name, value in whole.model.state_dict().items():
            assert torch.equal(one.model.state_dict()[name], value)
        assert str(one.optimizer.state_dict()) == str(whole.optimizer.state_dict())


def test_options_of_groups_stay_as_the_script_sets_them() -> None:
    """A script that is resumed runs its schedulers to where they were: a rate that is restored would fall twice."""
    stopped, resumed = (made(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(stopped.optimizer, 1, gamma=0.5)
    steps(stopped.model, stopped.optimizer, range(2))
    scheduler.step()
    resumed.binding.load_fixed(stopped.binding.extra())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.1
    assert "initial_lr" not in resumed.optimizer.param_groups[0]


def test_a_state_keeps_its_dtype_and_a_copied_optimizer_tells_nothing() -> None:
    class Wide(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad.float() / 3

    stopped, resumed = (made(Wide, torch.bfloat16) for _ in range(2))
    stopped.model.bfloat16()
    for one in (stopped.optimizer, copy.deepcopy(stopped.optimizer)):
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        one.step()
    resumed.binding.load_fixed(stopped.binding.extra())
    state = resumed.optimizer.state[resumed.model.weight]["sum"]
    assert state.dtype == torch.float32
    assert state[0, 0] == torch.tensor(1.0) / 3


def test_a_state_that_cannot_be_saved_is_refused_after_the_first_step() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            state: Any = self.state
            state["all"]["when"] = object()
            return super().step(closure)

    case = made(lambda params: Odd(params, lr=0.1))
    with pytest.raises(ConfigError, match=r"state\.all\.when, of the state of an optimizer, is a object"):
        steps(case.model, case.optimizer, range(1))
    case = made(lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(DataError, match="the version, and the script, that wrote it"):
        case.binding.load_fixed({PLAIN: np.frombuffer(b'{"loop.optimizer.0.0.step": [1]}', np.uint8)})
