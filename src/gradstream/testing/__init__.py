"""The public suites that every built-in carrier and strategy passes, for your own ones too."""

from gradstream.testing.pieces import ConformanceError, MakePair, Pair
from gradstream.testing.runs import TokenAudit, Tokens, numbered
from gradstream.testing.suites import (
    CHECKS,
    BrokenPropertiesError,
    PropertyResult,
    StrategyReport,
    check_endpoint,
    check_strategy,
    run_check,
)

__all__ = [
    "CHECKS",
    "BrokenPropertiesError",
    "ConformanceError",
    "MakePair",
    "Pair",
    "PropertyResult",
    "StrategyReport",
    "TokenAudit",
    "Tokens",
    "check_endpoint",
    "check_strategy",
    "numbered",
    "run_check",
]
