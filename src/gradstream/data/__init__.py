"""Data sets, and how a run divides their samples among workers.

`base.py` has the interfaces. `arrays.py`, `mapped.py`, `loader.py` and `stream.py` have users' data, `fashion.py` and
`caltech.py` built-in data sets. `plan.py` and `feed.py` order the samples and divide them among workers,
`feed.py` also reads them, `leases.py` assigns minibatches to workers, and `ledger.py` accounts for those in the model.
"""

from gradstream.data.arrays import from_arrays
from gradstream.data.base import BatchRef, Dataset, Ids
from gradstream.data.caltech import caltech101
from gradstream.data.fashion import fashion_mnist
from gradstream.data.feed import QueuePlan
from gradstream.data.ledger import Ledger
from gradstream.data.loader import from_loader
from gradstream.data.mapped import from_dataset
from gradstream.data.plan import EpochPlan, PartitionPlan, RoundPlan
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
