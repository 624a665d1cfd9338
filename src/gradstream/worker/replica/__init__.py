"""What a strategy sees of a worker: one class for each way of exchange."""

__all__ = ()
