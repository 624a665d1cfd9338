"""What a newcomer gets wrong first: each message says what, got, expected and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, GradstreamError

X, Y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
ONE = nn.Linear(2, 1)
DOWNPOUR: dict[str, Any] = {"strategy": "downpour"}


def run(
    build: Callable[[], nn.Module] = lambda: nn.Linear(2, 1),
    loss: Any = nn.functional.mse_loss,
    targets: Any = Y,
    **options: Any,
) -> None:
    data = gs.from_arrays(X, targets)
    gs.simulate(gs.from_torch(build, loss), data, workers=2, batch_size=2, epochs=1, **options)


@pytest.mark.parametrize(
    ("build", "what"),
    [(lambda: ONE, "Linear"), (lambda: nn.Sequential(ONE), "Sequential with a part")],
    ids=["itself", "in"],
)
@pytest.mark.parametrize("strategy", ["synchronous", "allreduce", "downpour"])
def test_one_module_for_all_workers(build: Callable[[], nn.Module], what: str, strategy: str) -> None:
    with pytest.raises(ConfigError, match=rf"a {what} that it has returned before.*a new module at each"):
        run(build, strategy=strategy)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.MSELoss, r"loss is the class MSELoss; expected a function.*MSELoss\(\)"),
        ("mse", r"loss is a str; expected a function"),
    ],
)
def test_a_loss_that_is_no_function(loss: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(loss=loss)


@pytest.mark.parametrize("optimizer", ["sgd", gs.optim.SGD])
def test_an_update_rule_without_its_rate(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"lacks lr; expected.*SGD\(lr=\.\.\.\), or --lr"):
        run(optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (torch.optim.AdamW, "AdamW"),
        (torch.optim.SGD(ONE.parameters(), lr=0.1), "SGD"),
        (torch.optim.RMSprop, "SGD"),
    ],
    ids=["class", "object", "none of ours"],
)
def test_an_optimizer_of_torch(optimizer: Any, rule: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"torch\.optim\.\w+, which.*expected.*gradstream\.optim\.{rule}\(lr=0\.01\)"
    ):
        run(optimizer=optimizer)


def test_data_without_targets() -> None:
    with pytest.raises(
        GradstreamError, match=r"data has no targets: gradstream\.from_arrays\(inputs, targets\)"
    ):
        run(targets=None)


def test_held_out_samples_in_a_dict_of_another_order() -> None:
    train, test = {"a": X, "b": {"c": X, "d": Y}}, {"b": {"d": Y, "c": X}, "a": X}
    data = gs.from_arrays(train, Y, test, Y)
    assert list(data.test_inputs) == ["a", "b"]
    assert list(data.test_inputs["b"]) == ["c", "d"]
