"""`SplitModule`: the module that `session.split` returns. It has one part, and is called as the whole one.

output = model(x)   every process gets the whole model's output, and computes the loss
loss.backward()     `p.grad` of this part's parameters, as that of the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.node import Node, map_arg
from torch.optim import LBFGS

from gradstream.errors import ConfigError
from gradstream.model.batch import Batch, leaves_of
from gradstream.model.built_module import put_tensor
from gradstream.session.part_link import PartLink, PartPass
from gradstream.split.part_model import PartModel

_BY_ELEMENT = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "ASGD",
    )
)
"""Optimizers whose step of an element does not depend on other elements: a piece of a tensor is enough for them."""


def batch_of(inputs: Any) -> Batch:
    """The inputs of a module as a minibatch. Raises ConfigError if they are no tensors of as many samples."""
    leaves = list(leaves_of(inputs))
    if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.dim() for _, leaf in leaves):
        raise ConfigError(
            f"session.split: got inputs of type {type(inputs).__name__}; expected a tensor, a tuple of the module's "
            "arguments or a dict of its keyword arguments, all of them tensors with the samples along the first axis"
        )
    return Batch(inputs, None, len(leaves[0][1]), np.empty(0, np.int64))


class SplitModule(nn.Module):
    """One part of a module. Parameters and buffers have the whole module's names; others are not there.

    Args:
        model: this part's model.
        link: leads to the other parts.
        parameters: (E,), which the module's parameters share.
        example: inputs by which the model was cut.
        stepped: called once a backward pass is complete, with the number of samples.
    """

    def __init__(
        self,
        model: PartModel,
        link: PartLink,
        parameters: torch.Tensor,
        example: Any,
        stepped: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._model, self._link, self._stepped = model, link, stepped
        self._flat = parameters
        self._example = example
        self._noted: dict[nn.Parameter, tuple[int, int]] = {}  # each gradient as backward has left it
        self._trained = []
        for name, view in model.layout.views(parameters):
            parameter = nn.Parameter(view)
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            put_tensor(self, name, parameter)
            self._trained.append(parameter)
        first = dict(self.named_parameters())
        for name, one in model.second_names.items():
            if one in first:
                put_tensor(self, name, first[one])
        self._frozen = []
        for stage in model.stages.values():
            for name, tensor in stage.fixed_tensors():
                put_tensor(self, name, tensor)
                if isinstance(tensor, nn.Parameter):
                    self._frozen.append(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole module's output. Every process must call it, with the same minibatch.

        Raises:
            ReplicasDifferError: another process has other inputs, or does something else.
            ConfigError: the inputs are not like the example, or the script has done what parts cannot follow.
        """
        batch = batch_of(self._inputs(args, kwargs))
        self._check(batch)
        made = self._link.forward(self._flat, batch, training=self.training)
        results: Sequence[torch.Tensor] = made.results
        if self.training and torch.is_grad_enabled():
            results = _Through.apply(self, made, *self._trained)  # type: ignore[no-untyped-call]
        in_order: Iterator[torch.Tensor] = iter(results)
        output = map_arg(self._model.plan.graph.output.args[0], lambda _: next(in_order))
        return _plain(output)

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """See `Session.clip_grad_norm_`."""
        gradients = [one.grad for one in parameters if one.grad is not None]
        squares = sum(float(torch.linalg.vector_norm(one)) ** 2 for one in gradients)
        self._link.agree("clip_grad_norm_", max_norm)
        total = torch.tensor(self._link.sum(squares) ** 0.5, dtype=self._flat.dtype)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for one in gradients:
            one.mul_(factor)
        for parameter in self._trained:
            self._note(parameter)
        return total

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises ConfigError for a step that would not be the whole model's."""
        if not self.has_any(optimizer):
            return
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "session.split: LBFGS needs all parameters at once; take SGD, Adam or another one"
            )
        divided = [one.name for some in self._model.plan.pieces for one in some if one.axis is not None]
        if divided and type(optimizer) not in _BY_ELEMENT:
            raise ConfigError(
                f"session.split: {divided[0]!r} is divided over the parts, and {kind} may need all of it for a step; "
                "expected an optimizer of torch.optim that steps each element by itself, such as Adam"
            )
        for parameter in self._trained:
            gradient = parameter.grad
            if gradient is not None and self._noted.get(parameter) != _state(gradient) and gradient.any():
                raise ConfigError(
                    "session.split: a gradient was changed between backward and step, where this process has those "
                    "of its part alone; clip by norm with session.clip_grad_norm_(model.parameters(), 1.0), and "
                    "change single elements in a hook (Tensor.register_hook)"
                )

    def has_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has a parameter of this module."""
        mine = {id(parameter) for parameter in self._trained}
        return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])

    def close(self) -> None:
        """Writes the final model, with the other parts."""
        self._link.agree("close")
        self._link.write_final(self._flat)

    # ---- passes -------------------------------------------------------------------------

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The inputs as the example has them."""
        if isinstance(self._example, dict) and not args:
            return dict(kwargs)
        if isinstance(self._example, tuple | list) and not kwargs:
            return type(self._example)(args)
        if isinstance(self._example, torch.Tensor) and len(args) == 1 and not kwargs:
            return args[0]
        raise ConfigError(
            f"a split model was called with {len(args)} arguments and {sorted(kwargs)}; expected them as the example "
            "that session.split was given"
        )

    def _check(self, batch: Batch) -> None:
        """Raises ConfigError for what the parts cannot follow."""
        views = [view for _, view in self._model.layout.views(self._flat)]
        if any(p.data_ptr() != v.data_ptr() for p, v in zip(self._trained, views, strict=True)):
            raise ConfigError(
                "session.split: a parameter has other memory than at session.split (model.to(...), p.data = ...); "
                "make the module as it is to be in the function that builds it, and copy values into parameters"
            )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ConfigError(
                "session.split: a parameter was frozen in the function that builds the module, and is not now; "
                "freeze it after session.split"
            )
        if any(leaf.requires_grad for _, leaf in leaves_of(batch.inputs)):
            raise ConfigError(
                "session.split: an input requires a gradient, which a split model does not give"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("session.split: torch.autocast does not reach the other parts; leave it out")

    def run_backward(
        self, made: PartPass, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of this part's parameters: None if the outputs do not depend on one."""
        into = torch.empty_like(self._flat)
        self._link.backward(made, gradients, into)
        reached = self._reached(tuple(one is not None for one in gradients))
        for stage in self._model.stages.values():
            reached = reached.difference(stage.unused)
        views = self._model.layout.views(into)
        found = [view.data if name in reached else None for name, view in views]  # each has its own version
        self._stepped(made.samples)
        return found

    def _reached(self, used: tuple[bool, ...]) -> set[str]:
        """Names of the parameters on which some of the outputs depend."""
        graph = self._model.plan.graph
        nodes: list[Node] = []
        map_arg(graph.output.args[0], nodes.append)
        open_ = [node for node, is_used in zip(nodes, used, strict=True) if is_used]
        seen: set[Node] = set()
        while open_:
            if (node := open_.pop()) not in seen:
                seen.add(node)
                open_ += node.all_input_nodes
        calls = [node for node in seen if node.op.startswith("call_")]
        return {piece.name for node in calls for piece in graph.tensors_of(node)}

    @property
    def version(self) -> int:
        """Grows with each change of a parameter."""
        return sum(parameter._version for parameter in self._trained)

    def _note(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._noted[parameter] = _state(parameter.grad)


class _Through(torch.autograd.Function):
    """A forward pass through all parts, as one operation on this part's parameters."""

    @staticmethod
    def forward(ctx: Any, module: SplitModule, made: PartPass, *parameters: torch.Tensor) -> Any:
        ctx.module, ctx.made, ctx.version = module, made, module.version
        ctx.set_materialize_grads(False)
        results = tuple(made.results)
        ctx.mark_non_differentiable(*(one for one in results if not one.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if not ctx.made.saved:
            raise ConfigError(
                "session.split: backward for the second time through one output of a split model"
            )
        if ctx.version != ctx.module.version:
            raise ConfigError(
                "session.split: parameters were changed between a forward pass and its backward; call the model again"
            )
        return None, None, *ctx.module.run_backward(ctx.made, gradients)


def _state(gradient: torch.Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version


def _plain(tree: Any) -> Any:
    """The same tree with lists, dicts and tuples of Python, which fx has replaced by its own."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_plain(value) for value in tree)
    return tree
