"""A job: a run as the user asks for it; finds its parts by name, checks it, and describes it as JSON."""

__all__ = ()
