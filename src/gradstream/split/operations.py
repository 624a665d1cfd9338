"""The operations of one stage, on a module of which only this stage's tensors have values."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradstream.errors import ConfigError
from gradstream.model.backprop import Sink
from gradstream.model.base import map_leaves
from gradstream.model.buffers import Buffers, as_numpy
from gradstream.model.built_module import WIDE_ELEMS, Fixed
from gradstream.model.torch_module import BUILD_SEED
from gradstream.split.cut import TorchPlan, parameter_of, value_name
from gradstream.split.graph import Piece, size_of
from gradstream.split.partial_build import tensor_at
from gradstream.split.trace import ByMode, run_node

# ---- halves ------------------------------------------------------------------------------
# A stage's backward pass in two halves: gradients of its inputs, and later those of its weights.
#
#    y = f(x, w):   first half  ∂L/∂x, and ∂L/∂y of each operation with weights      second half  ∂L/∂w = ∂L/∂y · ∂y/∂w
#
# Other parts wait for the first half alone (Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", 2023). The
# second half begins at each operation's own result, so it computes nothing again. The weights of several operations
# of the stage have their gradients in the first half: from the last operation to the first the same path would be
# gone twice.


@dataclass(frozen=True, slots=True)
class Use:
    """An operation that reads weights.

    Args:
        results: its results.
        pieces: the weights.
        inputs: (..., I) x of a wide linear layer y = x Wᵀ + b, whose pieces are W and b; None for others.
        version: of `inputs`. If something has written to them since, autograd is asked, and raises its error.
    """

    results: Sequence[Tensor]
    pieces: Sequence[Piece]
    inputs: Tensor | None = None
    version: int = 0

    @property
    def is_product(self) -> bool:
        """Whether the weight's gradient is (dL/dy)ᵀ x, with x as the operation has read it."""
        return self.inputs is not None and self.inputs._version == self.version


@dataclass(frozen=True, slots=True)
class LateWeights:
    """The second half.

    Args:
        leaves: the weights.
        known: gradients of weights that the first half has given.
        uses: operations whose weights come now, each with the gradients of its results.
    """

    leaves: Mapping[Piece, Tensor]
    known: Mapping[Piece, Tensor]
    uses: Sequence[tuple[Use, Sequence[Tensor]]]

    def add_to(self, sinks: Mapping[Piece, Sink]) -> None:
        """Adds the gradient of each weight on which the outputs depend to its sink. To be called once.

        That of a wide linear layer has no tensor of its own, as in `model.built_module`.
        """
        for piece, one in self.known.items():
            sinks[piece].add(one)
        for use, gradients in self.uses:
            if use.is_product:
                assert use.inputs is not None
                (gradient,), (weight, *biases) = gradients, use.pieces
                rows = gradient.reshape(-1, gradient.shape[-1])  # (N, O)
                sinks[weight].add_product(rows.t(), use.inputs.detach().reshape(-1, use.inputs.shape[-1]))
                for bias in biases:
                    sinks[bias].add(rows.sum(0))
                continue
            weights = [self.leaves[piece] for piece in use.pieces]
            found: Sequence[Tensor | None] = torch.autograd.grad(
                use.results, weights, gradients, retain_graph=True, allow_unused=True
            )
            for piece, late in zip(use.pieces, found, strict=True):
                if late is not None:
                    sinks[piece].add(late)


def first_half(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    leaves: Mapping[Piece, Tensor],
    uses: Sequence[Use],
) -> tuple[dict[str, Tensor], LateWeights]:
    """Computes the gradients of the inputs.

    Args:
        roots: outputs of the stage.
        gradients: their gradients.
        inputs: inputs that have gradients, by name.
        leaves: the stage's weights.
        uses: its operations with weights.

    Returns:
        (gradients by name of those inputs on which the outputs depend, the second half).
    """
    times = Counter(piece for use in uses for piece in use.pieces)
    sent = {id(root) for root in roots}
    several = [piece for piece, leaf in leaves.items() if times[piece] > 1 or id(leaf) in sent]
    single = [
        replace(
            use,
            results=[result for result in use.results if result.requires_grad],
            pieces=[piece for piece in use.pieces if piece not in several],
            inputs=None if any(piece in several for piece in use.pieces) else use.inputs,
        )
        for use in uses
    ]
    results = [result for use in single for result in use.results]
    wanted = [*inputs.values(), *(leaves[piece] for piece in several), *results]
    found: Sequence[Tensor | None] = (
        torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True) if roots else ()
    )
    by_id = {id(one): gradient for one, gradient in zip(wanted, found, strict=False) if gradient is not None}
    late = []
    for use in single:
        reached = [result for result in use.results if id(result) in by_id]
        if reached and use.pieces:
            late.append((replace(use, results=reached), [by_id[id(one)] for one in reached]))
    known = {piece: by_id[id(leaves[piece])] for piece in several if id(leaves[piece]) in by_id}
    returned = {name: by_id[id(leaf)] for name, leaf in inputs.items() if id(leaf) in by_id}
    return returned, LateWeights(leaves, known, late)


# ---- operations --------------------------------------------------------------------------

NOTHING = nullcontext()


class Operations:
    """Carries out the operations of a stage.

    Args:
        plan: the plan of the split model.
        number: the stage's number.

    Attributes:
        random: an operation, or the loss, may draw random numbers.
        plain: only linear layers read parameters or buffers.
    """

    def __init__(self, plan: TorchPlan, number: int) -> None:
        self._graph = graph = plan.graph
        self._plan = plan
        self._outputs = plan.stages[number].outputs
        self._nodes = plan.nodes[number]
        self._is_last = number == len(plan.stages) - 1
        self._trained = {slot.name for slot in graph.layout.slots}
        self._own = {piece.name for piece in plan.pieces[number]}
        used = {piece.name for node in self._nodes for piece in graph.tensors_of(node)}
        if self._is_last:  # what no operation uses is here, so that it is in the saved model
            everywhere = {
                piece.name for nodes in plan.nodes for node in nodes for piece in graph.tensors_of(node)
            }
            used |= set(graph.first.values()) - everywhere
        self._others = used - self._trained
        self._module = graph.blueprint.part(self._others, BUILD_SEED)
        self._kept_in_eval = [part for part in self._module.modules() if not part.training]
        self._training: bool | None = None
        self._bindings = list(self._binds())
        self._reads = {node: tuple(graph.tensors_of(node)) for node in self._nodes}
        self._given = {
            (training, node): _constants(node, training) for training in (True, False) for node in self._nodes
        }
        self.plain = all(self._is_linear(node) for node, read in self._reads.items() if read)
        others = (tensor_at(self._module, name) for name in sorted(self._others))
        self._changing = [tensor for tensor in others if not isinstance(tensor, nn.Parameter)]
        self._copies: list[torch.Tensor | None] = [None] * len(self._changing)
        self.random = self._is_last or any(
            node.meta["random"] for node in self._nodes
        )  # a loss may draw numbers

    def run(
        self,
        tensors: Mapping[Piece, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        samples: int,
        seed: int | None,
        uses: list[Use] | None = None,
        wide: AbstractContextManager[object] = NOTHING,
    ) -> dict[str, Any]:
        """Carries out all operations.

        Args:
            tensors: the stage's own parameters.
            inputs: the stage's inputs by name.
            samples: number of samples of the minibatch.
            seed: of random numbers; None means eval() mode.
            uses: gets the operations that read the stage's own parameters.
            wide: context of operations that read parameters or buffers.

        Returns:
            The stage's outputs by name. The last stage's have "outputs", the tree of the module's outputs.
        """
        self._set_mode(training=seed is not None)
        borrowed = {
            Piece(name): inputs[value] for value in inputs if (name := parameter_of(value)) is not None
        }
        scope = _Scope(self._plan, self._module, {**tensors, **borrowed}, inputs, samples)
        for module, key, piece in self._bindings:
            module._parameters[key] = scope.tensors[piece]  # type: ignore[assignment]  # as torch.func does
        for node in self._nodes:
            args, kwargs = self._given[seed is not None, node]
            args, kwargs = fx.map_arg((args, kwargs), scope.operand)
            if node.meta["random"] and seed is not None:
                _draw_from(seed, node.name)
            with NOTHING if node.meta["grad"] else torch.no_grad(), wide if self._reads[node] else NOTHING:
                scope.results[node] = run_node(node, self._module, args, kwargs)
            if uses is not None and (read := [piece for piece in self._reads[node] if piece in tensors]):
                results = tree_leaves(scope.results[node])
                results = [result for result in results if isinstance(result, torch.Tensor)]
                x = self._wide_input(node, args, kwargs, tensors[read[0]])
                uses.append(Use(results, read, x, 0 if x is None else x._version))
        names = {value_name(node): node for node in self._nodes}
        found: dict[str, Any] = {}
        for name in self._outputs:
            own = parameter_of(name)
            found[name] = (
                tensors[Piece(own)]
                if own is not None
                else self._plan.forms[name].pack(scope.results[names[name]], samples)
            )
        if self._is_last:
            found["outputs"] = fx.map_arg(self._graph.output.args[0], scope.operand)
            if seed is not None:
                _draw_from(seed, "loss")
        return found

    def _wide_input(
        self, node: fx.Node, args: Any, kwargs: Mapping[str, Any], weight: torch.Tensor
    ) -> torch.Tensor | None:
        """The x of a plain layer y = x Wᵀ + b with this wide weight W; None for any other operation."""
        read = None
        if self._is_linear(node) and args:
            layer = self._module.get_submodule(str(node.target)) if node.op == "call_module" else None
            read = args[1] if layer is None else layer.weight
        wide = read is weight and weight.dim() == 2 and weight.numel() >= WIDE_ELEMS
        return args[0] if wide and args and args[0].dim() > 1 and not kwargs else None

    def _is_linear(self, node: fx.Node) -> bool:
        """Whether an operation is a linear layer, and nothing beside it."""
        if node.op != "call_module":
            return node.target is nn.functional.linear and len(node.args) > 1
        layer = self._module.get_submodule(str(node.target))
        return type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)

    def _set_mode(self, *, training: bool) -> None:
        if training != self._training:
            self._training = training
            self._module.train(training)
            for part in self._kept_in_eval:
                part.training = False

    def targets(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """The tree of the minibatch's targets, in the last stage."""
        return map_leaves(lambda name: None if name is None else inputs[name], self._graph.targets)

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Frozen parameters and persistent buffers of the stage, by the module's own names."""
        return [
            (name, tensor)
            for name, tensor in self._module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and self._graph.first.get(name) in self._others
        ]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Persistent buffers alone."""
        return [(name, one) for name, one in self.fixed_tensors() if not isinstance(one, nn.Parameter)]

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets the buffers of the stage; see `StageModel.load_buffers`."""
        for name, buffer in self.buffers():
            array = buffers.get(name)
            if array is None or array.shape != tuple(buffer.shape):
                got = "nothing" if array is None else f"shape {array.shape}"
                raise ConfigError(
                    f"buffer {name!r}: got {got}, expected shape {tuple(buffer.shape)}; "
                    "is this the model that the run trained?"
                )
            buffer.copy_(torch.from_numpy(np.array(array)))

    def state(self) -> list[torch.Tensor]:
        """Copies of all buffers. One that has not changed since the last call is the same copy."""
        copies = [
            buffer.clone() if copy is None or not torch.equal(copy, buffer) else copy
            for buffer, copy in zip(self._changing, self._copies, strict=True)
        ]
        self._copies = [*copies]
        return copies

    def set_state(self, state: Sequence[torch.Tensor]) -> None:
        """Sets all buffers, also between a forward pass that has read them and its backward."""
        for buffer, copy in zip(self._changing, state, strict=True):
            buffer.data.copy_(copy)  # .data: autograd is to take it as the same value

    def fixed(self) -> Fixed:
        """Frozen parameters of the stage, and further names of those that it trains."""
        first = self._graph.first
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        frozen = {name: as_numpy(p.detach()) for name, p in parameters.items() if first[name] in self._others}
        return Fixed(
            frozen, {name: first[name] for name in first if first[name] in self._own and name != first[name]}
        )

    def _binds(self) -> Iterator[tuple[nn.Module, str, Piece]]:
        """(module, key, tensor) of each trained parameter that an operation reads from its module."""
        for node in self._nodes:
            if node.op == "call_module":
                target = str(node.target)
                for path, part in self._module.get_submodule(target).named_modules(prefix=target):
                    for key in part._parameters:
                        name = self._graph.first.get(f"{path}.{key}" if path else key)
                        if name in self._trained:
                            yield part, key, Piece(name)


class _Scope:
    """What operations of a stage may use for one minibatch."""

    def __init__(
        self,
        plan: TorchPlan,
        module: nn.Module,
        tensors: Mapping[Piece, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        samples: int,
    ) -> None:
        self._plan, self._module, self._inputs, self._samples = plan, module, inputs, samples
        self.tensors = tensors
        self.results: dict[fx.Node, Any] = {}

    def operand(self, node: fx.Node) -> Any:
        """The result of another operation, or what a node without an operation stands for."""
        if node in self.results:
            return self.results[node]
        size = size_of(node)
        if size is not None:
            return size[0] * self._samples + size[1]
        if node.op == "get_attr":
            piece = self._plan.graph.piece_of(node)
            if piece is None:
                return self._plan.graph.constants[str(node.target)]
            return self.tensors[piece] if piece in self.tensors else run_node(node, self._module, (), {})
        name = str(node.target) if node.op == "placeholder" else value_name(node)
        result = self.results[node] = self._plan.forms[name].unpack(self._inputs[name], self._samples)
        return result


def _constants(node: fx.Node, training: bool) -> Any:
    """(args, kwargs) of an operation in one of the two modes."""
    return tree_map_only(ByMode, lambda constant: constant.of(training), (node.args, node.kwargs))


def _draw_from(seed: int, name: str) -> None:
    """Lets the next random numbers come from one operation's own stream: on the CPU, where parts are computed."""
    torch.default_generator.manual_seed(_stream(seed, name))


def _stream(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
