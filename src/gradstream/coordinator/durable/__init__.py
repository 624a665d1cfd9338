"""The coordinator's durable state: a new process continues where a dead one stopped."""

__all__ = ()
