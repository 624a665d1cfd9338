"""Rows: parts of a chunk that can be sent without the rest of the chunk.

Every chunk is divided into rows, numbered from 0. Inside a table (a row-sparse tensor) they are the rows of the
table; elsewhere they are blocks of a fixed number of elements. A row of a table may lie in two chunks: then each
chunk has one row for its part. So chunks remain the unit of version, order and de-duplication, and a model's tables
need no special place in the vector::

    flat vector   |  bias, weight   |  table: rows of 5 elements        |
    chunks        [        0        |        1        |        2        ]
    rows of 1                       0 1    2    3    4 5  (0, 5: parts)

A chunk is sent whole, or as some of its rows. The payload has the numbers of the rows (int32, increasing), padded to
whole elements, and then the elements of the rows. The receiver checks a payload against this map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradstream.errors import ConfigError
from gradstream.model.base import Layout
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

# ---- rows --------------------------------------------------------------------------------

NUMBER = torch.int32
"""Type of row numbers in a payload: a chunk has at most 2²² elements, so at most 2²² rows."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """A row-sparse tensor: `num_rows` rows of `row_elems` elements, which begin at `start` of the flat vector."""

    start: int
    num_rows: int
    row_elems: int

    @property
    def stop(self) -> int:
        """The end of the table in the flat vector."""
        return self.start + self.num_rows * self.row_elems


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one table, or of no table, in a chunk.

    Args:
        first: number of the first row in the chunk.
        num_rows: number of rows.
        start, stop: bounds of the rows in the chunk, in elements.
        origin: element at which the first row begins; before `start` where it begins in the previous chunk.
        row_elems: elements of a whole row.
        table: number of the table; -1 for none.
        row: number of the first row in its table. Without a table: the position of `start` in the flat vector
            without its tables, in elements.
    """

    first: int
    num_rows: int
    start: int
    stop: int
    origin: int
    row_elems: int
    table: int
    row: int


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a chunk.

    Args:
        numbers: (n,) int64, increasing.
        values: elements of the rows, one row after the other.
    """

    numbers: torch.Tensor
    values: torch.Tensor


class RowMap:
    """Knows how each chunk is divided into rows: how many it has, and where each one lies.

    Args:
        chunks: division of the flat vector into chunks.
        tables: the row-sparse tensors, in the order of the flat vector; they do not overlap.
        block_elems: elements of a row outside of tables. Such a row is shorter at the end of its chunk and
            before a table.
    """

    def __init__(self, chunks: ChunkMap, tables: Sequence[RowTable], block_elems: int) -> None:
        self.chunks = chunks
        self.tables = tuple(tables)
        self.block_elems = block_elems
        self._runs = [tuple(self._cut(chunk)) for chunk in range(chunks.num_chunks)]
        self._columns = [torch.tensor([_column(run) for run in runs]).T.contiguous() for runs in self._runs]

    @classmethod
    def of(cls, chunks: ChunkMap, spec: v1.RowSpec) -> RowMap:
        """The row map of the registered model. Raises ConfigError if its tables do not fit the vector."""
        tables = [RowTable(table.start, table.rows, table.row_elems) for table in spec.tables]
        edges = [edge for table in tables for edge in (table.start, table.stop)]
        if edges != sorted(edges) or any(edge > chunks.elems for edge in edges) or not spec.block_elems:
            raise ConfigError(
                f"the registered model has tables with the edges {edges} in {chunks.elems} elements, and blocks of "
                f"{spec.block_elems} elements; expected increasing edges inside the vector, and at least 1 element"
            )
        return cls(chunks, tables, spec.block_elems)

    def runs(self, chunk: int) -> tuple[RowRange, ...]:
        """The row ranges of a chunk, in order."""
        return self._runs[chunk]

    def num_rows(self, chunk: int) -> int:
        """Number of rows of a chunk."""
        last = self._runs[chunk][-1]
        return last.first + last.num_rows

    def elements(self, chunk: int, numbers: torch.Tensor) -> torch.Tensor:
        """Positions of the elements of some rows in their chunk, one row after the other: (sum of lengths,) int64.

        Args:
            chunk: number of the chunk.
            numbers: (n,) int64, increasing: rows of the chunk.
        """
        starts, lengths = self._bounds(chunk, numbers)
        if not len(numbers):
            return starts
        width = int(lengths[0])
        if width == 1 and bool((lengths == 1).all()):
            return starts
        if bool((lengths == width).all()):
            return (starts[:, None] + torch.arange(width)).flatten()
        before = lengths.cumsum(0) - lengths
        return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))

    def num_elems(self, chunk: int, numbers: torch.Tensor) -> int:
        """Number of elements of some rows."""
        return int(self._bounds(chunk, numbers)[1].sum())

    def _bounds(self, chunk: int, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The start of each row in the chunk, (n,), and its length, (n,)."""
        first, start, stop, origin, row_elems = self._columns[chunk]
        if len(first) > 1:
            at = torch.searchsorted(first, numbers, right=True) - 1
            first, start, stop, origin, row_elems = (
                column[at] for column in (first, start, stop, origin, row_elems)
            )
        begin = origin + (numbers - first) * row_elems
        end = torch.minimum(begin + row_elems, stop)
        begin = torch.maximum(begin, start)
        return begin, end - begin

    def _cut(self, chunk: int) -> Iterable[RowRange]:
        lower, upper = self.chunks.bounds(chunk)
        first = 0
        edges = [lower, upper]
        for table in self.tables:
            edges += [edge for edge in (table.start, table.stop) if lower < edge < upper]
        for start, stop in pairwise(sorted(set(edges))):
            index = next((i for i, t in enumerate(self.tables) if t.start <= start < t.stop), -1)
            if index >= 0:
                table = self.tables[index]
                row, width = (start - table.start) // table.row_elems, table.row_elems
                origin = table.start + row * width
            else:
                row = start - sum(t.stop - t.start for t in self.tables if t.stop <= start)
                origin, width = start, self.block_elems
            num_rows = -(-(stop - origin) // width)
            yield RowRange(first, num_rows, start - lower, stop - lower, origin - lower, width, index, row)
            first += num_rows


def _column(run: RowRange) -> list[int]:
    return [run.first, run.start, run.stop, run.origin, run.row_elems]


def clipped(run: RowRange, numbers: torch.Tensor, values: torch.Tensor) -> RowPart:
    """The rows of a table that lie in a row range of a chunk, without elements of other chunks. Copies nothing.

    Args:
        run: the row range.
        numbers, values: (n,) and (n, row_elems): rows of the whole table, as in `TableRows`.
    """
    edges = torch.tensor([run.row, run.row + run.num_rows])
    low, high = torch.searchsorted(numbers, edges).tolist()
    own = numbers[low:high] - run.row
    flat = values[low:high].reshape(-1)
    if high > low:
        head = run.start - run.origin if int(own[0]) == 0 else 0
        over = run.origin + run.num_rows * run.row_elems - run.stop
        tail = over if int(own[-1]) == run.num_rows - 1 else 0
        flat = flat[head : len(flat) - tail]
    return RowPart(own + run.first, flat)


def joined(parts: Sequence[RowPart]) -> RowPart:
    """Joins parts of a chunk, given in the order of their row numbers."""
    if len(parts) == 1:
        return parts[0]
    return RowPart(torch.cat([part.numbers for part in parts]), torch.cat([part.values for part in parts]))


def row_spec_of(layout: Layout, block_elems: int) -> v1.RowSpec:
    """The description of a layout's rows in the registered model."""
    tables = [
        v1.RowSpec.Table(start=slot.start, rows=slot.shape[0], row_elems=slot.row_elems)
        for slot in layout.tables
    ]
    return v1.RowSpec(tables=tables, block_elems=block_elems)


def _number_elems(num_rows: int, dtype: torch.dtype) -> int:
    """Elements that row numbers take up in a payload."""
    return -(-num_rows * NUMBER.itemsize // dtype.itemsize)


def packed_elems(num_rows: int, num_values: int, dtype: torch.dtype) -> int:
    """Length of the payload of this number of rows and values, in elements."""
    return _number_elems(num_rows, dtype) + num_values


def pack(part: RowPart) -> torch.Tensor:
    """Makes the payload of some rows: numbers, then values. Copies both once."""
    head = _number_elems(len(part.numbers), part.values.dtype)
    payload = part.values.new_empty(head + len(part.values))
    numbers = payload[:head].view(NUMBER)
    numbers[: len(part.numbers)] = part.numbers
    numbers[len(part.numbers) :] = 0
    payload[head:] = part.values
    return payload


def unpack(rows: RowMap, chunk: int, num_rows: int, payload: torch.Tensor) -> RowPart:
    """Reads the rows of a chunk from a peer's payload. The values are a view of the payload.

    Args:
        rows: the row map.
        chunk: number of the chunk.
        num_rows: number of rows by the header.
        payload: the payload.

    Raises:
        ValueError: too many rows, a row that the chunk does not have, numbers that do not increase, or a payload
            of another length. The message says which.
    """
    if not 0 < num_rows <= rows.num_rows(chunk):
        raise ValueError(f"{num_rows} rows; expected 1 to {rows.num_rows(chunk)}")
    head = _number_elems(num_rows, payload.dtype)
    if len(payload) < head:
        raise ValueError(f"{len(payload)} elements, which do not hold the numbers of {num_rows} rows")
    numbers = payload[:head].view(NUMBER)[:num_rows].to(torch.int64)
    if int(numbers[0]) < 0 or int(numbers[-1]) >= rows.num_rows(chunk):
        raise ValueError(
            f"rows {int(numbers[0])} to {int(numbers[-1])}; expected rows from 0 "
            f"to {rows.num_rows(chunk) - 1}"
        )
    if not bool((numbers[1:] > numbers[:-1]).all()):
        raise ValueError("row numbers that do not grow; expected each row once, in growing order")
    expected = head + rows.num_elems(chunk, numbers)
    if len(payload) != expected:
        raise ValueError(f"{len(payload)} elements for {num_rows} rows; expected {expected}")
    return RowPart(numbers, payload[head:])


# ---- row store ---------------------------------------------------------------------------
# Rows on a shard: their sums, and the version in which each row changed last.
#
# A shard can apply an update to the rows of a push alone. That update has the bits of an update of the whole chunk
# with gradient 0 in all other rows, for every update rule that leaves such elements unchanged
# (`optim.base.skips_zeros`).

Part = torch.Tensor | RowPart
"""The content of one chunk of a push: all elements of the chunk, or some rows."""


class ChangedRows:
    """Remembers for each row of each chunk the version that changed it last.

    It takes 4 bytes a row, for the chunks of which single rows were ever updated.

    Args:
        rows: the rows of every chunk.
        dtype: element type of the parameters.
    """

    def __init__(self, rows: RowMap, dtype: torch.dtype) -> None:
        self.rows = rows
        self._dtype = dtype
        self._whole: dict[int, int] = {}  # by chunk: the last version that may have changed every row
        self._last: dict[int, torch.Tensor] = {}  # by chunk: (rows,) int32, the last version of each row

    def note(self, chunk: int, numbers: torch.Tensor | None, version: int) -> None:
        """Notes that a version changes these rows of a chunk; None stands for all rows."""
        if numbers is None:
            self._whole[chunk] = version
            return
        if chunk not in self._last:
            self._last[chunk] = torch.full((self.rows.num_rows(chunk),), -1, dtype=torch.int32)
        self._last[chunk][numbers] = version

    def since(self, chunk: int, known: int) -> torch.Tensor | None:
        """The rows that have changed after a version, (n,) int64; None if the whole chunk is no longer to send.

        Args:
            chunk: number of the chunk.
            known: the version that the reader has; -1 for none.
        """
        if known < self._whole.get(chunk, 0):
            return None
        if chunk not in self._last:
            return torch.empty(0, dtype=torch.int64)
        numbers = torch.nonzero(self._last[chunk] > known).flatten()
        start, stop = self.rows.chunks.bounds(chunk)
        elems = packed_elems(len(numbers), self.rows.num_elems(chunk, numbers), self._dtype)
        return None if elems >= stop - start else numbers

    def restored(self, versions: Mapping[int, int]) -> None:
        """Takes note that a checkpoint was loaded: any row may have changed in these versions, given by chunk."""
        self._whole, self._last = dict(versions), {}


def elements_of(part: Part) -> torch.Tensor:
    """The elements that were pushed."""
    return part.values if isinstance(part, RowPart) else part


def row_sum(rows: RowMap, chunk: int, parts: Sequence[RowPart], weights: Sequence[float]) -> RowPart:
    """Σ weight·part, summed in the order given. A single part of weight 1 is returned as it is."""
    if len(parts) == 1:
        part = parts[0]
        return part if weights[0] == 1.0 else RowPart(part.numbers, part.values * weights[0])
    numbers = torch.unique(torch.cat([part.numbers for part in parts]))
    elements = rows.elements(chunk, numbers)
    total = parts[0].values.new_zeros(len(elements))
    for part, weight in zip(parts, weights, strict=True):
        at = torch.searchsorted(elements, rows.elements(chunk, part.numbers))
        total[at] = total[at].add_(part.values, alpha=weight)
    return RowPart(numbers, total)
