"""`StageModel`: computes one stage of a split torch model in one process, forward and backward."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradstream.errors import ConfigError, GradientError
from gradstream.model.base import Reduction, finite_loss
from gradstream.model.buffers import Buffers, as_numpy
from gradstream.model.built_module import Fixed, WideLinear, is_wide
from gradstream.model.torch_module import TorchModel, usable
from gradstream.runtime.base import Report
from gradstream.split.cut import TorchPlan, layout_of_stage
from gradstream.split.operations import Operations, first_half
from gradstream.split.partial_build import tensor_at
from gradstream.split.plan import SplitPlan
from gradstream.split.saved import DroppedPass, SavedPass

# ---- joined loss -------------------------------------------------------------------------
# `JoinedLoss`: shows whether the loss of two pieces of a minibatch is what they make of it one by one.
#
# A pipeline cuts a minibatch of n samples into pieces of n_m, and adds up their gradients with weights n_m / n where
# the loss is a mean, and 1 if it is a sum. That is the gradient of
#
#     Σ n_m/n · loss(piece m)        which is loss(whole) for a mean over samples,
#
# but not for a mean over tokens that count, over weights of classes, or of anything that sees samples together. The
# last stage has the outputs of all pieces, so it can see that. It looks at the first two, and keeps the memory of no
# more. The user's function is called twice more for it, without gradients; one that draws random numbers cannot be
# compared.

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Difference that rounding may make, in relation to the largest of the losses; 0.02 for shorter numbers."""


def is_due(step: int) -> bool:
    """Whether the minibatch of a step is looked at: 0, 1, 2, 4, 8, …; a few suffice, and cost little."""
    return step & (step - 1) == 0


class JoinedLoss:
    """Takes the outputs of the first two pieces of a minibatch.

    Args:
        loss: the user's function of (outputs, targets).
        reduction: whether it is a mean or a sum over samples.
    """

    def __init__(self, loss: Callable[..., Any], reduction: Reduction) -> None:
        self._loss = loss
        self._reduction = reduction
        self._seen: list[tuple[int, Any, float]] = []
        self._compared = False

    def add(self, outputs: Any, targets: Any, samples: int, loss: float) -> None:
        """Adds a piece. With the second one, compares.

        Raises:
            GradientError: the loss of both is another than that of one and the other.
        """
        if self._compared:
            return
        self._seen.append((samples, pytree.tree_map(_detached, (outputs, targets)), loss))
        if len(self._seen) == 2:
            self._compare()
            self._compared = True
            self._seen.clear()

    def _compare(self) -> None:
        joint = sum(size for size, _, _ in self._seen)
        weights = [1.0 if self._reduction == "sum" else size / joint for size, _, _ in self._seen]
        losses = [loss for _, _, loss in self._seen]
        pieces = math.fsum(map(operator.mul, weights, losses))
        joined = self._joined(weights)
        if joined is None:
            return
        dtype = next(
            (leaf.dtype for leaf in pytree.tree_leaves(joined) if _is_number(leaf)),
            torch.float32,
        )
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole, again = (float(self._loss(*joined)) for _ in range(2))
        if whole != again or not math.isfinite(whole) or not math.isfinite(pieces):
            return  # it draws random numbers, or the gradient will be refused anyway
        # The mean of pieces may be near 0 if they are not.
        allowed = TOLERANCE.get(dtype, 0.02) * max(1e-6, *map(abs, (whole, *losses)))
        if abs(whole - pieces) > allowed:
            kind = "sum" if self._reduction == "sum" else "mean over samples"
            raise GradientError(
                f"the loss of two micro-batches together is {whole:.9g}, but the {kind} of one and the other is "
                f"{pieces:.9g}, so the gradient of the pieces is not the minibatch's. The loss is no {kind}: as with "
                "ignore_index (a mean over the tokens that count), with weights of classes, or where samples are seen "
                'together. Take micro_batches=1, or a loss that is one; reduction="sum" declares a sum'
            )

    def _joined(self, weights: list[float]) -> Any:
        """Outputs and targets of the whole; None if they are not of a form that can be joined."""
        leaves, specs = zip(*(pytree.tree_flatten(values) for _, values, _ in self._seen), strict=True)
        if any(spec != specs[0] for spec in specs[1:]):
            return None
        joined = []
        for pieces in zip(*leaves, strict=True):
            sized = zip(pieces, self._seen, strict=True)
            if all(torch.is_tensor(one) and one.dim() and len(one) == size for one, (size, _, _) in sized):
                joined.append(torch.cat(pieces))
            elif all(
                torch.is_tensor(piece) and not piece.dim() for piece in pieces
            ):  # a loss of the module's own
                joined.append(sum(weight * piece for weight, piece in zip(weights, pieces, strict=True)))
            elif all(
                piece is pieces[0] or (not torch.is_tensor(piece) and piece == pieces[0]) for piece in pieces
            ):
                joined.append(pieces[0])
            else:
                return None
        return pytree.tree_unflatten(joined, specs[0])


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def _is_number(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


# ---- stage model -------------------------------------------------------------------------


class StageModel:
    """One stage of a split model, whose process holds only the stage's own parameters.

    Its functions take the stage's own flat vector: the stage's ranges of the whole model's vector, joined. It must
    not be used from two threads at once. Several minibatches may be between their forward and backward.

    Args:
        model: the whole model.
        plan: from `plan_split` of the same model.
        number: the stage's number.

    Attributes:
        layout: names, shapes and places of its parameters; a piece of a divided tensor has the tensor's name.
        reduction: whether loss and gradient are the mean or the sum over a minibatch's samples.
        unused: names of parameters on which the loss of the last backward pass did not depend.

    Raises:
        ConfigError: the plan is not one of `plan_split`.
    """

    def __init__(self, model: TorchModel, plan: SplitPlan, number: int) -> None:
        if not isinstance(plan, TorchPlan):
            raise ConfigError(
                f"StageModel: plan is a {type(plan).__name__}, expected one that plan_split returned"
            )
        self.reduction: Reduction = model.reduction
        self.layout = layout_of_stage(plan, number)
        self.unused: Sequence[str] = ()
        self._loss = model.given[1]
        self._plan = plan
        self._stage = plan.stages[number]
        self._is_last = number == len(plan.stages) - 1
        self._pieces = plan.pieces[number]
        self._operations = Operations(plan, number)

    def joined_loss(self) -> JoinedLoss:
        """Looks at the loss of one minibatch's pieces."""
        return JoinedLoss(self._loss, self.reduction)

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the stage's vector with the values that `TorchModel.init(seed)` gives to these elements.

        No more than the stage's own parameters and one other tensor exist at a time.
        """
        views = dict(zip(self._pieces, (view for _, view in self.layout.views(parameters)), strict=True))
        whole = {piece.name: view.flatten() for piece, view in views.items() if piece.axis is None}
        blueprint = self._plan.graph.blueprint
        if whole:
            blueprint.part(whole, seed, whole)
        divided = {piece: view for piece, view in views.items() if piece.axis is not None}
        if divided:
            module = blueprint.part([piece.name for piece in divided], seed)
            for piece, view in divided.items():
                view.copy_(piece.of(tensor_at(module, piece.name)).detach())

    def forward(
        self,
        parameters: torch.Tensor,
        values: Mapping[str, torch.Tensor],
        *,
        seed: int,
        samples: int,
        halves: bool = False,
        recompute: bool = False,
        joined: JoinedLoss | None = None,
    ) -> tuple[dict[str, torch.Tensor], object]:
        """Computes the stage for a minibatch.

        Args:
            parameters: the stage's vector. It is not copied: the backward pass reads it again.
            values: the stage's inputs, by name.
            seed: of random numbers; each operation draws its own, from (seed, its name).
            samples: number of samples of the minibatch.
            halves: the backward pass comes as `backward_inputs` and `backward_weights`.
            recompute: the activations are dropped; `recompute` computes them again.
            joined: gets the outputs and targets of the last stage; None for a minibatch of one piece.

        Returns:
            (the stage's outputs by name, what `backward` needs). The last stage's outputs have "loss", a scalar.

        Raises:
            ConfigError: a value is missing, or has another shape or dtype than the plan says.
            GradientError: the loss is not one finite number that depends on the parameters, or `joined` raises it.
        """
        compute = partial(self._computed, parameters, values, seed, samples, halves)
        state = self._operations.state() if recompute else ()
        saved = compute(joined)
        outputs = {name: tensor.detach() for name, tensor in saved.outputs.items()}
        return outputs, DroppedPass(compute, state) if recompute else saved

    def recompute(self, saved: object) -> None:
        """Computes the activations of a forward pass that has dropped them. The backward pass must follow at once.

        The random numbers are those of the first time, and so are the buffers that the pass finds. Buffers that a
        pass changes, such as running statistics, are changed once: the backward pass leaves them as they were before.
        """
        assert isinstance(saved, DroppedPass)
        saved.newest = self._operations.state()
        self._operations.set_state(saved.state)
        saved.again = saved.compute()

    def backward(
        self,
        saved: object,
        gradients: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        *,
        weight: float = 1.0,
        add: bool = False,
        report: Report | None = None,
    ) -> dict[str, torch.Tensor]:
        """Computes the gradients of the stage for a minibatch. It may be called once for each `forward`.

        Args:
            saved: what `forward` returned.
            gradients: of the stage's outputs, by name; that of the loss is 1.
            gradient: the stage's vector for its parameters' gradient.
            weight: factor of the parameters' gradient.
            add: whether to add it to what `gradient` has, instead of replacing that.
            report: called with the number of elements from the front of `gradient` that are final, as it grows.

        Returns:
            Gradients of the stage's inputs, without the factor: of all whose `Value.has_gradient` is true.
        """
        graph = _graph_of(saved)
        self._land(graph, gradient, weight, add)
        # What is computed again needs the mode.
        with nullcontext() if self._operations.plain else self._wide(graph):
            graph.run(*graph.roots(gradients), self.layout.milestones, report)
        self.unused = graph.clear()
        if report is not None:
            report(self.layout.elems)
        self._restore(saved)
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in graph.inputs.items()
        }

    def backward_inputs(
        self, saved: object, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The half of `backward` for which other stages wait; see `split.operations`."""
        graph = _graph_of(saved)
        found, graph.late = first_half(*graph.roots(gradients), graph.inputs, graph.leaves, graph.uses or ())
        self._restore(saved)
        return {name: found.get(name, torch.zeros_like(leaf)) for name, leaf in graph.inputs.items()}

    def backward_weights(
        self, saved: object, gradient: torch.Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """The other half of `backward`, after `backward_inputs`: the gradient of the parameters. Same arguments."""
        graph = _graph_of(saved)
        assert graph.late is not None
        self._land(graph, gradient, weight, add)
        graph.late.add_to(graph.sinks)
        self.unused = graph.clear()

    def _computed(
        self,
        parameters: torch.Tensor,
        values: Mapping[str, torch.Tensor],
        seed: int,
        samples: int,
        halves: bool,
        joined: JoinedLoss | None = None,
    ) -> SavedPass:
        """A forward pass, with its graph."""
        saved = SavedPass(self._pieces, self.layout.views(parameters), halves)
        inputs = self._checked(values, samples)
        for name, tensor in inputs.items():
            if self._plan.value(name).has_gradient:
                inputs[name] = saved.inputs[name] = tensor.detach().requires_grad_()
        fork = torch.random.fork_rng(devices=[]) if self._operations.random else nullcontext()
        with torch.enable_grad(), fork:
            wide = self._wide(saved)
            results = self._operations.run(saved.leaves, inputs, samples, seed, saved.uses, wide)
            saved.outputs = {name: results[name] for name in self._stage.outputs}
            if self._is_last:
                outputs, targets = results["outputs"], self._operations.targets(inputs)
                saved.outputs["loss"] = loss = usable(self._loss(outputs, targets))
                number = float(loss.detach())
                finite_loss(number)
                if joined is not None:
                    joined.add(outputs, targets, samples, number)
        return saved

    def _restore(self, saved: object) -> None:
        if isinstance(saved, DroppedPass):
            self._operations.set_state(saved.newest)

    def _land(self, saved: SavedPass, gradient: torch.Tensor, weight: float, add: bool) -> None:
        for sink, (_, view) in zip(saved.sinks.values(), self.layout.views(gradient), strict=True):
            sink.into(view, weight, add)

    def evaluate(
        self, parameters: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Computes the stage in eval() mode, without a graph.

        Returns:
            The stage's outputs. The last stage's are "outputs", those of the module, and "loss" if `values` has
            targets.
        """
        counted = (len(values[name]) for name in self._stage.inputs if self._plan.value(name).per_sample)
        samples = next(counted, 0)
        inputs = self._checked(values, samples, with_targets=False)
        leaves = dict(zip(self._pieces, (view for _, view in self.layout.views(parameters)), strict=True))
        with torch.no_grad():
            results = self._operations.run(leaves, inputs, samples, None)
            if self._is_last and all(name in inputs for name in self._stage.inputs):
                results["loss"] = self._loss(results["outputs"], self._operations.targets(inputs))
        return results

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the stage's persistent buffers, under the module's own names."""
        return {name: as_numpy(buffer).copy() for name, buffer in self._operations.buffers()}

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets the stage's persistent buffers. Names that the stage does not have are ignored.

        Raises:
            ConfigError: a buffer is missing, or has another shape. Those before it have been set.
        """
        self._operations.load_buffers(buffers)

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The stage's frozen parameters and persistent buffers, as it uses them, by the module's own names."""
        return self._operations.fixed_tensors()

    def fixed(self) -> Fixed:
        """The stage's frozen parameters, and further names of its trained ones."""
        return self._operations.fixed()

    def _checked(
        self, values: Mapping[str, torch.Tensor], samples: int, *, with_targets: bool = True
    ) -> dict[str, torch.Tensor]:
        """The stage's inputs. Raises ConfigError unless they are as the plan says."""
        inputs = {}
        for name in self._stage.inputs:
            value, tensor = self._plan.value(name), values.get(name)
            if tensor is None and not with_targets and name.partition(".")[0] == "targets":
                continue
            if tensor is None or tensor.shape != value.shape_of(samples) or tensor.dtype != value.dtype:
                got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)} of {tensor.dtype}"
                raise ConfigError(
                    f"stage {self._stage.number}, input {name!r}: got {got}, expected {value.shape_of(samples)} of "
                    f"{value.dtype}: the model was split for samples like those of the first minibatch, or of "
                    "plan_split's example; only the number of samples may differ"
                )
            inputs[name] = tensor
        return inputs

    def _wide(self, saved: SavedPass) -> AbstractContextManager[object]:
        """The context in which gradients of wide layers are written directly."""
        if saved.uses is not None:
            return nullcontext()
        wide = [
            (leaf, sink)
            for slot, leaf, sink in zip(
                self.layout.slots, saved.leaves.values(), saved.sinks.values(), strict=True
            )
            if is_wide(slot)
        ]
        return WideLinear(*zip(*wide, strict=True)) if wide else nullcontext()


def _graph_of(saved: object) -> SavedPass:
    graph = saved.again if isinstance(saved, DroppedPass) else saved
    assert isinstance(graph, SavedPass)
    return graph
