"""The command line. Nothing heavy is imported before a command runs: --help answers at once.

The modules of `commands/` hold the commands: see `group.MODULES`.
"""

from gradstream.cli.group import main

__all__ = ["main"]
