"""The version of this package: what nodes of one run compare, and pip shows."""

__version__ = "0.1.0"
