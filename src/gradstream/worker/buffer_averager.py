"""Averages the workers' buffers for an evaluation, and makes them equal when loops begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gradstream.checkpoint import own_state
from gradstream.checkpoint.format import spec_of
from gradstream.checkpoint.own_state import OwnState, averaged
from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.model.base import Model
from gradstream.model.buffers import Buffers, buffers_of, load_buffers
from gradstream.model.built_module import entry_of, extra_of, fixed_of, load_fixed
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.tasks import Wakeup
from gradstream.transport.base import Endpoint

LOOK_S = 0.5
"""Seconds between two checks of whether the other workers are still present."""


class BufferAverager:
    """Averages a worker's buffers with those of the other workers, and answers their requests.

    In rounds, a worker that evaluates after step s asks the other workers for their buffers at step s. They have all
    computed that step's gradients, since the round is done, and a worker that is further ahead has kept its buffers
    from step s. At the end of the run, a worker answers once its last minibatch is over. So the average does not depend
    on timing.

    Args:
        runtime: runtime of the worker's node.
        endpoint: endpoint of the worker's node.
        model: the worker's own instance of the model.
        workers: names of the present workers, this one included.
        silence_s: seconds of silence after which it no longer waits for another worker.

    Attributes:
        restored: set once this worker's model has its initial state. Until then no other worker copies it.
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
        self._copies = 0  # served copies of this worker's initial state
        self._copied = Wakeup()
        self.restored = asyncio.Event()

    def serve(self) -> None:
        """Answers other workers from now on."""
        own_state.serve(
            self._endpoint, self._answer, self._answer_fixed, self._answer_last, self._answer_entry
        )

    def follow(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Sets the function that returns this worker's numbers of samples and steps."""
        self._progress = progress

    async def begin_as_first(self, *, buffers: bool = True) -> None:
        """Copies the first worker's model, so that all begin alike. The first worker waits until all have copied it.

        Args:
            buffers: also copy its buffers. False keeps those that this worker has restored from a checkpoint.

        Raises:
            PeerLostError, DeadlineError: the first worker is lost or silent.
            RefusedError: its model differs from this worker's.
        """
        first = self._workers()[0]
        if first == self._runtime.node:
            while self._copies < len(self._workers()) - 1:  # `_workers` has no lost worker
                await self._copied.rung(self._runtime, LOOK_S)
            return
        if buffers:
            state = await self._ask(first, await self._own())
            await self._runtime.compute(lambda _: load_buffers(self._model, state.buffers), work=Work("copy"))
        await self._copy(first)

    async def adopt(self) -> None:
        """Adopts the mean of the other workers' buffers, since this worker joins late and has seen no sample."""
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
        """The mean of the buffers over all workers that answer, weighted by samples. Workers may be lost meanwhile.

        Buffers are summed in the order of ranks, so that all workers get the same bits.

        Args:
            step: asks for the buffers after this many steps; None for the current ones.
            last: asks for the buffers after each worker's last minibatch. This worker's must be over.
            catch_up: first copies the model of the worker with most steps, if this worker has made fewer.
        """
        own = await self._own()
        states: dict[str, OwnState] = {}
        for worker in self._workers():
            if worker == self._runtime.node or not (own.buffers or catch_up):
                states[worker] = own
                continue
            try:
                states[worker] = await self._ask(worker, own, step, last=last)
            except (PeerLostError, DeadlineError):
                pass
            except RefusedError as error:
                if error.code == "BAD_REQUEST" and not last:  # its model differs from this worker's
                    raise  # at the end, nothing may keep the parameters from being saved
        furthest = max(states, key=lambda worker: states[worker].steps)
        if catch_up and states[furthest].steps > own.steps:
            await self._copy(furthest)
        return averaged(list(states.values()))

    async def _ask(
        self, worker: str, own: OwnState, step: int | None = None, *, last: bool = False
    ) -> OwnState:
        specs = [spec_of(name, array.shape, array.dtype) for name, array in own.buffers.items()]
        return await own_state.ask(
            self._endpoint, worker, specs, step=step, last=last, silence_s=self._silence_s
        )

    async def enter(self, worker: str) -> bool:
        """Copies all that a newcomer to users' own loops needs from this worker, but for its buffers: see `adopt`.

        Returns:
            Whether that worker's loop has made a step, so that it has it all.
        """
        return own_state.SESSION in await self._copy(worker, entry=True)

    async def _copy(self, worker: str, *, entry: bool = False) -> Buffers:
        """Copies another worker's model, except for its buffers, and returns what has come."""
        own = (await self._fixed()).buffers
        specs = [
            spec_of(name, array.shape, array.dtype)
            for name, array in own.items()
            if not name.startswith(own_state.EXTRA)
        ]
        besides = sum(array.nbytes for name, array in own.items() if name.startswith(own_state.EXTRA))
        copied = await own_state.ask(
            self._endpoint,
            worker,
            specs,
            fixed=True,
            entry=entry,
            besides_bytes=besides,
            silence_s=self._silence_s,
        )
        await self._runtime.compute(lambda _: load_fixed(self._model, copied.buffers), work=Work("copy"))
        return copied.buffers

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

    async def _answer_entry(self) -> bytes:
        def entry(_: object) -> bytes:
            model = self._model
            return OwnState(0, {**fixed_of(model).frozen, **extra_of(model), **entry_of(model)}).encode()

        return await self._runtime.compute(entry, work=Work("copy"), shape_only=b"")

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
