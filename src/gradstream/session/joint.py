"""The vector that a round carries where gradients alone are exchanged: a joint gradient, packed.

    [ gradients of what was trained at `wrap` | fired | broken | held | check ]

A round makes the weighted mean of all workers' vectors, and every worker gets it: weights are the samples
that each has behind its gradient, so a worker without samples changes nothing.

    fired, broken   one number for each parameter: 1 where this worker's backward has given it a gradient; 1
                    where that gradient had a NaN or an infinity. In the mean above 0: some worker's
    held            1 where it has a gradient, from whatever backward
    check           numbers that must be the same on all workers: then they are in the mean what they are here

Parameters that were frozen at `wrap`, and are trained later, have no place. Their gradients go in rounds of
their own, after the first, in the place of the others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradstream.checkpoint.own_state import CHECK, EXTRA
from gradstream.errors import ConfigError
from gradstream.model.base import Layout
from gradstream.model.buffers import Buffers
from gradstream.model.fixed import Fixed
from gradstream.session.binding import ParameterBinding
from gradstream.session.replica import LoopState

__all__ = ["Digest", "JointArrays", "JointReplica", "JointVector", "layout_of"]

NUM_CHECKS = 4
LIMIT = 1 << 16
"""Numbers to be checked are below: their weighted mean is exact to a part of 1 in float32."""


class JointVector:
    """Where in the vector things lie.

    Args:
        shapes: of what has a place, by name, the first one to be ready first.
        flags: how many parameters there are in all.
        dtype: of the vector.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], flags: int, dtype: torch.dtype) -> None:
        bounds, start = [], 0
        for shape in shapes.values():
            bounds.append((start, start + math.prod(shape)))
            start = bounds[-1][1]
        self.bounds: Sequence[tuple[int, int]] = bounds
        self.room = start
        self._fired = slice(start, start + flags)
        self._broken = slice(start + flags, start + 2 * flags)
        self._held = slice(start + 2 * flags, start + 3 * flags)
        self._checks = slice(start + 3 * flags, start + 3 * flags + NUM_CHECKS)
        gradients = [(f"{EXTRA}gradient.{name}", tuple(shape)) for name, shape in shapes.items()]
        self.layout = Layout.of([*gradients, (CHECK, (3 * flags + NUM_CHECKS,))], dtype)

    def finish(self, vector: torch.Tensor, flags: Sequence[Sequence[float]], checks: Sequence[int]) -> None:
        """Writes what comes behind the gradients: `flags` are fired, broken and held."""
        for place, numbers in zip((self._fired, self._broken, self._held), flags, strict=True):
            vector[place] = torch.tensor(numbers, dtype=vector.dtype)
        vector[self._checks] = torch.tensor([number % LIMIT for number in checks], dtype=vector.dtype)

    def fired(self, mean: torch.Tensor) -> list[int]:
        """Numbers of the parameters that some worker's backward has given a gradient."""
        return mean[self._fired].nonzero().flatten().tolist()

    def broken(self, mean: torch.Tensor) -> set[int]:
        """Those of which some worker's gradient had a NaN or an infinity."""
        return set(mean[self._broken].nonzero().flatten().tolist())

    def held(self, mean: torch.Tensor) -> set[int]:
        """Those that some worker with samples has a gradient of, from this backward or one before."""
        return set(mean[self._held].nonzero().flatten().tolist())

    def differing(self, mean: torch.Tensor, checks: Sequence[int]) -> list[int]:
        """Which of the numbers are not the same on all workers that have samples."""
        means = mean[self._checks].tolist()
        return [i for i, number in enumerate(checks) if not abs(means[i] - number % LIMIT) < 0.5]


class JointReplica(ParameterBinding):
    """What the run knows of a loop whose own optimizers move its modules: their state, and the layout.

    Args:
        replica: what the loop trains with.
        vector: what a round carries.
    """

    def __init__(self, replica: LoopState, vector: JointVector) -> None:
        self.layout = vector.layout
        self._replica = replica

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """There is no mean gradient yet."""
        del seed
        parameters.zero_()

    def show(self, parameters: torch.Tensor) -> None:
        """Nothing to be seen: who asks for the mean looks at it."""

    def take(self, gradient: torch.Tensor) -> None:
        """It is there: hooks have written it."""

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """See `ParameterBinding.buffers`."""
        return self._replica.buffers()

    def keep(self) -> None:
        """See `ParameterBinding.keep`."""
        self._replica.keep()

    def let_go(self) -> None:
        """See `ParameterBinding.let_go`."""
        self._replica.let_go()

    def load_buffers(self, buffers: Buffers) -> None:
        """See `ParameterBinding.load_buffers`."""
        self._replica.load_buffers(buffers)

    def fixed(self) -> Fixed:
        """All parameters: no round holds them."""
        return Fixed(self._replica.saved())

    def extra(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `model.fixed.extra_of`."""
        return self._replica.extra()

    def load_fixed(self, frozen: Buffers) -> None:
        """See `ParameterBinding.load_fixed`; and what `extra` has given."""
        self._replica.load(frozen)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """The modules' own."""
        del parameters
        return self._replica.saved()


class JointArrays(ParameterBinding):
    """As `JointReplica`, of numpy arrays that the loop's own update rule moves.

    Args:
        arrays: the user's own, by name.
        vector: what a round carries.
        state: vectors of the update rule, by name; filled at its first step.
        counts: how many steps there were.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        vector: JointVector,
        state: dict[str, torch.Tensor],
        counts: dict[str, int],
    ) -> None:
        self.layout = vector.layout
        self._arrays = arrays
        self._rule_state = state
        self._counts = counts

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """There is no mean gradient yet."""
        del seed
        parameters.zero_()

    def show(self, parameters: torch.Tensor) -> None:
        """Nothing to be seen."""

    def take(self, gradient: torch.Tensor) -> None:
        """It is there."""

    def fixed(self) -> Fixed:
        """All arrays: no round holds them."""
        return Fixed({name: array.copy() for name, array in self._arrays.items()})

    def extra(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `model.fixed.extra_of`."""
        state = {f"{EXTRA}rule.{name}": vector.numpy().copy() for name, vector in self._rule_state.items()}
        return {**state, **{f"{EXTRA}{name}": np.array(count) for name, count in self._counts.items()}}

    def load_fixed(self, frozen: Buffers) -> None:
        """See `ParameterBinding.load_fixed`."""
        for name, value in frozen.items():
            if name in self._arrays:
                self._arrays[name][...] = value
            elif name.startswith(f"{EXTRA}rule."):
                self._rule_state[name.removeprefix(f"{EXTRA}rule.")] = torch.from_numpy(value.copy())
            elif name.startswith(EXTRA):
                self._counts[name.removeprefix(EXTRA)] = int(value)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """The user's own."""
        del parameters
        return dict(self._arrays)


class Digest:
    """A number of a replica's parameters that differs where one of the looked-at elements does.

    Each call looks at another piece, so that all are looked at in the end: replicas that have drifted
    apart are found out within that many rounds, small ones at once.

    Args:
        parameters: by name.
    """

    PIECE_ELEMS = 1 << 13

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = list(parameters.items())
        self._begin = 0
        self._index = 0

    def next(self) -> tuple[str, int]:
        """(what is looked at, in words; 32 bits of it)."""
        first, left, digest, names = self._index, self.PIECE_ELEMS, 0, list[str]()
        while left > 0 and (not names or self._begin or self._index != first):
            name, parameter = self._parameters[self._index]
            names.append(name)
            flat = parameter.detach().flatten()  # no copy where it is contiguous
            piece = flat[self._begin : self._begin + left]
            digest = zlib.crc32(piece.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest)
            left -= len(piece)
            self._begin += len(piece)
            if self._begin >= len(flat):
                self._begin, self._index = 0, (self._index + 1) % len(self._parameters)
        whole = f"parameter {names[0]!r}" if len(names) == 1 else f"one of {names[0]!r} to {names[-1]!r}"
        return whole, digest


def layout_of(replica: LoopState) -> tuple[list[str], JointVector]:
    """The names of all parameters, those with a place in the vector first; and the vector.

    What requires a gradient now has a place: the last one first, about the order in which a backward ends.

    Raises:
        ConfigError: nothing requires a gradient, or a parameter is no real floating-point number.
    """
    trained = {name: p for name, p in replica.parameters.items() if p.requires_grad}
    dtypes = {parameter.dtype for parameter in trained.values()}
    if not dtypes or not all(dtype.is_floating_point for dtype in dtypes):
        got = ", ".join(sorted(map(str, dtypes))) or "no parameters that require a gradient"
        raise ConfigError(f"wrap: got {got}; expected floating-point parameters that require a gradient")
    names = [*reversed(trained), *(name for name in replica.parameters if name not in trained)]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    shapes = {name: tuple(trained[name].shape) for name in reversed(trained)}
    return names, JointVector(shapes, len(names), dtype)
