"""What a worker has accumulated and not pushed yet, and what of it is significant enough to be sent.

    acc ← acc + η_i/η·g
    a row is sent if |γ·acc| > θ·|w| of it ("relative"), or > θ ("absolute"), and is 0 then

With θ = 0 all of it is. What is not sent stays, and is added to what comes: elements are moved and, at one
rate, never changed, so what was sent and what is left add up to the sum of all gradients, exactly. A push is
applied at one rate η, that of its first gradient: where a schedule changes the rate, each gradient is weighed
by its own, and what is left is brought to the rate of the next push.

|·| is the root of the mean square over a row's elements; γ the update rule's nominal rate, which a schedule
does not lower: with the rate, what counts as significant falls, too.

Reference: Hsieh et al., "Gaia: geo-distributed machine learning approaching LAN speeds", NSDI 2017, §3.2
(θ of 1 %, falling as 1/√t). Different here: rows instead of single parameters, unless a row is one; the
worker's own parameters are the server's after a fetch, without what is left.
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

__all__ = ["RowSum"]

Test = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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

    def add(self, rest: torch.Tensor, tables: RowGradient, weight: float) -> None:
        """Adds one more gradient, times its weight."""
        self.rest.tensor.add_(rest, alpha=weight)
        self.tables.add_all(tables, weight)

    def scale(self, factor: float) -> None:
        """Multiplies all of it."""
        self.rest.tensor.mul_(factor)
        self.tables.scale(factor)

    def take(self, parameters: torch.Tensor, lr: float, *, everything: bool) -> Mapping[int, UpdatePiece]:
        """What is to be sent, by chunk; chunks without any of it are left out.

        Without a threshold, payloads of whole chunks lie in `rest`, which must stay as it is until they have
        been sent. With one, what is sent is 0 in the sum afterwards, and the rest of it is left.

        Args:
            parameters: (E,).
            lr: γ.
            everything: also what is not significant; with a threshold, all that is not 0.
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

    def _piece(self, chunk: int, part: RowPart) -> UpdatePiece | None:
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
        return UpdatePiece(num_rows, Vector(f"rows of chunk {chunk}", payload).all)

    def _blocks(self, run: RowRange, chunk: torch.Tensor, test: Test | None) -> RowPart:
        """The blocks of a run of the rest that are to be sent, taken out of the sum; None for all of them."""
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
        """Those rows of a table that are to be sent, taken out of the sum."""
        numbers, values = self.tables[slot]
        held = parameters[slot.start : slot.stop].view(slot.shape[0], -1)[numbers]
        chosen = test(values, held)
        self.tables.replace(slot, numbers[~chosen], values[~chosen])
        return numbers[chosen], values[chosen]

    def _test(self, lr: float, *, everything: bool) -> Test:
        """Which rows (n, width) of the sum are to be sent, beside those of the parameters: (n,) of bool."""
        if everything:
            return lambda held, parameters: (held != 0).any(1)
        bound = self._exchange.threshold**2
        if self._exchange.relative:
            return lambda held, w: (lr * held).square().mean(1) > bound * w.square().mean(1)
        return lambda held, w: (lr * held).square().mean(1) > bound


def _cut(elements: torch.Tensor, width: int) -> torch.Tensor:
    """As rows (n, width); zeros are added to a last one that is shorter."""
    missing = -len(elements) % width
    return (torch.nn.functional.pad(elements, (0, missing)) if missing else elements).view(-1, width)
