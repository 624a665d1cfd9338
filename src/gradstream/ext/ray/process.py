"""The command line of gradstream as a process of a Ray actor: `python -m gradstream.ext.ray.process PARENT WORDS…`.

It ends with its actor: the kernel kills it if that is gone, since Ray kills an actor without asking its processes.
"""

from __future__ import annotations

import runpy
import sys

from gradstream.run.local.forkserver import die_with_parent


def main() -> None:
    """Runs the command line that follows the process id of the actor."""
    die_with_parent(int(sys.argv.pop(1)))
    sys.argv[0] = "gradstream"
    runpy.run_module("gradstream", run_name="__main__")


if __name__ == "__main__":
    main()
