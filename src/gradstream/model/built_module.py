"""A PyTorch module whose parameters are views of a flat vector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakValueDictionary

import torch
from torch import nn

from gradstream.errors import ConfigError
from gradstream.model.backprop import Backprop
from gradstream.model.base import Layout, Slot
from gradstream.model.devices import seeded
from gradstream.model.factors import FactoredLayer
from gradstream.model.ties import tie
from gradstream.model.wide_linear import WIDE_ELEMS, WideLinear

Build = Callable[[], nn.Module]

_built: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Submodules with trained parameters that a `build()` has returned in this process, by id."""


class BuiltModule:
    """The module of a `TorchModel`, whose trained parameters are views of a flat vector.

    The module's own copies are dropped once their shapes are known, so that memory holds only the flat vector.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = trained_of(module)
        self.module = module
        self.layout = layout_of(module)
        self.parameters = [parameter for _, parameter in trained]
        self.names, self.frozen = names_of(module)
        self.buffer_shapes = {name: buffer.shape for name, buffer in self.buffers()}
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
        """Makes the parameters views of `flat`. Does nothing if they are already."""
        at = (flat.data_ptr(), flat.numel())
        if at == self._at:
            return
        self.check(flat)
        for parameter, (_, view) in zip(self.parameters, self.layout.views(flat), strict=True):
            parameter.data = view
        self._at = at

    def check(self, flat: torch.Tensor) -> None:
        """Raises ConfigError for a vector that cannot hold the parameters."""
        if flat.dtype != self.layout.dtype or flat.numel() != self.layout.elems:
            raise ConfigError(
                f"parameters: got a vector of {flat.numel()} x {flat.dtype}, expected "
                f"{self.layout.elems} x {self.layout.dtype}: take length and dtype from the model's layout"
            )

    def training(self, on: bool) -> None:
        """Sets submodules to the modes in which `build` left them, or all to eval()."""
        if self._training == on:
            return
        self.module.train(on)
        for part in self._kept_in_eval:
            part.training = False
        self._training = on

    @property
    def factored_layers(self) -> list[FactoredLayer]:
        """Wide linear layers whose weight has one name, so that no other layer uses it."""
        linear = {id(part.weight) for part in self.module.modules() if isinstance(part, nn.Linear)}
        num_names = Counter(self.names.values())
        return [
            FactoredLayer(slot.name, slot.start, *slot.shape)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
            if is_wide(slot) and id(parameter) in linear and num_names[slot.name] == 1
        ]

    def wide(self, backprop: Backprop) -> AbstractContextManager[object]:
        """The context that `WideLinear` needs; an empty one if the model has no wide layer."""
        triples = zip(self.layout.slots, self.parameters, backprop.sinks, strict=True)
        wide = [(parameter, sink) for slot, parameter, sink in triples if is_wide(slot)]
        return WideLinear(*zip(*wide, strict=True)) if wide else nullcontext()


def _row_sparse(module: nn.Module, trained: list[tuple[str, nn.Parameter]]) -> set[str]:
    """Names of the weights that only embeddings with sparse=True use."""
    sparse: set[int] = set()
    other: set[int] = set()
    for part in module.modules():
        rows = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        (sparse if rows else other).update(map(id, part.parameters(recurse=False)))
    return {name for name, parameter in trained if id(parameter) in sparse - other}


def is_wide(slot: Slot) -> bool:
    """Whether the tensor is a matrix whose gradient a linear layer writes directly; see `model.wide_linear`."""
    return len(slot.shape) == 2 and slot.stop - slot.start >= WIDE_ELEMS


def build_module(build: Build, seed: int) -> nn.Module:
    """Calls `build()` under this seed. Raises ConfigError unless it returns a module that can be trained."""
    with seeded(seed), torch.enable_grad():
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
    tie(module)
    for part in module.modules():
        if not any(parameter.requires_grad for parameter in part.parameters(recurse=False)):
            continue
        if _built.get(id(part)) is part:
            what = type(module).__name__ if part is module else f"{type(module).__name__} with a part"
            raise ConfigError(
                f"from_torch: build() returned a {what} that it has returned before; expected a new module "
                "at each call, since every worker has its own: make it inside of build(), or return "
                "copy.deepcopy(module)"
            )
        _built[id(part)] = part
    return module


def trained_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, the last one first, which is about backward order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]


def layout_of(module: nn.Module) -> Layout:
    """Names and places of the trained parameters. Raises ConfigError for dtypes that cannot be trained."""
    trained = trained_of(module)
    tensors = [(name, tuple(p.shape)) for name, p in trained]
    return Layout.of(tensors, _dtype_of(trained), _row_sparse(module, trained))


def names_of(module: nn.Module) -> tuple[dict[str, str | None], dict[str, torch.Tensor]]:
    """(every parameter's names, each with the name under which it is trained or None; frozen ones by name)."""
    trained_as = {id(parameter): name for name, parameter in trained_of(module)}
    names: dict[str, str | None] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = trained_as.get(id(parameter))
        if names[name] is None:
            frozen[name] = parameter.detach()
    return names, frozen


def put_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Registers a parameter or buffer under a dotted name, in submodules that have nothing else.

    Where the name is taken, the tensor gets the memory of the one that has it.
    """
    path, _, key = name.rpartition(".")
    for child in path.split(".") if path else ():
        if child not in module._modules:
            module.add_module(child, nn.Module())
        module = module.get_submodule(child)
    if hasattr(module, key):
        tensor.data = getattr(module, key).data
    elif isinstance(tensor, nn.Parameter):
        module.register_parameter(key, tensor)
    else:
        module.register_buffer(key, tensor)


def _dtype_of(trained: list[tuple[str, nn.Parameter]]) -> torch.dtype:
    dtypes = {parameter.dtype: name for name, parameter in reversed(trained)}
    if len(dtypes) == 1 and next(iter(dtypes)) in (torch.float32, torch.float64):
        return next(iter(dtypes))
    if not dtypes:
        raise ConfigError(
            "from_torch: the module has no parameters that require a gradient, so there is nothing to train: "
            "set requires_grad=True on those to train"
        )
    got = ", ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
    raise ConfigError(
        f"from_torch: parameters are {got}; expected one dtype, float32 or float64: call .float() in build()"
    )
