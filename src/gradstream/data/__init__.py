"""Data sets, and who goes through which sample when.

`base.py` the contract; `arrays.py`, `mapped.py`, `loader.py`, `stream.py` the user's data, `fashion.py`
and `caltech.py` ours; `plan.py` and `queue_plan.py` the order of samples and its cut among workers,
`feed.py` who reads them; `ledger.py` which of them are in the model.
"""

from gradstream.data.arrays import from_arrays
from gradstream.data.base import BatchRef, Dataset, Ids
from gradstream.data.caltech import caltech101
from gradstream.data.fashion import fashion_mnist
from gradstream.data.ledger import Ledger
from gradstream.data.loader import from_loader
from gradstream.data.mapped import from_dataset
from gradstream.data.plan import EpochPlan, PartitionPlan, RoundPlan
from gradstream.data.queue_plan import QueuePlan
from gradstream.data.stream import from_stream

__all__ = [
    "BatchRef",
    "Dataset",
    "EpochPlan",
    "Ids",
    "Ledger",
    "PartitionPlan",
    "QueuePlan",
    "RoundPlan",
    "caltech101",
    "fashion_mnist",
    "from_arrays",
    "from_dataset",
    "from_loader",
    "from_stream",
]
