"""Sparse problems, and updates of a vector that several processes share, as HOGWILD! makes them.

`data.py` has samples in compressed rows, `random_data.py` makes or reads them. `model.py` has the model of a
sparse problem, `problems.py` has problems. `sweep.py` is the innermost loop, `update_schemes.py` defines which locks an
update takes and which worker writes next, and `updates.py` names the updates.
"""

from gradstream.sparse.data import CsrTable, SparseDataset, SparseRows, Sparsity, from_csr, from_ratings
from gradstream.sparse.model import SparseModel, from_samples
from gradstream.sparse.problems import linear, matrix_completion
from gradstream.sparse.random_data import from_svmlight, read_svmlight, synthetic, synthetic_ratings

__all__ = [
    "CsrTable",
    "SparseDataset",
    "SparseModel",
    "SparseRows",
    "Sparsity",
    "from_csr",
    "from_ratings",
    "from_samples",
    "from_svmlight",
    "linear",
    "matrix_completion",
    "read_svmlight",
    "synthetic",
    "synthetic_ratings",
]
