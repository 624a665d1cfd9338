"""The subcommands, by subject; no module imports anything heavy at its top."""

__all__ = ()
