"""The command `gradstream`: finds its subcommands, and turns exceptions of the package into exit codes."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from typing import Any

import click

from gradstream._version import __version__
from gradstream.errors import EXIT_CODES, GradstreamError, exit_code
from gradstream.untrusted.text import open_standard_streams

MODULES = {
    "jobs": "train resume simulate config new demo",
    "machines": "launch join doctor add remove replace",
    "running_jobs": "runs attach status logs stop reshard",
    "results": "report trace evaluate export replay sharpness surface",
    "catalogue": "plugins data check bench",
}
"""The commands of each module of `gradstream.cli.commands`. A new command needs its function and its name."""
COMMANDS = {name: module for module, names in MODULES.items() for name in names.split()}


class CommandGroup(click.Group):
    """A group whose commands are functions of the modules in `MODULES`, which are imported when they are used."""

    def main(self, *args: Any, **named: Any) -> Any:
        """Runs the command line of this process, with the same hash seed as the nodes of its run."""
        open_standard_streams()
        is_process = not args and "args" not in named and sys.executable
        if is_process and os.environ.get("PYTHONHASHSEED", "random") == "random":
            os.environ["PYTHONHASHSEED"] = "0"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        return super().main(*args, **named)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command of this name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gradstream.cli.commands.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a command as click does; an error names the nearest one."""
        known = self.list_commands(ctx)
        near = difflib.get_close_matches(args[0], known, n=1, cutoff=0.5)
        if args[0] not in known and near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; prints an error on stderr, and exits with its `exit_code`."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
            return result
        except GradstreamError as error:
            from gradstream.cli.report import error_text
            from gradstream.untrusted.text import say

            say(error_text(error), ERROR_BYTES)
            ctx.exit(exit_code(error))
        except OSError as error:
            if not _stdout_is_full():
                raise
            from gradstream.untrusted.text import say

            sys.stdout = None  # or Python tries to flush it again at exit
            say(f"stdout: {error.strerror}: what was to be printed is lost, and nothing else")
            ctx.exit(1)
        except KeyboardInterrupt as error:
            from gradstream.untrusted.text import say

            say(str(error) or "interrupted")
            ctx.exit(exit_code(error))


def _stdout_is_full() -> bool:
    """Whether stdout cannot take what was printed. A reader that has gone, EPIPE, is no error."""
    try:
        if sys.stdout is not None:
            os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.errno not in (None, errno.EPIPE)
    return False


ERROR_BYTES = 1 << 17
"""Longest error message to show, in bytes: it may come from another node."""

EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:<4} {means}" for code, means in EXIT_CODES.items())


@click.group(cls=CommandGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradstream")
def main() -> None:
    """Trains one model on many machines that may be slow, far apart, and dying.

    A JOB is a Python file that defines job() or calls gradstream.train(...), or a function that makes
    a job: file.py:function or module:function.

    \b
    Examples:
      gradstream demo                    # see it work
      gradstream new mine                # a job file to begin with
      gradstream train mine.py --workers 4
      gradstream simulate mine.py --workers 64
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the errors of this package say the same
