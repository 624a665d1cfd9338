"""Rows: the parts of a chunk that can be sent without the rest of it.

Every chunk is cut into rows, numbered from 0: where it lies in a table (a row-sparse tensor) those of the
table, elsewhere blocks of some elements. Edges of chunks need not meet edges of rows: a row that lies in two
chunks is two rows, a part in each. So chunks stay what they are, the unit of version, order and
de-duplication, and a model's tables need no place of their own::

    flat vector   |  bias, weight   |  table: rows of 5 elements        |
    chunks        [        0        |        1        |        2        ]
    rows of 1                       0 1    2    3    4 5  (0, 5: parts)

A chunk travels whole, or as some of its rows: their numbers (int32, growing), filled up to whole elements,
and then their elements, in one payload. What is made of a payload is checked against this map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradstream.errors import ConfigError
from gradstream.model.base import Layout
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

__all__ = [
    "RowMap",
    "RowPart",
    "RowRange",
    "RowTable",
    "clipped",
    "joined",
    "pack",
    "packed_elems",
    "row_spec_of",
    "unpack",
]

NUMBER = torch.int32
"""A chunk has at most 2²² elements, so as many rows."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """A row-sparse tensor: `num_rows` rows of `row_elems` elements, from `start` of the flat vector on."""

    start: int
    num_rows: int
    row_elems: int

    @property
    def stop(self) -> int:
        """Its end in the flat vector."""
        return self.start + self.num_rows * self.row_elems


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of one kind that follow one another in a chunk.

    Args:
        first: number in the chunk of its first row.
        num_rows: how many.
        start, stop: its elements in the chunk.
        origin: where its first row begins: before `start` where that row begins in the chunk before.
        row_elems: elements of a whole row.
        table: which table; -1 for none.
        row: number in the table of its first row; without a table, where the run begins in the rest: in
            the flat vector without the tables.
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
        numbers: (n,) int64, growing.
        values: their elements, one row after the other.
    """

    numbers: torch.Tensor
    values: torch.Tensor


class RowMap:
    """The rows of every chunk.

    Args:
        chunks: the chunk map.
        tables: in the order of the vector; they do not overlap.
        block_elems: rows of what belongs to no table; a block ends where its chunk or a table begins.
    """

    def __init__(self, chunks: ChunkMap, tables: Sequence[RowTable], block_elems: int) -> None:
        self.chunks = chunks
        self.tables = tuple(tables)
        self.block_elems = block_elems
        self._runs = [tuple(self._cut(chunk)) for chunk in range(chunks.num_chunks)]
        self._columns = [torch.tensor([_column(run) for run in runs]).T.contiguous() for runs in self._runs]

    @classmethod
    def of(cls, chunks: ChunkMap, spec: v1.RowSpec) -> RowMap:
        """As the registered model says. Raises ConfigError where tables do not fit the vector."""
        tables = [RowTable(table.start, table.rows, table.row_elems) for table in spec.tables]
        edges = [edge for table in tables for edge in (table.start, table.stop)]
        if edges != sorted(edges) or any(edge > chunks.elems for edge in edges) or not spec.block_elems:
            raise ConfigError(
                f"the registered model has tables at {edges} of {chunks.elems} elements, and blocks of "
                f"{spec.block_elems}; expected growing places, and at least 1"
            )
        return cls(chunks, tables, spec.block_elems)

    def runs(self, chunk: int) -> tuple[RowRange, ...]:
        """What a chunk consists of, in order."""
        return self._runs[chunk]

    def num_rows(self, chunk: int) -> int:
        """Rows of a chunk."""
        last = self._runs[chunk][-1]
        return last.first + last.num_rows

    def elements(self, chunk: int, numbers: torch.Tensor) -> torch.Tensor:
        """Which elements of a chunk these rows are, one row after the other: (sum of their lengths,) int64.

        Args:
            numbers: (n,) int64, growing, each a row of the chunk.
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
        """How many elements these rows have."""
        return int(self._bounds(chunk, numbers)[1].sum())

    def _bounds(self, chunk: int, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n,) where each row starts in the chunk, and (n,) its length."""
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
    """Those rows of a run's table that lie in it, without what lies in another chunk. Copies nothing.

    Args:
        numbers, values: (n,) and (n, row_elems) of the table, as `TableRows`.
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
    """Rows of a chunk one after the other, given in the order of their numbers."""
    if len(parts) == 1:
        return parts[0]
    return RowPart(torch.cat([part.numbers for part in parts]), torch.cat([part.values for part in parts]))


def row_spec_of(layout: Layout, block_elems: int) -> v1.RowSpec:
    """What the registered model says of a layout's rows."""
    tables = [
        v1.RowSpec.Table(start=slot.start, rows=slot.shape[0], row_elems=slot.row_elems)
        for slot in layout.tables
    ]
    return v1.RowSpec(tables=tables, block_elems=block_elems)


def _number_elems(num_rows: int, dtype: torch.dtype) -> int:
    """How many elements the numbers of so many rows take up."""
    return -(-num_rows * NUMBER.itemsize // dtype.itemsize)


def packed_elems(num_rows: int, num_values: int, dtype: torch.dtype) -> int:
    """Length of the payload of so many rows with so many values."""
    return _number_elems(num_rows, dtype) + num_values


def pack(part: RowPart) -> torch.Tensor:
    """The payload of some rows: numbers, then values. Copies both once."""
    head = _number_elems(len(part.numbers), part.values.dtype)
    payload = part.values.new_empty(head + len(part.values))
    numbers = payload[:head].view(NUMBER)
    numbers[: len(part.numbers)] = part.numbers
    numbers[len(part.numbers) :] = 0
    payload[head:] = part.values
    return payload


def unpack(rows: RowMap, chunk: int, num_rows: int, payload: torch.Tensor) -> RowPart:
    """The rows of a chunk in a payload that a peer has sent. Values are a view of it.

    Args:
        num_rows: as its header says.

    Raises:
        ValueError: says what is wrong: too many rows, one that the chunk has not, numbers that do not grow,
            or a payload of another length.
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
