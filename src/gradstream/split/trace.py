"""Records a torch module as a graph of operations, with the shape of each result, by torch.fx.

The module computes on stand-ins, which know their shapes for three numbers of samples. What is the same for all
three (the number of features, a rank) is an ordinary number in the module's code. What grows with the samples stays
symbolic, so that a decision on it is refused. Modules of `torch.nn` are one operation each.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from traceback import extract_tb
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gradstream.errors import ConfigError
from gradstream.split import partial_build, refusals
from gradstream.split.partial_build import ShapeMode, to_meta
from gradstream.split.refusals import (
    BY_VALUE,
    Untraceable,
    described,
    drawn_state,
    line_of,
    refuse_augmented,
    refuse_changed,
    refuse_state,
    refuse_written_constants,
    state_of,
    storage,
    where,
)

# ---- modes -------------------------------------------------------------------------------
# One graph of the two that a module has, in train() and in eval(), if only constants differ.


class ByMode:
    """A constant of the graph that differs between train() and eval()."""

    def __init__(self, train: Any, evaluate: Any) -> None:
        self.train, self.evaluate = train, evaluate

    def of(self, training: bool) -> Any:
        """The constant of one mode."""
        return self.train if training else self.evaluate

    def __repr__(self) -> str:
        return f"{self.train!r} or in eval() {self.evaluate!r}"


def merge(graph: fx.Graph, evaluate: fx.Graph) -> None:
    """Puts constants that differ in eval() into the graph. Raises ConfigError if operations differ."""
    for node, other in zip_longest(graph.nodes, evaluate.nodes):
        if (
            node is None
            or other is None
            or (node.op, node.name, node.target) != (other.op, other.name, other.target)
        ):
            raise _differs(node or other)
        leaves, structure = tree_flatten((node.args, node.kwargs))
        others, other_structure = tree_flatten((other.args, other.kwargs))
        if structure != other_structure:
            raise _differs(node)
        for index, (leaf, other_leaf) in enumerate(zip(leaves, others, strict=True)):
            names = fx.map_arg((leaf, other_leaf), lambda used: used.name)
            if names[0] == names[1]:
                continue
            if isinstance(leaf, fx.Node) or isinstance(other_leaf, fx.Node):
                raise _differs(node)
            leaves[index] = ByMode(leaf, other_leaf)
        if any(isinstance(leaf, ByMode) for leaf in leaves):
            node.args, node.kwargs = tree_unflatten(leaves, structure)


def _differs(node: fx.Node) -> ConfigError:
    return ConfigError(
        f"split: {where(node) if 'where' in node.meta else 'the module'}: computes something else in train() than in "
        "eval(); expected the same operations in both: take modules such as nn.Dropout, or keep the model whole"
    )


# ---- trace -------------------------------------------------------------------------------

SAMPLES = (7, 11, 16)
"""Numbers of samples for which shapes are computed."""

_TORCH = str(Path(torch.__file__).parent)
_OWN = (__file__, partial_build.__file__, refusals.__file__, refusals.__file__)
_REFUSED = ("data", "grad", "grad_fn", "is_leaf", "requires_grad", "is_meta")
"""Attributes of tensors that a part of a module cannot know, or that would act outside of the graph."""

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_CONTAINERS = (nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules of torch.nn that consist of modules and are traced through, as Sequential is."""


Made = list[tuple[tuple[object, ...], dict[str, Any]]]


class _Proxy(fx.Proxy):
    """A stand-in for a tensor, or for a number that grows with the samples."""

    tracer: _Tracer

    def __getattr__(self, k: str) -> Any:
        if k in _REFUSED:
            raise Untraceable(f"it reads .{k} of a tensor, which a part of a module does not know", BY_VALUE)
        if k in _HOOKS:
            raise Untraceable(
                f"it calls .{k}(...) on a tensor, which a graph does not record",
                "a torch.autograd.Function with this backward, or a hook of a module (register_full_backward_hook)",
            )
        if callable(getattr(self.node.meta["values"][0], k)):
            return Attribute(self, k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __len__(self) -> int:
        lengths = {len(value) for value in self.node.meta["values"]}
        if len(lengths) > 1:
            raise Untraceable("it takes len() of a tensor whose axis grows with the samples", "x.shape[0]")
        return lengths.pop()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __iter__(self) -> Iterator[Any]:
        return iter([operator.getitem(self, index) for index in range(len(self))])


def _augmented(function: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], Any]:
    """An augmented assignment, such as h += 1: recorded as h + 1, which is the same where h has no other name."""

    def assign(left: _Proxy, right: Any) -> Any:
        made = function(left, right)
        if isinstance(made, fx.Proxy) and isinstance(left.node.meta["values"][0], torch.Tensor):
            made.node.meta["augments"] = left.node
        return made

    return assign


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"):
    setattr(_Proxy, f"__i{_name.rstrip('_')}__", _augmented(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Records operations, and computes the shapes of their results at once.

    Args:
        call: calls the module on stand-ins for the minibatch's values.
        values: names of these, each with its tensors on the meta device, one per number of samples.
        first: what another tracer has `made` of the module, if it is to do the same again; the results are known then.

    Attributes:
        made: each operation with its node's `meta`, in order.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        call: Callable[[nn.Module, dict[str, Any]], Any],
        values: Mapping[str, tuple[Any, ...]],
        first: Made | None = None,
    ) -> None:
        super().__init__()
        self.made: Made = []
        self._first = first
        self._call = call
        self._inputs = values
        self._evaluating = False
        self._drew = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one operation of the graph."""
        return not isinstance(m, _CONTAINERS) and super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """(function to record, its arguments)."""
        stand_ins = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}
        return (lambda root: self._call(root, stand_ins)), [self.root]

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Records a call of a module, or what it does inside."""
        if self._evaluating:
            return forward(*args, **kwargs)
        self._refuse_autocast()
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A stand-in for a parameter or a buffer."""
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The stand-in of a node."""
        return _Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """Records an operation. Returns its result: a stand-in, or a constant, or a container of these."""
        self._refuse_autocast()
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        return self._result(proxy, proxy.node.meta["values"])

    def create_node(self, kind: str, target: Any, *rest: Any, **more: Any) -> fx.Node:
        """Records an operation, a parameter or a constant."""
        node = super().create_node(kind, target, *rest, **more)
        doing, known = described(node), None
        if self._first is not None:
            before, known = self._first[len(self.made)]
            refuse_changed(before, doing)
        self.made.append((doing, node.meta))
        if kind != "output":
            node.meta["where"] = _user_line(self.root, node)
            node.meta["grad"] = torch.is_grad_enabled()
            if known is not None:
                node.meta |= {key: known[key] for key in ("values", "random", "writes") if key in known}
            elif kind == "placeholder":
                node.meta["values"] = self._inputs[target]
            else:
                node.meta["values"] = self._values_of(node)
        return node

    def _values_of(self, node: fx.Node) -> tuple[Any, ...]:
        """The node's results on the meta device. Notes whether it draws random numbers, and what it writes."""
        found = []
        self._drew = False
        for index in range(len(SAMPLES)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["values"][index])  # noqa: B023
            touched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if node.op == "call_module":
                module = self.root.get_submodule(node.target)  # type: ignore[arg-type]
                touched += [*module.parameters(), *module.buffers()]
            before = [tensor._version for tensor in touched]
            self._evaluating = True
            try:
                made = run_node(node, self.root, args, kwargs)
                found.append(tree_map_only(torch.Tensor, to_meta, made))
            except Exception as error:
                if node.op == "call_module":
                    raise _inside_module(str(node.target), module, error) from error
                raise
            finally:
                self._evaluating = False
            if index == 0:
                versions = zip(touched, before, strict=True)
                node.meta["writes"] = {
                    storage(tensor) for tensor, version in versions if tensor._version != version
                }
        node.meta["random"] = self._drew
        return tuple(found)

    def _result(self, proxy: Any, values: tuple[Any, ...]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            return proxy
        if isinstance(first, tuple | list | dict):
            keys = list(first) if isinstance(first, dict) else range(len(first))
            if any(len(value) != len(first) for value in values):
                raise Untraceable(
                    "the number of tensors that it returns depends on the number of samples", BY_VALUE
                )
            if proxy.node.target is getattr and first in values[1:] and len(set(values)) == 1:
                return first  # a shape without samples
            parts = [self.create_proxy("call_function", operator.getitem, (proxy, key), {}) for key in keys]
            if isinstance(first, dict):
                return dict(zip(keys, parts, strict=True))
            if hasattr(first, "_fields"):
                return type(first)(*parts)
            return (
                type(first)(parts)
                if type(first) in (list, tuple) or hasattr(first, "n_fields")
                else tuple(parts)
            )
        if isinstance(first, torch.device):
            return torch.device("cpu")
        same = all(type(value) is type(first) and value == first for value in values)
        return first if same and not self._may_differ(proxy.node, first) else proxy

    def _may_differ(self, node: fx.Node, value: Any) -> bool:
        """Whether a result that was the same for these numbers of samples could be another for others."""
        if node.target is operator.getitem or (node.target is operator.eq and value is True):
            return False
        return any(depends_on_samples(used) for used in node.all_input_nodes)

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled("cpu") and not self._evaluating:
            raise Untraceable(
                "it enters torch.autocast, which is not recorded in a part of a module",
                "casts of the tensors themselves, such as x.bfloat16()",
            )


class _TraceMode(ShapeMode):  # type: ignore[no-untyped-call]
    """Computes shapes for a tracer, and refuses random numbers that would become a constant of the graph."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__(draws=False)
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carries out one operation: on shapes for the tracer, on values for the module's own constants."""
        drew = torch.Tag.nondeterministic_seeded in func.tags
        if self._tracer._evaluating:
            self._tracer._drew |= drew
            return super().__torch_dispatch__(func, types, args, kwargs)
        if drew:
            raise Untraceable(
                "random numbers without a tensor of the minibatch would be the same in each step",
                "torch.randn_like(x) or x.new_empty(...).normal_()",
            )
        return func(*args, **(kwargs or {}))


def _inside_module(name: str, module: nn.Module, error: Exception) -> Untraceable:
    """What to say of an error in a module of torch.nn."""
    got = f"module {name!r} ({type(module).__name__}) fails without the values of its tensors: {error}"
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
        return Untraceable(
            f"{got}; it has momentum=None, which counts minibatches", "momentum=0.1 or another number"
        )
    return Untraceable(got, "a module that computes on any values alike")


def depends_on_samples(node: fx.Node) -> bool:
    """Whether the node is a number, or a shape, that grows with the samples."""
    first, *others = node.meta["values"]
    return not isinstance(first, torch.Tensor) and any(other != first for other in others)


def run_node(node: fx.Node, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Carries out one operation of the graph."""
    target: Any = node.target
    if node.op == "call_module":
        return module.get_submodule(target)(*args, **kwargs)
    if node.op == "call_function":
        return target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    path, _, attribute = target.rpartition(".")
    return getattr(module.get_submodule(path), attribute)


def trace(
    module: nn.Module,
    call: Callable[[nn.Module, dict[str, Any]], Any],
    values: Mapping[str, tuple[torch.Tensor, ...]],
    set_mode: Callable[[bool], None],
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """Records a module.

    Args:
        module: the module, large tensors of which have no values.
        call: calls it on stand-ins for the minibatch's values, by name.
        values: these names, each with its tensors on the meta device, one per number of samples.
        set_mode: puts the module into train() or eval().

    Returns:
        (the graph, its constants by name). Each node's `meta` has: "values", its results on the meta device;
        "where", file:line; "random", whether it draws random numbers; "writes", memory that it changes in place;
        "grad", whether gradients are enabled.

    Raises:
        ConfigError: the module cannot be recorded; the message has file and line.
    """
    graphs, constants = [], []
    made: Made | None = None
    # The third finds what differs from call to call. Before the second, a module may fill its caches.
    for number, mode in enumerate((True, False, True)):
        set_mode(mode)
        tracer = _Tracer(call, values, made if number == 2 else None)
        graph, found = _trace_once(module, tracer, fills=number == 0)
        made = made or tracer.made
        graphs.append(graph)
        constants.append(found)
    merge(*graphs[:2])
    for name, tensor in constants[0].items():
        others = [found.get(name) for found in constants[1:]]
        if tensor.device.type == "meta" or any(
            other is None or not torch.equal(tensor, other) for other in others
        ):
            raise ConfigError(
                f"split: the module computes {name}, of shape {tuple(tensor.shape)}, from a tensor that is neither a "
                "parameter nor a buffer, or differently in each call or in eval(); expected one that each process can "
                "compute alone: call register_buffer"
            )
    return graphs[0], constants[0]


def _trace_once(
    module: nn.Module, tracer: _Tracer, *, fills: bool
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which torch.fx does not record by itself, with stand-ins as arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return call

    def apply_recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return recorded(MethodType(apply, cls))(*args, **kwargs)

    kept, drawn = state_of(module, tracer.is_leaf_module), drawn_state()
    try:
        with ExitStack() as patches:
            patches.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(apply_recorded)))
            for name in _FACTORIES:
                patches.enter_context(patch.object(torch, name, recorded(getattr(torch, name))))
            with _TraceMode(tracer):
                graph = tracer.trace(module)
        if drawn != drawn_state():
            raise Untraceable(
                "it draws random numbers of Python or NumPy, which would be the same in each step",
                "numbers of torch: torch.randn_like(x), torch.rand_like(x) or nn.Dropout",
            )
        refuse_state(kept, state_of(module, tracer.is_leaf_module), fills=fills)
        refuse_written_constants(graph, module)
        refuse_augmented(graph)
    except ConfigError:
        raise
    except Exception as error:
        place = (error.where if isinstance(error, Untraceable) else None) or _raised_at(error, module)
        expected = error.expected if isinstance(error, Untraceable) else _expected(error)
        raise ConfigError(
            f"split: {place}: the module cannot be cut into stages: {error}; expected {expected}"
        ) from error
    constants = {
        name: module.__dict__.pop(name) for name in list(module.__dict__) if name.startswith("_tensor_con")
    }
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not node.meta.get("writes"):
            graph.erase_node(node)
    return graph, constants


def _expected(error: Exception) -> str:
    """The remedy for an error that is not ours."""
    by_value = isinstance(error, fx.proxy.TraceError) or any(
        word in str(error) for word in ("meta", "_Proxy")
    )
    return BY_VALUE if by_value else "a module that computes on stand-ins of these shapes: change this line"


def _raised_at(error: BaseException, module: nn.Module) -> str:
    """file:line of the innermost function of the user's on an exception's way, or of the module's forward()."""
    frames = [
        frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((_TORCH, "<"))
    ]
    own = [frame for frame in frames if frame.filename not in _OWN]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else line_of(None, module)


def _user_line(root: Any, node: fx.Node) -> str:
    """file:line of the innermost function that is not torch's; the module's name if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == __file__ and frame.f_code.co_name == "trace":
            break
        if name != __file__ and not name.startswith((_TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    if node.op == "call_module":
        return f"module {node.target!r} ({type(root.get_submodule(node.target)).__name__})"
    return f"operation {node.name!r}"
