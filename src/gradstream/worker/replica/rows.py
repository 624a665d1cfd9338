"""A replica that exchanges only what has changed: rows of gradients up, rows of parameters down.

Besides the parameters it has two vectors, which leave the row-sparse tensors ("tables") out: a gradient, and the
sum of gradients. A fetch brings changed rows; `swap_in` first takes the worker's own steps since the last fetch
back (`own_steps.py`), and then writes the rows into the parameters. So these are the server's, bit for bit, as if
all of them had been fetched. No operation goes through a whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from gradstream.errors import ConfigError
from gradstream.model.base import Layout
from gradstream.model.rows import RowGradient
from gradstream.optim.schedules import nominal_rate
from gradstream.runtime.base import Work
from gradstream.server.client.arrival import Arrival, SparseDelta
from gradstream.server.client.client import ServerClient
from gradstream.server.update import Update, UpdatePiece
from gradstream.strategies import api
from gradstream.strategies.base import RowExchange
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.replica.base import ReplicaContext
from gradstream.worker.replica.own_steps import OwnSteps
from gradstream.worker.replica.row_sum import RowSum
from gradstream.worker.replica.server import ServerReplica

BRIEF_ELEMS = 1 << 16
"""Number of elements up to which arithmetic takes less time than its change of thread."""


class RowReplica(ServerReplica):
    """Implements `strategies.api.ServerWorker` where only what has changed is exchanged.

    Args:
        context: parts of every replica.
        server: client of the parameter server, whose fetches are sparse deltas.
        exchange: which rows are significant enough to be sent.
    """

    def __init__(self, context: ReplicaContext, server: ServerClient, *, exchange: RowExchange) -> None:
        super().__init__(context, server)
        assert server.rows is not None
        layout, landing = self._layout, self._landing
        self._own = OwnSteps(layout, self._allocate("kept", landing).tensor, context.rule.scales)
        self._total = RowSum(server.rows, layout, exchange, self._allocate("accumulated", landing))
        self._single = RowSum(server.rows, layout, RowExchange(), self._gradient)  # one gradient, in `update`
        # What is significant depends on the rate, unless all of it is.
        self._lr = nominal_rate(context.rule.lr) if exchange.threshold > 0 else 1.0

    @property
    def _landing(self) -> Layout:
        return self._layout.rest

    def _new_gradient(self, batch: SampleBatch, *, mean: bool) -> ComputedGradient:
        gradient = super()._new_gradient(batch, mean=mean)
        gradient.rows = RowGradient(self._layout.tables, self._layout.dtype)
        return gradient

    # ---- down ---------------------------------------------------------------------------

    async def swap_in(self, arrival: Arrival) -> None:
        """See `strategies.api.ServerWorker`: takes own steps back, then writes the rows that have come."""
        await arrival.done()
        assert isinstance(arrival, SparseDelta)
        delta, parameters = arrival, self.parameters

        def land() -> None:
            self._own.take_back(parameters.tensor)
            delta.apply_to(parameters.tensor)

        await self._work(land, [], [parameters], _work_of(delta.num_elems + self._layout.rest.elems))
        self.server.back_buffer, self.server.known = arrival.vector, arrival.versions
        self._computes_on(arrival)

    async def pull(self, *, own: bool = True, flush: bool = False, min_clock: int = 0) -> None:
        """See `ServerReplica.pull`."""
        if min_clock and self._attendance.between:
            await self._attendance.stand()
        await self.swap_in(self.server.fetch_soon(own=own, flush=flush, min_clock=min_clock))

    # ---- local steps and sums -----------------------------------------------------------

    async def apply(self, gradient: api.Gradient, lr: float | None = None) -> None:
        """See `strategies.api.ServerWorker`."""
        if not gradient.samples:
            return
        rate, rows = self._local_rate(gradient, lr), _rows_of(gradient)
        parameters, vector = self.parameters, gradient.vector
        await self._work(
            lambda: self._own.step(parameters.tensor, vector.tensor, rows, rate),
            [vector],
            [parameters],
            _work_of(len(vector)),
        )

    async def accumulate(self, gradient: api.Gradient) -> None:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(gradient, ComputedGradient)
        if not gradient.samples:
            self._count(gradient)
            return
        rows, total = _rows_of(gradient), self._total
        if not self._next.update.num_gradients:
            await self._open_period(total.rest)
            await self._keep_left(gradient.lr)
        if self._next.begins_with(gradient):
            self._gradient, total.rest = total.rest, gradient.vector
            total.tables = rows
        else:
            vector, weight = gradient.vector, self._next.weight(gradient)
            await self._work(
                lambda: total.add(vector.tensor, rows, weight), [vector], [total.rest], _work_of(len(vector))
            )
        self._next.update.vector = total.rest
        self._count(gradient, summed=True)

    async def _keep_left(self, lr: float) -> None:
        """Begins the next sum with what was not significant, brought to the rate of that sum."""
        total, rest, upcoming = self._total, self._total.rest, self._next
        upcoming.num_summed = int(total.left)
        if total.left and lr and upcoming.lr not in (0.0, lr):
            ratio, upcoming.lr = upcoming.lr / lr, lr
            await self._work(lambda: total.scale(ratio), [], [rest], _work_of(len(rest)))

    async def local_step(
        self, gradient: api.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
        """See `strategies.api.ServerWorker`."""
        if momentum:
            raise ConfigError(
                f"local_momentum={momentum:g} moves every parameter at every step, so a push could leave out no rows: "
                "use local_momentum=0, or a model without row-sparse tensors and no significance"
            )
        await self.accumulate(gradient)
        await self.apply(gradient, lr)

    # ---- up -----------------------------------------------------------------------------

    def take_accumulated(self) -> Update:
        """See `strategies.api.ServerWorker`. Rows that are not significant are left for a later update."""
        update = super().take_accumulated()
        update.pieces, update.prompt = partial(self._pieces, self._total, everything=False), True
        return update

    def update(self, gradient: api.Gradient) -> Update:
        """See `strategies.api.ServerWorker`: the push begins once the gradient is complete."""
        update = super().update(gradient)
        if update.vector is None:
            return update
        rows, single = _rows_of(gradient), self._single

        async def pieces() -> Mapping[int, UpdatePiece]:
            await gradient.done()
            single.rest, single.tables = gradient.vector, rows
            return await self._pieces(single, everything=True)

        update.ready, update.pieces = None, pieces
        return update

    async def _flush(self) -> None:
        if self._next.refs or self._total.left:
            update = self.take_accumulated()
            if not update.num_gradients and self._total.left:
                update.vector, update.lr = self._total.rest, self._next.lr
            update.pieces = partial(self._pieces, self._total, everything=True)
            await self.server.push_soon(update)
        await self.server.flush()
        if self._total.left:  # by a push that had begun before
            await self._flush()

    async def _pieces(self, total: RowSum, *, everything: bool) -> Mapping[int, UpdatePiece]:
        parameters = self.parameters
        return await self._runtime.compute(
            lambda _: total.take(parameters.tensor, self._lr, everything=everything),
            work=_work_of(len(total.rest)),
            reads=[parameters.all],
            writes=[total.rest.all],
            shape_only={},
        )

    def retire(self) -> None:
        """See `Replica.retire`."""
        super().retire()
        self._own = OwnSteps(Layout((), self._layout.dtype), self._gradient.tensor, ())
        self._total.rest = self._single.rest = self._gradient


def _rows_of(gradient: api.Gradient) -> RowGradient:
    assert isinstance(gradient, ComputedGradient)
    assert gradient.rows is not None
    return gradient.rows


def _work_of(elems: int) -> Work:
    return Work("copy", elems=elems, brief=elems <= BRIEF_ELEMS)
