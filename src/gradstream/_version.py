"""The version of this package: nodes of one run compare it, and pip shows it."""

__version__ = "0.1.0"
