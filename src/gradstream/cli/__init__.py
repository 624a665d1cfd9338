"""The command line. Nothing heavy is imported before a command runs: --help answers at once."""

from gradstream.cli.commands import main

__all__ = ["main"]
