"""Event records, and the counters and stopwatches behind them, which every layer may use."""

__all__ = ()
