"""What a worker's node needs of its way of exchange."""

__all__ = ()
