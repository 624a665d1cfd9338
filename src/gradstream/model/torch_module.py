"""`from_torch`: makes a `Model` on flat vectors out of a PyTorch module and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gradstream.errors import ConfigError, GradientError
from gradstream.model.backprop import Backprop
from gradstream.model.base import Batch, Layout, Reduction, check_option, finite_loss
from gradstream.model.buffers import Buffers, arrays_of, as_numpy, for_torch, set_tensor
from gradstream.model.built_module import Build, BuiltModule, Fixed, build_module, trained_of
from gradstream.model.devices import seeded
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import Report

Loss = Callable[[Any, Any], torch.Tensor]
LossOf = Literal["outputs", "batch"]

BUILD_SEED = 0
"""Of the `build()` that gives frozen parameters and first buffers, in every process."""


def from_torch(
    build: Build,
    loss: Loss,
    *,
    reduction: Reduction = "mean",
    loss_of: LossOf = "outputs",
    spread: bool = False,
) -> TorchModel:
    """Makes a model out of a function that builds a PyTorch module, and a loss.

    Parameters that require a gradient are trained, under their own names. Tied weights count once, and are
    saved under each of their names. Frozen parameters come from a `build()` under a fixed seed, so all workers
    have the same; they are saved too. Each worker has its own buffers (a BatchNorm's running means) while it
    trains; for an evaluation and for the saved model they are averaged, weighted by samples. Buffers that are
    not persistent are never exchanged. Gradients are computed in the modes in which `build` left its modules,
    outputs in eval() mode. For each gradient, torch's generator is seeded by (run seed, worker, step), so
    dropout is reproducible. The weight of an embedding with sparse=True is row-sparse: strategies that support
    it send only the rows that were used.

    Args:
        build: returns a new module, initialised with torch's generator (which is seeded).
        loss: function from (outputs, targets) to a scalar tensor, such as
            `torch.nn.functional.cross_entropy`. Floating-point inputs and targets are cast to the parameters'
            dtype. The loss and the module may use torch.autocast.
        reduction: whether `loss` is the mean or the sum over samples.
        loss_of: "batch" for a loss that calls the module itself: a function from (module, batch) to a scalar
            tensor. The batch is the pair (inputs, targets), or the inputs if there are no targets. `spread`
            then concerns only `outputs`.
        spread: True passes inputs that are a dict to the module as keyword arguments, and those that are a
            tuple as several arguments. False passes them as one argument.

    Raises:
        ConfigError: `build` is a module, or `loss` is not a function. On first use: `build` returns no
            module, or the same one twice, or the module has no parameters to train, or several dtypes, or one
            that is neither float32 nor float64; or parameters share memory, and are not the same.

    Example:
        >>> model = from_torch(lambda: nn.Linear(3, 1), nn.functional.mse_loss)
        >>> model.layout.elems
        4
    """
    if isinstance(build, nn.Module):
        raise ConfigError(
            f"from_torch: build is a module, {type(build).__name__}; expected a function that builds one, "
            "since each worker has its own: pass a function, such as lambda: Net()"
        )
    _check_loss(loss)
    check_option("from_torch", "reduction", reduction, "mean", "sum")
    check_option("from_torch", "loss_of", loss_of, "outputs", "batch")
    return TorchModel(build, loss, reduction, loss_of, spread)


def _check_loss(loss: object) -> None:
    """Raises ConfigError for a class, or an object that cannot be called."""
    if isinstance(loss, type):
        got, remedy = f"the class {loss.__name__}", f"an instance of it, {loss.__name__}()"
    elif not callable(loss):
        got, remedy = f"a {type(loss).__name__}", "torch.nn.functional.cross_entropy, for example"
    else:
        return
    raise ConfigError(f"from_torch: loss is {got}; expected a function of (outputs, targets): give {remedy}")


class TorchModel:
    """A PyTorch module whose parameters are views of the flat vector that was passed last.

    It must not be used from two threads at once. Made by `from_torch`.

    Attributes:
        given: the arguments of the constructor: `TorchModel(*model.given)` is the same model, not yet built.
    """

    def __init__(self, build: Build, loss: Loss, reduction: Reduction, loss_of: LossOf, spread: bool) -> None:
        self.given = build, loss, reduction, loss_of, spread
        self.reduction: Reduction = reduction
        self._build = build
        self._loss = loss
        self._takes_batch = loss_of == "batch"
        self._spread = spread
        self._built: BuiltModule | None = None

    @property
    def layout(self) -> Layout:
        """Names and places of the trained parameters. The first use builds the module once."""
        return self._module().layout

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector with the parameters of `build()` under this seed; see `Model.init`."""
        layout = self.layout
        fresh = trained_of(build_module(self._build, seed))
        if [(name, tuple(p.shape)) for name, p in fresh] != [(s.name, s.shape) for s in layout.slots]:
            raise ConfigError(
                "from_torch: build() returned other parameter names or shapes than at its first call; expected the "
                "same at each call, whatever the seed"
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
        rows: RowGradient | None = None,
    ) -> float:
        """Writes the gradient at `parameters` into `gradient`; see `Model.gradient`.

        Args:
            rows: takes the gradients of row-sparse parameters; `gradient` then has the layout `layout.rest`.

        Raises:
            GradientError: the loss is not one finite number that depends on the parameters. The
                content of `gradient` is then undefined.
        """
        built = self._module()
        if batch.num_samples == 0:
            gradient.zero_()
            report(len(gradient))
            return 0.0
        built.point_at(parameters)
        built.training(True)
        backprop = Backprop(built.layout, built.parameters, gradient, report, rows)
        with torch.enable_grad(), backprop, built.wide(backprop), seeded(seed):
            loss = usable(self._loss_of(built, batch))
            value = finite_loss(float(loss.detach()))
            backprop.run(loss)
        backprop.finish()
        return value

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The module's outputs in eval() mode, without a graph; see `Model.outputs`."""
        built = self._module()
        self._show(built, parameters)
        built.training(False)
        with torch.no_grad():
            outputs: torch.Tensor = self.call(built.module, self._tensors(inputs))
        return outputs

    @property
    def calls_itself(self) -> bool:
        """Whether the loss calls the module itself: `loss_of="batch"`."""
        return self._takes_batch

    def loss_of(self, outputs: Any, targets: Any) -> float:
        """The loss of outputs in main memory, without a graph; see `worker.evaluation`."""
        with torch.no_grad():
            return float(self._loss(outputs, targets))

    def held_out_loss(self, parameters: torch.Tensor, batch: Batch) -> float:
        """The loss in eval() mode, without a graph; see `worker.evaluation`."""
        built = self._module()
        self._show(built, parameters)
        built.training(False)
        with torch.no_grad():
            return float(self._loss_of(built, batch))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under all of their names, in the module's own order.

        Trained ones are numpy views of the flat vector; frozen ones are included.
        """
        built = self._module()
        views = dict(built.layout.views(parameters))
        return {
            name: as_numpy(views[trained] if trained is not None else built.frozen[name])
            for name, trained in built.names.items()
        }

    def fixed(self) -> Fixed:
        """Frozen parameters, and second names of tied ones."""
        built = self._module()
        frozen = {name: as_numpy(tensor) for name, tensor in built.frozen.items()}
        second = {name: first for name, first in built.names.items() if first not in (None, name)}
        return Fixed(frozen, second)

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the persistent buffers, under the module's own names."""
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name, buffer in self._module().buffers():
            found |= arrays_of(name, buffer)
        return found

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets the persistent buffers. Names that the module does not have are ignored.

        Raises:
            ConfigError: a buffer is missing, or has another shape than one whose shape the module never changes.
                Those before it have been set.
        """
        built = self._module()
        for name, buffer in built.buffers():
            own = {} if buffer.shape != built.buffer_shapes.get(name) else arrays_of(name, buffer)
            for key, array in own.items():
                got = f"shape {buffers[key].shape}" if key in buffers else "nothing"
                if key not in buffers or (array.size and buffers[key].shape != array.shape):
                    raise ConfigError(
                        f"buffer {key!r}: got {got}, expected shape {array.shape}; "
                        "is this the model that the run trained?"
                    )
            set_tensor(name, buffer, buffers)

    def _module(self) -> BuiltModule:
        if self._built is None:
            self._built = BuiltModule(build_module(self._build, BUILD_SEED))
        return self._built

    def _show(self, built: BuiltModule, parameters: torch.Tensor) -> None:
        """Sets the parameters (E,) of the module."""
        built.point_at(parameters)

    def _tensors(self, tree: Any) -> Any:
        """The same tree with tensors in place of arrays, where the module computes."""
        return for_torch(tree, self._module().layout.dtype)

    def _loss_of(self, built: BuiltModule, batch: Batch) -> torch.Tensor:
        inputs, targets = self._tensors(batch.inputs), self._tensors(batch.targets)
        if self._takes_batch:
            return self._loss(built.module, inputs if targets is None else (inputs, targets))
        return self._loss(self.call(built.module, inputs), targets)

    def call(self, module: nn.Module, inputs: Any) -> Any:
        """Calls a module on a minibatch's inputs: as one argument, or as several (`spread` of `from_torch`)."""
        if self._spread and isinstance(inputs, dict):
            return module(**inputs)
        if self._spread and isinstance(inputs, tuple | list):
            return module(*inputs)
        return module(inputs)


def usable(loss: torch.Tensor) -> torch.Tensor:
    """Raises GradientError unless the loss is one number that can be differentiated. Returns it."""
    if not isinstance(loss, torch.Tensor):
        raise GradientError(f"loss is a {type(loss).__name__}, expected a scalar tensor: do not call .item()")
    if loss.numel() != 1:
        raise GradientError(f"loss has shape {tuple(loss.shape)}, expected a scalar: take its mean or sum")
    if not loss.requires_grad:
        raise GradientError(
            "loss does not depend on any parameter, expected one that can be differentiated: remove .detach() or "
            "no_grad() between the parameters and the loss"
        )
    return loss
