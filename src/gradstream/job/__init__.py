"""A job: what a user asks for, found by name, validated, and told to other processes."""

__all__ = ()
