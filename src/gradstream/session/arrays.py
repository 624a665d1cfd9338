"""Updates of numpy arrays for a loop that computes its own gradients, in one process or on many workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from gradstream.checkpoint.own_state import EXTRA
from gradstream.errors import ConfigError, GradientError
from gradstream.job.overrides import text_of_optimizer
from gradstream.model.base import Layout, finite
from gradstream.model.buffers import Arrays, Buffers, Tree, leaves
from gradstream.model.built_module import Fixed
from gradstream.optim.base import ByShape, Optimizer
from gradstream.session.binding import GradientBinding, ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_vector import GradientVector
from gradstream.session.samples import whole

STEPS = EXTRA + "steps"
"""Name of the array that holds the number of steps, in a checkpoint."""


class ArrayBinding(ParameterBinding):
    """Copies the flat vector into numpy arrays, which are updated in place.

    Args:
        arrays: one array, or a tree (dict, list or tuple) of arrays.

    Raises:
        ConfigError: a leaf is not a writable array, or the arrays have several dtypes or one that is neither
            float32 nor float64.
    """

    def __init__(self, arrays: Tree) -> None:
        self._arrays = dict(_named(arrays))
        for name, array in self._arrays.items():
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise ConfigError(
                    f"session.exchange: parameter {name!r}: got {type(array).__name__}, expected a numpy array "
                    "that is writable, since it is updated in place"
                )
        dtypes = {array.dtype.name for array in self._arrays.values()}
        if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
            got = ", ".join(sorted(dtypes)) or "no arrays"
            raise ConfigError(
                f"session.exchange: the parameters are {got}; expected one dtype, float32 or float64, for all "
                "of them: convert them with array.astype(np.float32)"
            )
        tensors = [(name, array.shape) for name, array in self._arrays.items()][::-1]
        self.layout = Layout.of(tensors, getattr(torch, dtypes.pop()))
        self._gradients: dict[str, np.ndarray[Any, Any]] = {}
        self._shown = torch.empty(0)

    @override
    def check_unchanged(self, where: str) -> None:
        for name, view in self.layout.views(self._shown) if len(self._shown) else ():
            if not np.array_equal(view.numpy(), self._arrays[name], equal_nan=True):
                raise ConfigError(
                    f"{where}: your script changed array {name!r} since the last session.exchange, and the next "
                    "exchange would overwrite the change: change it before the first exchange or after "
                    "session.close, or use the update rule (weight_decay, for example)"
                )

    @property
    def by_name(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The arrays by name."""
        return self._arrays

    def check(self, arrays: Tree) -> None:
        """Raises ConfigError unless these are the arrays of the first call."""
        for name, array in _named(arrays):
            if self._arrays.get(name) is not array:
                raise ConfigError(
                    f"session.exchange: {name!r} is another array than at the first call: parameters are "
                    "updated in place, so pass the same arrays each time (w += d instead of w = w + d)"
                )

    def set_gradients(self, gradients: Tree) -> None:
        """Sets the gradients that `copy_gradient` reads.

        Raises:
            GradientError: a parameter has no gradient, or one of another shape or dtype.
        """
        named = {name: np.asarray(array) for name, array in _named(gradients)}
        if named.keys() != self._arrays.keys():
            raise GradientError(
                f"session.exchange: got gradients of {sorted(named)}; expected one for each parameter, "
                f"{sorted(self._arrays)}: pass zeros where a parameter has no gradient"
            )
        for name, array in self._arrays.items():
            got = named[name]
            if got.shape != array.shape or got.dtype != array.dtype:
                raise GradientError(
                    f"session.exchange: gradient of {name}: got shape {got.shape} {got.dtype}, expected "
                    f"{array.shape} {array.dtype}, as the parameter has"
                )
        self._gradients = named

    @override
    def init(self, seed: int, parameters: torch.Tensor) -> None:
        del seed
        for name, view in self.layout.views(parameters):
            view.numpy()[...] = self._arrays[name]

    def set_parameters(self, parameters: torch.Tensor) -> None:
        """See `ParameterBinding.set_parameters`: copies into the arrays."""
        for name, view in self.layout.views(parameters):
            self._arrays[name][...] = view.numpy()
        self._shown = parameters

    @override
    def copy_gradient(self, gradient: torch.Tensor) -> None:
        for name, view in self.layout.views(gradient):
            view.numpy()[...] = self._gradients[name]


class LocalUpdates:
    """Applies update rules to numpy arrays in this process.

    Attributes:
        state: state vectors of the update rule by name, created at the first step.
        steps: number of steps made.
    """

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.steps = 0

    def step(self, parameters: Tree, gradients: Tree, rule: Optimizer) -> Tree:
        """Makes one step, in place. Returns the parameters."""
        binding = ArrayBinding(parameters)
        binding.set_gradients(gradients)
        flat, gradient = (torch.empty(binding.layout.elems, dtype=binding.layout.dtype) for _ in range(2))
        binding.init(0, flat)
        binding.copy_gradient(gradient)
        self.update(flat, gradient, rule)
        binding.set_parameters(flat)
        return parameters

    def saved(self) -> Arrays:
        """The state of the rule and the number of steps, as arrays for a checkpoint."""
        state = {f"{EXTRA}rule.{name}": vector.numpy().copy() for name, vector in self.state.items()}
        return {**state, STEPS: np.array(self.steps)}

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `saved` has returned."""
        for name, value in arrays.items():
            if name.startswith(f"{EXTRA}rule."):
                self.state[name.removeprefix(f"{EXTRA}rule.")] = torch.from_numpy(value.copy())
            elif name == STEPS:
                self.steps = int(value)

    def update(self, flat: torch.Tensor, gradient: torch.Tensor, rule: Optimizer) -> None:
        """Makes one step of a flat vector (n,), in place."""
        if not self.state:
            self.state.update({name: torch.full_like(flat, rule.state_init) for name in rule.state_names})
        self.steps += 1
        rule.apply(flat, gradient, self.state, lr=rate_of(rule), step=self.steps)


class ArrayParameters:
    """A loop's arrays under a strategy that exchanges parameters: the servers apply the update rule.

    Args:
        parameters: see `Session.exchange`.
        rule: the update rule of the first step.

    Raises:
        ConfigError: see `ArrayBinding`.
    """

    def __init__(self, parameters: Tree, rule: Optimizer) -> None:
        self.binding = ArrayBinding(parameters)
        self._rule: Any = rule

    def rule_text(self) -> str:
        """The update rule as text, for the run. The learning rate comes with each step."""
        return text_of_optimizer(dataclasses.replace(self._rule, lr=1.0))

    def check(self, parameters: Tree, rule: Optimizer) -> None:
        """Raises ConfigError unless arrays and rule are those of the first step; only `lr` may differ."""
        check_rule(rule, self._rule)
        self.binding.check(parameters)


class ArrayGradients:
    """A loop's arrays under a strategy that exchanges only gradients: each worker applies the update rule.

    Args:
        parameters: see `Session.exchange`.

    Raises:
        ConfigError: see `ArrayBinding`.
    """

    def __init__(self, parameters: Tree) -> None:
        self._arrays = ArrayBinding(parameters)
        self._updates = LocalUpdates()
        layout = self._arrays.layout
        shapes = {slot.name: slot.shape for slot in layout.slots}
        self._vector = GradientVector(shapes, 1, layout.dtype)
        self.binding = ArrayReplicaBinding(self._arrays.by_name, self._vector, self._updates)

    def synchronize(self, bridge: LoopBridge) -> None:
        """Waits for all workers, by a round without a gradient."""

        def write(vector: torch.Tensor) -> None:
            self._vector.finish(vector.zero_(), [[0.0], [0.0], [0.0]], [0, 0, 0, 0])

        write(bridge.open(1, silent=True))
        bridge.exchange(math.nan, write)

    def step(
        self, bridge: LoopBridge, parameters: Tree, gradients: Tree, rule: Optimizer, samples: float
    ) -> Tree:
        """Makes one step together with all workers. Returns the parameters.

        Raises:
            ConfigError: the arrays are not those of the first step.
            GradientError: the gradients do not fit, or are not finite on some worker.
        """
        arrays, elems = self._arrays, self._vector.gradient_elems
        arrays.check(parameters)
        arrays.set_gradients(gradients)
        count, scale = whole(samples)
        checks = [self._updates.steps, 0, 0, 0]

        def write(vector: torch.Tensor) -> bool:
            arrays.copy_gradient(vector[:elems])
            broken = bool(count) and not finite(vector[:elems])
            if broken or not count:
                vector.zero_()
            vector[:elems] *= scale
            self._vector.finish(vector, [[1.0], [float(broken)], [1.0]], checks, scale)
            return broken

        broken = write(bridge.open(count))
        mean = bridge.exchange(math.nan, write)
        if self._vector.broken(mean):
            raise GradientError(
                f"session.exchange, step {checks[0]}: {'this' if broken else 'another'} worker's gradient has "
                "a NaN or an infinity. No worker has applied it. Lower the learning rate, scale the inputs, "
                "or clip the gradient"
            )
        flat = torch.empty(elems, dtype=mean.dtype)
        arrays.init(0, flat)
        self._updates.update(flat, self._vector.unscaled(mean)[:elems], rule)
        arrays.set_parameters(flat)
        bridge.stepped()
        return parameters


class ArrayReplicaBinding(GradientBinding):
    """Presents a loop's numpy arrays to a run in which every worker applies the update rule itself.

    Args:
        arrays: the user's arrays by name.
        vector: the vector that a round carries.
        updates: the update rule's state and step count.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], vector: GradientVector, updates: LocalUpdates
    ) -> None:
        super().__init__(vector)
        self._arrays = arrays
        self._updates = updates

    def fixed(self) -> Fixed:
        """All arrays, since no round carries them."""
        return Fixed({name: array.copy() for name, array in self._arrays.items()})

    def extra(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `model.built_module.extra_of`: the update rule's state too."""
        return {**super().extra(), **self._updates.saved()}

    @override
    def load_fixed(self, frozen: Buffers) -> None:
        super().load_fixed(frozen)
        for name, value in frozen.items():
            if name in self._arrays:
                self._arrays[name][...] = value
        self._updates.load(frozen)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """The user's arrays."""
        del parameters
        return dict(self._arrays)


def rate_of(rule: Optimizer) -> float:
    """The learning rate of a step.

    Raises:
        ConfigError: it is a schedule, or the rule needs whole arrays.
    """
    if isinstance(rule, ByShape):
        raise ConfigError(
            f"session.exchange: {type(rule).__name__} needs the shape of each array, and the arrays are exchanged as "
            "one vector; expected a rule for single elements, such as SGD or AdamW"
        )
    if callable(rule.lr):
        raise ConfigError(
            f"session.exchange: the update rule has the schedule lr={rule.lr!r}; expected a number: compute the "
            "learning rate of each step in your loop, and pass SGD(lr=0.1), for example"
        )
    return rule.lr


def check_rule(rule: Any, first: Any) -> None:
    """Raises ConfigError unless the rule is that of the first step; only `lr` may differ."""
    if type(rule) is not type(first) or _without_lr(rule) != _without_lr(first):
        raise ConfigError(
            f"session.exchange: got the update rule {rule}; expected the rule of the first step, {first}: only its lr "
            "may change"
        )


def _without_lr(rule: Any) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.name != "lr"}


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return list(leaves(list(tree) if isinstance(tree, tuple) else tree))
