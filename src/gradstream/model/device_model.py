"""A PyTorch model that a device computes, while the exchanged vectors stay in main memory."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from gradstream.model.backprop import Backprop
from gradstream.model.base import Batch, Reduction, finite_loss, map_leaves
from gradstream.model.built_module import Build, BuiltModule
from gradstream.model.devices import Copied, Streams, device_of, seeded, streams_of
from gradstream.model.rows import RowGradient
from gradstream.model.torch_module import Loss, LossOf, TorchModel, usable
from gradstream.runtime.base import Report

# ---- staging -----------------------------------------------------------------------------
# Copies flat vectors between main memory, where they are exchanged, and a device that computes.
#
#     parameters (E,)  ── one copy ──▶  flat on the device; the module's parameters are views of it
#     gradient (E,)    ◀── a copy as often as enough of it is ready, while backprop continues ──  flat there
#
# Copies to main memory run on a separate stream, after the computations that they need and beside those that follow.
# Elements are reported when the event of their copy says that they have arrived.

COPY_ELEMS = 1 << 16
"""A gradient is copied in pieces of at least this many elements, since a copy costs some microseconds."""


class Staging:
    """The flat vectors of one model on its device.

    Args:
        elems: E.
        dtype: dtype of the parameters.
        streams: copy streams of the device.
    """

    def __init__(self, elems: int, dtype: torch.dtype, streams: Streams) -> None:
        self.streams = streams
        self.parameters = torch.empty(elems, dtype=dtype, device=streams.device)
        self._gradient = torch.empty_like(self.parameters)

    def show(self, parameters: torch.Tensor) -> None:
        """Copies parameters (E,) to the device, for the next computations; they may change once these have ended."""
        self.parameters.copy_(parameters, non_blocking=True)

    @contextmanager
    def landing(self, gradient: torch.Tensor, report: Report) -> Iterator[Landing]:
        """Copies a gradient to main memory as it is computed. On exit, all copies have ended.

        Args:
            gradient: (n,) in main memory, n <= E; written.
            report: called with the length of the prefix that has arrived, as it grows.
        """
        self.streams.pin(gradient)
        landing = Landing(self.streams, self._gradient[: len(gradient)], gradient, report)
        try:
            yield landing
        finally:
            landing.abandon()


class Landing:
    """Copies one gradient from the device to main memory, piece by piece.

    Args:
        streams: copy streams of the device.
        source: (n,) on the device, where the backward pass writes it.
        gradient: (n,) in main memory.
        report: called with the length of the prefix that has arrived.
    """

    def __init__(
        self, streams: Streams, source: torch.Tensor, gradient: torch.Tensor, report: Report
    ) -> None:
        self.source = source
        self._streams = streams
        self._gradient = gradient
        self._report = report
        self._asked = 0  # elements whose copies are queued
        self._under_way: deque[tuple[Copied, Callable[[], None]]] = deque()

    def scalar(self, value: torch.Tensor, then: Callable[[float], None]) -> None:
        """Copies a number, and calls `then` with it, before any element that is copied later is reported."""
        host = self._streams.pinned_like(value)
        copied = self._streams.to_host(value, host)
        self._under_way.append((copied, lambda: then(float(host))))

    def ready(self, elems: int) -> None:
        """Called by the backward pass when the device has written the first `elems` elements, or has queued that."""
        if elems - self._asked >= COPY_ELEMS or elems == len(self.source):
            piece = slice(self._asked, elems)
            copied = self._streams.to_host(self.source[piece], self._gradient[piece])
            self._under_way.append((copied, partial(self._report, elems)))
            self._asked = elems
        self._report_arrived(wait=False)

    def finish(self) -> None:
        """Reports the rest, piece by piece as it arrives."""
        self._report_arrived(wait=True)

    def abandon(self) -> None:
        """Waits for all copies, and reports nothing."""
        while self._under_way:
            self._under_way.popleft()[0].synchronize()

    def _report_arrived(self, *, wait: bool) -> None:
        while self._under_way:
            copied, then = self._under_way[0]
            if wait:
                copied.synchronize()
            elif not copied.query():
                return
            self._under_way.popleft()
            then()


# ---- device model ------------------------------------------------------------------------


def on_device(model: TorchModel, name: str, rank: int = 0) -> TorchModel:
    """The same model, not yet built, for a worker that computes on a device.

    Args:
        model: the user's model.
        name: name of the device; see `Job.device`.
        rank: number of the worker.

    Raises:
        ConfigError: torch has no such device here.
    """
    device = device_of(name, rank)
    if device.type != "cpu":
        return DeviceModel(*model.given, streams=partial(streams_of, device))
    return TorchModel(*model.given)


class DeviceModel(TorchModel):
    """A `TorchModel` that computes on a device. Its arguments and results are in main memory.

    Args:
        build, loss, reduction, loss_of, spread: see `from_torch`.
        streams: returns the copy streams. Called before the first computation, so that only a worker uses the
            device: shards and the launcher read only the layout.
    """

    def __init__(
        self,
        build: Build,
        loss: Loss,
        reduction: Reduction,
        loss_of: LossOf,
        spread: bool,
        *,
        streams: Callable[[], Streams],
    ) -> None:
        super().__init__(build, loss, reduction, loss_of, spread)
        self._make_streams = streams
        self._staging: Staging | None = None

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
        rows: RowGradient | None = None,
    ) -> float:
        """See `TorchModel.gradient`. Waits for the device only after the whole backward pass is queued."""
        if batch.num_samples == 0:
            return super().gradient(parameters, batch, gradient, seed=seed, report=report)
        built, staging, losses = self._module(), self._placed(), list[float]()
        streams = staging.streams
        with streams.current(), staging.landing(gradient, report) as landing:
            streams.pin(parameters)
            self._show(built, parameters)
            built.training(True)
            backprop = Backprop(built.layout, built.parameters, landing.source, landing.ready, rows)
            with torch.enable_grad(), backprop, seeded(seed):
                loss = usable(self._loss_of(built, batch))
                landing.scalar(loss.detach(), lambda value: losses.append(finite_loss(value)))
                backprop.run(loss)
            backprop.finish()
            landing.finish()
        return losses[0]

    @override
    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        with self._placed().streams.current():
            outputs = super().outputs(parameters, inputs)
            brought: torch.Tensor = tree_map_only(torch.Tensor, torch.Tensor.cpu, outputs)
        return brought

    @override
    def loss_of(self, outputs: Any, targets: Any) -> float:
        with self._placed().streams.current():
            return super().loss_of(self._tensors(outputs), self._tensors(targets))

    @override
    def held_out_loss(self, parameters: torch.Tensor, batch: Batch) -> float:
        with self._placed().streams.current():
            return super().held_out_loss(parameters, batch)

    def _placed(self) -> Staging:
        """The vectors on the device. The first use moves the module there, and a loss that is a module."""
        if self._staging is None:
            built, streams = self._module(), self._make_streams()
            staging = Staging(built.layout.elems, built.layout.dtype, streams)
            built.module.to(streams.device)
            built.point_at(staging.parameters)
            if isinstance(self._loss, nn.Module):
                self._loss = copy.deepcopy(self._loss).to(streams.device)
            self._staging = staging
        return self._staging

    def _show(self, built: BuiltModule, parameters: torch.Tensor) -> None:
        """See `TorchModel._show`: copies the parameters to the device."""
        built.check(parameters)
        self._placed().show(parameters)

    @override
    def _tensors(self, tree: Any) -> Any:
        moved = self._placed().streams.moved
        tensors = super()._tensors(tree)
        return map_leaves(lambda leaf: moved(leaf) if isinstance(leaf, torch.Tensor) else leaf, tensors)
