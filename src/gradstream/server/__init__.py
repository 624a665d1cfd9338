"""The sharded parameter server: chunk map, aggregation rules, the shard's side and the worker's side."""

__all__ = ()
