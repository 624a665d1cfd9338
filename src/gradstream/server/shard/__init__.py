"""A shard: the process that holds a part of the parameters."""

__all__ = ()
