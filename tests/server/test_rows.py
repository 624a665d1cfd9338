"""Rows of chunks: with any edges, the rows cover the vector once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradstream.model.base import Layout
from gradstream.model.rows import merged
from gradstream.server.rows import RowMap, RowPart, RowTable, clipped, joined, pack, row_spec_of, unpack
from gradstream.wire.chunks import ChunkMap


@st.composite
def row_maps(draw: st.DrawFn) -> RowMap:
    """Some tables with any gaps between them, divided into chunks of 64 or 128 elements."""
    tables, at = [], draw(st.integers(0, 100))
    for _ in range(draw(st.integers(0, 3))):
        table = RowTable(at, draw(st.integers(1, 60)), draw(st.integers(1, 40)))
        tables.append(table)
        at = table.stop + draw(st.integers(0, 100))
    elems = max(1, at)
    chunks = ChunkMap(elems, draw(st.sampled_from([64, 128])), draw(st.integers(1, 3)))
    return RowMap(chunks, tables, draw(st.sampled_from([1, 3, 16, 64])))


@settings(max_examples=30)
@given(row_maps())
def test_all_rows_of_a_chunk_are_the_chunk(rows: RowMap) -> None:
    for chunk in range(rows.chunks.num_chunks):
        start, stop = rows.chunks.bounds(chunk)
        every = torch.arange(rows.num_rows(chunk))
        assert rows.elements(chunk, every).tolist() == list(range(stop - start))
        assert rows.num_elems(chunk, every) == stop - start


@settings(max_examples=30)
@given(row_maps(), st.integers(0, 2**32))
def test_rows_of_tables_arrive_where_they_belong(rows: RowMap, seed: int) -> None:
    """The payloads, packed and unpacked and written into their chunks, give the dense gradient."""
    generator = torch.Generator().manual_seed(seed)
    dense, touched = torch.zeros(rows.chunks.elems), []
    for table in rows.tables:
        some = torch.randint(0, table.num_rows, (7,), generator=generator)
        values = torch.randint(1, 9, (7, table.row_elems), generator=generator).float()
        dense[table.start : table.stop].view(table.num_rows, -1).index_add_(0, some, values)
        touched.append(merged(some, values, table.num_rows))
    for chunk in range(rows.chunks.num_chunks):
        if all(run.table < 0 for run in rows.runs(chunk)):
            continue
        start, stop = rows.chunks.bounds(chunk)
        parts = [clipped(run, *touched[run.table]) for run in rows.runs(chunk) if run.table >= 0]
        got, part = torch.zeros(stop - start), joined(parts)
        if len(part.numbers):
            again = unpack(rows, chunk, len(part.numbers), pack(part))
            got[rows.elements(chunk, again.numbers)] = again.values
        assert torch.equal(got, dense[start:stop])


def example() -> RowMap:
    return RowMap(ChunkMap(200, 64, 1), [RowTable(10, 30, 5)], 16)


def test_the_map_on_paper() -> None:
    rows = example()
    assert [(run.first, run.num_rows, run.start, run.stop) for run in rows.runs(0)] == [
        (0, 1, 0, 10),
        (1, 11, 10, 64),
    ]
    assert rows.runs(1)[0].origin == -4  # row 10 of the table is elements 60 to 65 of the vector
    assert rows.elements(1, torch.tensor([0, 1])).tolist() == [0, 1, 2, 3, 4, 5]
    assert [run.row for run in rows.runs(2)] == [
        23,
        10,
    ]  # after the table, the elements without a table continue at number 10
    layout = Layout.of([("bias", (10,)), ("table", (30, 5)), ("more", (40,))], torch.float32, {"table"})
    assert RowMap.of(rows.chunks, row_spec_of(layout, 16)).runs(2) == rows.runs(2)


@pytest.mark.parametrize(
    ("num_rows", "numbers", "values", "says"),
    [
        (0, [0], 10, "0 rows"),
        (900, [0], 10, "900 rows"),
        (2, [3, 3], 10, "do not grow"),
        (2, [3, 2], 10, "do not grow"),
        (2, [-1, 2], 10, "rows -1 to 2"),
        (2, [3, 14], 10, "expected rows from 0 to 13"),
        (2, [3, 4], 9, "11 elements for 2 rows; expected 12"),
        (9, [3, 4], 0, "do not hold the numbers of 9 rows"),
    ],
)
def test_hostile_numbers_are_refused(num_rows: int, numbers: list[int], values: int, says: str) -> None:
    payload = pack(RowPart(torch.tensor(numbers), torch.zeros(values)))
    with pytest.raises(ValueError, match=says):
        unpack(example(), 1, num_rows, payload)
