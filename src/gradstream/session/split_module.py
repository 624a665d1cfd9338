"""`SplitModule`: the module that `session.split` returns. It has one part, and is called like the whole module.

output = model(x)   every process gets the whole model's output, and computes the loss
loss.backward()     `p.grad` of this part's parameters, as that of the whole model
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.node import Node, map_arg
from torch.optim import LBFGS
from torch.utils._python_dispatch import _disable_current_modes

from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.job.plan import worker_name
from gradstream.model.base import Batch, leaves_of
from gradstream.model.built_module import put_tensor
from gradstream.model.torch_module import TorchModel
from gradstream.session.binding import GradientBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_vector import GradientVector
from gradstream.session.part_link import OutputHook, PartLink, PartPass
from gradstream.split.part_model import PartModel
from gradstream.worker.parts.channel import check_encodable

# ---- split module ------------------------------------------------------------------------

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
"""Optimizers that step each element independently of the others, so that a piece of a tensor is enough."""


def batch_of(inputs: Any) -> Batch:
    """The inputs of a module as a minibatch. Raises ConfigError unless they are tensors with equally many samples."""
    leaves = list(leaves_of(inputs))
    if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.dim() for _, leaf in leaves):
        raise ConfigError(
            f"session.split: got inputs of type {type(inputs).__name__}; expected a tensor, a tuple of the module's "
            "arguments or a dict of its keyword arguments, all of them tensors with the samples along the first axis"
        )
    return Batch(inputs, None, len(leaves[0][1]), np.empty(0, np.int64))


class SplitModule(nn.Module):
    """One part of a module: its parameters and buffers, with their names in the whole module.

    Args:
        model: this part's model.
        link: connection to the other parts.
        parameters: (E,), the memory of the module's parameters.
        example: the inputs with which the model was traced.
        stepped: called with the number of samples after each complete backward pass.
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
        self._noted: dict[
            nn.Parameter, tuple[int, int]
        ] = {}  # each gradient's identity and version after backward
        self._trained = []
        for name, view in model.layout.views(parameters):
            parameter = nn.Parameter(view)
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            put_tensor(self, name, parameter)
            self._trained.append(parameter)
        first = dict(self.named_parameters())
        for name, second_name in model.second_names.items():
            if second_name in first:
                put_tensor(self, name, first[second_name])
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
            ConfigError: the inputs do not match the example, or the script has done something that the parts
                cannot follow.
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
        for gradient in gradients:
            gradient.mul_(factor)
        for parameter in self._trained:
            self._note(parameter)
        return total

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises ConfigError for a step that would differ from the whole model's."""
        if not self.has_any(optimizer):
            return
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "session.split: LBFGS needs all parameters at once; use SGD, Adam or another optimizer"
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
        """Whether an optimizer has any parameter of this module."""
        own = {id(parameter) for parameter in self._trained}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def close(self) -> None:
        """Writes the final model, together with the other parts."""
        self._link.agree("close")
        self._link.write_final(self._flat)

    # ---- passes -------------------------------------------------------------------------

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The inputs in the form of the example."""
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
                "session.split: an input requires a gradient, which a split model does not compute"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("session.split: torch.autocast does not reach the other parts; leave it out")

    def run_backward(
        self, made: PartPass, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of this part's parameters; None for a parameter that the outputs do not depend on."""
        into = torch.empty_like(self._flat)
        self._link.backward(made, gradients, into)
        reached = self._reached(tuple(gradient is not None for gradient in gradients))
        for stage in self._model.stages.values():
            reached = reached.difference(stage.unused)
        views = self._model.layout.views(into)
        results = [view.data if name in reached else None for name, view in views]  # each has its own version
        self._stepped(made.samples)
        return results

    def _reached(self, used: tuple[bool, ...]) -> set[str]:
        """Names of the parameters that some output depends on."""
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
        """A number that grows with each change of a parameter."""
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
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
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
    """The same tree with plain lists, dicts and tuples in place of fx's types."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_plain(value) for value in tree)
    return tree


# ---- splitting ---------------------------------------------------------------------------
# Makes one process's part of a split model.


class LoopSplit:
    """A part of a loop's model, before and while its process joins the run.

    Args:
        part: the part of this process.
        build, example, into, pipeline_dtype: see `Session.split`.
        processes: number of processes of the session.

    Attributes:
        binding: presents the loop to the run, although parts exchange no parameters.

    Raises:
        ConfigError: see `Session.split`.
    """

    RULE = json.dumps({"class": "of each part", "fields": {}})
    """Stands in for the description of the optimizer, which the session does not see before its first step."""

    def __init__(
        self,
        part: int,
        build: Callable[[], nn.Module],
        example: Any,
        into: int,
        processes: int,
        job: Job,
        pipeline_dtype: str | None,
    ) -> None:
        if isinstance(build, nn.Module) or not callable(build):
            raise ConfigError(
                f"session.split: got a {type(build).__name__}; expected a function that builds the module, since no "
                "process is to hold the whole: lambda: Net()"
            )
        if into != processes:
            raise ConfigError(
                f"session.split(into={into}) in a session of {processes} processes; expected into={processes}, or "
                f"{into} processes, one for each part. Several replicas of a split model need a job of train(split=)"
            )
        if job.codec is not None:
            raise ConfigError(
                f"session.split: codec={job.codec!r} is for gradients that replicas exchange, and parts exchange none; "
                "leave codec out. pipeline_dtype= makes activations smaller"
            )
        if job.checkpoint_every is not None:
            raise ConfigError(
                f"session.split: the run makes checkpoints (checkpoint_every={job.checkpoint_every!r}), which would "
                "not have the parts; expected join(checkpoint_every=None): save model.state_dict() of each part"
            )
        self._deadlines, self._example, self._batch = job.deadlines, example, batch_of(example)
        self._build, self._hook, self._dtype = _Seeded(build), OutputHook(), pipeline_dtype
        model = TorchModel(self._build, self._hook, "mean", "outputs", spread=True)
        self._model = PartModel(model, self._batch, into, part)
        check_encodable(
            self._model.plan, pipeline_dtype
        )  # raises before this process joins, as the plan would
        self.binding = _NoExchange()

    def join(self, bridge: LoopBridge, seed: int, stepped: Callable[[int], None]) -> SplitModule:
        """Makes this process's part, with the initial values of the whole module.

        Args:
            bridge: the worker beside the loop, which has joined the run.
            seed: the run's seed.
            stepped: see `SplitModule`.
        """
        model = self._model
        names = [worker_name(part) for part in range(model.plan.parts)]
        silence_s = self._deadlines.silence_s
        link = PartLink(bridge, model, self._hook, names, self._dtype, seed=seed, silence_s=silence_s)
        bridge.open(1, silent=True).zero_()
        bridge.exchange(math.nan, torch.Tensor.zero_)  # waits until all parts answer
        shapes = repr([(path, leaf.shape, leaf.dtype) for path, leaf in leaves_of(self._batch.inputs)])
        link.agree("split", model.whole.fingerprint % 2**32, zlib.crc32(shapes.encode()))
        self._build.state = link.first(self._build.state.double()).to(torch.uint8)
        parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
        model.init(0, parameters)
        if model.part == 0:
            model.plan.graph.blueprint.draw(0)
        torch.set_rng_state(link.first(self._build.after.double()).to(torch.uint8))
        return SplitModule(model, link, parameters, self._example, stepped)


class _Seeded:
    """A build function that always starts from the same state of torch's generator.

    Attributes:
        state: the generator state at the start.
        after: the generator state at the end of the last call.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.state = self.after = torch.get_rng_state()
        self._build = build

    def __call__(self) -> nn.Module:
        with _disable_current_modes():  # a part is built in modes that would treat the states as its tensors
            torch.set_rng_state(self.state)
        module = self._build()
        with _disable_current_modes():
            self.after = torch.get_rng_state()
        return module


class _NoExchange(GradientBinding):
    """Rounds without gradients, which count steps and keep the loops of the parts together."""

    def __init__(self) -> None:
        super().__init__(GradientVector({}, 0, torch.float64))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Returns nothing: the parts have written the final model."""
        return {}
