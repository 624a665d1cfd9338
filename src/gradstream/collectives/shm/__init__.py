"""Collectives between processes of one host, in place, in shared memory."""

__all__ = ()
