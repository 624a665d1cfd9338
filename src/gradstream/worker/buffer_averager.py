"""The workers' buffers: averaged for an evaluation, and made equal where loops begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gradstream.checkpoint import own_state
from gradstream.checkpoint.format import spec_of
from gradstream.checkpoint.own_state import OwnState, averaged
from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.model.base import Model
from gradstream.model.buffers import Buffers, buffers_of, load_buffers
from gradstream.model.built_module import extra_of, fixed_of, load_fixed
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.tasks import Wakeup
from gradstream.transport.base import Endpoint

LOOK_S = 0.5
"""Seconds between two looks whether the others are still there."""


class BufferAverager:
    """Averages a worker's buffers with those of the other workers, and answers their requests.

    In rounds, a worker that evaluates after step s asks for the others' buffers as of step s. All others have
    computed their gradients of that step, since the round is done. A worker that has gone further kept its buffers
    as of step s. At the end of the run, a worker answers once its last minibatch is over. So the average does not
    depend on timing.

    Args:
        runtime: runtime of the worker's node.
        endpoint: endpoint of the worker's node.
        model: the worker's own instance of the model.
        workers: names of the present workers, this one included.
        silence_s: seconds of silence after which another worker is not waited for any more.

    Attributes:
        restored: set once this worker's model holds what it begins with. Until then no other worker copies it.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        model: Model,
        *,
        workers: Callable[[], Sequence[str]],
        silence_s: float,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._model = model
        self._workers = workers
        self._silence_s = silence_s
        self._progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._kept: tuple[int, OwnState] | None = None  # number of steps, and the state after them
        self._frozen: OwnState | None = None
        self._ended = asyncio.Event()
        self._copies = 0  # of what this worker begins with
        self._copied = Wakeup()
        self.restored = asyncio.Event()

    def serve(self) -> None:
        """Answers other workers from now on."""
        own_state.serve(self._endpoint, self._answer, self._answer_fixed, self._answer_last)

    def follow(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Takes a function that returns the numbers of samples and steps that this worker has done."""
        self._progress = progress

    async def begin_as_first(self, *, buffers: bool = True) -> None:
        """Copies what the model of the first worker holds: all begin alike. The first one waits until all have it.

        Args:
            buffers: copy its buffers too. False keeps those that this worker has restored from a checkpoint.

        Raises:
            PeerLostError, DeadlineError: it is gone, or says nothing.
            RefusedError: its model is not like this worker's.
        """
        first = self._workers()[0]
        if first == self._runtime.node:
            while self._copies < len(self._workers()) - 1:  # a lost worker is none of them any more
                await self._copied.rung(self._runtime, LOOK_S)
            return
        if buffers:
            state = await self._ask(first, await self._own())
            await self._runtime.compute(lambda _: load_buffers(self._model, state.buffers), work=Work("copy"))
        await self._copy(first)

    async def adopt(self) -> None:
        """Takes the other workers' mean buffers: this worker joins them late, and has gone through no sample."""
        buffers = await self.average()
        await self._runtime.compute(lambda _: load_buffers(self._model, buffers), work=Work("copy"))

    async def keep(self, step: int) -> None:
        """Keeps the current buffers, after `step` steps, for the worker that evaluates there."""
        state = await self._own()
        if state.buffers:
            self._kept = step, state

    async def freeze(self) -> None:
        """Keeps the current buffers for good: this worker computes no more gradients."""
        self._frozen = await self._own()
        self._ended.set()

    async def average(
        self, step: int | None = None, *, last: bool = False, catch_up: bool = False
    ) -> Buffers:
        """The buffers averaged over all workers that answer, weighted by samples. Workers may be lost meanwhile.

        They are summed in the order of ranks, so that all workers get the same bits.

        Args:
            step: number of steps after which the buffers are asked for; None for the present ones.
            last: asks for the buffers after each worker's last minibatch. This worker's must be over.
            catch_up: first copies what the model of the worker with most steps holds, if this one has made fewer.
        """
        mine = await self._own()
        states: dict[str, OwnState] = {}
        for worker in self._workers():
            if worker == self._runtime.node or not (mine.buffers or catch_up):
                states[worker] = mine
                continue
            try:
                states[worker] = await self._ask(worker, mine, step, last=last)
            except (PeerLostError, DeadlineError):
                pass
            except RefusedError as error:
                if error.code == "BAD_REQUEST" and not last:  # its model is not like this worker's
                    raise  # at the end, nothing may keep the parameters from being saved
        furthest = max(states, key=lambda worker: states[worker].steps)
        if catch_up and states[furthest].steps > mine.steps:
            await self._copy(furthest)
        return averaged(list(states.values()))

    async def _ask(
        self, worker: str, mine: OwnState, step: int | None = None, *, last: bool = False
    ) -> OwnState:
        specs = [spec_of(name, array.shape, array.dtype) for name, array in mine.buffers.items()]
        return await own_state.ask(
            self._endpoint, worker, specs, step=step, last=last, silence_s=self._silence_s
        )

    async def _copy(self, worker: str) -> None:
        """Copies what the model of another worker holds, except for its buffers."""
        mine = (await self._fixed()).buffers
        specs = [
            spec_of(name, array.shape, array.dtype)
            for name, array in mine.items()
            if not name.startswith(own_state.EXTRA)
        ]
        theirs = await own_state.ask(self._endpoint, worker, specs, fixed=True, silence_s=self._silence_s)
        await self._runtime.compute(lambda _: load_fixed(self._model, theirs.buffers), work=Work("copy"))

    async def _answer(self, step: int | None) -> OwnState:
        if self._kept is not None and self._kept[0] == step:
            return self._kept[1]
        return await self._own()

    async def _answer_last(self) -> OwnState:
        await self._ended.wait()
        return await self._own()

    async def _answer_fixed(self) -> OwnState:
        await self.restored.wait()
        fixed = await self._fixed()
        self._copies += 1
        self._copied.ring()
        return fixed

    async def _fixed(self) -> OwnState:
        return await self._runtime.compute(
            lambda _: OwnState(0, {**fixed_of(self._model).frozen, **extra_of(self._model)}),
            work=Work("copy"),
            shape_only=OwnState(0, {}),
        )

    async def _own(self) -> OwnState:
        """This worker's state, read between two gradients, since computing one changes the buffers."""
        if self._frozen is not None:
            return self._frozen

        def own(_: object) -> OwnState:
            samples, steps = self._progress()
            return OwnState(samples, buffers_of(self._model), steps)

        return await self._runtime.compute(own, work=Work("copy"), shape_only=OwnState(0, {}))
