"""The gradients that a worker has accumulated and not pushed yet, and which of their rows it sends.

    acc ← acc + η_i/η·g
    a row is sent if |γ·acc| > θ·|w| ("relative") or |γ·acc| > θ ("absolute"), and is 0 afterwards

With θ = 0 every row is sent. Rows that are not sent stay in the sum. At a constant rate, sent rows and rows that
are left add up to the sum of all gradients, exactly. A push is applied at one rate η, the rate of its first
gradient. Where a schedule changes the rate, each gradient is weighed by its own rate η_i, and rows that are left
are scaled to the rate of the next push.

|·| is the root of the mean square over a row's elements. γ is the nominal rate of the update rule, which a schedule
does not lower.

Reference: Hsieh et al., "Gaia: geo-distributed machine learning approaching LAN speeds", NSDI 2017, §3.2
(θ of 1 %, falling as 1/√t). Two differences: rows are tested instead of single parameters; and after a fetch the
worker's parameters are the server's, without the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gradstream.memory import Vector
from gradstream.model.base import Layout, Slot
from gradstream.model.rows import RowGradient, TableRows
from gradstream.server.rows import RowMap, RowPart, RowRange, clipped, joined, pack, packed_elems
from gradstream.server.update import UpdatePiece
from gradstream.strategies.base import RowExchange

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
        """Takes the rows to be sent out of the sum, by chunk; chunks without such rows are left out.

        Without a threshold, the payloads of whole chunks lie in `rest`, which nobody may change until they are
        sent. With a threshold, the rows that are sent become 0 in the sum, and the others are left.

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
        """Takes the blocks of a run of the rest that pass the test out of the sum; without a test, all of them."""
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
        """Takes the rows of a table that pass the test out of the sum."""
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
