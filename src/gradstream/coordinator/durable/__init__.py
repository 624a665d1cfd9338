"""The coordinator's durable state: a new process goes on where one that died has stopped."""

__all__ = ()
