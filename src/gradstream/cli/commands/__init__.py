"""The subcommands: each module holds the command of its name, and imports nothing heavy at its top."""

__all__ = ()
