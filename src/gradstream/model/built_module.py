"""A PyTorch module whose parameters are views of a flat vector."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradstream.errors import ConfigError
from gradstream.model.backprop import Backprop, RowSink, Sink
from gradstream.model.base import Layout, Slot
from gradstream.model.devices import seeded

# ---- wide linear -------------------------------------------------------------------------
# Computes the weight gradients of wide linear layers directly in the flat vector.
#
# torch makes the gradient of a weight as a new tensor, which is then copied into the flat vector. For a layer of
# 49152 x 1500 that takes 295 MB of new memory and two more passes over it in each step. Here the same kernel writes
# the product of the same operands into the flat vector: the bits are the same.

WIDE_ELEMS = 1 << 20
"""Elements from which a weight is wide. For smaller ones a copy costs less than the detour."""


class WideLinear(TorchFunctionMode):
    """A context in which `linear` with one of the given weights writes the weight's gradient directly.

    Forward and backward pass must both run inside it. Contributions of other uses of the weight (an embedding
    that is tied to it) take the ordinary path, and are added.

    Args:
        weights: the weights of the wide layers.
        sinks: the collectors of their gradients, in the same order.
    """

    def __init__(self, weights: Iterable[nn.Parameter], sinks: Iterable[Sink | RowSink]) -> None:
        super().__init__()
        self._sinks = {id(weight): sink for weight, sink in zip(weights, sinks, strict=True)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sends calls of `linear` with one of the weights through `_Linear`; leaves others unchanged."""
        if func is torch.nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(
        self,
        input: torch.Tensor,  # noqa: A002  the name callers of torch's own function may use
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sink = self._sinks.get(id(weight))
        if sink is None or input.dim() < 2 or _is_hooked(weight) or not _plain(input, weight, bias):
            return torch.nn.functional.linear(input, weight, bias)
        output: torch.Tensor = _Linear.apply(input, weight, bias, sink)  # type: ignore[no-untyped-call]
        return output


def _is_hooked(weight: torch.Tensor) -> bool:
    """Whether the user's hooks are to see, or to change, the gradient of the weight: torch has to make it then."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _plain(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether all have one dtype and gradients are wanted: not under autocast, no_grad or torch.func."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and inputs.dtype == weight.dtype
        and (bias is None or bias.dtype == weight.dtype)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, whose backward adds dL/dW = (dL/dy)ᵀ x to a sink instead of returning it.

    In a backward pass other than the sink's, which a loss runs for its own purposes, it returns dL/dW.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,  # (..., I)
        weight: torch.Tensor,  # (O, I)
        bias: torch.Tensor | None,  # (O,)
        sink: Sink,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sink = sink
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])  # (N, O)
        product = rows.t(), inputs.reshape(-1, inputs.shape[-1])
        grad_weight = None
        if ctx.sink.of.under_way:
            ctx.sink.add_product(*product)
        else:
            grad_weight = torch.mm(*product)
        grad_input = rows.mm(weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None


# ---- fixed -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fixed:
    """Tensors of a model that are not trained.

    Args:
        frozen: parameters that require no gradient, under all of their names.
        second: further names of trained parameters, each with its name in the layout.
    """

    frozen: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    second: Mapping[str, str] = field(default_factory=dict)


def fixed_of(model: object) -> Fixed:
    """A model's fixed tensors; none for a model without such a method."""
    give = getattr(model, "fixed", None)
    return Fixed() if give is None else give()


def extra_of(model: object) -> Mapping[str, np.ndarray[Any, Any]]:
    """The further state of a user's own loop, such as its optimizer's, from which the loop resumes.

    Names begin with `checkpoint.own_state.EXTRA`. {} for a model without such a method.
    """
    give = getattr(model, "extra", None)
    return {} if give is None else give()


def entry_of(model: object) -> Mapping[str, np.ndarray[Any, Any]]:
    """What a newcomer to users' own loops needs besides `fixed_of` and `extra_of`; {} for a model without it."""
    give = getattr(model, "entry_state", None)
    return {} if give is None else give()


def load_fixed(model: object, frozen: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Sets frozen parameters, and the state that `extra_of` has returned, if the model has a method for it.

    Names that the model does not know are ignored.
    """
    take = getattr(model, "load_fixed", None)
    if take is not None:
        take(frozen)


# ---- names -------------------------------------------------------------------------------

K = TypeVar("K")

COMPILED = "_orig_mod"
"""The attribute of torch.compile's wrapper that is the module itself."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module, without the wrappers of torch.compile and torch's data parallelism."""
    while True:
        if COMPILED in module._modules:
            module = module._modules[COMPILED]  # type: ignore[assignment]
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


def named(tensors: Iterable[tuple[str, K]]) -> Iterator[tuple[str, K]]:
    """The tensors of a module under the names that they have if none of its submodules is compiled."""
    for name, tensor in tensors:
        yield ".".join(part for part in name.split(".") if part != COMPILED), tensor


# ---- ties --------------------------------------------------------------------------------
# Finds tensors of a module that share memory: weights that a script has tied by `b.weight.data = a.weight.data`.
#
# torch's usual tie is one Parameter under two names. Memory that two Parameters share is seen by neither: where their
# memory is replaced by views of a flat vector, each gets a place of its own, and the tie is gone silently.

Named = tuple[str, torch.Tensor]


def shared(tensors: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """The pairs of tensors that have an element in common in memory. One object under several names is no pair."""
    storages: dict[int, list[Named]] = defaultdict(list)
    seen: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) in seen or tensor.layout is not torch.strided or not tensor.numel():
            continue
        seen.add(id(tensor))
        storages[tensor.untyped_storage()._cdata].append((name, tensor))
    for several in storages.values():
        for one, other in combinations(several, 2):
            if _overlap(one[1], other[1]):
                yield one, other


def tie(module: nn.Module) -> None:
    """Makes trained parameters that are the same memory one Parameter, under all of their names.

    Raises:
        ConfigError: trained parameters share memory in another way: transposed, in part, or with a tensor that is
            not trained.
    """
    for (name, one), (other_name, other) in shared((*module.named_parameters(), *module.named_buffers())):
        if not (one.requires_grad or other.requires_grad):
            continue
        same = (one.shape, one.stride(), one.storage_offset(), one.dtype, one.requires_grad)
        if same != (other.shape, other.stride(), other.storage_offset(), other.dtype, other.requires_grad):
            raise ConfigError(f"from_torch: {_told(name, one, other_name, other)}")
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is other:
                    part._parameters[key] = one  # type: ignore[assignment]  # its kind is that of the other


def check_untied(module: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Raises ConfigError if one of these parameters shares memory with another tensor of the module or among them."""
    moved = list(trained)
    ids = set(map(id, moved))
    known = (*module.named_parameters(), *module.named_buffers())
    others = [(f"other.{index}", parameter) for index, parameter in enumerate(moved)]
    for (name, one), (other_name, other) in shared((*known, *others)):
        if id(one) in ids or id(other) in ids:
            raise ConfigError(
                f'session.wrap: {_told(name, one, other_name, other)}. Or use the strategy "synchronous" or '
                '"allreduce", which move no parameter'
            )


def _told(name: str, one: torch.Tensor, other_name: str, other: torch.Tensor) -> str:
    last, other_last = (text.rpartition(".")[2] for text in (name, other_name))
    return (
        f"{name!r}, {tuple(one.shape)}, and {other_name!r}, {tuple(other.shape)}, share memory (`.data = ...`, or a "
        "view), and each would get memory of its own: training would separate them. Tie them as one Parameter "
        f"(b.{other_last} = a.{last}); where one is the transpose or a part of the other, compute with it in forward()"
    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    begin, ends = zip(_range(one), _range(other), strict=True)
    if max(begin) >= min(ends):
        return False
    if one.is_contiguous() or other.is_contiguous() or one.element_size() != other.element_size():
        return True
    there = torch.zeros(max(ends) // one.element_size(), dtype=torch.bool)
    there.as_strided(one.shape, one.stride(), one.storage_offset())[...] = True
    return bool(there.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage; the last one excluded."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + int(last) + 1) * size


# ---- built module ------------------------------------------------------------------------

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
    """Whether the tensor is a matrix whose gradient a linear layer writes directly; see `WideLinear`."""
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
