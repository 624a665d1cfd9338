"""What a shard does with rows: adds them up, updates them alone, and remembers when each changed last.

An update of some rows has the bits of one of the whole chunk in which all other gradients are 0, for every
update rule that leaves such elements as they are (`optim.skips_zeros`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradstream.server.rows import RowMap, RowPart, packed_elems

__all__ = ["ChangedRows", "Part", "elements_of", "row_sum", "whole"]

Part = torch.Tensor | RowPart
"""What was pushed of a chunk: all elements of it, or some rows."""


class ChangedRows:
    """By chunk and row, the version that changed it last.

    Takes 4 bytes a row, of chunks of which rows alone have ever been changed.

    Args:
        rows: of every chunk.
        dtype: of the elements.
    """

    def __init__(self, rows: RowMap, dtype: torch.dtype) -> None:
        self.rows = rows
        self._dtype = dtype
        self._whole: dict[int, int] = {}  # version that changed all of the chunk last
        self._last: dict[int, torch.Tensor] = {}  # (rows,) of int32

    def note(self, chunk: int, numbers: torch.Tensor | None, version: int) -> None:
        """These rows are what makes this version; None: any might."""
        if numbers is None:
            self._whole[chunk] = version
            return
        if chunk not in self._last:
            self._last[chunk] = torch.full((self.rows.num_rows(chunk),), -1, dtype=torch.int32)
        self._last[chunk][numbers] = version

    def since(self, chunk: int, known: int) -> torch.Tensor | None:
        """Rows that have changed since a version, (n,) int64; None where the whole chunk is no more to send.

        Args:
            known: -1 where nothing of it is.
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
        """Chunks come from elsewhere, a checkpoint: nothing is known of their rows."""
        self._whole, self._last = dict(versions), {}


def elements_of(part: Part) -> torch.Tensor:
    """The elements that were pushed."""
    return part.values if isinstance(part, RowPart) else part


def whole(rows: RowMap, chunk: int, part: Part) -> torch.Tensor:
    """All elements of a chunk: 0 in rows that were not pushed."""
    if not isinstance(part, RowPart):
        return part
    start, stop = rows.chunks.bounds(chunk)
    out = part.values.new_zeros(stop - start)
    out[rows.elements(chunk, part.numbers)] = part.values
    return out


def row_sum(rows: RowMap, chunk: int, parts: Sequence[RowPart], weights: Sequence[float]) -> RowPart:
    """Σ weight·part, summed in the order given. A single part of weight 1 is given back as it is."""
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
