"""Receipts on the wire, and the minibatches that they name."""

from __future__ import annotations

from gradstream.data.base import BatchRef
from gradstream.wire import v1


def ref_of(receipt: v1.Receipt) -> BatchRef:
    """Returns the minibatch that a receipt names."""
    return BatchRef(receipt.epoch, receipt.partition, receipt.batch, receipt.more + 1)


def receipt_of(ref: BatchRef) -> v1.Receipt:
    """Returns the receipt for a minibatch."""
    return v1.Receipt(epoch=ref.epoch, partition=ref.partition, batch=ref.batch, more=ref.count - 1)
