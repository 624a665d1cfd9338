"""A replica that exchanges only what has changed: rows of gradients up, rows of parameters down.

Two vectors besides the parameters, and these without the tables: a gradient, and the sum of them. What a
fetch brings is kept apart and lands on top of the parameters when it is adopted, once the worker's own steps
since the last one are taken back (`own_steps.py`): so they are the server's, bit for bit, as if all of them
had been fetched. Nothing here goes through a table from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gradstream.errors import ConfigError
from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.model.rows import RowGradient
from gradstream.optim.schedules import nominal_rate
from gradstream.runtime.base import Work
from gradstream.server.client.arrival import Arrival, SparseDelta
from gradstream.server.client.client import ServerClient
from gradstream.server.update import Update, UpdatePiece
from gradstream.strategies import api
from gradstream.strategies.base import RowExchange
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.replica.base import ReplicaContext
from gradstream.worker.replica.own_steps import OwnSteps
from gradstream.worker.replica.row_sum import RowSum
from gradstream.worker.replica.server import ServerReplica

__all__ = ["RowReplica"]

BRIEF_ELEMS = 1 << 16
"""Up to here arithmetic takes less time than handing it to another thread."""


class RowReplica(ServerReplica):
    """Implements `strategies.api.Worker` where only what has changed is exchanged.

    Args:
        context: what every replica is made of.
        server: client of the parameter server, that fetches patches.
        exchange: what is significant enough to be sent.
    """

    def __init__(self, context: ReplicaContext, server: ServerClient, *, exchange: RowExchange) -> None:
        super().__init__(context, server)
        assert server.rows is not None
        self._rows = server.rows
        self._own = OwnSteps(context.layout, self._allocate("kept", self._landing).tensor, context.scales)
        self._held = RowSum(
            server.rows, context.layout, exchange, self._allocate("accumulated", self._landing)
        )
        self._weighs = exchange.threshold > 0
        self._unsent = RowSum(server.rows, context.layout, RowExchange(), self._gradient)

    @property
    def _landing(self) -> Layout:
        return self._layout.rest

    def _new_rows(self) -> RowGradient:
        return RowGradient(self._layout.tables, self._layout.dtype)

    # ---- down ---------------------------------------------------------------------------

    async def swap_in(self, arrival: Arrival) -> None:
        """See `strategies.api.Worker`: what has come lands on the parameters, own steps are taken back."""
        await arrival.done()
        assert isinstance(arrival, SparseDelta)
        patch, parameters = arrival, self.parameters

        def land() -> None:
            self._own.take_back(parameters.tensor)
            patch.apply_to(parameters.tensor)

        await self._brief(land, patch.num_elems + self._layout.rest.elems, [], [parameters])
        self.server.back_buffer, self.server.known = arrival.vector, arrival.versions
        self._computes_on(arrival)

    async def pull(self, *, own: bool = True, flush: bool = False, min_clock: int = 0) -> None:
        """See `strategies.api.Worker`; `flush` as in `ServerClient.fetch_soon`."""
        if min_clock and self._between:
            await self._stand()
        await self.swap_in(self.server.fetch_soon(own=own, flush=flush, min_clock=min_clock))

    # ---- local steps and sums -------------------------------------------------------------

    async def apply(self, gradient: api.Gradient, lr: float | None = None) -> None:
        """See `strategies.api.Worker`."""
        if not gradient.samples:
            return
        rate, rows = self._local_rate(gradient, lr), _rows_of(gradient)
        parameters, vector = self.parameters, gradient.vector
        await self._brief(
            lambda: self._own.step(parameters.tensor, vector.tensor, rows, rate),
            len(vector),
            [vector],
            [parameters],
        )

    async def accumulate(self, gradient: api.Gradient) -> None:
        """See `strategies.api.Worker`."""
        if not gradient.samples:
            self._count(gradient)
            return
        assert isinstance(gradient, ComputedGradient)
        rows, total = _rows_of(gradient), self._held
        if not self._taken.num_gradients:
            await self._open_period(total.rest)
            await self._keep_left(gradient.lr)
        if self._begins_sum(gradient):
            self._gradient, total.rest = total.rest, gradient.vector
            total.tables = rows
        else:
            vector, weight = gradient.vector, self._weight(gradient)
            await self._brief(
                lambda: total.add(vector.tensor, rows, weight), len(vector), [vector], [total.rest]
            )
        self._taken.vector = total.rest
        self._num_summed += 1
        self._count(gradient)

    async def _keep_left(self, lr: float) -> None:
        """What was not significant begins the next sum, brought to the rate of that."""
        total, rest = self._held, self._held.rest
        self._num_summed = int(total.left)
        if total.left and lr and self._sum_rate not in (0.0, lr):
            ratio, self._sum_rate = self._sum_rate / lr, lr
            await self._brief(lambda: total.scale(ratio), len(rest), [], [rest])

    async def local_step(
        self, gradient: api.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
        """See `strategies.api.Worker`."""
        if momentum:
            raise ConfigError(
                f"local momentum of {momentum:g} moves every parameter at every step, so none is left out of "
                "what is sent: use 0, or a model without row-sparse tensors and no significance"
            )
        await self.accumulate(gradient)
        await self.apply(gradient, lr)

    # ---- up -----------------------------------------------------------------------------

    def take_accumulated(self) -> Update:
        """See `strategies.api.Worker`. What is not significant is left, and comes with a later one."""
        update = super().take_accumulated()
        update.pieces, update.prompt = partial(self._pieces, self._held, everything=False), True
        return update

    def update(self, gradient: api.Gradient) -> Update:
        """See `strategies.api.Worker`: it leaves once the gradient is complete."""
        update = super().update(gradient)
        if update.vector is None:
            return update
        rows, unsent = _rows_of(gradient), self._unsent

        async def pieces() -> Mapping[int, UpdatePiece]:
            await gradient.done()
            unsent.rest, unsent.tables = gradient.vector, rows
            return await self._pieces(unsent, everything=True)

        update.ready, update.pieces = None, pieces
        return update

    async def _flush(self) -> None:
        if self._taken.num_gradients or self._refs or self._held.left:
            update = self.take_accumulated()
            if not update.num_gradients and self._held.left:
                update.vector, update.lr = self._held.rest, self._sum_rate
            update.pieces = partial(self._pieces, self._held, everything=True)
            await self.server.push_soon(update)
        await self.server.flush()
        if self._held.left:  # of a push that was under way
            await self._flush()

    async def _pieces(self, total: RowSum, *, everything: bool) -> Mapping[int, UpdatePiece]:
        parameters, rate = self.parameters, nominal_rate(self._lr) if self._weighs else 1.0
        return await self._runtime.compute(
            lambda _: total.take(parameters.tensor, rate, everything=everything),
            work=_work_of(len(total.rest)),
            reads=[parameters.all],
            writes=[total.rest.all],
            shape_only={},
        )

    async def _brief(
        self, arithmetic: Callable[[], object], elems: int, reads: Sequence[Vector], writes: Sequence[Vector]
    ) -> None:
        """As `_work`, of so many elements of these vectors."""
        begun_ns = self._runtime.now()
        await self._runtime.compute(
            lambda _: arithmetic(),
            work=_work_of(elems),
            reads=[vector.all for vector in reads],
            writes=[vector.all for vector in writes],
        )
        self._stopwatch.worked(begun_ns, self._runtime.now())

    def retire(self) -> None:
        """See `Replica.retire`."""
        super().retire()
        self._own = OwnSteps(Layout((), self._layout.dtype), self._gradient.tensor, ())
        self._held.rest = self._unsent.rest = self._gradient


def _rows_of(gradient: api.Gradient) -> RowGradient:
    assert isinstance(gradient, ComputedGradient)
    assert gradient.rows is not None
    return gradient.rows


def _work_of(elems: int) -> Work:
    return Work("copy", elems=elems, brief=elems <= BRIEF_ELEMS)
