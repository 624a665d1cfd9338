"""Collects the figures that a user's training loop logs, and the losses of its `backward()` calls.

    session.log(accuracy=0.9)  ──▶ means by name ──▶ LogEvent, at most ten a second ──▶ the worker's node
    loss.backward()            ──▶ mean          ──▶ loss of the next StepEvent

The loop's thread reads a tensor on the stream that computed it, and only when a report is due, not when it is logged.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from numbers import Real
from time import monotonic_ns
from typing import Any

import numpy as np
import torch

from gradstream.errors import ConfigError
from gradstream.job.validation import whole
from gradstream.telemetry.events import LogEvent, MemberEvent, NoteEvent

MAX_NAMES = 64
EVERY_NS = 100_000_000
"""Time between two reports of a worker; figures logged in between are averaged by name."""

MAX_WAITING = 100
"""The most reports that wait for the node, which takes them every second. Beyond that, values are averaged."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]{0,63}")
"""Names that all trackers accept."""


class SessionLog:
    """Collects figures and losses of one worker's loop. Call all methods but `take` from the loop's thread.

    Args:
        rank: number of the worker.
        steps: returns the number of steps that the worker has made.
    """

    def __init__(self, rank: int, steps: Callable[[], int] = lambda: 0) -> None:
        self._rank = rank
        self._steps = steps
        self._total_steps = 0
        self._means: dict[str, _Mean] = {}
        self._loss = _Mean()
        self._dropped = 0  # values of names beyond MAX_NAMES
        self._due_ns = 0
        self._reports: deque[MemberEvent] = deque()
        self.scales = False  # a GradScaler has scaled a loss in this loop

    def open(self) -> None:
        """Records the losses of `backward()` in this thread until `close`."""
        _start_recording(self)

    def log(self, /, **values: Any) -> None:
        """Logs figures: numbers, or tensors of one element. NaN and infinities are allowed.

        Raises:
            ConfigError: a value is not a number, or a name has characters that trackers do not accept.
        """
        for name, value in values.items():
            mean = self._means.get(name) or self._named(name)
            if mean is None:
                self._dropped += 1
                continue
            try:
                mean.add(value)
            except TypeError:
                got = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)[:80]
                raise ConfigError(
                    f"session.log({name}=...): got {type(value).__name__} ({got}), expected a number or "
                    "a tensor of one element: log its mean, or one element"
                ) from None
        if monotonic_ns() >= self._due_ns:
            self._report()

    def note(self, message: str) -> None:
        """Tells the user something about the loop, on the terminal that started the run and in its report."""
        self._reports.append(NoteEvent(rank=self._rank, message=message))

    def backward(self, loss: torch.Tensor) -> None:
        """Records the loss of a `backward()` call. Its value is read at the next step."""
        self._loss.add(loss)

    def step(self, loss: float = math.nan) -> float:
        """The loss of the step that the loop submits.

        Args:
            loss: the loss that the loop has passed; NaN if none.

        Returns:
            That loss or, if it is NaN, the mean of the losses of `backward` since the last call, or NaN.
        """
        mean = self._loss.take()
        if monotonic_ns() >= self._due_ns:
            self._report()
        return mean if math.isnan(loss) else loss

    def total(self, steps: int) -> None:
        """Sets this worker's number of steps in the whole run, to estimate when the run ends.

        Raises:
            ConfigError: `steps` is not a whole number of at least 1.
        """
        whole("session.total: steps", steps, least=1)
        self._total_steps = int(steps)
        self._report(even_if_empty=True)

    def close(self) -> None:
        """Reports the remaining figures, and stops recording losses. A second call does nothing."""
        _stop_recording(self)
        self._report()

    def take(self) -> Iterable[MemberEvent]:
        """The reports since the last call. Always call it from the same thread, whichever it is."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _named(self, name: str) -> _Mean | None:
        """A mean for a new name; None if there are `MAX_NAMES` already."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"session.log: got the name {name[:80]!r}; expected 1 to 64 letters (A-Z, a-z), digits and _ . / "
                "- or space, beginning with a letter, a digit or _"
            )
        return self._means.setdefault(name, _Mean()) if len(self._means) < MAX_NAMES else None

    def _report(self, *, even_if_empty: bool = False) -> None:
        if len(self._reports) >= MAX_WAITING:
            return
        counts = {name: mean.count for name, mean in self._means.items() if mean.count}
        if not counts and not self._dropped and not even_if_empty:
            return
        self._reports.append(
            LogEvent(
                rank=self._rank,
                step=self._steps(),
                values={name: self._means[name].take() for name in counts},
                merged=sum(counts.values()) - len(counts),
                dropped=self._dropped,
                total_steps=self._total_steps,
            )
        )
        self._dropped, self._due_ns = 0, monotonic_ns() + EVERY_NS


class _Mean:
    """A mean of numbers. Tensors are added up on their accelerator, and only `take` waits for them."""

    __slots__ = ("_sum", "count")

    def __init__(self) -> None:
        self.count = 0
        self._sum: float | torch.Tensor = 0.0

    def add(self, value: Any) -> None:
        """Adds a number. Raises TypeError for other values."""
        number = value if type(value) is float else _number(value)
        if isinstance(number, torch.Tensor) and isinstance(self._sum, torch.Tensor):
            number = number.to(self._sum.device)  # a model may be spread over several accelerators
        self._sum = self._sum + number
        self.count += 1

    def take(self) -> float:
        """The mean since the last call; NaN if nothing was added."""
        mean = float(self._sum) / self.count if self.count else math.nan
        self.count, self._sum = 0, 0.0
        return mean


def _number(value: Any) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise TypeError
        if value.device.type == "cpu":
            return value.item()
        return value.detach().reshape(()).float()
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, Real | np.bool_):
        raise TypeError
    return float(value)


# ---- the losses of `backward()` -----------------------------------------------------------

_lock = threading.Lock()
_logs: dict[int, SessionLog] = {}  # by the thread of the loop
_wrapped: dict[tuple[type, str], tuple[Any, Any]] = {}  # method -> (original, wrapper)
UNSCALED = "_gradstream_unscaled"


def _start_recording(log: SessionLog) -> None:
    with _lock:
        _logs[threading.get_ident()] = log
        for (cls, name), wrap in _WRAPPERS.items():
            if (cls, name) not in _wrapped:
                was = getattr(cls, name)
                _wrapped[cls, name] = was, wrap(was)
                setattr(cls, name, _wrapped[cls, name][1])


def _stop_recording(log: SessionLog) -> None:
    with _lock:
        for thread in [thread for thread, one in _logs.items() if one is log]:
            del _logs[thread]
        if _logs:
            return
        for (cls, name), (was, wrapper) in list(_wrapped.items()):
            if (
                getattr(cls, name) is wrapper
            ):  # otherwise other code has wrapped this wrapper, which stays and records nothing
                setattr(cls, name, was)
                del _wrapped[cls, name]


def _log_of_thread() -> SessionLog | None:
    """The log of this thread's loop or, failing that, the only log that there is."""
    log, logs = _logs.get(threading.get_ident()), tuple(_logs.values())
    return logs[0] if log is None and len(logs) == 1 else log


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensor: torch.Tensor, gradient: Any = None, *rest: Any, **options: Any) -> Any:
        log = _log_of_thread()
        if log is not None and gradient is None:
            # GradScaler.scale notes the unscaled loss on its result. A loss computed from that result
            # (divided by a number of minibatches, for example) is neither scaled nor unscaled: skip it.
            loss = getattr(tensor, UNSCALED, None if log.scales else tensor)
            try:
                if loss is not None:
                    log.backward(loss)
            except (TypeError, RuntimeError):
                pass  # the loss has no value yet, as while a graph is traced: that must not end the loop
        return original(tensor, gradient, *rest, **options)

    return backward


def _wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        log = _log_of_thread()
        if log is not None and scaler.is_enabled():
            log.scales = True
            losses, results = ((one,) if isinstance(one, torch.Tensor) else one for one in (outputs, scaled))
            if isinstance(losses, list | tuple):  # an iterator would be used up
                for loss, result in zip(losses, results, strict=True):
                    if isinstance(result, torch.Tensor):
                        setattr(result, UNSCALED, loss.detach())
        return scaled

    return scale


_WRAPPERS: dict[tuple[type, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    (torch.Tensor, "backward"): _wrap_backward,
    (torch.amp.GradScaler, "scale"): _wrap_scale,
}
