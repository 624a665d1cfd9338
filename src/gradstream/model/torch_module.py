"""`from_torch`: a PyTorch module and a loss as a `Model` on flat vectors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gradstream.errors import ConfigError, GradientError
from gradstream.model.arrays import for_torch
from gradstream.model.backprop import Backprop
from gradstream.model.base import Layout, Reduction
from gradstream.model.batch import Batch, map_leaves
from gradstream.model.buffers import Buffers
from gradstream.model.built_module import Build, BuiltModule, as_numpy, build_module, trained_of
from gradstream.model.devices import Streams, device_of, streams_of
from gradstream.model.factors import KeptLayers, OuterLayer
from gradstream.model.fixed import Fixed
from gradstream.model.rows import RowGradient
from gradstream.model.staging import Staging
from gradstream.runtime.base import Report

__all__ = ["TorchModel", "from_torch"]

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
    gradient by (run seed, worker, step), so that dropout is reproducible. The weight of an embedding with
    sparse=True is row-sparse: a strategy that can sends its touched rows alone.

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
        ConfigError: `build` is a module; on first use, where it returns none, or one whose parameters
            are none, of several dtypes, or neither float32 nor float64.

    Example:
        >>> model = from_torch(lambda: nn.Linear(3, 1), nn.functional.mse_loss)
        >>> model.layout.elems
        4
    """
    if isinstance(build, nn.Module):
        raise ConfigError(
            f"from_torch: build is a module, {type(build).__name__}; expected a function that builds one, "
            "since every worker has its own"
        )
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"from_torch: reduction is {reduction!r}; expected 'mean' or 'sum'")
    if loss_of not in ("outputs", "batch"):
        raise ConfigError(f"from_torch: loss_of is {loss_of!r}; expected 'outputs' or 'batch'")
    return TorchModel(build, loss, reduction, loss_of, spread)


class TorchModel:
    """A PyTorch module whose parameters are views of whichever flat vector was given last, or of its copy.

    One at a time: not for use from two threads at once. Made by `from_torch`.
    """

    def __init__(
        self,
        build: Build,
        loss: Loss,
        reduction: Reduction,
        loss_of: LossOf,
        spread: bool,
        streams: Callable[[], Streams] | None = None,
    ) -> None:
        self.reduction: Reduction = reduction
        self._build = build
        self._loss = loss
        self._loss_shape: LossOf = loss_of
        self._spread = spread
        self._streams = streams
        self._keeps_factors = streams is None
        self._built: BuiltModule | None = None
        self._staging: Staging | None = None

    def on_device(self, name: str, rank: int = 0) -> TorchModel:
        """The same model, to be computed on another device. What is given to it stays in main memory.

        Args:
            name: see `Job.device`.
            rank: of the worker.

        Raises:
            ConfigError: torch has no such device here.
        """
        device = device_of(name, rank)
        model = self.staged(partial(streams_of, device))
        if device.type == "cpu":
            model._streams = None  # computes as ever, and offers what the workers with a device do
        return model

    def staged(self, streams: Callable[[], Streams]) -> TorchModel:
        """The same model, to be computed where `streams()` copies to; called when something is computed."""
        return TorchModel(self._build, self._loss, self.reduction, self._loss_shape, self._spread, streams)

    @property
    def layout(self) -> Layout:
        """Names and places of the trained parameters. The first use builds the module once."""
        return self._module().layout

    @property
    def outer_layers(self) -> Sequence[OuterLayer]:
        """Wide linear layers with a weight of their own: see `model.factors`. None on a device."""
        return self._module().outer_layers if self._keeps_factors else ()

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector with what `build()` gives under this seed; see `Model.init`."""
        layout = self.layout
        fresh = trained_of(build_module(self._build, seed))
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
        kept: KeptLayers | None = None,
        rows: RowGradient | None = None,
    ) -> float:
        """Writes the gradient at `parameters` into `gradient`; see `Model.gradient`.

        Args:
            kept: layers of `outer_layers` whose gradient is to be kept as factors. Their places in
                `gradient` are left as they are, where they are not refused.
            rows: takes the gradients of row-sparse parameters; `gradient` is then that of `layout.rest`.

        Raises:
            GradientError: the loss is not one finite number that depends on the parameters. The
                content of `gradient` is then undefined.
        """
        built = self._module()
        if batch.num_samples == 0:
            gradient.zero_()
            report(len(gradient))
            return 0.0
        built.training(True)
        if self._streams is not None:
            return self._staged_gradient(built, parameters, batch, gradient, seed, report, rows)
        built.point_at(parameters)
        backprop = Backprop(built.layout, built.parameters, gradient, report, kept, rows)
        with torch.enable_grad(), backprop, built.wide(backprop), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loss = _scalar(self._loss_of(built, batch))
            value = _finite(float(loss.detach()))
            backprop.run(_differentiable(loss))
        backprop.finish()
        return value

    def _staged_gradient(
        self,
        built: BuiltModule,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        seed: int,
        report: Report,
        rows: RowGradient | None,
    ) -> float:
        """`gradient` by way of the device. Nothing waits for it there before backprop has been asked for."""
        built.check(parameters)
        staging, losses = self._placed(built), list[float]()
        staging.streams.pin(parameters)
        with staging.landing(gradient, report) as landing:
            staging.show(parameters)
            backprop = Backprop(built.layout, built.parameters, landing.source, landing.ready, None, rows)
            generators = staging.streams.generators
            with torch.enable_grad(), backprop, torch.random.fork_rng(devices=generators):
                torch.manual_seed(seed)
                loss = _scalar(self._loss_of(built, batch))
                landing.scalar(loss.detach(), lambda value: losses.append(_finite(value)))
                backprop.run(_differentiable(loss))
            backprop.finish()
            landing.finish()
        return losses[0]

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The module's outputs in eval() mode, without a graph; see `Model.outputs`."""
        built = self._module()
        built.training(False)
        with torch.no_grad(), self._shown(built, parameters):
            outputs: torch.Tensor = self._call(built.module, self._tensors(inputs, built.layout.dtype))
            if self._staging is not None:
                outputs = tree_map_only(torch.Tensor, torch.Tensor.cpu, outputs)
        return outputs

    @property
    def calls_itself(self) -> bool:
        """Whether the loss calls the module, in a way of its own: `loss_of="batch"`."""
        return self._loss_shape == "batch"

    def held_out_loss(self, parameters: torch.Tensor, batch: Batch) -> float:
        """The loss in eval() mode, without a graph; see `worker.evaluation`."""
        built = self._module()
        built.training(False)
        with torch.no_grad(), self._shown(built, parameters):
            return float(self._loss_of(built, batch))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under all of their names, in the module's own order.

        Trained ones are numpy views of the flat vector; frozen ones are there as well.
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
        return {name: as_numpy(buffer).copy() for name, buffer in self._module().buffers()}

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

    def _module(self) -> BuiltModule:
        if self._built is None:
            self._built = BuiltModule(build_module(self._build, _BUILD_SEED))
        return self._built

    def _placed(self, built: BuiltModule) -> Staging:
        """The way to the device. The first use moves the module there, and a loss that is one."""
        if self._staging is None:
            assert self._streams is not None
            staging = Staging(built.layout.elems, built.layout.dtype, self._streams())
            built.module.to(staging.streams.device)
            built.point_at(staging.parameters)
            if isinstance(self._loss, nn.Module):
                self._loss = copy.deepcopy(self._loss).to(staging.streams.device)
            self._staging = staging
        return self._staging

    def _shown(self, built: BuiltModule, parameters: torch.Tensor) -> AbstractContextManager[object]:
        """The module has these parameters while this is active, and computes on its device."""
        if self._streams is None:
            built.point_at(parameters)
            return nullcontext()
        built.check(parameters)
        staging = self._placed(built)
        staging.show(parameters)
        return staging.streams.current()

    def _tensors(self, tree: Any, dtype: torch.dtype) -> Any:
        """The same tree with tensors in place of arrays, on the module's device."""
        tree, staging = for_torch(tree, dtype), self._staging
        if staging is None:
            return tree
        moved = staging.streams.moved
        return map_leaves(lambda leaf: moved(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    def _loss_of(self, built: BuiltModule, batch: Batch) -> torch.Tensor:
        dtype = built.layout.dtype
        inputs, targets = self._tensors(batch.inputs, dtype), self._tensors(batch.targets, dtype)
        if self.calls_itself:
            return self._loss(built.module, inputs if targets is None else (inputs, targets))
        return self._loss(self._call(built.module, inputs), targets)

    def _call(self, module: nn.Module, inputs: Any) -> Any:
        if self._spread and isinstance(inputs, dict):
            return module(**inputs)
        if self._spread and isinstance(inputs, tuple | list):
            return module(*inputs)
        return module(inputs)


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, torch.Tensor):
        raise GradientError(f"loss is a {type(loss).__name__}, expected a scalar tensor: do not call .item()")
    if loss.numel() != 1:
        raise GradientError(f"loss has shape {tuple(loss.shape)}, expected a scalar: take its mean or sum")
    return loss


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise GradientError(f"loss is {loss}; lower the learning rate or look at the inputs of this batch")
    return loss


def _differentiable(loss: torch.Tensor) -> torch.Tensor:
    if not loss.requires_grad:
        raise GradientError(
            "loss does not depend on any parameter; is there a .detach() or no_grad() on its way?"
        )
    return loss
