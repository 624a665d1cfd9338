"""Runs a script with a training loop of its own, as one worker of `gradstream train`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from gradstream.errors import RESUMABLE, GradstreamError, Interrupted, UserCodeError
from gradstream.job.code import run_kept
from gradstream.job.files import traceback_in
from gradstream.job.places import load_module
from gradstream.run.local.ranks import set_environment
from gradstream.run.node import ABORTED, FAILED, OK, Say, say_to, traceback_of
from gradstream.run.node_spec import NodeSpec
from gradstream.run.placement import WorkerPlacement, assign, running
from gradstream.run.remote.address import Address


def main(argv: list[str] | None = None) -> int:
    """Runs the script as `__main__`, as one of the workers, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="gradstream.run.script", description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="file made by the launcher")
    parser.add_argument("--name", required=True, help="worker-0, ...")
    parser.add_argument("--coordinator", required=True, help="its address")
    parser.add_argument("--credentials", required=True, help="file with credentials, made by the launcher")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address to listen on")
    parser.add_argument("--insecure", action="store_true", help="plain text on other interfaces")
    parser.add_argument("--report-fd", type=int, help="file descriptor for reports to the launcher")
    given = parser.parse_args(argv)
    say = say_to(given.report_fd)
    spec = NodeSpec.read(given.spec)
    rank, size = int(given.name.rpartition("-")[2]), int(spec.plain["workers"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    master, own = Address.parse(spec.meeting, "meeting"), Address.parse(given.listen, "--listen")
    set_environment(rank, size, spec.per_machine, (master.host, master.port), own.host)
    network = ["--listen", given.listen, "--credentials", given.credentials]
    network += ["--insecure"] if given.insecure else []
    assign(WorkerPlacement(rank, size, str(given.spec), given.coordinator, network))
    if rank == 0:
        sys.stdout = _Tee(sys.stdout, say)
    sys.argv = [spec.script, *spec.argv[1:]]
    run_kept(Path(spec.run_dir))
    status, session = _run(Path(spec.script), given.name, say), running()
    if status != OK and session is not None and not session.resumable:
        say(begins_again=True)
    return status


def _run(script: Path, name: str, say: Say) -> int:
    try:
        load_module(script, "__main__")
    except Interrupted:
        return RESUMABLE
    except SystemExit as error:
        if error.code not in (None, 0):
            return _failed(UserCodeError(f"{name}: the script ended with status {error.code!r}"), name, say)
    except GradstreamError as error:
        # the run has failed, here or elsewhere, or the script has misused the session
        return _failed(error, name, say)
    except BaseException as error:
        text = traceback_in(script.resolve(), error)
        message = f"{name}: the script raised {type(error).__name__}: {error}"
        return _failed(UserCodeError(message, text), name, say)
    session = running()
    if session is None:
        return OK
    try:
        session.finish()
    except Interrupted:
        return RESUMABLE
    except GradstreamError as error:
        return _failed(error, name, say)
    return OK


def _failed(error: GradstreamError, name: str, say: Say) -> int:
    session = running()
    text = traceback_of(error)
    sys.stderr.write(text)
    if session is not None and session.aborted:
        return ABORTED  # the coordinator has ended the run and knows why
    if session is not None:
        session.fail(error)
    say(error=type(error).__name__, message=str(error), traceback=text)
    return FAILED


class _Tee:
    """Standard output that goes to the launcher too."""

    def __init__(self, log: TextIO, say: Say) -> None:
        self._log = log
        self._say = say

    def write(self, text: str) -> int:
        """Writes to both."""
        self._say(printed=text)
        self._log.write(text)
        self._log.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)
