"""One run: the plan of its nodes, the nodes as processes or simulated, and what they leave behind."""

__all__ = ()
