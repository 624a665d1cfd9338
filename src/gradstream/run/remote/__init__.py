"""Other machines of a run: how they join it, and how to find out why they cannot."""

__all__ = ()
