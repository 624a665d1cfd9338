"""Lets two threads take turns: the user's loop and the worker that makes its exchanges.

    worker's arithmetic thread                    user's thread
    turn(parameters, gradient) ── sets them  ──▶  … forward, backward …
                               ◀── a gradient ──  step()
    … exchange, new parameters …                  waits in step()
    turn(parameters, gradient) ── sets them  ──▶  step() returns

Only one of the two runs at any time, so parameters change only inside `step`, and no other thread writes them while
the user's thread reads.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gradstream.data.open_ledger import Left
from gradstream.errors import ClosedError, PeerLostError, UserCodeError
from gradstream.model.buffers import Buffers
from gradstream.session.binding import ParameterBinding
from gradstream.session.log import SessionLog
from gradstream.session.registered import Registered
from gradstream.session.roster import Roster
from gradstream.telemetry.events import MemberEvent
from gradstream.worker.loop import LoopContext, Round, Turn

# ---- progress ----------------------------------------------------------------------------
# Steps and samples of a training loop since the run began or was resumed.


class LoopCounts:
    """Counts what a loop has submitted to its worker since it began or was resumed.

    Args:
        counts_steps: the loop reports its own steps: a step may contain several submissions (one for each backward),
            or a submission may cover several steps. Otherwise each submission is one step.

    Attributes:
        batches: number of submitted gradients.
        samples: number of samples in them.
        iterations: iterations of the loop, if it calls `Session.skip`; else 0.
        unfinished: whether something was submitted for a step that is not made yet.
    """

    def __init__(self, *, counts_steps: bool) -> None:
        self.batches = self.samples = self.iterations = 0
        self._counts_steps = counts_steps
        self._steps = 0
        self._steps_whole = 0  # steps that are fully submitted
        self._pending_samples = 0  # submitted for a step that is not made yet
        self.unfinished = False

    def hand_over(self, samples: int, *, silent: bool = False, whole: bool = False) -> None:
        """Counts a submission. A `silent` one belongs to no step; a `whole` one covers all steps so far."""
        self.batches += 1
        if not silent:
            self.samples += samples
            self._pending_samples += samples
            self.unfinished = True
        if whole:
            self._steps_whole, self._pending_samples, self.unfinished = self._steps, 0, False

    def step(self, *, handed: bool = True) -> None:
        """Counts a step: one made from all that was submitted or, if not `handed`, one still to be submitted."""
        self._steps = self.iterations or self._steps + 1
        if handed:
            self._steps_whole, self._pending_samples, self.unfinished = self._steps, 0, False

    def saved(self, *, local_rounds: bool) -> list[int]:
        """Minibatches, steps and iterations with which a newcomer begins, as it takes part in the submitted round.

        Args:
            local_rounds: the round has several steps, which are counted already. The newcomer makes one in it.
        """
        iterations = self._steps - local_rounds if self.iterations else 0
        return [self.batches - 1, self.steps - local_rounds, iterations]

    def load(self, batches: int, steps: int, iterations: int) -> None:
        """Goes on from what `saved` of another worker has returned."""
        self.batches, self._steps, self._steps_whole, self.iterations = batches, steps, steps, iterations

    @property
    def steps(self) -> int:
        """Steps of the loop or, if it calls `Session.skip`, iterations up to its last step."""
        return self._steps if self._counts_steps else self.batches

    @property
    def behind(self) -> tuple[int, int] | None:
        """See `Loop.behind`."""
        return (self._pending_samples, self._steps_whole) if self._counts_steps else None


# ---- bridge ------------------------------------------------------------------------------

T = TypeVar("T")


def _nothing(gradient: torch.Tensor) -> None:
    """The binding has written all."""


class LoopBridge:
    """Implements `worker.loop.Loop` for a loop that runs in another thread.

    Args:
        binding: the user's parameters; None before `bind`.
        log: the figures that the user's loop logs, or None.
        counts_steps: the loop calls `stepped` for each step; otherwise each turn is a step.
        rank: rank of this worker.
        roster: hears which workers make which rounds; None where the loop does not care.
        registered: what the loop has besides its model.

    Attributes:
        averages_gradients: see `Loop`. A turn is then a backward.
        ended: whether the user's loop has ended well, or its phase.
        goes_on, is_slow: see `Loop`.
        visible: the parameters (E,) that the user sees; None before the first turn.
        find_left: returns what `left` is.
        find_mark: returns a number from 2 on that is equal on workers which have dealt the same minibatches.
        is_at_edge: returns whether the round that is made now, if it begins a step, begins a minibatch too.
        falls_out: called when the loops are not in step.
        roster: which workers make which rounds.
        stays_out, contributed: see `Loop`.
        before: gradients, samples and steps that the loop had submitted before this phase.
        counts: numbers of gradients, samples and steps that the loop has submitted.
    """

    def __init__(
        self,
        binding: ParameterBinding | None,
        log: SessionLog | None = None,
        *,
        counts_steps: bool = False,
        rank: int = 0,
        roster: Roster | None = None,
        registered: Registered | None = None,
    ) -> None:
        self.averages_gradients = self.ended = False
        self.goes_on = self.is_slow = False
        self.visible: torch.Tensor | None = None
        self.counts = LoopCounts(counts_steps=counts_steps)
        self.find_left: Callable[[], Left | None] = lambda: None
        self.find_mark: Callable[[], int] = lambda: 2
        self.is_at_edge: Callable[[], bool] = lambda: True
        self.falls_out: Callable[[], None] = lambda: None
        self.rank = rank
        self.roster = roster or Roster(1)
        self.stays_out = False
        self.contributed: Counter[int] = Counter()
        self._bound = binding
        self._log = log
        self._on_step: Callable[[], None] = lambda: None
        self._registered = registered or Registered()
        self._condition = threading.Condition()
        self._whose: Literal["worker", "user"] = "worker"
        self._context: LoopContext | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.before = (0, 0, 0)
        self._turn = Turn(0, 0.0, math.nan)  # the user's current turn, or the last one
        self._is_between = False  # two phases
        self._is_first = True  # of its step
        self._round: Round | None = None  # the worker's round for that turn
        self._rewrite: Callable[[torch.Tensor], object] = _nothing  # writes the round's vector again
        self._worker_end: BaseException | bool = (
            False  # the error that ended the worker; True: it ended without one
        )
        self._user_failure: UserCodeError | PeerLostError | None = (
            None  # the error that ended the user's loop
        )

    @property
    def _binding(self) -> ParameterBinding:
        assert self._bound is not None
        return self._bound

    @property
    def batches(self) -> int:
        """Number of gradients that the loop has submitted in this phase."""
        return self.counts.batches - self.before[0]

    @property
    def samples(self) -> int:
        """Number of samples in these gradients."""
        return self.counts.samples - self.before[1]

    def fetch(self) -> torch.Tensor:
        """Fetches the servers' current parameters (E,). Call it from the user's thread, between steps.

        Raises:
            PeerLostError, DeadlineError: a server does not answer.
        """
        assert self._context is not None
        return self.ask(lambda context: context.replica.newest())

    @property
    def is_late(self) -> bool:
        """Whether this worker has come to a run that had begun."""
        return self._context is not None and self._context.late

    def ask(self, work: Callable[[LoopContext], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` in the event loop of the worker's node. Call it from the user's thread, between rounds.

        Raises:
            GradstreamError: the error that ended the worker.
        """
        return self.result(self.spawn(work))

    def spawn(self, work: Callable[[LoopContext], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begins `work` in the event loop of the worker's node, and does not wait for it: see `result`.

        Raises:
            RuntimeError: the run and its event loop have ended.
        """
        assert self._context is not None and self._event_loop is not None
        begun = work(self._context)
        try:
            return asyncio.run_coroutine_threadsafe(begun, self._event_loop)
        except RuntimeError:
            begun.close()
            raise

    def result(self, asked: Future[T]) -> T:
        """Waits for what `spawn` has begun. Raises the worker's error if the worker ends first."""

        def notify(_: object) -> None:
            with self._condition:
                self._condition.notify_all()

        asked.add_done_callback(notify)
        with self._condition:
            self._condition.wait_for(lambda: self._worker_end or (asked.done() and not asked.cancelled()))
            if not asked.done() or asked.cancelled():
                self._raise_worker_end()
        return asked.result()

    # ---- called by the worker -----------------------------------------------------------

    def bind(self, binding: ParameterBinding, *, averages_gradients: bool) -> None:
        """Goes on in a phase with another binding of the parameters. The user's thread waits."""
        with self._condition:
            self.goes_on, self.averages_gradients = self._context is not None, averages_gradients
            self._bound, self._on_step, self._rewrite = binding, binding.snapshot_buffers, _nothing
            self.before = (self.counts.batches, self.counts.samples, self.counts.steps)
            self.contributed = Counter()
            self.ended &= not self._is_between
            self._is_between = False

    def begin(self, context: LoopContext) -> None:
        """See `Loop.begin`."""
        self._context, self._event_loop = context, asyncio.get_running_loop()

    def turn(self, parameters: torch.Tensor, current: Round) -> Turn:
        """Lets the user's loop take a step, and waits for it: see `Loop.turn`.

        Raises:
            UserCodeError: the user's loop has failed.
        """
        with self._condition:
            if not self.ended and self._user_failure is None:
                self._set_parameters(parameters)
                self._round = current
                self._pass_to("user")
                self._condition.wait_for(lambda: self._whose == "worker")
            if self._user_failure is not None:
                raise self._user_failure
            if self.ended:
                current.gradient.zero_()
                return Turn(0, self._turn.lr, math.nan)
            self._binding.copy_gradient(current.gradient)
            return self._turn

    def again(self, current: Round) -> Turn:
        """Writes the loop's contribution once more: see `Loop.again`. The user's thread waits for its exchange."""
        with self._condition:
            self._round = current
            current.known(self._turn)
            self._binding.copy_gradient(current.gradient)
            self._rewrite(current.gradient)
            return self._turn

    @property
    def left(self) -> Left | None:
        """See `Loop.left`."""
        return self.find_left()

    @property
    def mark(self) -> int:
        """See `Loop.mark`. The user's thread waits."""
        if self.ended:
            return 0
        if not self._has_submitted:
            return -1 if self.counts.batches else 1
        may_be_entered = not self._turn.silent and self._is_first and self.is_at_edge()
        return self.find_mark() if may_be_entered else -self.find_mark()

    @property
    def _has_submitted(self) -> bool:
        """Whether the loop has submitted the round that is made now; else it has to get the result of the last one."""
        context = self._context
        return context is not None and self.batches == context.replica.step - context.first_step + 1

    def members(
        self, ranks: Sequence[int], number: int, entered: Sequence[int] = (), *, in_step: bool = True
    ) -> None:
        """See `Loop.members`. The user's thread waits."""
        if not in_step:
            self.falls_out()
        number += self.before[0]
        if (
            self._is_between
        ):  # rounds after the phase are none of the loop's, and the next one has their numbers
            number = min(number, self.counts.batches)
        self.roster.change(number, ranks, entered)

    def missed(self, rounds: int) -> None:
        """See `Loop.missed`. The user's thread waits."""
        self.counts.batches += rounds

    def state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `Loop.state`."""
        return self._registered.marked()

    def restore(self, state: Mapping[str, np.ndarray[Any, Any]], *, own: bool) -> None:
        """See `Loop.restore`. The user's thread waits until all workers have joined."""
        self._registered.load(state, own=own)

    def logged(self) -> Iterable[MemberEvent]:
        """See `Loop.logged`."""
        return () if self._log is None else self._log.take()

    def finish(self, parameters: torch.Tensor, buffers: Buffers) -> None:
        """See `Loop.finish`."""
        self._set_parameters(parameters)
        self._binding.load_buffers(buffers)

    def over(self, error: BaseException | None) -> None:
        """Notes that the worker has ended, with this error or with None, and takes no more turns."""
        with self._condition:
            self._worker_end = error or True
            self._condition.notify_all()

    def _set_parameters(self, parameters: torch.Tensor) -> None:
        self.visible = parameters
        self._binding.set_parameters(parameters)

    # ---- called by the user's thread ----------------------------------------------------

    def first(self) -> None:
        """Waits for the first turn: by then all workers have joined, with the same parameters.

        Raises:
            GradstreamError: the error that ended the worker.
        """
        with self._condition:
            self._wait()

    def step(self, samples: int, lr: float, loss: float) -> None:
        """Submits the loop's gradient, and returns once the worker has set the next parameters.

        The worker reads the gradient with `ParameterBinding.copy_gradient`.

        Args:
            samples: number of samples in the gradient.
            lr: learning rate of this step.
            loss: mean loss over the samples, NaN if unknown.

        Raises:
            ClosedError: the session is closed.
            GradstreamError: the error that ended the worker. The gradient may or may not have been applied.
        """
        with self._condition:
            self._check_open()
            self._turn = Turn(samples, lr, loss)
            self.counts.hand_over(samples, whole=True)
            self._pass_to("worker")
            self._wait()

    def check_open(self) -> None:
        """Raises what `step` would raise, so that a loop with local steps learns of the end between two exchanges.

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
        """Begins a round once the previous one is over. Returns the vector (E,), to be filled from the front.

        Args:
            samples: number of samples in the gradient, its weight in the mean; 0 gives it none.
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
        """Number of samples in the open round or, if none is open, in the last one."""
        return self._turn.samples

    def report(self, elems: int) -> None:
        """Reports that the first `elems` elements are final and may be sent."""
        assert self._round is not None
        self._round.report(elems)

    def exchange(self, loss: float, rewrite: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Submits the filled vector and waits for the mean (E,), which stays valid until the next `open`.

        Args:
            loss: mean loss over the round's samples, NaN where unknown.
            rewrite: writes the whole vector (E,) once more, into other memory. It is called by another thread during
                this call, if a worker is lost: sums are made in place, so what was written is gone.

        Raises:
            ClosedError, GradstreamError: see `step`.
        """
        with self._condition:
            self._turn, self._rewrite = replace(self._turn, loss=loss), rewrite
            self._is_first = not self.counts.unfinished  # an evaluation of a closure may have been before
            self.counts.hand_over(self._turn.samples, silent=self._turn.silent)
            self._pass_to("worker")
            self._wait()
            assert self.visible is not None
            return self.visible

    def stepped(self, *, handed: bool = True) -> None:
        """Notes that the loop has made a step: see `LoopCounts.step`."""
        self.counts.step(handed=handed)
        self._on_step()
        self._registered.stepped()

    @property
    def behind(self) -> tuple[int, int] | None:
        """See `Loop.behind`."""
        if self.counts.behind is None:
            return None
        samples, steps = self.counts.behind
        return samples, steps - self.before[2]

    @property
    def unfinished(self) -> bool:
        """See `Loop.unfinished`."""
        return self.counts.unfinished

    def end_phase(self) -> None:
        """Notes that the loop has made the steps of its phase, and waits for the first turn of the next one.

        Raises:
            ClosedError, GradstreamError: see `step`.
        """
        with self._condition:
            self._wait()
            self.ended = self._is_between = True
            self._pass_to("worker")
            self._wait()

    def end(self, failure: UserCodeError | PeerLostError | None = None) -> None:
        """Notes that the loop has ended, normally or with an error of the user's. Does not wait."""
        with self._condition:
            self._is_between = False
            self.ended, self._user_failure = failure is None, failure
            self._pass_to("worker")

    @property
    def error(self) -> BaseException | None:
        """The error that ended the worker; None if it ended without one or still runs."""
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
