"""Synthetic gradients: the parts of a split model train apart, each by a predicted gradient of its own output.

    h_i = f_i(h_{i-1}; w_i)                     part i of 1 … K
    d_i = M_i(h_i, y)                           for i < K: predicted at once; M_i is 0 at the start
    d_K = ∂ℓ/∂h_K                               the last part computes the loss
    w_i ← w_i - η (∂h_i/∂w_i)ᵀ d_i              no part waits for the parts above it
    δ_{i-1} = (∂h_i/∂h_{i-1})ᵀ d_i              goes down: itself a prediction, unless i = K
    M_i ← a step of Adam on |M_i(h_i, y) - δ_i|²    when δ_i has come

With synthetic inputs, part i takes I_i(x) in place of h_{i-1}, and I_i learns from h_{i-1} likewise: then no part
waits for those below it either.

Source: Jaderberg, Czarnecki, Osindero, Vinyals, Graves, Silver, Kavukcuoglu, "Decoupled neural interfaces using
synthetic gradients", ICML 2017.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from gradstream.errors import ConfigError

LAG = 4
"""A predictor learns the target of a minibatch while its part has the fourth one after it. So the result does not
depend on when targets come, and a part is at most this many minibatches ahead of the part above it."""

KERNEL = 3
"""Side of the filters of a predictor of images."""


@dataclass(frozen=True, slots=True)
class SyntheticGradients:
    """The `pipeline=` of a split model whose parts train apart, by predicted gradients.

    Args:
        labels: predictors also see the targets of the minibatch: classes, or numbers.
        hidden: units, or channels, of the one hidden layer of each predictor; with 0 it is linear.
        lr: learning rate of predictors, > 0, under Adam.
        inputs: parts also predict their inputs, from those of the model, and wait for nobody.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> gs.pipeline.SyntheticGradients(labels=False, hidden=0)
        SyntheticGradients(labels=False, hidden=0, lr=0.001, inputs=False)
    """

    labels: bool = True
    hidden: int = 128
    lr: float = 1e-3
    inputs: bool = False

    def __post_init__(self) -> None:
        hidden, lr = cast(Any, self.hidden), cast(Any, self.lr)
        if not isinstance(hidden, int) or hidden < 0:
            raise ConfigError(f"SyntheticGradients(hidden={hidden!r}): expected a number of units, 0 or more")
        if not isinstance(lr, int | float) or not 0 < lr < math.inf:
            raise ConfigError(f"SyntheticGradients(lr={lr!r}): expected a finite number > 0")

    def of_parts(self, parts: int) -> str:
        """Names the predictors of this many parts: those of equal names take each other's weights."""
        return f"split={parts}, pipeline=gs.pipeline.{self}"


class Predictor:
    """Predicts a tensor of each sample from another one, and from its label. Gives zeros until it has learned.

    Where both are images of one size, its layers are convolutions, and each label is a plane of its own; else they
    are dense.

    Args:
        source: shape of a sample of what it sees.
        labels: number of label features; 0 for none.
        target: shape of a sample of what it predicts.
        how: its hidden units and learning rate.
        seed: of its first weights.
        dtype: of its weights.

    Attributes:
        elems: number of its weights.
    """

    def __init__(
        self,
        source: Sequence[int],
        labels: int,
        target: Sequence[int],
        how: SyntheticGradients,
        *,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        self._images = len(source) == 3 and tuple(source[1:]) == tuple(target[1:])
        sizes = [source[0], target[0]] if self._images else [math.prod(source), math.prod(target)]
        sizes[0] += labels
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers = [self._layer(sizes[0], how.hidden), nn.ReLU()] if how.hidden else []
            last = self._layer(how.hidden or sizes[0], sizes[1])
        self._target = tuple(target)
        self._net = nn.Sequential(*layers, last).to(dtype)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self._optimizer = torch.optim.Adam(self._net.parameters(), how.lr)
        self.elems = sum(parameter.numel() for parameter in self._net.parameters())

    def predict(self, source: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """(b, *target) from (b, *source) and (b, label features)."""
        with torch.no_grad():
            return self._of(source, labels)

    def learn(self, source: torch.Tensor, labels: torch.Tensor | None, target: torch.Tensor) -> float:
        """Makes a step towards the target, (b, *target). Returns the mean squared error before it."""
        with torch.enable_grad():
            error = functional.mse_loss(self._of(source, labels), target)
            self._optimizer.zero_grad()
            error.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return error.item()

    def state(self) -> dict[str, torch.Tensor]:
        """Its weights, and the state of its optimizer, by name."""
        moments = self._optimizer.state_dict()["state"]
        state = {
            f"{number}.{name}": tensor
            for number, moment in moments.items()
            for name, tensor in moment.items()
        }
        return {**{f"net.{name}": tensor for name, tensor in self._net.state_dict().items()}, **state}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `state` has returned. Raises RuntimeError, or KeyError, if it was of another predictor."""
        self._net.load_state_dict({name: state[f"net.{name}"] for name in self._net.state_dict()})
        moments = defaultdict[int, dict[str, torch.Tensor]](dict)
        for number, name in (key.split(".") for key in state if not key.startswith("net.")):
            moments[int(number)][name] = state[f"{number}.{name}"]
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": dict(moments), "param_groups": groups})

    def _layer(self, inputs: int, outputs: int) -> nn.Module:
        if self._images:
            return nn.Conv2d(inputs, outputs, KERNEL, padding=KERNEL // 2)
        return nn.Linear(inputs, outputs)

    def _of(self, source: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        seen = source if self._images else source.flatten(1)
        if labels is not None:
            if self._images:
                labels = labels[:, :, None, None].expand(-1, -1, *source.shape[2:])
            seen = torch.cat([seen, labels], 1)
        result: torch.Tensor = self._net(seen)
        return result.view(len(source), *self._target)


def label_features(targets: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """(b, width) of what predictors see of the targets: numbers as they are; for a class, the one feature that is 1."""
    if targets.is_floating_point():
        return targets.reshape(len(targets), width).to(dtype)
    return functional.one_hot(targets.long(), width).to(dtype)
