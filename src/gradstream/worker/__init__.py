"""The node that runs a strategy: batches, compute, overlap of exchange with backprop."""

from gradstream.worker.node import WorkerConfig, WorkerNode

__all__ = ["WorkerConfig", "WorkerNode"]
