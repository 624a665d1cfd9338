"""Local steps that can be taken back, where only what has changed is fetched.

A fetch of what has changed lands on top of the parameters that the worker has, and says nothing of the rest
of them: that must be as the server had it. So what a local step overwrites is kept, and put back before the
next fetch is adopted. Of a table these are the rows that the step has touched; of all else a copy, once a
period.
"""

from __future__ import annotations

import torch

from gradstream.model.base import Layout, Slot
from gradstream.model.rows import RowGradient
from gradstream.worker.replica.updater import Factors

__all__ = ["OwnSteps"]


class OwnSteps:
    """The local steps since a fetch was adopted. Arithmetic alone.

    Args:
        layout: of the parameters.
        kept: (n,) for what the steps overwrite of what is in no table.
        scales: factors of the rate.
    """

    def __init__(self, layout: Layout, kept: torch.Tensor, scales: Factors) -> None:
        self._tables = [(table, _factor_at(scales, table.start)) for table in layout.tables]
        # What is in no table: in the vector, in the rest alone, and the factor of its rate.
        self._places: list[tuple[slice, slice, float]] = []
        at = 0
        for slot in layout.slots:
            if not slot.row_sparse:
                size, scale = slot.stop - slot.start, _factor_at(scales, slot.start)
                self._places.append((slice(slot.start, slot.stop), slice(at, at + size), scale))
                at += size
        self._rest = kept
        self._rest_kept = False
        self._rows: list[
            tuple[Slot, torch.Tensor, torch.Tensor]
        ] = []  # table, numbers, what they held before

    def step(self, parameters: torch.Tensor, rest: torch.Tensor, rows: RowGradient, lr: float) -> None:
        """W ← w - lr·scale·g, of all elements of the rest and of the touched rows alone.

        Args:
            parameters: (E,), changed.
            rest: gradient of what is in no table, packed.
            rows: gradient of the tables.
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
        """Makes parameters (E,) what they were before the first of these steps, bit for bit."""
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
