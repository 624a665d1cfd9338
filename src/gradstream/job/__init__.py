"""A job: a run as the user asks for it. Finds its parts by name, checks them, and describes the job as JSON."""

__all__ = ()
