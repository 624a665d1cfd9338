"""What drawn loops train: small modules of float64, and optimizers of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import parametrizations

__all__ = ["MODELS", "OPTIMIZERS", "Model", "make_optimizer"]

DIM = 4
"""Of inputs and outputs."""


class Model(nn.Module):
    """Maps (n, DIM) to (n, DIM). What is drawn besides `body` depends on the class.

    Args:
        body: layers in turn.
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleList(body)

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        """`branch`: of a model that has some, which one is taken; others pass over it."""
        del branch
        for layer in self.body:
            x = layer(x)
        return x

    def layers(self) -> list[nn.Module]:
        """Those that may be frozen."""
        return [layer for layer in self.body if any(True for _ in layer.parameters())]


def _activation(rng: random.Random) -> nn.Module:
    kinds: list[type[nn.Module]] = [nn.Tanh, nn.GELU, nn.Softplus, nn.ReLU]
    return rng.choice(kinds)()


def _mlp(rng: random.Random) -> Model:
    width = rng.randint(2, 6)
    layers = [nn.Linear(DIM, width, bias=rng.random() < 0.8), _activation(rng)]
    if rng.random() < 0.4:
        layers += [nn.Linear(width, width), _activation(rng)]
    return Model(*layers, nn.Linear(width, DIM))


class _Tied(Model):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Linear(DIM, 3), nn.Linear(3, DIM), nn.Linear(DIM, 3))
        self.body[2].weight = self.body[0].weight  # under two names
        self.transposed = rng.random() < 0.5

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        first, second, third = self.body
        middle = torch.tanh(third(second(torch.tanh(first(x)))))
        return nn.functional.linear(middle, first.weight.T) if self.transposed else second(middle)  # type: ignore[arg-type]


class _Branches(Model):
    """The layer of `branch` is taken; the last one never is."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 4), *(nn.Linear(4, DIM) for _ in range(4)))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        middle = torch.tanh(self.body[0](x))
        return self.body[1 + branch % 3](middle)  # type: ignore[no-any-return]


class _Residual(Model):
    """A gate of shape () and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM))
        self.gate = nn.Parameter(torch.zeros(()))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return x + self.gate * torch.tanh(self.body[0](x)) + self.none.sum()


class _Words(Model):
    """Looks numbers up that it makes of its inputs."""

    def __init__(self, rng: random.Random, **options: Any) -> None:
        super().__init__(nn.Embedding(7, 3, **options), nn.Linear(3, DIM))
        self.counts = rng.random() < 0.5

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        numbers = (x * 3).long().remainder(7)
        return self.body[1](torch.tanh(self.body[0](numbers).mean(1)))  # type: ignore[no-any-return]


class _Images(Model):
    """A convolution whose weights lie in another order."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 3, 2, padding=1), nn.Linear(3, DIM))
        self.body[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        images = x.view(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        return self.body[1](torch.tanh(self.body[0](images)).mean((2, 3)))  # type: ignore[no-any-return]


class _Sequences(Model):
    """A recurrent layer, in training mode."""

    def __init__(self) -> None:
        super().__init__(nn.GRU(2, 3, batch_first=True), nn.Linear(3, DIM))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return self.body[1](self.body[0](x.view(-1, 2, 2))[0][:, -1])  # type: ignore[no-any-return]


class _Normed(Model):
    """BatchNorm in evaluation mode: alone, or with the whole model."""

    def __init__(self, rng: random.Random) -> None:
        norm = nn.BatchNorm1d(5, affine=rng.random() < 0.8)
        self.whole = rng.random() < 0.5
        super().__init__(nn.Linear(DIM, 5), norm, nn.Tanh(), nn.Linear(5, DIM))
        assert norm.running_mean is not None
        norm.running_mean += 0.25
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As of all modules."""
        super().train(mode and not self.whole)
        self.body[1].eval()
        return self


def _parametrized(rng: random.Random) -> Model:
    del rng
    return Model(
        parametrizations.weight_norm(nn.Linear(DIM, 4)), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, DIM)
    )


MODELS: Mapping[str, Callable[[random.Random], Model]] = {
    "mlp": _mlp,
    "tied": _Tied,
    "branches": lambda rng: _Branches(),
    "residual": lambda rng: _Residual(),
    "embedding": lambda rng: _Words(rng, padding_idx=0 if rng.random() < 0.5 else None),
    "convolution": lambda rng: _Images(),
    "recurrent": lambda rng: _Sequences(),
    "batch norm": _Normed,
    "weight norm": _parametrized,
    "sparse embedding": lambda rng: _Words(rng, sparse=True),
    "bounded embedding": lambda rng: _Words(rng, max_norm=0.5),
}


class _Lion(torch.optim.Optimizer):
    """Chen et al. 2023, with tanh in the place of the sign: a rounding is not to turn a step round."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), wd: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            one, other = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                state["steps"] = state.get("steps", 0) + 1
                p.mul_(1 - group["lr"] * group["wd"])
                p.sub_(group["lr"] * torch.tanh(10 * (one * mean + (1 - one) * p.grad)))
                mean.mul_(other).add_(p.grad, alpha=1 - other)
        return loss


def _decay(rng: random.Random) -> float:
    return rng.choice([0.0, 0.0, 0.01, 0.3])


def _sgd(rng: random.Random) -> dict[str, Any]:
    momentum = rng.choice([0.0, 0.5, 0.9])
    nesterov = momentum > 0 and rng.random() < 0.5
    dampening = 0.0 if nesterov else rng.choice([0.0, 0.1])
    return {"momentum": momentum, "nesterov": nesterov, "dampening": dampening, "weight_decay": _decay(rng)}


def _adam(rng: random.Random) -> dict[str, Any]:
    return {"amsgrad": rng.random() < 0.4, "weight_decay": _decay(rng), "eps": rng.choice([1e-8, 1e-3])}


OPTIMIZERS: Mapping[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "SGD": (0.1, _sgd),
    "Adam": (0.05, _adam),
    "AdamW": (0.05, _adam),
    "RMSprop": (0.02, lambda rng: {"momentum": rng.choice([0.0, 0.5]), "eps": 1e-4}),
    "Adagrad": (
        0.1,
        lambda rng: {"lr_decay": rng.choice([0.0, 0.1]), "weight_decay": _decay(rng), "eps": 1e-4},
    ),
    "NAdam": (0.05, lambda rng: {"weight_decay": _decay(rng)}),
    "RAdam": (0.05, lambda rng: {"weight_decay": _decay(rng)}),
    "Adadelta": (1.0, lambda rng: {"rho": 0.8}),
    "Adamax": (0.05, lambda rng: {"weight_decay": _decay(rng)}),
    "ASGD": (0.1, lambda rng: {"t0": 2.0}),
    "Rprop": (0.01, lambda rng: {}),
    "Adafactor": (0.05, lambda rng: {"weight_decay": _decay(rng)}),
    "Lion": (0.02, lambda rng: {"wd": _decay(rng)}),
}
"""By name: the learning rate, and other options."""

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
WITHOUT_FOREACH = ("Lion",)
WITHOUT_MAXIMIZE = ("Lion",)


def options_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """Drawn options of an optimizer."""
    rate, draw = OPTIMIZERS[kind]
    options = {"lr": rate * rng.choice([0.3, 1.0]), **draw(rng)}
    way = rng.random()
    if kind not in WITHOUT_FOREACH and way < 0.3:
        options["foreach"] = True
    elif kind in FUSED and way < 0.45:
        options["fused"] = True
    if kind not in WITHOUT_MAXIMIZE and rng.random() < 0.1:
        options["maximize"] = True
    return options


def make_optimizer(
    kind: str, parameters: Iterable[nn.Parameter], options: Mapping[str, Any], groups: int
) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS`, with its parameters dealt to several groups of other rates and decays."""
    cls: Any = _Lion if kind == "Lion" else getattr(torch.optim, kind)
    several = list(parameters)
    if groups == 1 or len(several) < 2:
        return cls(several, **options)  # type: ignore[no-any-return]
    own: dict[str, Any] = {"params": several[1::2], "lr": options["lr"] / 2}
    if "weight_decay" in options:
        own["weight_decay"] = 0.05
    return cls([{"params": several[::2]}, own], **options)  # type: ignore[no-any-return]
