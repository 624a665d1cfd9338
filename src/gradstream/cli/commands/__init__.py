"""The commands: each module holds the one of its own name, and imports nothing heavy at its top."""

__all__ = ()
