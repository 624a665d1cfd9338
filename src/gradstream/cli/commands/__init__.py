"""The subcommands, by what they are about; no module imports anything heavy at its top."""

__all__ = ()
