"""The command line. Nothing heavy is imported before a command runs: --help answers at once.

Each command is a file of its own in `commands/`, found by its name.
"""

from gradstream.cli.group import main

__all__ = ["main"]
