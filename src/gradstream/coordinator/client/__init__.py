"""A node's side of the coordinator."""

__all__ = ()
