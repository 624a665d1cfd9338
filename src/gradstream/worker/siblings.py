"""Buffers: this worker's for whoever asks, and the average of all for an evaluation or a saved model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradstream.checkpoint import own_state
from gradstream.checkpoint.format import spec_of
from gradstream.checkpoint.own_state import OwnState, averaged
from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.model.base import Model
from gradstream.model.buffers import Buffers, buffers_of
from gradstream.model.fixed import fixed_of
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint

__all__ = ["Siblings"]


class Siblings:
    """A worker's buffers beside those of the others.

    In rounds, who evaluates after step s asks for what the others had then. They have all computed
    their gradients of that step, since the round is done; those that are past it have kept their
    buffers as they were, those that are not have them still. So the average depends on no timing.

    Args:
        runtime, endpoint: of this worker.
        model: of this worker.
        workers: names of those that are there, this one among them.
        silence_s: how long another one may say nothing.
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
        self._kept: tuple[int, OwnState] | None = None  # as it was after so many steps
        self._frozen: OwnState | None = None

    def serve(self, progress: Callable[[], tuple[int, int]]) -> None:
        """From now on others can ask. `progress()`: samples and minibatches that are behind this worker."""
        self._progress = progress
        own_state.serve(self._endpoint, self._answer, self._fixed)

    async def keep(self, step: int) -> None:
        """Remembers the buffers as they are now, after `step` steps, for who evaluates there."""
        state = await self._own()
        if state.buffers:
            self._kept = step, state

    async def freeze(self) -> None:
        """There will be no more gradients: the buffers as they are now are this worker's for good."""
        self._frozen = await self._own()

    async def average(self, step: int | None = None) -> Buffers:
        """Averaged over all workers that answer, weighted by samples; one may be gone at any time.

        Summed by rank, so that all workers get the same bits.

        Args:
            step: as they were after so many steps; None as they are.
        """
        mine = await self._own()
        specs = [spec_of(name, array.shape, array.dtype) for name, array in mine.buffers.items()]
        states: list[OwnState] = []
        for worker in self._workers():
            if worker == self._runtime.node or not specs:
                states.append(mine)
                continue
            try:
                asked = own_state.ask(self._endpoint, worker, specs, step=step, silence_s=self._silence_s)
                states.append(await asked)
            except (PeerLostError, DeadlineError):
                pass
            except RefusedError as error:
                if error.code == "BAD_REQUEST":  # what it has is not what this worker has
                    raise
        return averaged(states)

    async def _answer(self, step: int | None) -> OwnState:
        if self._kept is not None and self._kept[0] == step:
            return self._kept[1]
        return await self._own()

    async def _fixed(self) -> OwnState:
        return await self._runtime.compute(
            lambda _: OwnState(0, fixed_of(self._model).frozen), work=Work("copy"), phantom=OwnState(0, {})
        )

    async def _own(self) -> OwnState:
        """Between two gradients: buffers change while one is computed."""
        if self._frozen is not None:
            return self._frozen

        def own(_: object) -> OwnState:
            samples, steps = self._progress()
            return OwnState(samples, buffers_of(self._model), steps)

        return await self._runtime.compute(
            own,
            work=Work("copy"),
            phantom=OwnState(0, {}),
        )
