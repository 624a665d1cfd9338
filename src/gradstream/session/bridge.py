"""Two threads that take turns: the user's loop, and the worker that exchanges for it.

    worker's arithmetic thread                    user's thread
    turn(parameters, gradient) ── shows them ──▶  … forward, backward …
                               ◀── a gradient ──  step()
    … exchange, new parameters …                  waits in step()
    turn(parameters, gradient) ── shows them ──▶  step() returns

At any time exactly one of them runs. So all changes of parameters happen inside `step`, and the user
sees parameters that nobody writes.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from gradstream.data.left_over import Block, Epoch
from gradstream.errors import ClosedError, UserCodeError
from gradstream.model.buffers import Buffers
from gradstream.session.binding import ParameterBinding
from gradstream.session.log import SessionLog
from gradstream.telemetry.events import LogEvent
from gradstream.worker.replica.loop import LoopReplica, Round, Turn

__all__ = ["LoopBridge"]

T = TypeVar("T")


class LoopBridge:
    """Implements `worker.replica.loop.Loop` for a loop that runs in another thread.

    Args:
        held: the parameters that the user holds.
        log: what the user's loop says of itself; None where it says nothing.
        joint: gradients alone are exchanged: a turn is a backward, and `stepped` says when a step was made.
        on_step: called by `stepped`.
    """

    def __init__(
        self,
        held: ParameterBinding,
        log: SessionLog | None = None,
        *,
        joint: bool = False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.joint = joint
        self.ended = False
        self.batches = 0
        self.samples = 0
        self.shown: torch.Tensor | None = None  # the parameters that the user sees
        self._held = held
        self._log = log
        self._condition = threading.Condition()
        self._whose: Literal["worker", "user"] = "worker"
        self._replica: LoopReplica | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._step = Turn(0, 0.0, math.nan)
        self._round: Round | None = None  # of this turn
        self._steps = self._pending = 0  # whole ones; samples handed over since
        self.iterations = 0  # of the loop, where it counts them
        self._on_step = on_step
        self._over: BaseException | bool = False  # what the worker has ended with; True: well
        self._failure: UserCodeError | None = None  # what the user's loop has ended with

    def fetch(self) -> torch.Tensor:
        """The servers' parameters (E,) as they are now. From the user's thread, between steps.

        Raises:
            PeerLostError, DeadlineError: a server is gone.
        """
        assert self._replica is not None
        return self._ask(self._replica.newest())

    def begun(self, epoch: Epoch, step: int, *, unclear: bool = False) -> None:
        """Says that the loop begins an epoch of a loader: see `Reassignment.begun`. From the user's thread."""
        assert self._replica is not None and self._event_loop is not None
        say = partial(self._replica.endings.begun, epoch, step, unclear=unclear)
        with suppress(RuntimeError):  # the run is over: nobody needs to know
            self._event_loop.call_soon_threadsafe(say)

    def take_over(
        self, epoch: Epoch, begin: int, step: int, parts: Sequence[int], per_step: int, oldest: int
    ) -> Block | None:
        """Asks for what lost workers have left: see `Reassignment.take`. From the user's thread, between steps.

        Raises:
            PeerLostError, DeadlineError: the coordinator is gone.
            What the worker has failed with.
        """
        assert self._replica is not None
        return self._ask(self._replica.endings.take_over(epoch, begin, step, parts, per_step, oldest))

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """What the worker answers; raises what it has ended with, where it ends before."""
        assert self._event_loop is not None

        def notify(_: object) -> None:
            with self._condition:
                self._condition.notify_all()

        asked = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        asked.add_done_callback(notify)
        with self._condition:
            self._condition.wait_for(lambda: self._over or (asked.done() and not asked.cancelled()))
            if not asked.done() or asked.cancelled():
                self._raise_failure()
        return asked.result()

    # ---- the worker's side --------------------------------------------------------------

    def begin(self, replica: LoopReplica) -> None:
        """See `Loop.begin`."""
        self._replica, self._event_loop = replica, asyncio.get_running_loop()

    def turn(self, parameters: torch.Tensor, given: Round) -> Turn:
        """See `Loop.turn`. Raises UserCodeError where the user's loop has failed."""
        with self._condition:
            if not self.ended and self._failure is None:
                self._show(parameters)
                self._round = given
                self._pass_to("user")
                self._condition.wait_for(lambda: self._whose == "worker")
            if self._failure is not None:
                raise self._failure
            if self.ended:
                given.gradient.zero_()
                return Turn(0, self._step.lr, math.nan)
            self._held.take(given.gradient)
            return self._step

    def logged(self) -> Iterable[LogEvent]:
        """See `Loop.logged`."""
        return () if self._log is None else self._log.take()

    def finish(self, parameters: torch.Tensor, buffers: Buffers) -> None:
        """See `Loop.finish`."""
        self._show(parameters)
        self._held.load_buffers(buffers)

    def over(self, error: BaseException | None) -> None:
        """The worker has ended, and will take no turn any more."""
        with self._condition:
            self._over = error or True
            self._condition.notify_all()

    def _show(self, parameters: torch.Tensor) -> None:
        self.shown = parameters
        self._held.show(parameters)

    # ---- the user's side ----------------------------------------------------------------

    def first(self) -> None:
        """Waits for the first turn: everybody is there, and the parameters are those of all.

        Raises:
            What the worker has failed with.
        """
        with self._condition:
            self._wait()

    def step(self, samples: int, lr: float, loss: float) -> None:
        """Hands over the gradient that `ParameterBinding.take` finds, and waits for the next turn.

        Raises:
            ClosedError: the loop was ended before.
            What the worker has failed with: whether this gradient was applied is unknown then.
        """
        with self._condition:
            if self.ended:
                raise ClosedError("the session was closed: no step can follow")
            self._raise_failure()
            self._step = Turn(samples, lr, loss)
            self.batches += 1
            self.samples += samples
            self._pass_to("worker")
            self._wait()

    def open(self, samples: int, *, silent: bool = False) -> torch.Tensor:
        """Begins a round: the vector (E,) to be written from the front, once the round before is over.

        Args:
            samples: behind the gradient; 0 changes nothing.
            silent: it is none of the loop's own steps.

        Raises:
            As `step`.
        """
        with self._condition:
            if self.ended:
                raise ClosedError("the session was closed: no backward can follow")
            self._wait()
            assert self._round is not None
            self._step = Turn(samples, 1.0, math.nan, silent)
            self._round.known(self._step)
            return self._round.gradient

    @property
    def counts(self) -> int:
        """Samples of the round that is open, or was last."""
        return self._step.samples

    def report(self, elems: int) -> None:
        """So many elements from the front are final, and may leave."""
        assert self._round is not None
        self._round.report(elems)

    def exchange(self, loss: float) -> torch.Tensor:
        """Ends the round: its vector is whole. Returns the mean (E,) of all workers', until the next `open`.

        Raises:
            As `step`.
        """
        with self._condition:
            self._step = replace(self._step, loss=loss)
            self.batches += 1
            if not self._step.silent:
                self.samples += self._step.samples
                self._pending += self._step.samples
            self._pass_to("worker")
            self._wait()
            assert self.shown is not None
            return self.shown

    def stepped(self) -> None:
        """A step was made of what was handed over."""
        self._steps = self.iterations or self._steps + 1
        self._pending = 0
        self._on_step()

    @property
    def steps(self) -> int:
        """Steps that the loop has made; of one that calls `Session.skip`, iterations up to its last step."""
        return self._steps if self.joint else self.batches

    @property
    def behind(self) -> tuple[int, int] | None:
        """See `Loop.behind`."""
        return (self._pending, self._steps) if self.joint else None

    def end(self, failure: UserCodeError | None = None) -> None:
        """The loop has ended, well or by an error of the user's. Does not wait."""
        with self._condition:
            self.ended, self._failure = failure is None, failure
            self._pass_to("worker")

    @property
    def error(self) -> BaseException | None:
        """What the worker has failed with, if it has ended and did not end well."""
        return self._over if isinstance(self._over, BaseException) else None

    def _pass_to(self, whose: Literal["worker", "user"]) -> None:
        self._whose = whose
        self._condition.notify_all()

    def _wait(self) -> None:
        self._condition.wait_for(lambda: self._whose == "user" or self._over)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if isinstance(self._over, BaseException):
            raise self._over
        if self._over:
            raise ClosedError("the run is over")
