"""Sparse data: samples that touch few features each, as one table in compressed rows (CSR).

Machine code reads the table itself, by sample number, so that a minibatch copies nothing (`SparseRows`). In a
HOGWILD! run the table lies in shared memory, once for all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gradstream.data.arrays import check_ids, checksum_of
from gradstream.errors import DataError
from gradstream.model.base import Batch

MAX_FEATURES = (1 << 31) - 1  # features are int32
FEW_FEATURES, FEATURES_PER_VALUE = 1 << 24, 1024

Array = np.ndarray[Any, Any]


class CsrTable(NamedTuple):
    """Samples in compressed rows: the features and values of sample i are at indptr[i] to indptr[i+1].

    Args:
        indptr: (n+1,) int64.
        indices: (z,) int32, features, ascending in each row.
        values: (z,) float32.
        targets: (n,) float32; classes are 0 and 1.
        scale: (d,) float32: n/d_v, where d_v samples have feature v; 0 if none has. A regulariser of touched
            components alone, times this, equals in expectation the regulariser of all components.
    """

    indptr: Array
    indices: Array
    values: Array
    targets: Array
    scale: Array


class TableSize(NamedTuple):
    """Numbers of samples and of values in a `CsrTable`, known before the table is made."""

    num_samples: int
    num_values: int


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The inputs of a sparse minibatch: samples of a table by number.

    Args:
        table: table of all samples.
        ids: (b,) int64, numbers of the samples.
    """

    table: CsrTable
    ids: Array

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Sparsity:
    """How rarely samples E have components in common, as Niu and others (2011) measure it.

    Args:
        omega: Ω, the most components of a sample.
        delta: Δ, the largest share of samples that have the same component.
        rho: ρ, the largest share of samples that have a component in common with one sample; or a bound of it.
        exact: whether `rho` is exact. Otherwise it is min(1, max_e Σ_{v∈e} d_v/|E|), an upper bound: d_v samples have
            component v.
    """

    omega: int
    delta: float
    rho: float
    exact: bool


class SparseDataset:
    """A data set of sparse samples. Made by `from_csr`, `from_ratings`, `synthetic` and `from_svmlight`.

    Args:
        name: name for messages and records.
        num_features: d.
        build: makes the training table and the held-out table, when they are first read.
        train: size of the training table.
        test: size of the held-out table.
        classes: whether targets are classes.
        checksum: tells data sets of this name apart.
    """

    def __init__(
        self,
        name: str,
        num_features: int,
        build: Callable[[], tuple[CsrTable, CsrTable]],
        *,
        train: TableSize,
        test: TableSize,
        classes: bool = True,
        checksum: str = "",
    ) -> None:
        self.name = name
        self.num_samples = train.num_samples
        self.num_features = num_features
        self.num_test_samples = test.num_samples
        self.classes = classes
        self.checksum = checksum
        self._sizes = {"train": train, "test": test}
        self._build = build

    @cached_property
    def tables(self) -> tuple[CsrTable, CsrTable]:
        """The training table and the held-out table, made when they are first read unless `map` came before."""
        return self._build()

    def batch(self, ids: Array) -> Batch:
        """The samples with these ids, without a copy. Raises DataError for an unknown id."""
        return self._rows(self.tables[0], ids, self.num_samples, "training")

    def test_batch(self, ids: Array) -> Batch:
        """The held-out samples with these ids. Raises DataError for an unknown id."""
        return self._rows(self.tables[1], ids, self.num_test_samples, "test")

    def sparsity(self, *, exact: bool = False) -> Sparsity:
        """Ω, Δ and ρ of the training samples; see `Sparsity`.

        Args:
            exact: whether to compute ρ itself and not an upper bound. That takes time in proportion to Σ_v d_v²,
                where d_v is the number of samples that have component v.
        """
        return _sparsity_of(self.tables[0], exact=exact)

    def shared(self) -> Iterator[tuple[str, int, np.dtype[Any]]]:
        """(name, number of elements, dtype) of each array of both tables, before the tables are made."""
        for part, (samples, values) in self._sizes.items():
            yield f"{part} indptr", samples + 1, np.dtype(np.int64)
            yield f"{part} indices", values, np.dtype(np.int32)
            yield f"{part} values", values, np.dtype(np.float32)
            yield f"{part} targets", samples, np.dtype(np.float32)
            yield f"{part} scale", self.num_features if part == "train" else 0, np.dtype(np.float32)

    def fill(self, places: Mapping[str, Array]) -> None:
        """Makes both tables in memory that `shared` has described. Other processes `map` them afterwards."""
        for array, place in zip((a for table in self.tables for a in table), places.values(), strict=True):
            place[...] = array
        self.map(places)

    def map(self, places: Mapping[str, Array]) -> None:
        """Uses the tables in `places` and drops those in this process's own memory."""
        arrays = list(places.values())
        self.__dict__["tables"] = (CsrTable(*arrays[:5]), CsrTable(*arrays[5:]))
        self._build = _nothing

    def _rows(self, table: CsrTable, ids: Array, num_samples: int, what: str) -> Batch:
        check_ids(ids, num_samples, f"{what} samples of {self.name}")
        targets = table.targets[ids]
        return Batch(
            SparseRows(table, ids), targets.astype(np.int64) if self.classes else targets, len(ids), ids
        )

    def __repr__(self) -> str:
        samples = f"{self.num_samples} + {self.num_test_samples} samples"
        return f"<{self.name}: {samples}, {self.num_features} features>"


def _nothing() -> tuple[CsrTable, CsrTable]:
    raise AssertionError("the tables are there")


def from_csr(
    indptr: Any,
    indices: Any,
    values: Any,
    targets: Any,
    *,
    num_features: int | None = None,
    test: tuple[Any, Any, Any, Any] | None = None,
    classes: bool | None = None,
    name: str = "sparse",
) -> SparseDataset:
    """A data set from arrays in compressed rows, as scipy's `csr_matrix` has them.

    Args:
        indptr: (n+1,) position at which each sample begins.
        indices: (z,) features, from 0, each at most once in a sample, in any order.
        values: (z,) numbers.
        targets: (n,) classes 0 and 1 (or -1 and 1), or numbers.
        num_features: d; None takes the largest feature.
        test: the same four arrays of held-out samples.
        classes: whether targets are classes; None takes them for classes if all are -1, 0 or 1.
        name: name for messages and records.

    Raises:
        DataError: lengths do not fit, a feature is out of range or twice in a sample, a number is not finite.

    Example:
        >>> data = from_csr([0, 2, 3], [0, 5, 2], [1.0, 2.0, 1.0], [0, 1])
        >>> data.num_features, data.sparsity().omega
        (6, 2)
    """
    parts = [(indptr, indices, values, targets), *([] if test is None else [test])]
    arrays = [_checked(part, which) for part, which in zip(parts, ("training", "test"), strict=False)]
    largest = max((int(part[1].max()) + 1 for part in arrays if len(part[1])), default=0)
    d = largest if num_features is None else num_features
    if largest > MAX_FEATURES or not 0 <= d <= MAX_FEATURES:
        raise DataError(f"{name}: {max(largest, d)} features; expected at most {MAX_FEATURES:,}")
    num_values = sum(len(part[1]) for part in arrays)
    if num_features is None and largest > FEW_FEATURES + FEATURES_PER_VALUE * num_values:
        raise DataError(
            f"{name}: feature {largest - 1} in {num_values} values: give num_features if there are so many, "
            "since they take memory"
        )
    if largest > d:
        raise DataError(f"{name}: feature {largest - 1} of num_features={d}: features are numbered from 0")
    labels = np.concatenate([part[3] for part in arrays])
    if classes is None:
        classes = bool(np.isin(labels, (-1, 0, 1)).all())
    tables = [
        table_of(part[0], part[1], part[2], (part[3] > 0) if classes else part[3], d if k == 0 else 0)
        for k, part in enumerate(arrays)
    ]
    if len(tables) == 1:
        tables.append(table_of(np.zeros(1), np.zeros(0, np.int32), np.zeros(0), np.zeros(0), 0))
    sizes = [TableSize(len(table.targets), len(table.values)) for table in tables]
    if not sizes[0].num_samples:
        raise DataError(f"{name} has no samples: indptr has {len(tables[0].indptr)} elements")
    return SparseDataset(
        name,
        d,
        lambda: (tables[0], tables[1]),
        train=sizes[0],
        test=sizes[1],
        classes=classes,
        checksum=checksum_of([array for table in tables for array in table]),
    )


def from_ratings(
    rows: Any,
    columns: Any,
    values: Any,
    shape: tuple[int, int],
    *,
    test: tuple[Any, Any, Any] | None = None,
    name: str = "ratings",
) -> SparseDataset:
    """A data set of known entries of a matrix, for `matrix_completion`. A sample touches its row and column.

    Args:
        rows, columns: (n,) position of each entry.
        values: (n,) the entries.
        shape: rows and columns of the matrix.
        test: the same three arrays of held-out entries.
        name: name for messages and records.

    Raises:
        DataError: lengths do not fit, an entry is outside of the matrix, a number is not finite.
    """

    def incidence(i: Any, j: Any, v: Any) -> tuple[Array, Array, Array, Array]:
        i, j, v = np.asarray(i), np.asarray(j), np.asarray(v)
        if not len(i) == len(j) == len(v):
            raise DataError(
                f"{name}: {len(i)} rows, {len(j)} columns and {len(v)} values; expected the same number of each"
            )
        if len(i) and not (i.min() >= 0 and j.min() >= 0 and i.max() < shape[0] and j.max() < shape[1]):
            raise DataError(f"{name}: an entry is outside of the {shape[0]} × {shape[1]} matrix")
        both = np.stack([i, j + shape[0]], axis=1).astype(np.int32).ravel()
        return 2 * np.arange(len(i) + 1), both, np.ones(2 * len(i), np.float32), v

    held_out = None if test is None else incidence(*test)
    return from_csr(
        *incidence(rows, columns, values), num_features=sum(shape), test=held_out, classes=False, name=name
    )


def _sparsity_of(table: CsrTable, *, exact: bool) -> Sparsity:
    """See `SparseDataset.sparsity`."""
    n, sizes = len(table.targets), np.diff(table.indptr)
    degrees = np.bincount(table.indices, minlength=1)
    reach = np.add.reduceat(np.append(degrees[table.indices], 0), table.indptr[:-1])
    rho = min(1.0, float(np.where(sizes > 0, reach, 0).max(initial=0)) / n)
    if exact:
        order = np.argsort(table.indices, kind="stable")
        samples = np.repeat(np.arange(n), sizes)[order]  # by feature
        ends = np.concatenate([[0], np.cumsum(degrees)])
        most = 0
        for i in range(n):
            features = table.indices[table.indptr[i] : table.indptr[i + 1]]
            met = [samples[ends[v] : ends[v + 1]] for v in features]
            most = max(most, len(np.unique(np.concatenate(met))) if met else 0)
        rho = most / n
    return Sparsity(int(sizes.max(initial=0)), float(degrees.max(initial=0)) / n, rho, exact)


def _checked(part: tuple[Any, Any, Any, Any], which: str) -> tuple[Array, Array, Array, Array]:
    try:
        indptr, indices, values, targets = (np.asarray(array) for array in part)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{which} samples: {error}; expected four arrays of numbers") from error
    kinds = (("indptr", indptr, "iu"), ("indices", indices, "iu"), ("values", values, "iufb"))
    for what, array, kind in (*kinds, ("targets", targets, "iufb")):
        if array.ndim != 1 or (array.dtype.kind not in kind and len(array)):
            raise DataError(
                f"{what} of the {which} samples: {array.ndim} dimensions of {array.dtype}; expected one, of "
                f"{'whole numbers' if kind == 'iu' else 'numbers'}"
            )
    if indptr.ndim != 1 or not len(indptr) or indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise DataError(
            f"indptr of the {which} samples: got {indptr[:4].tolist()}, ..., expected n + 1 numbers that begin at 0 "
            "and never decrease, as in a CSR matrix"
        )
    if not len(indices) == len(values) == indptr[-1] or len(targets) != len(indptr) - 1:
        raise DataError(
            f"{which} samples: {len(targets)} targets, {len(indices)} indices and {len(values)} values; "
            f"expected {len(indptr) - 1} targets and {indptr[-1]} of both others, as indptr says"
        )
    if len(indices) and indices.min() < 0:
        raise DataError(
            f"{which} samples: the indices have {indices.min()}; expected numbers of features, which begin at 0"
        )
    with np.errstate(over="ignore"):  # a number that overflows is not finite, and refused below
        values, targets = (array.astype(np.float32, copy=False) for array in (values, targets))
    if not (np.isfinite(values).all() and np.isfinite(targets).all()):
        raise DataError(
            f"{which} samples: got a value or target that is not finite, expected float32 numbers"
        )
    rows = np.repeat(np.arange(len(targets)), np.diff(indptr))
    order = np.lexsort((indices, rows))
    indices, values = indices[order], values[order]
    twice = (np.diff(indices) == 0) & (np.diff(rows) == 0)
    if twice.any():
        at = int(np.argmax(twice))
        raise DataError(f"{which} sample {rows[at]} has feature {indices[at]} twice: add them up first")
    return indptr, indices, values, targets


def table_of(indptr: Array, indices: Array, values: Array, targets: Array, d: int) -> CsrTable:
    """Makes a table of arrays that fit together; `d` is the number of features, or 0 if `scale` is not needed."""
    n, indices = len(targets), np.asarray(indices, np.int32)
    degrees = np.bincount(indices, minlength=d)[:d]
    scale = np.divide(n, degrees, out=np.zeros(d), where=degrees > 0)
    return CsrTable(
        np.asarray(indptr, np.int64),
        indices,
        np.asarray(values, np.float32),
        np.asarray(targets, np.float32),
        scale.astype(np.float32),
    )
