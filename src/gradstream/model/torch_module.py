"""`from_torch`: a PyTorch module and a loss as a `Model` on flat vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream.errors import ConfigError, GradientError
from gradstream.model.arrays import for_torch
from gradstream.model.backprop import Backprop
from gradstream.model.base import Batch, Layout, Reduction
from gradstream.model.wide_linear import WIDE_ELEMS, WideLinear
from gradstream.runtime.base import Report

__all__ = ["TorchModel", "from_torch"]

Build = Callable[[], nn.Module]
Loss = Callable[[Any, Any], torch.Tensor]

_BUILD_SEED = 0


def from_torch(build: Build, loss: Loss, *, reduction: Reduction = "mean") -> TorchModel:
    """A model from a function that builds a PyTorch module, and a loss.

    Trained are the parameters that require a gradient, under their own names; tied weights count
    once. Frozen parameters and buffers (a BatchNorm's running means) are each worker's own: they
    come from a `build()` under a fixed seed and are not exchanged. Gradients are computed in the
    train() mode that `build` left its modules in, outputs in eval() mode.

    Args:
        build: returns a new module, initialised with torch's generator (which is seeded).
        loss: (outputs, targets) to a scalar tensor, `torch.nn.functional.cross_entropy` for one.
            Floating-point inputs and targets are cast to the parameters' dtype.
        reduction: whether `loss` is the mean or the sum over samples.

    Raises:
        ConfigError: on first use, where `build` returns no module, or one whose parameters are
            none, of several dtypes, or neither float32 nor float64.

    Example:
        >>> model = from_torch(lambda: nn.Linear(3, 1), nn.functional.mse_loss)
        >>> model.layout.elems
        4
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"from_torch: reduction is {reduction!r}; expected 'mean' or 'sum'")
    return TorchModel(build, loss, reduction)


class TorchModel:
    """A PyTorch module whose parameters are views of whichever flat vector was given last.

    One at a time: not for use from two threads at once. Made by `from_torch`.
    """

    def __init__(self, build: Build, loss: Loss, reduction: Reduction) -> None:
        self.reduction: Reduction = reduction
        self._build = build
        self._loss = loss
        self._built: _Built | None = None

    @property
    def layout(self) -> Layout:
        """Names and places of the trained parameters. The first use builds the module once."""
        return self._module().layout

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector with what `build()` gives under this seed; see `Model.init`."""
        layout = self.layout
        fresh = _trained(_build(self._build, seed))
        if [(name, tuple(p.shape)) for name, p in fresh] != [(s.name, s.shape) for s in layout.slots]:
            raise ConfigError(
                "from_torch: build() gave other names or shapes than the time before; it must not"
            )
        with torch.no_grad():
            for (_, parameter), (_, view) in zip(fresh, layout.views(parameters), strict=True):
                view.copy_(parameter)

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
    ) -> float:
        """Writes the gradient at `parameters` into `gradient`; see `Model.gradient`.

        Raises:
            GradientError: the loss is not one finite number that depends on the parameters. The
                content of `gradient` is then undefined.
        """
        built = self._module()
        if batch.num_samples == 0:
            gradient.zero_()
            report(built.layout.elems)
            return 0.0
        built.point_at(parameters)
        built.training(True)
        backprop = Backprop(built.layout, built.parameters, gradient, report)
        with torch.enable_grad(), backprop, built.wide(backprop), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loss = self._loss_of(built, batch)
            value = _checked(loss)
            backprop.run(loss)
        backprop.finish()
        return value

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The module's outputs in eval() mode, without a graph; see `Model.outputs`."""
        built = self._module()
        built.point_at(parameters)
        built.training(False)
        with torch.no_grad():
            outputs: torch.Tensor = built.module(for_torch(inputs, built.layout.dtype))
        return outputs

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters by name, as numpy views of the flat vector, in the module's own order."""
        views = dict(self.layout.views(parameters))
        return {name: views[name].numpy() for name in reversed(views)}

    def _module(self) -> _Built:
        if self._built is None:
            self._built = _Built(_build(self._build, _BUILD_SEED))
        return self._built

    def _loss_of(self, built: _Built, batch: Batch) -> torch.Tensor:
        dtype = built.layout.dtype
        outputs = built.module(for_torch(batch.inputs, dtype))
        return self._loss(outputs, for_torch(batch.targets, dtype))


class _Built:
    """The one module of a `TorchModel`, without parameters of its own.

    They are dropped once their shapes are known, so that memory holds the flat vector alone.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = _trained(module)
        dtype = _dtype_of(trained)
        self.module = module
        self.layout = Layout.of([(name, tuple(p.shape)) for name, p in trained], dtype)
        self.parameters = [parameter for _, parameter in trained]
        self._at: tuple[int, int] | None = None
        self._training: bool | None = None
        self._kept_in_eval = [part for part in module.modules() if not part.training]
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)

    def point_at(self, flat: torch.Tensor) -> None:
        """Makes the parameters views of `flat`. Free where they are already: views keep its memory."""
        at = (flat.data_ptr(), flat.numel())
        if at == self._at:
            return
        if flat.dtype != self.layout.dtype or flat.numel() != self.layout.elems:
            raise ConfigError(
                f"parameters are {flat.numel()} x {flat.dtype}; this model's are "
                f"{self.layout.elems} x {self.layout.dtype}: take the length and dtype from its layout"
            )
        for parameter, (_, view) in zip(self.parameters, self.layout.views(flat), strict=True):
            parameter.data = view
        self._at = at

    def training(self, on: bool) -> None:
        """Switches to the modes that `build` left the parts in, or all to eval()."""
        if self._training == on:
            return
        self.module.train(on)
        for part in self._kept_in_eval:
            part.training = False
        self._training = on

    def wide(self, backprop: Backprop) -> AbstractContextManager[object]:
        """The direct path for wide layers; nothing where the model has none."""
        pairs = zip(self.parameters, backprop.sinks, strict=True)
        wide = [(p, sink) for p, sink in pairs if p.dim() == 2 and p.numel() >= WIDE_ELEMS]
        return WideLinear(*zip(*wide, strict=True)) if wide else nullcontext()


def _build(build: Build, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        module = build()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"from_torch: build() returned {type(module).__name__}, expected a torch.nn.Module; "
            "pass a function that builds one, not the module itself"
        )
    return module


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, the last one first: that is about backward order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]


def _dtype_of(trained: list[tuple[str, nn.Parameter]]) -> torch.dtype:
    dtypes = {parameter.dtype: name for name, parameter in reversed(trained)}
    if len(dtypes) == 1 and next(iter(dtypes)) in (torch.float32, torch.float64):
        return next(iter(dtypes))
    if not dtypes:
        raise ConfigError(
            "from_torch: the module has no parameters that require a gradient; nothing to train"
        )
    got = ", ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
    raise ConfigError(
        f"from_torch: parameters are {got}; expected one dtype, float32 or float64: call .float() in build()"
    )


def _checked(loss: torch.Tensor) -> float:
    """The loss as a number, if it is one that can be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise GradientError(f"loss is a {type(loss).__name__}, expected a scalar tensor: do not call .item()")
    if loss.numel() != 1:
        raise GradientError(f"loss has shape {tuple(loss.shape)}, expected a scalar: take its mean or sum")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise GradientError(f"loss is {value}; lower the learning rate or look at the inputs of this batch")
    if not loss.requires_grad:
        raise GradientError(
            "loss does not depend on any parameter; is there a .detach() or no_grad() on its way?"
        )
    return value
