"""Through one vector in memory that all workers of a machine write."""
