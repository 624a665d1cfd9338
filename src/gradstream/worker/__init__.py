"""The node that runs a strategy: batches, compute, overlap of exchange with backprop."""

from gradstream.worker.config import WorkerConfig
from gradstream.worker.node import WorkerNode

__all__ = ["WorkerConfig", "WorkerNode"]
