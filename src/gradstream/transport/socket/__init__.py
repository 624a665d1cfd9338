"""Frames over stream sockets: the `tcp` carrier, and what the `shm` carrier shares with it."""

__all__ = ()
