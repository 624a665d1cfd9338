"""Event records, and the accounts that they are made from: what every layer may report to."""

__all__ = ()
