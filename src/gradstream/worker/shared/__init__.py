"""The shared-memory topology: all workers of a machine write one vector."""
