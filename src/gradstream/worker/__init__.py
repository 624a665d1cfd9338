"""The node that runs a strategy: minibatches, computation, overlap of exchange with backprop."""

from gradstream.worker.config import WorkerConfig
from gradstream.worker.node import WorkerNode

__all__ = ["WorkerConfig", "WorkerNode"]
