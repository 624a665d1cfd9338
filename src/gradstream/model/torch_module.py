"""`from_torch`: a PyTorch module and a loss as a `Model` on flat vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gradstream.errors import ConfigError, GradientError
from gradstream.model.arrays import for_torch
from gradstream.model.backprop import Backprop
from gradstream.model.base import Layout, Reduction
from gradstream.model.batch import Batch
from gradstream.model.buffers import Buffers
from gradstream.model.wide_linear import WIDE_ELEMS, WideLinear
from gradstream.runtime.base import Report

__all__ = ["TorchModel", "from_torch"]

Build = Callable[[], nn.Module]
Loss = Callable[[Any, Any], torch.Tensor]
LossOf = Literal["outputs", "batch"]

_BUILD_SEED = 0


def from_torch(
    build: Build,
    loss: Loss,
    *,
    reduction: Reduction = "mean",
    loss_of: LossOf = "outputs",
    spread: bool = False,
) -> TorchModel:
    """A model from a function that builds a PyTorch module, and a loss.

    Trained are the parameters that require a gradient, under their own names. Tied weights count once,
    and are saved under each of their names. Frozen parameters come from a `build()` under a fixed seed,
    so that all workers have the same ones; they are saved too. Buffers (a BatchNorm's running means)
    are each worker's own while it trains, and are averaged by samples for evaluation and for the saved
    model; those that are not persistent are never exchanged. Gradients are computed in the train() mode
    that `build` left its modules in, outputs in eval() mode. torch's generator is seeded for each
    gradient by (run seed, worker, step), so that dropout is reproducible.

    Args:
        build: returns a new module, initialised with torch's generator (which is seeded).
        loss: (outputs, targets) to a scalar tensor, `torch.nn.functional.cross_entropy` for one.
            Floating-point inputs and targets are cast to the parameters' dtype. torch.autocast
            may be used in it, and in the module.
        reduction: whether `loss` is the mean or the sum over samples.
        loss_of: "batch" for a loss of another shape: (module, batch) to a scalar tensor. It calls the
            module itself; the batch is the pair (inputs, targets), or all inputs where there are no
            targets. `spread` is then the loss's own affair, but for `outputs`.
        spread: how inputs that are a dict or a tuple get to the module: as one argument, or with
            True as keywords, or as several arguments.

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
    if loss_of not in ("outputs", "batch"):
        raise ConfigError(f"from_torch: loss_of is {loss_of!r}; expected 'outputs' or 'batch'")
    return TorchModel(build, loss, reduction, loss_of, spread)


class TorchModel:
    """A PyTorch module whose parameters are views of whichever flat vector was given last.

    One at a time: not for use from two threads at once. Made by `from_torch`.
    """

    def __init__(self, build: Build, loss: Loss, reduction: Reduction, loss_of: LossOf, spread: bool) -> None:
        self.reduction: Reduction = reduction
        self._build = build
        self._loss = loss
        self._takes_batch = loss_of == "batch"
        self._spread = spread
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
            outputs: torch.Tensor = self._call(built.module, for_torch(inputs, built.layout.dtype))
        return outputs

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under all of their names, in the module's own order.

        Trained ones are numpy views of the flat vector; frozen ones are there as well.
        """
        built = self._module()
        views = dict(built.layout.views(parameters))
        return {
            name: _numpy(views[trained] if trained is not None else built.frozen[name])
            for name, trained in built.names.items()
        }

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the persistent buffers, under the module's own names."""
        return {name: _numpy(buffer).copy() for name, buffer in self._module().buffers()}

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets the persistent buffers; names that are none of them are passed over.

        Raises:
            ConfigError: one is missing, or of another shape. Those before it have been set.
        """
        for name, buffer in self._module().buffers():
            array = buffers.get(name)
            if array is None or array.shape != tuple(buffer.shape):
                got = "nothing" if array is None else f"shape {array.shape}"
                raise ConfigError(
                    f"buffer {name!r}: got {got}, expected shape {tuple(buffer.shape)}; "
                    "is this the model that the run trained?"
                )
            buffer.copy_(torch.from_numpy(np.array(array)))

    def _module(self) -> _Built:
        if self._built is None:
            self._built = _Built(_build(self._build, _BUILD_SEED))
        return self._built

    def _loss_of(self, built: _Built, batch: Batch) -> torch.Tensor:
        dtype = built.layout.dtype
        inputs, targets = for_torch(batch.inputs, dtype), for_torch(batch.targets, dtype)
        if self._takes_batch:
            return self._loss(built.module, inputs if targets is None else (inputs, targets))
        return self._loss(self._call(built.module, inputs), targets)

    def _call(self, module: nn.Module, inputs: Any) -> Any:
        if self._spread and isinstance(inputs, dict):
            return module(**inputs)
        if self._spread and isinstance(inputs, tuple | list):
            return module(*inputs)
        return module(inputs)


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
        self.names, self.frozen = _names(module, trained)
        self._at: tuple[int, int] | None = None
        self._training: bool | None = None
        self._kept_in_eval = [part for part in module.modules() if not part.training]
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Persistent buffers by name, in the module's own order."""
        state = self.module.state_dict(keep_vars=True)
        return [
            (name, tensor)
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter)
        ]

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
    if any(map(nn.parameter.is_lazy, module.parameters())):
        raise ConfigError(
            "from_torch: build() returned a module with lazy parameters, whose shapes are not known: "
            "give the layers their sizes, or run the module once in build()"
        )
    return module


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, the last one first: that is about backward order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]


def _names(
    module: nn.Module, trained: list[tuple[str, nn.Parameter]]
) -> tuple[dict[str, str | None], dict[str, torch.Tensor]]:
    """Name of every parameter -> the name that it is trained under, or None; and those frozen, by name."""
    trained_as = {id(parameter): name for name, parameter in trained}
    names: dict[str, str | None] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = trained_as.get(id(parameter))
        if names[name] is None:
            frozen[name] = parameter.detach()
    return names, frozen


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Numpy has no bfloat16: its values are float32 there."""
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: np.ndarray[Any, Any] = wide.numpy()
    return array


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
