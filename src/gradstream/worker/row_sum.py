"""What a worker has accumulated and not pushed yet, and what of it is significant enough to be sent.

    acc ← acc + g;   a row is sent if |γ·acc| > θ·|w| of it ("relative"), or > θ ("absolute"), and is 0 then

With θ = 0 all of it is. What is not sent stays, and is added to what comes: elements are moved and never
changed, so what was sent and what is left add up to the sum of all gradients, exactly.

|·| is the root of the mean square over a row's elements; γ the update rule's nominal rate, which a schedule
does not lower: with the rate, what counts as significant falls, too.

Reference: Hsieh et al., "Gaia: geo-distributed machine learning approaching LAN speeds", NSDI 2017, §3.2
(θ of 1 %, falling as 1/√t). Different here: rows instead of single parameters, unless a row is one; the
worker's own parameters are the server's after a fetch, without what is left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.model.rows import RowGradient, TableRows
from gradstream.server.client import Piece
from gradstream.server.rows import RowMap, RowPart, Run, clipped, joined, pack, packed_elems
from gradstream.strategies.base import RowExchange

__all__ = ["RowSum"]


class RowSum:
    """A sum of gradients: what is in no table as a vector, tables as rows. Arithmetic alone.

    Args:
        rows: of every chunk.
        layout: of the parameters.
        exchange: what is significant.
        rest: for what is in no table, packed.
    """

    def __init__(self, rows: RowMap, layout: Layout, exchange: RowExchange, rest: Vector) -> None:
        self.rest = rest
        self.tables = RowGradient(layout.tables, layout.dtype)
        self.left = False  # something of an earlier period is in it
        self._rows = rows
        self._exchange = exchange

    def add(self, rest: torch.Tensor, tables: RowGradient) -> None:
        """Adds one more gradient."""
        self.rest.tensor.add_(rest)
        self.tables.add_all(tables)

    def take(self, parameters: torch.Tensor, lr: float, *, everything: bool) -> Mapping[int, Piece]:
        """What is to be sent, by chunk; chunks without any of it are left out.

        Where all of it is, payloads of whole chunks lie in `rest`, which must stay as it is until they have
        been sent. Otherwise what is sent is 0 in the sum afterwards, and the rest of it is left.

        Args:
            parameters: (E,).
            lr: γ.
            everything: of what significance ever.
        """
        everything = everything or self._exchange.threshold == 0
        tables = [
            self.tables[slot] if everything else self._significant_rows(index, parameters, lr)
            for index, slot in enumerate(self.tables.tables)
        ]
        touched = self._touched(tables)
        pieces: dict[int, Piece] = {}
        for chunk in range(self._rows.chunks.num_chunks):
            runs = self._rows.runs(chunk)
            if chunk not in touched and all(run.table >= 0 for run in runs):
                continue
            if everything and len(runs) == 1 and runs[0].table < 0:
                start = runs[0].row
                pieces[chunk] = Piece(0, self.rest[start : start + runs[0].stop])
                continue
            start, stop = self._rows.chunks.bounds(chunk)
            held = parameters[start:stop]
            parts = [
                clipped(run, *tables[run.table])
                if run.table >= 0
                else self._blocks(run, held, lr, everything=everything)
                for run in runs
            ]
            piece = self._piece(chunk, joined(parts))
            if piece is not None:
                pieces[chunk] = piece
        if everything:
            self.tables = RowGradient(self.tables.tables, parameters.dtype)
            self.left = False
        else:
            self.left = self.tables.num_rows > 0 or bool(self.rest.tensor.any())
        return pieces

    def _touched(self, tables: list[TableRows]) -> set[int]:
        """Chunks that any of these rows lie in."""
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

    def _piece(self, chunk: int, part: RowPart) -> Piece | None:
        """Some rows of a chunk as they are sent: as all of it, where that takes no more."""
        num_rows, values = len(part.numbers), part.values
        if not num_rows:
            return None
        start, stop = self._rows.chunks.bounds(chunk)
        if packed_elems(num_rows, len(values), values.dtype) < stop - start:
            payload = pack(part)
        else:
            payload, num_rows = values.new_zeros(stop - start), 0
            payload[self._rows.elements(chunk, part.numbers)] = values
        return Piece(num_rows, Vector(f"rows of chunk {chunk}", payload).all)

    def _blocks(self, run: Run, chunk: torch.Tensor, lr: float, *, everything: bool) -> RowPart:
        """The blocks of a run of the rest that are to be sent."""
        held = self.rest.tensor[run.row : run.row + run.stop - run.start]
        if everything:
            return RowPart(run.first + torch.arange(run.num_rows), held)
        change = _mean_squares(held, run.row_elems) * lr**2
        blocks = torch.nonzero(
            self._exceeds(change, _mean_squares(chunk[run.start : run.stop], run.row_elems))
        )
        places = (blocks * run.row_elems + torch.arange(run.row_elems)).flatten()
        places = places[places < len(held)]
        values = held[places]
        held[places] = 0
        return RowPart(run.first + blocks.flatten(), values)

    def _significant_rows(self, index: int, parameters: torch.Tensor, lr: float) -> TableRows:
        """Those rows of a table that are to be sent; takes them out of the sum."""
        slot = self.tables.tables[index]
        numbers, values = self.tables[slot]
        held = parameters[slot.start : slot.stop].view(slot.shape[0], -1)[numbers]
        chosen = self._exceeds(values.square().mean(1) * lr**2, held.square().mean(1))
        self.tables.replace(slot, numbers[~chosen], values[~chosen])
        return numbers[chosen], values[chosen]

    def _exceeds(self, change: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """Whether a change is significant. Both are mean squares, by row."""
        bound = self._exchange.threshold**2
        return change > (bound * parameters if self._exchange.relative else bound)


def _mean_squares(elements: torch.Tensor, width: int) -> torch.Tensor:
    """By block of so many elements, the last of which may be shorter."""
    if width == 1:
        return elements.square()
    full = len(elements) // width * width
    out = elements[:full].view(-1, width).square().mean(1)
    return out if full == len(elements) else torch.cat([out, elements[full:].square().mean().view(1)])
