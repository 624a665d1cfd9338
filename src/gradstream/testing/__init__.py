"""The public suites that every built-in carrier and strategy passes, for your own ones too."""

from gradstream.testing.endpoints import CHECKS, ConformanceError, MakePair, Pair, check_endpoint, run_check
from gradstream.testing.strategies import (
    BrokenPropertiesError,
    PropertyResult,
    StrategyReport,
    check_strategy,
)
from gradstream.testing.tokens import TokenAudit, Tokens, numbered

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
