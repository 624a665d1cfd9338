"""Row-sparse gradients: a minibatch uses a hundred rows of a table that has a million.

The model says which tensors are *row-sparse*: `nn.Embedding(..., sparse=True)` in PyTorch, names passed to
`from_functions`. From the backward pass to the update rule on the shard, the gradient of such a tensor is a list
of row numbers and their values. No step reads or writes the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradstream.errors import GradientError
from gradstream.model.base import Slot


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a row-sparse array that have a gradient, as `gradients` of `from_functions` returns them.

    Args:
        numbers: (n,) integers, indices of rows along the first axis. Values of a repeated row are added up.
        values: (n, ...) gradients of these rows, in the parameter's dtype.
    """

    numbers: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


TableRows = tuple[torch.Tensor, torch.Tensor]
"""Row numbers (n,), int64, ascending, each once; and their values (n, row_elems)."""


def merged(numbers: torch.Tensor, values: torch.Tensor, num_rows: int) -> TableRows:
    """Rows in ascending order, each once. Values of a repeated row are added up in the order given.

    Args:
        numbers: (n,) int64, from 0 to num_rows - 1.
        values: (n, row_elems).
    """
    if len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all()):
        return numbers, values
    size = (num_rows, values.shape[1])
    whole = torch.sparse_coo_tensor(numbers[None], values, size, check_invariants=False).coalesce()
    return whole.indices()[0], whole.values()


class RowGradient:
    """Collects the gradients of a model's row-sparse tensors, of one minibatch or summed over several.

    Args:
        tables: the row-sparse tensors.
        dtype: dtype of their elements.
    """

    def __init__(self, tables: Sequence[Slot], dtype: torch.dtype) -> None:
        self.tables = tuple(tables)
        self._dtype = dtype
        self._rows: dict[str, list[TableRows]] = {slot.name: [] for slot in tables}

    def __getitem__(self, table: Slot) -> TableRows:
        """The rows of a table that have a gradient."""
        parts = self._rows[table.name]
        if len(parts) != 1:
            none = (torch.empty(0, dtype=torch.int64), torch.empty(0, table.row_elems, dtype=self._dtype))
            numbers, values = map(torch.cat, zip(*(parts or [none]), strict=True))
            parts[:] = [merged(numbers, values, table.shape[0])]
        return parts[0]

    def add(self, table: Slot, numbers: torch.Tensor, values: torch.Tensor, weight: float = 1.0) -> None:
        """Adds weight · rows. With weight 1 they are not copied.

        Args:
            numbers: (n,) integers in any order, with repetitions.
            values: (n, ...) elements of these rows.

        Raises:
            GradientError: a row number is out of range.
        """
        if not len(numbers):
            return
        numbers = numbers.to(torch.int64)
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= table.shape[0]:
            raise GradientError(
                f"gradient of {table.name!r} has row {low if low < 0 else high}; expected rows from 0 to "
                f"{table.shape[0] - 1}, along the first axis of {table.shape}: check the indexes in the minibatch"
            )
        flat = values.reshape(len(numbers), table.row_elems)
        rows = merged(numbers, flat, table.shape[0])
        self._rows[table.name].append(rows if weight == 1.0 else (rows[0], rows[1] * weight))

    def replace(self, table: Slot, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces all rows of a table. Numbers must be ascending, each once."""
        self._rows[table.name] = [(numbers, values)]

    def add_all(self, other: RowGradient, weight: float = 1.0) -> None:
        """Adds weight · another gradient of the same tables."""
        for table in self.tables:
            self.add(table, *other[table], weight)

    def scale(self, factor: float) -> None:
        """Multiplies all values."""
        for table in self.tables:
            numbers, values = self[table]
            self.replace(table, numbers, values * factor)

    def clamp(self, bound: float) -> None:
        """Clips each value to [-bound, bound]."""
        for table in self.tables:
            numbers, values = self[table]
            self.replace(table, numbers, values.clamp(-bound, bound))

    def values(self) -> Iterator[torch.Tensor]:
        """The values of each table, (n, row_elems)."""
        for table in self.tables:
            yield self[table][1]

    @property
    def num_rows(self) -> int:
        """Number of rows that have a gradient, in all tables."""
        return sum(len(self[table][0]) for table in self.tables)
