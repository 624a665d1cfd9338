"""Sparse problems, and updates of a vector that several processes share: what HOGWILD! is made of.

`data.py` samples in compressed rows; `synthetic.py` and `svmlight.py` where they come from; `model.py`
problems whose samples touch few components; `sweep.py` the innermost loop, `ways.py` what one update takes,
`turns.py` who writes next, `atomics.py` the instructions below.
"""

from gradstream.sparse.data import CsrTable, SparseDataset, SparseRows, Sparsity, from_csr, from_ratings
from gradstream.sparse.model import SparseModel, from_samples, linear, matrix_completion
from gradstream.sparse.svmlight import from_svmlight, read_svmlight
from gradstream.sparse.synthetic import synthetic, synthetic_ratings

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
