"""What a training loop of the user's own says of itself: figures that it logs, and the loss of `backward()`.

    session.log(accuracy=0.9)  ──▶ means by name ──▶ LogEvent, at most ten a second ──▶ the worker's node
    loss.backward()            ──▶ mean          ──▶ loss of the next StepEvent

Numbers are read in the loop's own thread, so a tensor on an accelerator is read on the stream that made it.
It is read when a report is due, not when it is logged.
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
from gradstream.telemetry.events import LogEvent

__all__ = ["MAX_NAMES", "SessionLog"]

MAX_NAMES = 64
EVERY_NS = 100_000_000
"""Between two reports of one worker; what is logged meanwhile becomes a mean by name."""

MAX_WAITING = 100
"""Reports that wait for the node, which takes them each second. Beyond, values go on to be merged."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]{0,63}")
"""What all trackers take."""


class SessionLog:
    """Collects what one worker's loop says of itself. All methods but `take` are called in the loop's thread.

    Args:
        rank: of the worker.
        steps: says how many steps the worker has made.
    """

    def __init__(self, rank: int, steps: Callable[[], int] = lambda: 0) -> None:
        self._rank = rank
        self._steps = steps
        self._total_steps = 0
        self._means: dict[str, _Mean] = {}
        self._loss = _Mean()
        self._dropped = 0  # values of names beyond the most
        self._due_ns = 0
        self._reports: deque[LogEvent] = deque()
        self.scales = False  # a GradScaler has scaled a loss in this loop

    def open(self) -> None:
        """Hears the losses of `backward()` in this thread from now on, until `close`."""
        _hear(self)

    def log(self, /, **values: Any) -> None:
        """Takes figures: numbers, or tensors of one element. NaN and infinities are figures, too.

        Raises:
            ConfigError: a value is no number, or a name has other characters than trackers take.
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
                    "a tensor of one element: log a mean, or an element"
                ) from None
        if monotonic_ns() >= self._due_ns:
            self._report()

    def backward(self, loss: torch.Tensor) -> None:
        """`loss` is differentiated. Its value is remembered, and read with the next step."""
        self._loss.add(loss)

    def step(self, loss: float = math.nan) -> float:
        """The loop hands a gradient over.

        Args:
            loss: as the loop gives it; NaN where it does not.

        Returns:
            The loss of the step: that, or else the mean of `backward` since this was asked before, or NaN.
        """
        heard = self._loss.take()
        if monotonic_ns() >= self._due_ns:
            self._report()
        return heard if math.isnan(loss) else loss

    def total(self, steps: int) -> None:
        """Says how many steps this worker makes in the whole run: the run's end can be estimated.

        Raises:
            ConfigError: it is not a whole number of at least 1.
        """
        whole("session.total: steps", steps, least=1)
        self._total_steps = int(steps)
        self._report(even_if_empty=True)

    def close(self) -> None:
        """Reports what is left, and hears no losses any more. Calling it twice changes nothing."""
        _unhear(self)
        self._report()

    def take(self) -> Iterable[LogEvent]:
        """The reports since it was asked before, for the run's events. From any one thread."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _named(self, name: str) -> _Mean | None:
        """A mean for a new name; None where there are too many."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"session.log: the name {name[:80]!r}: expected 1 to 64 letters (A-Z, a-z), digits and _ . / "
                "- or space, the first of them a letter, a digit or _"
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
    """Of numbers. Tensors on an accelerator are added there: nothing waits for them before `take`."""

    __slots__ = ("_sum", "count")

    def __init__(self) -> None:
        self.count = 0
        self._sum: float | torch.Tensor = 0.0

    def add(self, value: Any) -> None:
        """Raises TypeError for what is no number."""
        number = value if type(value) is float else _number(value)
        if isinstance(number, torch.Tensor) and isinstance(self._sum, torch.Tensor):
            number = number.to(self._sum.device)  # where a model is spread over several accelerators
        self._sum = self._sum + number
        self.count += 1

    def take(self) -> float:
        """The mean since it was taken before; NaN where there was nothing."""
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
_hearing: dict[int, SessionLog] = {}  # by the thread of the loop
_wrapped: dict[tuple[type, str], tuple[Any, Any]] = {}  # method -> (what it was, what stands there)
UNSCALED = "_gradstream_unscaled"


def _hear(log: SessionLog) -> None:
    with _lock:
        _hearing[threading.get_ident()] = log
        for (cls, name), wrap in _WRAPPERS.items():
            if (cls, name) not in _wrapped:
                was = getattr(cls, name)
                _wrapped[cls, name] = was, wrap(was)
                setattr(cls, name, _wrapped[cls, name][1])


def _unhear(log: SessionLog) -> None:
    with _lock:
        for thread in [thread for thread, one in _hearing.items() if one is log]:
            del _hearing[thread]
        if _hearing:
            return
        for (cls, name), (was, ours) in list(_wrapped.items()):
            if (
                getattr(cls, name) is ours
            ):  # else somebody has wrapped ours: it stays below, and hears nothing
                setattr(cls, name, was)
                del _wrapped[cls, name]


def _log_of_thread() -> SessionLog | None:
    """The loop's that runs in this thread; the only one there is where it differentiates in another."""
    log, logs = _hearing.get(threading.get_ident()), tuple(_hearing.values())
    return logs[0] if log is None and len(logs) == 1 else log


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensor: torch.Tensor, gradient: Any = None, *rest: Any, **options: Any) -> Any:
        log = _log_of_thread()
        if log is not None and gradient is None:
            # Of a scaled loss the loss itself is known where it was scaled; what came of it by further
            # arithmetic (divided by a number of parts, say) is neither.
            loss = getattr(tensor, UNSCALED, None if log.scales else tensor)
            try:
                if loss is not None:
                    log.backward(loss)
            except (TypeError, RuntimeError):
                pass  # no value yet, as while a graph is traced: a loss that is not shown must not end a loop
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
            if isinstance(losses, list | tuple):  # an iterator is used up
                for loss, result in zip(losses, results, strict=True):
                    if isinstance(result, torch.Tensor):
                        setattr(result, UNSCALED, loss.detach())
        return scaled

    return scale


_WRAPPERS: dict[tuple[type, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    (torch.Tensor, "backward"): _wrap_backward,
    (torch.amp.GradScaler, "scale"): _wrap_scale,
}
