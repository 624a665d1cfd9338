"""What drawn loops do to gradients before a step, to parameters after it, and between steps; schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from drawn.loop import Loop
from drawn.parts import DIM

if TYPE_CHECKING:
    from drawn.text import Text

__all__ = ["CLIPS", "EDITS", "EVENTS", "scheduler_of"]


def _gradients(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Text], None]:
    def change_all(text: Text) -> None:
        for parameter in text.model.parameters():
            if parameter.grad is not None:
                parameter.grad = change(parameter.grad)

    return change_all


def _drop_one(text: Text) -> None:
    parameters = [parameter for parameter in text.model.parameters() if parameter.grad is not None]
    for parameter in parameters[:1]:
        parameter.grad = None


def _each_group(text: Text) -> None:
    for optimizer in text.optimizers:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.3)


CLIPS: Mapping[str, Callable[[Text], Any]] = {
    "none": lambda text: None,
    "norm": lambda text: nn.utils.clip_grad_norm_(text.model.parameters(), 0.3),
    "largest": lambda text: nn.utils.clip_grad_norm_(text.model.parameters(), 0.3, norm_type=torch.inf),
    "value": _gradients(lambda gradient: gradient.clamp_(-0.1, 0.1)),
    "replace": _gradients(lambda gradient: gradient.clamp(-0.2, 0.2)),
    "centre": _gradients(lambda gradient: gradient.sub_(gradient.mean())),
    "drop one": _drop_one,
    "each group": _each_group,
}


def _each(change: Callable[[nn.Parameter], Any]) -> Callable[[Text], None]:
    def change_all(text: Text) -> None:
        for parameter in text.model.parameters():
            change(parameter)

    return change_all


def _average(text: Text) -> None:
    if text.average is None:
        text.average = copy.deepcopy(text.model).requires_grad_(False)
    for mean, parameter in zip(text.average.parameters(), text.model.parameters(), strict=True):
        mean.lerp_(parameter, 0.3)


def _as_a_vector(text: Text) -> None:
    vector = nn.utils.parameters_to_vector(text.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.99, text.model.parameters())


EDITS: Mapping[str, Callable[[Text], None]] = {
    "none": lambda text: None,
    "clamp": _each(lambda parameter: parameter.clamp_(-0.6, 0.6)),
    "normalise": _each(lambda parameter: parameter.div_(parameter.norm() + 1)),
    "data": _each(lambda parameter: setattr(parameter, "data", parameter.data * 0.98)),
    "average": _average,
    "as a vector": _as_a_vector,
}


def _reload(text: Text) -> None:
    for optimizer in text.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _new_optimizers(text: Text) -> None:
    text.optimizers = text.made_optimizers()


def _other_inputs(text: Text) -> torch.Tensor:
    """Of another length on each worker."""
    return torch.ones(2 + 3 * text.session.rank, DIM, dtype=text.dtype)


def _evaluate(text: Text) -> None:
    text.model.eval()
    with torch.no_grad():
        text.model(_other_inputs(text))
    text.model.train()


def _train_a_copy(text: Text) -> None:
    copy.deepcopy(text.model)(_other_inputs(text)).sum().backward()
    copy.deepcopy(text.optimizers)


def _slower(text: Text) -> None:
    for optimizer in text.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


EVENTS: Mapping[str, Callable[[Text], Any]] = {
    "freeze": lambda text: text.model.layers()[0].requires_grad_(False),
    "unfreeze": lambda text: text.model.requires_grad_(True),
    "reload optimizer": _reload,
    "restore": lambda text: text.model.load_state_dict(text.kept),
    "new optimizer": _new_optimizers,
    "evaluate": _evaluate,
    "copy": _train_a_copy,
    "slower": _slower,
}


def _falling(group: int, step: int) -> float:
    return 1 / (1 + group + step)


def scheduler_of(loop: Loop, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler | None:
    """That of a loop; None where it has none."""
    steps, first = len(loop.sizes), optimizer.param_groups[0]
    if loop.scheduler == "step":
        return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if loop.scheduler == "by group":
        falls = [partial(_falling, group) for group in range(len(optimizer.param_groups))]
        return lr_scheduler.LambdaLR(optimizer, list(falls))
    if loop.scheduler == "one cycle":
        cycled = first.get("momentum", 0) > 0 or "betas" in first
        rate = optimizer.defaults["lr"]
        return lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, cycle_momentum=cycled)
    return None
