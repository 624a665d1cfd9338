"""Lets two threads take turns: the user's loop, and the worker that exchanges for it.

    worker's arithmetic thread                    user's thread
    turn(parameters, gradient) ── sets them  ──▶  … forward, backward …
                               ◀── a gradient ──  step()
    … exchange, new parameters …                  waits in step()
    turn(parameters, gradient) ── sets them  ──▶  step() returns

Exactly one of the two runs at any time. So parameters change only inside `step`, and the user's thread
sees parameters that no other thread writes.
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

from gradstream.data.reassignment import Block, Epoch
from gradstream.errors import ClosedError, ConfigError, UserCodeError
from gradstream.model.buffers import Buffers
from gradstream.session.binding import ParameterBinding
from gradstream.session.log import SessionLog
from gradstream.telemetry.events import LogEvent
from gradstream.worker.loop import LoopContext, Round, Turn

# ---- progress ----------------------------------------------------------------------------
# Counts of a training loop: steps and samples, now and before its run was resumed.


class LoopCounts:
    """Counts what a loop has handed to its worker since it began or was resumed.

    Args:
        counts_steps: the loop says itself when it has made a step. A step may take several hand-overs, one for each
            backward; or a hand-over is of several steps, which it follows. Otherwise each hand-over is a step.

    Attributes:
        batches: gradients that were handed over.
        samples: samples behind them.
        iterations: iterations of a loop that calls `Session.skip`; 0 for other loops.
    """

    def __init__(self, *, counts_steps: bool) -> None:
        self.batches = self.samples = self.iterations = 0
        self._counts_steps = counts_steps
        self._steps = 0
        self._steps_whole = 0  # of which all is handed over
        self._pending_samples = 0  # handed over, of a step that is not made yet

    def hand_over(self, samples: int, *, silent: bool = False, whole: bool = False) -> None:
        """Counts a hand-over; a silent one belongs to no step of the loop, and a whole one is of all steps so far."""
        self.batches += 1
        if not silent:
            self.samples += samples
            self._pending_samples += samples
        if whole:
            self._steps_whole, self._pending_samples = self._steps, 0

    def step(self, *, handed: bool = True) -> None:
        """Counts a step that was made of all that was handed over; or, if not `handed`, that will be handed over."""
        self._steps = self.iterations or self._steps + 1
        if handed:
            self._steps_whole, self._pending_samples = self._steps, 0

    @property
    def steps(self) -> int:
        """Steps of the loop. Where it calls `Session.skip`: iterations up to its last step."""
        return self._steps if self._counts_steps else self.batches

    @property
    def behind(self) -> tuple[int, int] | None:
        """See `Loop.behind`."""
        return (self._pending_samples, self._steps_whole) if self._counts_steps else None


class ResumePoint:
    """Where a resumed loop goes on, and how far the script has skipped what it did before.

    Args:
        steps: steps that this worker made before the run was resumed; None if the run begins.

    Attributes:
        skipped: iterations that the script has skipped.
        asked: whether the script has asked where the run goes on.
    """

    def __init__(self, steps: int | None) -> None:
        self.skipped = 0
        self.asked = False
        self._steps = steps

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._steps is not None

    @property
    def steps(self) -> int:
        """Steps before the run was resumed."""
        return self._steps or 0

    def skip(self) -> bool:
        """Counts an iteration; True if it was done before the run was resumed."""
        self.asked = True
        if self.skipped == self.steps:
            return False
        self.skipped += 1
        return True

    def next_step(self, batches: int) -> int | None:
        """The number of the next step since the run was resumed: below 0 while the script skips.

        Args:
            batches: gradients that were handed over since.

        Returns:
            None while it cannot be known whether the script skips.
        """
        if self.steps and not batches and not self.skipped:
            return None
        return batches + (self.skipped - self.steps if self.skipped else 0)

    def check_asked(self) -> None:
        """Raises ConfigError if a resumed script makes steps without having asked where to go on."""
        if self.steps and not self.asked:
            raise ConfigError(
                f"this run was resumed at step {self.steps}, but the script begins its loop at the first step: "
                "skip the iterations that are done (`if session.skip(): continue` at the top of the loop), or "
                "begin the loop at session.step"
            )


# ---- bridge ------------------------------------------------------------------------------

T = TypeVar("T")


class LoopBridge:
    """Implements `worker.loop.Loop` for a loop that runs in another thread.

    Args:
        binding: the user's parameters.
        log: figures that the user's loop logs; None if it logs none.
        gradients_only: whether only gradients are exchanged. Then a turn is a backward, and the loop calls `stepped`
            after each step.
        counts_steps: the loop calls `stepped` for each step; else each turn is one. Always, if `gradients_only`.
        on_step: called after each step of the loop.

    Attributes:
        ended: whether the user's loop has ended well.
        visible: the parameters (E,) that the user sees; None before the first turn.
        counts: numbers of gradients, samples and steps that the loop has handed over.
    """

    def __init__(
        self,
        binding: ParameterBinding,
        log: SessionLog | None = None,
        *,
        gradients_only: bool = False,
        counts_steps: bool = False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.gradients_only = gradients_only
        self.ended = False
        self.visible: torch.Tensor | None = None
        self.counts = LoopCounts(counts_steps=gradients_only or counts_steps)
        self._binding = binding
        self._log = log
        self._on_step = on_step
        self._condition = threading.Condition()
        self._whose: Literal["worker", "user"] = "worker"
        self._context: LoopContext | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._turn = Turn(0, 0.0, math.nan)  # the user's present one, or the last
        self._round: Round | None = None  # what the worker has given for it
        self._worker_end: BaseException | bool = False  # the error that the worker has ended with; True: none
        self._user_failure: UserCodeError | None = None  # the error that the user's loop has ended with

    @property
    def batches(self) -> int:
        """Gradients that the loop has handed over."""
        return self.counts.batches

    @property
    def samples(self) -> int:
        """Samples behind them."""
        return self.counts.samples

    def fetch(self) -> torch.Tensor:
        """Fetches the servers' present parameters (E,). Call it from the user's thread, between steps.

        Raises:
            PeerLostError, DeadlineError: a server does not answer.
        """
        assert self._context is not None
        return self._ask(self._context.replica.newest())

    def begun(self, epoch: Epoch, step: int, *, unclear: bool = False) -> None:
        """Reports that the loop begins an epoch: see `Reassignment.begun`. Called from the user's thread."""
        assert self._context is not None and self._event_loop is not None
        say = partial(self._context.endings.begun, epoch, step, unclear=unclear)
        with suppress(RuntimeError):  # the run is over, and the coordinator with it
            self._event_loop.call_soon_threadsafe(say)

    def take_over(
        self, epoch: Epoch, begin: int, step: int, parts: Sequence[int], per_step: int, oldest: int
    ) -> Block | None:
        """Asks the coordinator for minibatches of lost workers: see `Reassignment.take`.

        Call it from the user's thread, between steps.

        Raises:
            PeerLostError, DeadlineError: the coordinator does not answer.
            GradstreamError: the worker has ended with this error.
        """
        assert self._context is not None
        return self._ask(self._context.endings.take_over(epoch, begin, step, parts, per_step, oldest))

    def ask(self, work: Callable[[LoopContext], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` in the event loop of the worker's node. Call it from the user's thread, between rounds.

        Raises:
            GradstreamError: the worker has ended with this error.
        """
        assert self._context is not None
        return self._ask(work(self._context))

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the worker's event loop. Raises the worker's error where it ends before."""
        assert self._event_loop is not None

        def notify(_: object) -> None:
            with self._condition:
                self._condition.notify_all()

        asked = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        asked.add_done_callback(notify)
        with self._condition:
            self._condition.wait_for(lambda: self._worker_end or (asked.done() and not asked.cancelled()))
            if not asked.done() or asked.cancelled():
                self._raise_worker_end()
        return asked.result()

    # ---- called by the worker -----------------------------------------------------------

    def begin(self, context: LoopContext) -> None:
        """See `Loop.begin`."""
        self._context, self._event_loop = context, asyncio.get_running_loop()

    def turn(self, parameters: torch.Tensor, given: Round) -> Turn:
        """Lets the user's loop take a step, and waits for it: see `Loop.turn`.

        Raises:
            UserCodeError: the user's loop has failed.
        """
        with self._condition:
            if not self.ended and self._user_failure is None:
                self._set_parameters(parameters)
                self._round = given
                self._pass_to("user")
                self._condition.wait_for(lambda: self._whose == "worker")
            if self._user_failure is not None:
                raise self._user_failure
            if self.ended:
                given.gradient.zero_()
                return Turn(0, self._turn.lr, math.nan)
            self._binding.copy_gradient(given.gradient)
            return self._turn

    def logged(self) -> Iterable[LogEvent]:
        """See `Loop.logged`."""
        return () if self._log is None else self._log.take()

    def finish(self, parameters: torch.Tensor, buffers: Buffers) -> None:
        """See `Loop.finish`."""
        self._set_parameters(parameters)
        self._binding.load_buffers(buffers)

    def over(self, error: BaseException | None) -> None:
        """Notes that the worker has ended, and takes no more turns; None if it has ended well."""
        with self._condition:
            self._worker_end = error or True
            self._condition.notify_all()

    def _set_parameters(self, parameters: torch.Tensor) -> None:
        self.visible = parameters
        self._binding.set_parameters(parameters)

    # ---- called by the user's thread ----------------------------------------------------

    def first(self) -> None:
        """Waits for the first turn: then all workers are there, with the same parameters.

        Raises:
            GradstreamError: the worker has ended with this error.
        """
        with self._condition:
            self._wait()

    def step(self, samples: int, lr: float, loss: float) -> None:
        """Gives the loop's gradient to the worker, and returns when the worker has set the next parameters.

        The worker reads the gradient with `ParameterBinding.copy_gradient`.

        Args:
            samples: number of samples behind the gradient.
            lr: learning rate of this step.
            loss: mean loss over the samples, NaN where it is unknown.

        Raises:
            ClosedError: the session was closed before.
            GradstreamError: the error with which the worker has ended. The gradient may or may not be applied.
        """
        with self._condition:
            self._check_open()
            self._turn = Turn(samples, lr, loss)
            self.counts.hand_over(samples, whole=True)
            self._pass_to("worker")
            self._wait()

    def check_open(self) -> None:
        """Raises what `step` would raise: a loop that makes steps of its own in between is to hear of the end at once.

        Raises:
            ClosedError, GradstreamError: see `step`.
        """
        with self._condition:
            self._check_open()

    def _check_open(self) -> None:
        if self.ended:
            raise ClosedError("optimizer.step: the session is closed; make all steps before session.close")
        self._raise_worker_end()

    def open(self, samples: int, *, silent: bool = False) -> torch.Tensor:
        """Begins a round, once the one before is over. Returns the vector (E,), to be written from the front.

        Args:
            samples: samples behind the gradient; 0 changes nothing.
            silent: the round belongs to no step of the loop.

        Raises:
            ClosedError, GradstreamError: see `step`.
        """
        with self._condition:
            if self.ended:
                raise ClosedError("backward: the session is closed; make all steps before session.close")
            self._wait()
            assert self._round is not None
            self._turn = Turn(samples, 1.0, math.nan, silent)
            self._round.known(self._turn)
            return self._round.gradient

    @property
    def round_samples(self) -> int:
        """Number of samples of the open round, or else of the last one."""
        return self._turn.samples

    def report(self, elems: int) -> None:
        """Says that `elems` elements from the front are final, and may be sent."""
        assert self._round is not None
        self._round.report(elems)

    def exchange(self, loss: float) -> torch.Tensor:
        """Ends the round, whose vector is complete. Returns the mean (E,) of all workers', until `open`.

        Raises:
            ClosedError, GradstreamError: see `step`.
        """
        with self._condition:
            self._turn = replace(self._turn, loss=loss)
            self.counts.hand_over(self._turn.samples, silent=self._turn.silent)
            self._pass_to("worker")
            self._wait()
            assert self.visible is not None
            return self.visible

    def stepped(self, *, handed: bool = True) -> None:
        """Notes that the loop has made a step: see `LoopCounts.step`."""
        self.counts.step(handed=handed)
        self._on_step()

    @property
    def behind(self) -> tuple[int, int] | None:
        """See `Loop.behind`."""
        return self.counts.behind

    def end(self, failure: UserCodeError | None = None) -> None:
        """Notes that the loop has ended, well or with an error of the user's. Does not wait."""
        with self._condition:
            self.ended, self._user_failure = failure is None, failure
            self._pass_to("worker")

    @property
    def error(self) -> BaseException | None:
        """The error that the worker has ended with; None if it has ended well, or not yet."""
        return self._worker_end if isinstance(self._worker_end, BaseException) else None

    def _pass_to(self, whose: Literal["worker", "user"]) -> None:
        self._whose = whose
        self._condition.notify_all()

    def _wait(self) -> None:
        self._condition.wait_for(lambda: self._whose == "user" or self._worker_end)
        self._raise_worker_end()

    def _raise_worker_end(self) -> None:
        if isinstance(self._worker_end, BaseException):
            raise self._worker_end
        if self._worker_end:
            raise ClosedError("the run has ended, so this worker can make no more steps")
