"""A worker's side of the parameter server."""

__all__ = ()
