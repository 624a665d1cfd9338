"""Local steps that can be taken back, for workers that fetch only changed rows.

Such a fetch overwrites some of the worker's parameters. All others must be as the server had them. So a local step
keeps the elements that it overwrites, and the worker puts them back before it swaps in the next fetch. Of a
row-sparse tensor ("table") these are the rows that the step touches; of everything else ("the rest") one copy is
kept for each period.
"""

from __future__ import annotations

import torch

from gradstream.model.base import Layout, Slot
from gradstream.model.rows import RowGradient
from gradstream.worker.replica.updater import Factors


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
            view = _rows_of(table, parameters)
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
            _rows_of(table, parameters)[numbers] = before


def _factor_at(factors: Factors, place: int) -> float:
    return next(factor for start, stop, factor in factors if start <= place < stop)


def _rows_of(table: Slot, flat: torch.Tensor) -> torch.Tensor:
    return flat[table.start : table.stop].view(table.shape[0], table.row_elems)
