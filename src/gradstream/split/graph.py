"""A torch model as a graph: its operations, the tensors of the module that each uses, and what a cut would carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from gradstream.errors import ConfigError
from gradstream.model.base import Batch, Layout, map_leaves
from gradstream.model.buffers import for_torch
from gradstream.model.built_module import layout_of
from gradstream.model.torch_module import TorchModel
from gradstream.split.partial_build import Blueprint
from gradstream.split.refusals import storage, where
from gradstream.split.trace import SAMPLES, depends_on_samples, trace


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the module, or its elements [start, stop) along one axis."""

    name: str
    axis: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of the whole tensor, as a view."""
        return tensor if self.axis is None else tensor.narrow(self.axis, self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor of a graph depends on the number of samples: `shape[axis]` is `per_sample` for each.

    `axis` is None for a tensor that does not depend on it; `shape` is then its whole shape.
    """

    shape: tuple[int, ...]
    axis: int | None
    dtype: torch.dtype

    @property
    def packed(self) -> tuple[int, ...]:
        """Its shape on the way, without the axis of samples, which comes first."""
        if self.axis is None:
            return self.shape
        rest = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        return rest if self.shape[self.axis] == 1 else (self.shape[self.axis], *rest)

    def pack(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        """The tensor with the samples first."""
        if self.axis is None:
            return tensor
        moved = tensor.movedim(self.axis, 0)
        return moved if self.shape[self.axis] == 1 else moved.reshape(samples, *self.packed)

    def unpack(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        """Undoes `pack`."""
        if self.axis is None:
            return tensor
        per_sample = self.shape[self.axis]
        merged = tensor if per_sample == 1 else tensor.reshape(samples * per_sample, *self.packed[1:])
        return merged.movedim(0, self.axis)


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded model.

    Args:
        model: the whole model.
        blueprint: its module without values.
        layout: of the whole model's flat vector.
        nodes: the operations in order, without parameters, constants, and numbers that follow from the samples.
        output: the node whose argument is the tree of the module's outputs.
        constants: tensors that the module makes itself, by name.
        inputs: the tree of a minibatch's inputs, with names instead of arrays.
        targets: the same of the targets.
        data: form of each of the minibatch's values, by name.
        first: for each name of a parameter or buffer, its first one.
    """

    model: TorchModel
    blueprint: Blueprint
    layout: Layout
    nodes: tuple[fx.Node, ...]
    output: fx.Node
    constants: Mapping[str, torch.Tensor]
    inputs: Any
    targets: Any
    data: Mapping[str, Form]
    first: Mapping[str, str]

    def tensors_of(self, node: fx.Node) -> Iterator[Piece]:
        """Parameters and buffers that an operation uses."""
        if node.op == "call_module":
            module = self.blueprint.module.get_submodule(str(node.target))
            for found in (module.named_parameters(), module.named_buffers()):
                for name, _ in found:
                    yield Piece(self.first[f"{node.target}.{name}" if node.target else name])
        for used in node.all_input_nodes:
            if used.op == "get_attr" and (piece := self.piece_of(used)) is not None:
                yield piece

    def piece_of(self, node: fx.Node) -> Piece | None:
        """The tensor that a node of kind "get_attr" stands for; None for a constant."""
        target = str(node.target)
        if target in self.constants:
            return None
        piece: Piece | None = node.meta.get("piece")
        return piece or Piece(self.first.get(target, target))


def record(model: TorchModel, example: Batch) -> Graph:
    """Records a model. Raises ConfigError if it cannot be cut into stages."""
    if model.calls_itself:
        raise ConfigError(
            'split: the loss calls the module itself (loss_of="batch"), so it cannot be cut into stages; expected a '
            'loss of (outputs, targets): move what the loss does with the module into the module, loss_of="outputs"'
        )
    blueprint = Blueprint(model.given[0])
    module = blueprint.module
    layout = layout_of(module)
    inputs, targets = _names("inputs", example.inputs), _names("targets", example.targets)
    data = dict(_forms(inputs, example.inputs, example, layout.dtype))
    values = {
        name: tuple(torch.empty((n, *form.shape[1:]), dtype=form.dtype, device="meta") for n in SAMPLES)
        for name, form in data.items()
    }
    data |= _forms(targets, example.targets, example, layout.dtype)
    kept = [part for part in module.modules() if not part.training]

    def call(root: nn.Module, stand_ins: Mapping[str, Any]) -> Any:
        return model.call(root, map_leaves(lambda name: None if name is None else stand_ins[name], inputs))

    def set_mode(training: bool) -> None:
        module.train(training)
        for part in kept:
            part.training = False

    graph, constants = trace(module, call, values, set_mode)
    *_, output = graph.nodes
    first: dict[str, str] = {}
    for every, own in (
        (module.named_parameters(remove_duplicate=False), dict(module.named_parameters())),
        (module.named_buffers(remove_duplicate=False), dict(module.named_buffers())),
    ):
        names = {id(tensor): name for name, tensor in own.items()}
        first |= {name: names[id(tensor)] for name, tensor in every}
    recorded = Graph(
        model, blueprint, layout, ordered(graph), output, constants, inputs, targets, data, first
    )
    _refuse_writes(recorded, graph)
    return recorded


def ordered(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Operations in order, but those whose results are numbers that follow from the number of samples."""
    nodes: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        needed = node.meta.get("writes") or any(user.op == "output" or user in nodes for user in node.users)
        if node.op.startswith("call_") and needed and size_of(node) is None:
            nodes[node] = None
    return tuple(reversed(nodes))


def minibatch_values(graph: Graph, batch: Batch) -> dict[str, torch.Tensor]:
    """The values of a minibatch by name, floating-point ones in the parameters' dtype.

    Raises:
        ConfigError: a sample has another shape or dtype than in the example by which the model was cut.
    """
    found: dict[str, torch.Tensor] = {}
    for names, tree in ((graph.inputs, batch.inputs), (graph.targets, batch.targets)):
        for (name, form), (_, tensor) in zip(
            _forms(names, tree, batch, graph.layout.dtype),
            _pairs(names, for_torch(tree, graph.layout.dtype)),
            strict=True,
        ):
            if graph.data.get(name) != form:
                raise ConfigError(
                    f"split: {name}: got {form}, expected {graph.data.get(name)}, as in the example"
                )
            found[name] = tensor
    return found


def _names(prefix: str, tree: Any) -> Any:
    """The same tree with names in place of leaves: "inputs", "inputs.0", "inputs.key". None stays None."""
    if isinstance(tree, Mapping):
        return {key: _names(f"{prefix}.{key}", branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        branches = [_names(f"{prefix}.{index}", branch) for index, branch in enumerate(tree)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return None if tree is None else prefix


def _pairs(names: Any, tree: Any) -> list[tuple[str, Any]]:
    found: list[Any] = []
    leaves: list[Any] = []
    map_leaves(found.append, names)
    map_leaves(leaves.append, tree)
    return [(name, leaf) for name, leaf in zip(found, leaves, strict=True) if name is not None]


def _forms(names: Any, tree: Any, batch: Batch, dtype: torch.dtype) -> Iterator[tuple[str, Form]]:
    for name, leaf in _pairs(names, for_torch(tree, dtype)):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != batch.num_samples:
            got = (
                f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            )
            raise ConfigError(
                f"split: {name} of {batch.num_samples} samples: got {got}, expected an array with the samples along "
                "its first axis: pad samples of varying length"
            )
        yield name, Form((1, *leaf.shape[1:]), 0, leaf.dtype)


def size_of(node: fx.Node) -> tuple[int, int] | None:
    """(a, b) of a number that is a · samples + b; None for anything else."""
    values = node.meta.get("values", ())
    if not all(type(value) is int for value in values) or not values or not depends_on_samples(node):
        return None
    slope, left = divmod(values[1] - values[0], SAMPLES[1] - SAMPLES[0])
    offset = values[0] - slope * SAMPLES[0]
    fits = all(value == slope * samples + offset for value, samples in zip(values, SAMPLES, strict=True))
    return (slope, offset) if fits and not left else None


def form_of(node: fx.Node) -> Form | None:
    """The form of a node's tensor; None if it cannot travel: no tensor, or of a shape that mixes samples."""
    values = node.meta["values"]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    shapes = [tuple(value.shape) for value in values]
    axes = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if not axes:
        return Form(shapes[0], None, values[0].dtype)
    axis = axes[0]
    per_sample, left = divmod(shapes[0][axis], SAMPLES[0])
    grows = all(shape[axis] == per_sample * samples for shape, samples in zip(shapes, SAMPLES, strict=True))
    if len(axes) > 1 or left or not grows:
        return None
    return Form((*shapes[0][:axis], per_sample, *shapes[0][axis + 1 :]), axis, values[0].dtype)


def _refuse_writes(graph: Graph, recorded: fx.Graph) -> None:
    """Raises ConfigError for operations that change the minibatch or a parameter."""
    fixed = {
        storage(node.meta["values"][0]): str(node.target)
        for node in recorded.nodes
        if node.op == "placeholder"
    }
    fixed |= {storage(tensor): name for name, tensor in graph.blueprint.module.named_parameters()}
    for node in graph.nodes:
        for written in node.meta["writes"]:
            if written in fixed:
                raise ConfigError(
                    f"split: {where(node)}: writes {fixed[written]!r} in place, which other parts use; expected an "
                    "operation that makes a new tensor (relu instead of relu_, inplace=False)"
                )
