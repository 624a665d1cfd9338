"""The `grpc` carrier."""

__all__ = ()
