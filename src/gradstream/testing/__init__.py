"""Public: conformance suites that the house's own carriers pass, and anybody's can."""

from gradstream.testing.endpoints import CHECKS, ConformanceError, MakePair, Pair, check_endpoint, run_check

__all__ = ["CHECKS", "ConformanceError", "MakePair", "Pair", "check_endpoint", "run_check"]
