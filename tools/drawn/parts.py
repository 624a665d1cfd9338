"""What drawn loops are made of: modules, optimizers, and what happens to them before and after a step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from drawn.text import Text

DIM = 4
"""Of inputs and outputs."""


class Model(nn.Module):
    """Maps (n, DIM) to (n, DIM).

    Args:
        body: layers, in turn. Each may be frozen.
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleList(body)

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        """`branch`: of a model that has some, which one is taken."""
        del branch
        for layer in self.body:
            x = layer(x)
        return x

    def complete(self) -> None:
        """Called when the model has its dtype, which tears apart what shares memory."""

    def layers(self) -> list[nn.Module]:
        """Those with parameters."""
        return [layer for layer in self.body if list(layer.parameters())]


def _mlp(rng: random.Random) -> Model:
    width = rng.randint(2, 6)
    kinds: list[type[nn.Module]] = [nn.Tanh, nn.GELU, nn.Softplus, nn.ReLU]
    middle = [nn.Linear(width, width), rng.choice(kinds)()] if rng.random() < 0.4 else []
    first = nn.Linear(DIM, width, bias=rng.random() < 0.8)
    return Model(first, rng.choice(kinds)(), *middle, nn.Linear(width, DIM))


class _Tied(Model):
    """One weight under two names, or used twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, 3), nn.Linear(3, DIM), nn.Linear(DIM, 3))
        self.body[2].weight = self.body[0].weight
        self.transposed = rng.random() < 0.5

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        first, second, third = self.body
        middle = torch.tanh(third(second(torch.tanh(first(x)))))
        return nn.functional.linear(middle, first.weight.T) if self.transposed else second(middle)  # type: ignore[arg-type]


class _Branches(Model):
    """The layer of `branch` is taken; the last one never is."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, 4), *(nn.Linear(4, DIM) for _ in range(4)))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return self.body[1 + branch % 3](torch.tanh(self.body[0](x)))  # type: ignore[no-any-return]


class _Residual(Model):
    """A gate of shape () and a parameter without elements."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, DIM))
        self.gate = nn.Parameter(torch.zeros(()))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return x + self.gate * torch.tanh(self.body[0](x)) + self.none.sum()


class _Words(Model):
    """Looks numbers up that it makes of its inputs."""

    def __init__(self, rng: random.Random, **options: Any) -> None:
        super().__init__(nn.Embedding(7, 3, **options), nn.Linear(3, DIM))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        numbers = (x * 3).long().remainder(7)
        return self.body[1](torch.tanh(self.body[0](numbers).mean(1)))  # type: ignore[no-any-return]


class _Images(Model):
    """A convolution whose weights lie in another order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Conv2d(2, 3, 2, padding=1), nn.Linear(3, DIM))
        self.body[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        images = x.view(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        return self.body[1](torch.tanh(self.body[0](images)).mean((2, 3)))  # type: ignore[no-any-return]


class _Normed(Model):
    """BatchNorm in evaluation mode: alone, or with the whole model."""

    def __init__(self, rng: random.Random, kind: Callable[..., nn.Module] = nn.BatchNorm1d) -> None:
        norm = kind(5, affine=rng.random() < 0.8)
        self.whole = rng.random() < 0.5
        super().__init__(nn.Linear(DIM, 5), norm, nn.Tanh(), nn.Linear(5, DIM))
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As of all modules."""
        super().train(mode and not self.whole)
        self.body[1].eval()
        return self


class _Shared(Model):
    """Two weights in the same memory, or in a part of it, which torch does not know of; or a weight and a buffer."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM, bias=False))
        self.how = rng.choice(["same", "transposed", "part", "buffer"])

    def complete(self) -> None:
        first, last = (self.body[number].get_parameter("weight") for number in (0, 2))
        if self.how == "buffer":
            self.register_buffer("row", first.data[0])
        elif self.how == "part":
            self.body[0].get_parameter("bias").data = first.data[1]
        else:
            last.data = first.data.T if self.how == "transposed" else first.data

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        found = super().forward(x, branch)
        return found + self.get_buffer("row") if self.how == "buffer" else found


class _Wide(Model):
    """Of so many numbers that their norm is rounded differently by other numbers of threads."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, 9_000), nn.Tanh(), nn.Linear(9_000, DIM))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return super().forward(x, branch) / 100


class _Odd(Model):
    """Buffers of many kinds, constant and not, kept and not."""

    mask: torch.Tensor
    turns: torch.Tensor
    near: torch.Tensor

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, 3), nn.Tanh(), nn.Linear(3, DIM))
        self.keep = rng.random() < 0.5

    def complete(self) -> None:
        for name, buffer in {
            "mask": torch.full((DIM, DIM), -torch.inf).triu(1),
            "turns": torch.polar(torch.ones(2).double(), torch.arange(2).double()),
            "near": torch.eye(3).to_sparse(),
            "scale": (torch.ones(3) / 3).bfloat16(),
            "step": torch.tensor(0.1).expand(3),
            "flags": torch.tensor([True, False]),
            "lowest": torch.tensor(-torch.inf),
            "unknown": torch.full((2,), torch.nan),
            "table": torch.arange(6).view(2, 3),
            "pixels": torch.arange(3, dtype=torch.uint8),
            "none": torch.zeros(0, 3),
        }.items():
            self.register_buffer(name, buffer, persistent=self.keep)

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2, 2).double()) * self.turns)
        weights = self.mask.softmax(1).to(x.dtype)
        return super().forward((turned.reshape(-1, DIM).to(x.dtype) + x) @ weights.T, branch)


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.ndim > 1


class Counting(torch.optim.Optimizer):
    """SGD whose rate rises by a counter in its groups, where it also has a list, a tensor and a function."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        own = {"k": 0, "seen": [], "d": torch.tensor(0.5), "decays": _is_matrix}
        super().__init__(params, {"lr": lr, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of all optimizers."""
        with torch.enable_grad():
            found = closure() if closure else None
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = [*group["seen"], group["k"]]
            group["d"] = group["d"] * 1.1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    decay = 0.01 if group["decays"](parameter) else 0.0
                    rate = group["lr"] * min(1.0, group["k"] / 4) * float(group["d"])
                    parameter.sub_(parameter.grad + decay * parameter, alpha=rate)
        return found


MODELS: Mapping[str, Callable[[random.Random], Model]] = {
    "mlp": _mlp,
    "tied": _Tied,
    "branches": _Branches,
    "residual": _Residual,
    "embedding": lambda rng: _Words(rng, padding_idx=rng.choice([0, None])),
    "convolution": _Images,
    "batch norm": _Normed,
    "sync batch norm": partial(_Normed, kind=nn.SyncBatchNorm),
    "shared memory": _Shared,
    "odd buffers": _Odd,
    "wide": _Wide,
    "sparse embedding": lambda rng: _Words(rng, sparse=True),
    "bounded embedding": lambda rng: _Words(rng, max_norm=0.5),
}

DECAYS = (0.0, 0.0, 0.01, 0.3)

OPTIMIZERS: Mapping[str, tuple[float, Mapping[str, tuple[float, ...]]]] = {
    "SGD": (0.1, {"momentum": (0.0, 0.5, 0.9), "dampening": (0.0, 0.0, 0.1), "weight_decay": DECAYS}),
    "Adam": (0.05, {"amsgrad": (False, True), "eps": (1e-8, 1e-3), "weight_decay": DECAYS}),
    "AdamW": (0.05, {"amsgrad": (False, True), "eps": (1e-8, 1e-3), "weight_decay": DECAYS}),
    "Adagrad": (0.1, {"lr_decay": (0.0, 0.1), "eps": (1e-4,), "weight_decay": DECAYS}),
    "RMSprop": (0.02, {"momentum": (0.0, 0.5), "eps": (1e-4,)}),
    "NAdam": (0.05, {"weight_decay": DECAYS}),
    "RAdam": (0.05, {"weight_decay": DECAYS}),
    "Adadelta": (1.0, {"rho": (0.8,)}),
    "Adamax": (0.05, {"weight_decay": DECAYS}),
    "ASGD": (0.1, {"t0": (2.0,)}),
    "Rprop": (0.01, {}),
    "Adafactor": (0.05, {"weight_decay": DECAYS}),
}
"""By name: the learning rate, and what other options may be."""

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def options_of(kind: str, rng: random.Random, dtype: str = "float64") -> dict[str, Any]:
    """Drawn options of an optimizer."""
    rate, choices = OPTIMIZERS[kind]
    options: dict[str, Any] = {"lr": rate * rng.choice([0.3, 1.0])}
    options |= {name: rng.choice(values) for name, values in choices.items()}
    if kind == "SGD" and options["momentum"] and not options["dampening"]:
        options["nesterov"] = rng.random() < 0.5
    way = rng.random()
    if way < 0.3:
        options["foreach"] = True
    elif kind in FUSED and way < 0.45 and dtype != "bfloat16":  # of which torch's has momentum at random
        options["fused"] = True
    if rng.random() < 0.1:
        options["maximize"] = True
    return options


def make_optimizer(
    kind: str, parameters: Iterable[nn.Parameter], options: Mapping[str, Any], groups: int
) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS`. With two groups every second parameter has another rate, and another decay."""
    several = list(parameters)
    own: dict[str, Any] = {"params": several[1::2], "lr": options["lr"] / 2}
    if "weight_decay" in options:
        own["weight_decay"] = 0.05
    dealt = [{"params": several[::2]}, own] if groups == 2 and len(several) > 1 else several
    made = Counting if kind == "Counting" else getattr(torch.optim, kind)
    return made(dealt, **options)


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


CLIPS: Mapping[str, Callable[[Text], Any]] = {
    "none": lambda text: None,
    "norm": lambda text: nn.utils.clip_grad_norm_(text.model.parameters(), 0.3),
    "largest": lambda text: nn.utils.clip_grad_norm_(text.model.parameters(), 0.3, norm_type=torch.inf),
    "value": _gradients(lambda gradient: gradient.clamp_(-0.1, 0.1)),
    "replace": _gradients(lambda gradient: gradient.clamp(-0.2, 0.2)),
    "centre": _gradients(lambda gradient: gradient.sub_(gradient.mean())),
    "drop one": _drop_one,
}


def _each(change: Callable[[nn.Parameter], Any]) -> Callable[[Text], None]:
    def change_all(text: Text) -> None:
        for parameter in text.model.parameters():
            change(parameter)

    return change_all


EDITS: Mapping[str, Callable[[Text], None]] = {
    "none": lambda text: None,
    "clamp": _each(lambda parameter: parameter.clamp_(-0.6, 0.6)),
    "normalise": _each(lambda parameter: parameter.div_(parameter.norm() + 1)),
    "data": _each(lambda parameter: setattr(parameter, "data", parameter.data * 0.98)),
    "pointed": _each(lambda parameter: parameter.data.add_(0.001)),
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
    # A model that is trained in evaluation mode cannot be told from one that is evaluated but by no_grad.
    with torch.set_grad_enabled(text.step % 2 == 1 and "batch norm" not in text.loop.model):
        for inputs in text.session.shard([_other_inputs(text)] * 3):
            text.model(inputs)
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
    "discard": lambda text: text.discard(),
}


def _falling(group: int, step: int) -> float:
    return 1 / (1 + group + step)


def scheduler_of(kind: str, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler | None:
    """One of `loop.SCHEDULERS`."""
    if kind == "step":
        return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if kind == "by group":
        falls = [partial(_falling, group) for group in range(len(optimizer.param_groups))]
        return lr_scheduler.LambdaLR(optimizer, list(falls))
    return None
