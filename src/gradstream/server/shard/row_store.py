"""Rows on a shard: their sums, and the version in which each row changed last.

A shard can apply an update to the rows of a push alone. That update has the bits of an update of the whole chunk
with gradient 0 in all other rows, for every update rule that leaves such elements unchanged (`optim.skips_zeros`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradstream.server.rows import RowMap, RowPart, packed_elems

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
