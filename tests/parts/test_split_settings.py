"""Split runs of models in which not every parameter is trained alike: frozen ones, and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.runtime.storage import MemoryStorage
from split_jobs import difference, net, run

GROUPS: Sequence[Mapping[str, Any]] = [
    {"match": "*.bias", "weight_decay": 0.0},
    {"match": ["2.*", "6.weight"], "lr_scale": 0.3},
    {"match": "0.weight", "lr_scale": 0},
]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "synchronous", "servers": 2, "optimizer": gs.optim.SGD(0.05, weight_decay=0.1)},
        {"strategy": "allreduce", "optimizer": gs.optim.AdamW(0.01, weight_decay=0.1)},
        {"strategy": "elastic-averaging", "workers": 1, "optimizer": gs.optim.SGD(0.05, weight_decay=0.1)},
    ],
    ids=lambda options: options["strategy"],
)
def test_groups_of_a_split_model_train_as_those_of_the_whole(options: dict[str, Any]) -> None:
    given = {**options, "groups": GROUPS}
    whole, plain = run(**given), run(**{**given, "groups": ()})
    assert difference(whole, run(**given, split=4)) < 1e-12
    assert difference(whole, plain) > 1e-4


def test_a_group_that_no_part_has_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"7\.bias"):
        run(split=2, groups=[{"match": "7.bias", "lr_scale": 2.0}])


def tuned() -> nn.Module:
    """A network with frozen layers at its beginning and in its middle, one of them used twice."""
    module = cast(nn.Sequential, net())
    module[2].requires_grad_(False)
    again = nn.Linear(9, 7).double()
    again.weight = cast(nn.Linear, module[2]).weight
    frozen = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double().requires_grad_(False)
    return _Tuned(frozen, module, again)


class _Tuned(nn.Module):
    def __init__(self, frozen: nn.Module, module: nn.Sequential, again: nn.Module) -> None:
        super().__init__()
        self.frozen, self.first, self.twice = frozen, module[:2], module[2]
        self.again, self.last = again, module[3:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.frozen(x))
        result: torch.Tensor = self.last(self.twice(hidden) + self.again(hidden))
        return result


@pytest.mark.parametrize(("strategy", "split"), [("synchronous", 2), ("allreduce", 3)])
def test_frozen_parameters_of_a_split_model(strategy: str, split: int) -> None:
    given: dict[str, Any] = {"strategy": strategy, "build": tuned, "epochs": 3, "evaluate_every": 2}
    whole, storage = run(**given), MemoryStorage()
    run(**{**given, "epochs": 2}, split=split, storage=storage, checkpoint_every=2)
    resumed = run(**given, split=1, storage=storage, resume=True, checkpoint_every=None)
    split_run = run(**given, split=split)
    assert {"frozen.0.weight", "twice.weight", "again.weight"} <= set(whole.parameters)
    for one in (split_run, resumed):
        assert difference(whole, one) < 1e-12
    assert [one["accuracy"] for one in split_run.evaluations] == [
        one["accuracy"] for one in whole.evaluations
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 3, "pipeline": "2bw"}, r"micro_batches=1 with pipeline='2bw': expected at least"),
        ({"split": 2, "pipeline": "interleaved", "micro_batches": 3}, r'"interleaved" needs multiples of'),
        (
            {"split": 2, "pipeline": "1f1b", "pipeline_dtype": "bfloat16"},
            "pipeline_dtype='bfloat16': what parts send",
        ),
    ],
)
def test_what_parts_cannot_do_is_refused_before_any_is_started(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        run(**options)
