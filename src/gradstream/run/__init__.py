"""One run: the plan of its nodes, the nodes as processes or simulated, and the files that they leave."""

__all__ = ()
