"""The virtual network of a simulation, and its endpoints."""

__all__ = ()
