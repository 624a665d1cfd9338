"""The `shm` carrier: payloads stay in memory that two processes of a host share."""

__all__ = ()
