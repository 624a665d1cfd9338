"""The flat vector of one round, for strategies that exchange only gradients.

    [ gradients of the parameters that required one at `wrap` | fired | broken | present | check | scale | bits ]

A round gives every worker the weighted mean of all workers' vectors. A worker's weight is the number of samples in
its gradient, so a worker without samples changes nothing.

    fired     one number for each parameter: 1 if this worker's backward has computed a gradient
    broken    1 if that gradient has a NaN or an infinity
    present   1 if the parameter has a gradient, from this backward or from an earlier one
    check     numbers that must be equal on all workers: then their mean is the number itself
    scale     1 if this worker's weight is not a whole number, and its weight divided by the number of samples
              that the round counts. The worker has multiplied its gradients by that
    bits      of a checksum that should be equal: all workers see alike whether it is, also those without samples

A flag above 0 in the mean was set on at least one worker that has samples.

Parameters that were frozen at `wrap` and are trained later have no place in the vector. Their gradients are
exchanged in rounds of their own, after the first one, in the part that holds the others' gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from gradstream.checkpoint.own_state import CHECK, EXTRA
from gradstream.errors import ConfigError, GradientError, UserCodeError
from gradstream.model.base import Layout, finite
from gradstream.model.devices import Copied, Streams, streams_of

NUM_CHECKS = 4
NUM_BITS = 32
LEAST_SHARE = 1e-5
"""A worker with a smaller share of a round's samples cannot be distinguished from rounding."""

CHECK_LIMIT = 1 << 16
"""Checked numbers are taken modulo this, so that their weighted mean errs by less than 1 in float32."""

REPORT_ELEMS = 1 << 16
"""The writer reports progress after at least this many elements, since small layers would report constantly."""


class GradientVector:
    """Knows where in the vector each gradient, flag and check lies.

    Args:
        shapes: shape of each gradient that has a place, by parameter name, in the order of the vector.
        num_parameters: number of all parameters, with or without a place.
        dtype: dtype of the vector.

    Attributes:
        bounds: [start, stop) of each gradient in the vector.
        gradient_elems: elements of all gradients together.
        layout: names and shapes of the parts of the vector.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], num_parameters: int, dtype: torch.dtype) -> None:
        bounds, start = [], 0
        for shape in shapes.values():
            bounds.append((start, start + math.prod(shape)))
            start = bounds[-1][1]
        self.bounds: Sequence[tuple[int, int]] = bounds
        self.gradient_elems = start
        self._fired = slice(start, start + num_parameters)
        self._broken = slice(start + num_parameters, start + 2 * num_parameters)
        self._present = slice(start + 2 * num_parameters, start + 3 * num_parameters)
        self._checks = slice(start + 3 * num_parameters, start + 3 * num_parameters + NUM_CHECKS)
        self._scale = slice(self._checks.stop, self._checks.stop + 2)
        self._bits = slice(self._scale.stop, self._scale.stop + NUM_BITS)
        gradients = [(f"{EXTRA}gradient.{name}", tuple(shape)) for name, shape in shapes.items()]
        self.layout = Layout.of([*gradients, (CHECK, (self._bits.stop - start,))], dtype)

    def finish(
        self,
        vector: torch.Tensor,
        flags: Sequence[Sequence[float]],
        checks: Sequence[int],
        scale: float = 1.0,
        checksum: int = 0,
    ) -> None:
        """Writes flags (fired, broken, present), check numbers, scale and checksum behind the gradients."""
        for place, numbers in zip((self._fired, self._broken, self._present), flags, strict=True):
            vector[place] = torch.tensor(numbers, dtype=vector.dtype)
        vector[self._checks] = torch.tensor([number % CHECK_LIMIT for number in checks], dtype=vector.dtype)
        vector[self._scale] = torch.tensor([float(scale != 1), scale], dtype=vector.dtype)
        bits = [float(checksum >> place & 1) for place in range(NUM_BITS)]
        vector[self._bits] = torch.tensor(bits, dtype=vector.dtype)

    def unscaled(self, mean: torch.Tensor) -> torch.Tensor:
        """Converts a mean by samples into the mean by weights."""
        is_scaled, scale = mean[self._scale].tolist()
        return mean / scale if is_scaled else mean

    def fired(self, mean: torch.Tensor) -> list[int]:
        """Indices of the parameters for which some worker's backward has computed a gradient."""
        return mean[self._fired].nonzero().flatten().tolist()

    def broken(self, mean: torch.Tensor) -> set[int]:
        """Indices of the parameters for which some worker's gradient has a NaN or an infinity."""
        return set(mean[self._broken].nonzero().flatten().tolist())

    def present(self, mean: torch.Tensor) -> set[int]:
        """Indices of the parameters that have a gradient on some worker, from this backward or before."""
        return set(mean[self._present].nonzero().flatten().tolist())

    def checksums_differ(self, mean: torch.Tensor) -> bool:
        """Whether the checksums of workers with samples differ. The same on every worker."""
        return any(LEAST_SHARE < bit < 1 - LEAST_SHARE for bit in mean[self._bits].tolist())

    def differing(self, mean: torch.Tensor, checks: Sequence[int]) -> list[int]:
        """Indices of the checks that are not equal on all workers that have samples."""
        means = mean[self._checks].tolist()
        return [i for i, number in enumerate(checks) if not abs(means[i] - number % CHECK_LIMIT) < 0.5]


def vector_of(parameters: Mapping[str, nn.Parameter]) -> tuple[list[str], GradientVector]:
    """Returns (names of all parameters, those with a place first; the vector).

    Parameters that require a gradient now get a place, the last one first, since backward finishes gradients in
    about that order.

    Raises:
        ConfigError: no parameter requires a gradient, or one that does is not floating-point.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    dtypes = {parameter.dtype for parameter in trained.values()}
    if not dtypes or not all(dtype.is_floating_point for dtype in dtypes):
        got = ", ".join(sorted(map(str, dtypes))) or "no parameters that require a gradient"
        raise ConfigError(
            f"session.wrap: the modules have {got}; expected floating-point parameters that require a gradient"
        )
    names = [*reversed(trained), *(name for name in parameters if name not in trained)]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    shapes = {name: tuple(trained[name].shape) for name in reversed(trained)}
    return names, GradientVector(shapes, len(names), dtype)


class GradientWriter:
    """Writes gradients into a vector in any order, and reports how many leading elements are final.

    The worker sends elements as soon as they are final. Gradients on an accelerator are copied asynchronously during
    backward, and are final once copied.

    Args:
        names: names of the parameters that have a place, in the order of the vector.
        bounds: [start, stop) of each.
        report: called with the number of leading elements that are final.
        streams_of: returns the copy streams of a device.

    Attributes:
        broken: indices of the gradients with a NaN or an infinity; zeros are written instead.
        scale: factor by which gradients are multiplied.
    """

    def __init__(
        self,
        names: Sequence[str],
        bounds: Sequence[tuple[int, int]],
        report: Callable[[int], None],
        streams_of: Callable[[torch.device], Streams] = streams_of,
    ) -> None:
        self.broken: set[int] = set()
        self.scale = 1.0
        self._names = names
        self._bounds = bounds
        self._report = report
        self._streams_of = streams_of
        self._streams: dict[torch.device, Streams] = {}
        self._vector: torch.Tensor | None = None
        self._begun: set[int] = set()
        self._final: set[int] = set()
        self._copies: deque[tuple[int, Copied]] = deque()
        self._front = self._reported = 0

    @property
    def is_open(self) -> bool:
        """Whether a vector is begun and not finished."""
        return self._vector is not None

    def begin(self, vector: torch.Tensor, scale: float = 1.0) -> None:
        """Begins a vector (E,): gradients are written into it from now on, multiplied by `scale`."""
        self._vector = vector
        self.scale = scale
        self.broken = set()
        self._begun.clear()
        self._final.clear()
        self._front = self._reported = 0

    def __contains__(self, index: int) -> bool:
        return index in self._begun

    def write(self, index: int, gradient: torch.Tensor | None) -> None:
        """Writes a gradient of any floating dtype; None writes zeros. It must not change until `finish`.

        Raises:
            GradientError: the gradient is sparse.
            UserCodeError: it is written a second time after the first was sent.
        """
        assert self._vector is not None
        start, stop = self._bounds[index]
        if start < self._reported:
            raise UserCodeError(
                f"backward computed the gradient of {self._names[index]!r} twice, and this worker has sent "
                "the first one already. Activation checkpointing causes this: call "
                "torch.utils.checkpoint with use_reentrant=False, which computes each gradient once"
            )
        view = self._vector[start:stop]
        self._begun.add(index)
        if gradient is None:
            view.zero_()
            self._final.add(index)
        elif gradient.layout != torch.strided:
            raise GradientError(
                f"the gradient of {self._names[index]!r} is sparse ({gradient.layout}); this strategy "
                "averages dense gradients: make the layer with sparse=False"
            )
        elif gradient.device.type == "cpu" and self._streams_of is streams_of:
            view.view(gradient.shape).copy_(gradient.detach())
            self._finalise(index)
        else:
            self._copies.append((index, self._copy(gradient.detach(), view)))
        while self._copies and self._copies[0][1].query():
            self._finalise(self._copies.popleft()[0])
        self._advance()

    def finish(self) -> torch.Tensor:
        """Writes zeros where no gradient was written, waits for copies, and returns the vector."""
        assert self._vector is not None
        for index in range(len(self._bounds)):
            if index not in self._begun:
                self.write(index, None)
        while self._copies:
            index, copied = self._copies.popleft()
            copied.synchronize()
            self._finalise(index)
        vector, self._vector = self._vector, None
        return vector

    def _copy(self, gradient: torch.Tensor, view: torch.Tensor) -> Copied:
        assert self._vector is not None
        streams = self._streams.get(gradient.device)
        if streams is None:
            streams = self._streams[gradient.device] = self._streams_of(gradient.device)
        streams.pin(self._vector)
        return streams.to_host(gradient, view.view(gradient.shape))

    def _finalise(self, index: int) -> None:
        assert self._vector is not None
        start, stop = self._bounds[index]
        self.broken.discard(index)
        if not finite(self._vector[start:stop]):
            self._vector[start:stop].zero_()
            self.broken.add(index)
        elif self.scale != 1:
            self._vector[start:stop] *= self.scale
        self._final.add(index)

    def _advance(self) -> None:
        while self._front < len(self._bounds) and self._front in self._final:
            self._front += 1
        done = self._bounds[self._front - 1][1] if self._front else 0
        if done >= self._reported + REPORT_ELEMS:
            self._reported = done
            self._report(done)
