"""The sharded parameter server: aggregation rules, the shards, and the workers' clients."""

__all__ = ()
