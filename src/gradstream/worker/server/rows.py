"""A replica that exchanges only changes: rows of gradients up, rows of parameters down.

Besides the parameters it has two vectors without the row-sparse tensors ("tables"): a gradient, and the sum of
gradients. A fetch brings changed rows; `swap_in` first reverts the worker's own steps since the last fetch
(`OwnSteps`), and then writes the rows into the parameters. So these equal the server's parameters bit for bit, as if
all had been fetched. No operation goes through a whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from typing_extensions import override

from gradstream.errors import ConfigError
from gradstream.memory import Vector
from gradstream.model.base import Layout, Slot
from gradstream.model.rows import RowGradient, TableRows
from gradstream.optim.schedules import nominal_rate
from gradstream.runtime.base import Work
from gradstream.server.client.client import ServerClient
from gradstream.server.client.fetch import Arrival, SparseDelta
from gradstream.server.client.push import Update, UpdatePiece
from gradstream.server.rows import RowMap, RowPart, RowRange, clipped, joined, pack, packed_elems
from gradstream.strategies import api
from gradstream.strategies.base import RowExchange
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.replica import ReplicaContext
from gradstream.worker.server.replica import ServerReplica
from gradstream.worker.updater import Factors

# ---- row sum -----------------------------------------------------------------------------
# The gradients that a worker has accumulated and not pushed yet, and which of their rows it sends.
#
#     acc ← acc + η_i/η·g
#     a row is sent if |γ·acc| > θ·|w| ("relative") or |γ·acc| > θ ("absolute"), and is 0 afterwards
#
# With θ = 0 every row is sent. Rows that are not sent stay in the sum. At a constant rate, sent rows and rows that
# are left add up to the sum of all gradients, exactly. A push is applied at one rate η, the rate of its first
# gradient. Where a schedule changes the rate, each gradient is weighed by its own rate η_i, and rows that are left
# are scaled to the rate of the next push.
#
# |·| is the root of the mean square over a row's elements. γ is the nominal rate of the update rule, which a schedule
# does not lower.
#
# Reference: Hsieh et al., "Gaia: geo-distributed machine learning approaching LAN speeds", NSDI 2017, §3.2 (θ of 1 %,
# falling as 1/√t). Two differences: rows are tested instead of single parameters; and after a fetch the worker's
# parameters are the server's, without the rows that are left.

Test = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RowSum:
    """A sum of gradients: row-sparse tensors ("tables") as rows, the rest as a vector. Arithmetic alone.

    Args:
        rows: rows of every chunk.
        layout: layout of the parameters.
        exchange: which rows are significant.
        rest: memory for the sum of the rest, packed.

    Attributes:
        rest: see above.
        tables: sums of the tables.
        left: the sum holds rows of an earlier period.
    """

    def __init__(self, rows: RowMap, layout: Layout, exchange: RowExchange, rest: Vector) -> None:
        self.rest = rest
        self.tables = RowGradient(layout.tables, layout.dtype)
        self.left = False
        self._rows = rows
        self._exchange = exchange

    def add(self, rest: torch.Tensor, tables: RowGradient, weight: float) -> None:
        """Adds a gradient, multiplied by its weight."""
        self.rest.tensor.add_(rest, alpha=weight)
        self.tables.add_all(tables, weight)

    def scale(self, factor: float) -> None:
        """Multiplies the whole sum."""
        self.rest.tensor.mul_(factor)
        self.tables.scale(factor)

    def take(self, parameters: torch.Tensor, lr: float, *, everything: bool) -> Mapping[int, UpdatePiece]:
        """Removes the rows to be sent from the sum, by chunk; chunks without such rows are skipped.

        Without a threshold, the payloads of whole chunks lie in `rest`, which must not change until they are sent.
        With a threshold, the rows that are sent become 0 in the sum, and the others stay.

        Args:
            parameters: (E,), read.
            lr: γ.
            everything: sends insignificant rows too; with a threshold, all rows that are not 0.
        """
        weighs, test = self._exchange.threshold > 0, self._test(lr, everything=everything)
        tables = [
            self._chosen_rows(slot, parameters, test) if weighs and not everything else self.tables[slot]
            for slot in self.tables.tables
        ]
        touched = self._touched(tables)
        pieces: dict[int, UpdatePiece] = {}
        for chunk in range(self._rows.chunks.num_chunks):
            runs = self._rows.runs(chunk)
            if chunk not in touched and all(run.table >= 0 for run in runs):
                continue
            if not weighs and len(runs) == 1 and runs[0].table < 0:
                start = runs[0].row
                pieces[chunk] = UpdatePiece(0, self.rest[start : start + runs[0].stop])
                continue
            start, stop = self._rows.chunks.bounds(chunk)
            held = parameters[start:stop]
            parts = [
                clipped(run, *tables[run.table])
                if run.table >= 0
                else self._blocks(run, held, test if weighs else None)
                for run in runs
            ]
            piece = self._piece(chunk, joined(parts))
            if piece is not None:
                pieces[chunk] = piece
        if everything or not weighs:
            self.tables = RowGradient(self.tables.tables, parameters.dtype)
        self.left = weighs and (self.tables.num_rows > 0 or bool(self.rest.tensor.any()))
        return pieces

    def _touched(self, tables: list[TableRows]) -> set[int]:
        """The chunks in which these rows lie."""
        touched: set[int] = set()
        chunk_elems = self._rows.chunks.chunk_elems
        for table, (numbers, _) in zip(self._rows.tables, tables, strict=True):
            first = table.start + numbers * table.row_elems
            last = first + table.row_elems - 1
            for low, high in zip(
                (first // chunk_elems).tolist(), (last // chunk_elems).tolist(), strict=True
            ):
                touched.update(range(low, high + 1))
        return touched

    def _piece(self, chunk: int, part: RowPart) -> UpdatePiece | None:
        """The message with these rows of a chunk; with the whole chunk, where that is not larger."""
        num_rows, values = len(part.numbers), part.values
        if not num_rows:
            return None
        start, stop = self._rows.chunks.bounds(chunk)
        if packed_elems(num_rows, len(values), values.dtype) < stop - start:
            payload = pack(part)
        else:
            payload, num_rows = values.new_zeros(stop - start), 0
            payload[self._rows.elements(chunk, part.numbers)] = values
        return UpdatePiece(num_rows, Vector(f"rows of chunk {chunk}", payload).all)

    def _blocks(self, run: RowRange, chunk: torch.Tensor, test: Test | None) -> RowPart:
        """Removes the blocks of a run of the rest that pass the test from the sum; without a test, all of them."""
        held = self.rest.tensor[run.row : run.row + run.stop - run.start]
        if test is None:
            return RowPart(run.first + torch.arange(run.num_rows), held)
        width = run.row_elems
        blocks = torch.nonzero(test(_cut(held, width), _cut(chunk[run.start : run.stop], width))).flatten()
        places = (blocks[:, None] * width + torch.arange(width)).flatten()
        places = places[places < len(held)]
        values = held[places]
        held[places] = 0
        return RowPart(run.first + blocks, values)

    def _chosen_rows(self, slot: Slot, parameters: torch.Tensor, test: Test) -> TableRows:
        """Removes the rows of a table that pass the test from the sum."""
        numbers, values = self.tables[slot]
        held = parameters[slot.start : slot.stop].view(slot.shape[0], -1)[numbers]
        chosen = test(values, held)
        self.tables.replace(slot, numbers[~chosen], values[~chosen])
        return numbers[chosen], values[chosen]

    def _test(self, lr: float, *, everything: bool) -> Test:
        """A function of rows of the sum and of the parameters, both (n, width): whether to send each row, (n,)."""
        if everything:
            return lambda held, parameters: (held != 0).any(1)
        bound = self._exchange.threshold**2
        if self._exchange.relative:
            return lambda held, w: (lr * held).square().mean(1) > bound * w.square().mean(1)
        return lambda held, w: (lr * held).square().mean(1) > bound


def _cut(elements: torch.Tensor, width: int) -> torch.Tensor:
    """The elements as rows (n, width); the last row is filled up with zeros."""
    missing = -len(elements) % width
    return (torch.nn.functional.pad(elements, (0, missing)) if missing else elements).view(-1, width)


# ---- own steps ---------------------------------------------------------------------------
# Local steps that can be taken back, for workers that fetch only changed rows.
#
# Such a fetch overwrites some of the worker's parameters, and all others must equal the server's. So a local step saves
# the elements that it overwrites, and the worker restores them before it swaps in the next fetch. Of a row-sparse
# tensor ("table") these are the rows that the step touches; everything else ("the rest") is copied once a period.


class OwnSteps:
    """The local steps since the last fetch. Arithmetic alone.

    Args:
        layout: layout of the parameters.
        kept: (n,), memory for the rest as it was before the steps.
        scales: factor of each range's learning rate.
    """

    def __init__(self, layout: Layout, kept: torch.Tensor, scales: Factors) -> None:
        self._tables = [(table, _factor_at(scales, table.start)) for table in layout.tables]
        # A part of the rest: its place in the parameters and in the packed rest, and the factor of its rate.
        self._places: list[tuple[slice, slice, float]] = []
        at = 0
        for slot in layout.slots:
            if not slot.row_sparse:
                size, scale = slot.stop - slot.start, _factor_at(scales, slot.start)
                self._places.append((slice(slot.start, slot.stop), slice(at, at + size), scale))
                at += size
        self._rest = kept
        self._rest_kept = False
        # (table, numbers of rows, their values before the step)
        self._rows: list[tuple[Slot, torch.Tensor, torch.Tensor]] = []

    def step(self, parameters: torch.Tensor, rest: torch.Tensor, rows: RowGradient, lr: float) -> None:
        """Makes a step w ← w - lr·scale·g, for the rest and for the rows that the gradient touches.

        Args:
            parameters: (E,), changed.
            rest: gradient of the rest, packed.
            rows: gradients of the tables.
            lr: learning rate.
        """
        for place, packed, scale in self._places:
            if not self._rest_kept:
                self._rest[packed] = parameters[place]
            parameters[place].add_(rest[packed], alpha=-lr * scale)
        self._rest_kept = True
        for table, scale in self._tables:
            numbers, values = rows[table]
            view = _rows_at(table, parameters)
            before = view[numbers]
            self._rows.append((table, numbers, before))
            view[numbers] = before.add(values, alpha=-lr * scale)

    def take_back(self, parameters: torch.Tensor) -> None:
        """Restores the parameters (E,) to their values before the first of these steps, bit for bit."""
        if self._rest_kept:
            for place, packed, _ in self._places:
                parameters[place] = self._rest[packed]
            self._rest_kept = False
        while self._rows:
            table, numbers, before = self._rows.pop()
            _rows_at(table, parameters)[numbers] = before


def _factor_at(factors: Factors, place: int) -> float:
    return next(factor for start, stop, factor in factors if start <= place < stop)


def _rows_at(table: Slot, flat: torch.Tensor) -> torch.Tensor:
    return flat[table.start : table.stop].view(table.shape[0], table.row_elems)


# ---- rows --------------------------------------------------------------------------------

BRIEF_ELEMS = 1 << 16
"""Number of elements up to which arithmetic is faster than switching threads for it."""


class RowReplica(ServerReplica):
    """Implements `strategies.api.ServerWorker` by exchanging only changes.

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
        """See `strategies.api.ServerWorker`: reverts own steps, then writes the fetched rows."""
        await arrival.done()
        assert isinstance(arrival, SparseDelta)
        delta, parameters = arrival, self.parameters

        def land() -> None:
            self._own.take_back(parameters.tensor)
            delta.apply_to(parameters.tensor)

        await self._work(land, [], [parameters], _work_of(delta.num_elems + self._layout.rest.elems))
        self.server.back_buffer, self.server.known = arrival.vector, arrival.versions
        self._computes_on(arrival)

    @override
    async def pull(self, *, own: bool = True, flush: bool = False, min_clock: int = 0) -> None:
        if min_clock and self._pausable_gate.between:
            await self._pausable_gate.stand()
        await self.swap_in(self.server.fetch_soon(own=own, flush=flush, min_clock=min_clock))

    # ---- local steps and sums -----------------------------------------------------------

    @override
    async def apply(self, gradient: api.Gradient, lr: float | None = None) -> None:
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

    @override
    async def accumulate(self, gradient: api.Gradient) -> None:
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
        """Begins the next sum with the insignificant rows, scaled to the rate of that sum."""
        total, rest, upcoming = self._total, self._total.rest, self._next
        upcoming.num_summed = int(total.left)
        if total.left and lr and upcoming.lr not in (0.0, lr):
            ratio, upcoming.lr = upcoming.lr / lr, lr
            await self._work(lambda: total.scale(ratio), [], [rest], _work_of(len(rest)))

    @override
    async def local_step(
        self, gradient: api.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
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

    @override
    def retire(self) -> None:
        super().retire()
        self._own = OwnSteps(Layout((), self._layout.dtype), self._gradient.tensor, ())
        self._total.rest = self._single.rest = self._gradient


def _rows_of(gradient: api.Gradient) -> RowGradient:
    assert isinstance(gradient, ComputedGradient)
    assert gradient.rows is not None
    return gradient.rows


def _work_of(elems: int) -> Work:
    return Work("copy", elems=elems, brief=elems <= BRIEF_ELEMS)
