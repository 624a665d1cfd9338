"""Data sets, and who goes through which sample when.

`base.py` the contract; `arrays.py`, `fashion.py`, `caltech101.py` data sets; `plan.py` the order
of samples and its cut among workers; `ledger.py` which of them are in the model.
"""

from gradstream.data.arrays import from_arrays
from gradstream.data.base import BatchRef, Dataset, Ids
from gradstream.data.caltech101 import caltech101
from gradstream.data.fashion import fashion_mnist
from gradstream.data.ledger import Ledger
from gradstream.data.plan import EpochPlan, PartitionPlan, RoundPlan

__all__ = [
    "BatchRef",
    "Dataset",
    "EpochPlan",
    "Ids",
    "Ledger",
    "PartitionPlan",
    "RoundPlan",
    "caltech101",
    "fashion_mnist",
    "from_arrays",
]
