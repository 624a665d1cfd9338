"""The launcher process of a detached run: `python -P -m gradstream._detached RUN`.

In a session of its own it does what `gradstream train` does: it starts the nodes, follows them to the end, and
evaluates the model. Its output goes to `logs/launcher.log`. It takes the lock before it reads the job, so
that the command that starts it returns soon.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradstream.errors import (
    DataError,
    DeadlineError,
    DiskError,
    GradstreamError,
    PeerLostError,
    exit_code,
)
from gradstream.run.launcher_lock import LauncherRecord, launcher_lock
from gradstream.run.local.environment import StopSignals, python_environment, there
from gradstream.run.local.forkserver import log_stream
from gradstream.runtime.storage import disk_remedy
from gradstream.untrusted import escaped

if TYPE_CHECKING:
    from gradstream.job.plan import RunPlan

READY = b"ready\n"
"""What a launcher writes to its standard output once the run has a launcher."""

START_S = 60.0

TAIL_BYTES = 2048


def start_launcher(run_dir: Path, *, cwd: str | None = None) -> None:
    """Starts a launcher. Returns once the run has one: this one, or another that was faster.

    Args:
        run_dir: directory of the run, with its nodes.json.
        cwd: see `Job.cwd`.

    Raises:
        PeerLostError, DeadlineError: the process ended, or did not report in time.
        DiskError: its log cannot be written.
    """
    log = run_dir / "logs" / "launcher.log"
    try:
        log.parent.mkdir(exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DiskError(
            f"{log} cannot be written: {error.strerror}; nothing was started: {disk_remedy(error)}"
        ) from error
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=python_environment({}),
            cwd=there(cwd),
            start_new_session=True,
        )
    finally:
        os.close(output)
    assert process.stdout is not None
    with process.stdout as said:
        answered = bool(select.select([said], [], [], START_S)[0])
        ready = answered and said.readline() == READY
    # If this process outlives the launcher, it has to reap it.
    threading.Thread(target=process.wait, name="detached-launcher", daemon=True).start()
    if ready:
        return
    if not answered:
        raise DeadlineError("launcher", f"did not start within {START_S:g} s; see {log}")
    tail = escaped(log.read_text(errors="replace")[-TAIL_BYTES:], TAIL_BYTES, newlines=True)
    raise PeerLostError("launcher", f"its process did not start; the end of {log}:\n{tail}")


def main(argv: list[str] | None = None) -> int:
    """Runs the launcher to the end of the run and returns its exit status."""
    parser = argparse.ArgumentParser(prog="gradstream._detached", description=__doc__)
    parser.add_argument("run", type=Path)
    arguments = parser.parse_args(argv)
    # print() must not raise when the disk is full.
    sys.stderr = log_stream(2, by_line=True)
    try:
        status = _hold(arguments.run)
    except SystemExit as error:
        status = exit_code(error)
    except BaseException as error:
        traceback.print_exc()
        status = exit_code(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def _hold(run_dir: Path) -> int:
    """Runs the launcher under the lock and returns its exit status. Does nothing if another launcher was faster."""
    events = run_dir / "events.jsonl"
    record = LauncherRecord.here(events_from=events.stat().st_size if events.is_file() else 0)
    with StopSignals() as signals, ExitStack() as stack:
        try:
            stack.enter_context(launcher_lock(run_dir, record))
        except DataError:
            os.write(1, READY)
            return 0
        os.write(1, READY)
        os.dup2(2, 1)  # closes the pipe on which the starting process waits
        sys.stdout = log_stream(1, by_line=True)
        return _launch(run_dir, signals)


def _launch(run_dir: Path, signals: StopSignals) -> int:
    with signals.held():  # a second signal would leave nodes behind
        from gradstream._launch import run_nodes
        from gradstream.run.failures import evaluate, failed_event
        from gradstream.run.followed_events import FollowedEvents
        from gradstream.run.preparation import LaunchOptions

        try:
            plan = _plan(run_dir)
        except GradstreamError as error:
            FollowedEvents(run_dir, None).emit(failed_event(error, "launcher"))
            raise
    run = run_nodes(plan, run_dir, LaunchOptions(detached=signals))
    evaluate(run)
    sys.stdout.write(f"{run}\n")
    return 0


def _plan(run_dir: Path) -> RunPlan:
    """The plan of the run. Its job is read where, and with the arguments with which, the command was typed."""
    from gradstream.job.code import run_kept
    from gradstream.run.result import spec_of_run

    spec = spec_of_run(run_dir)
    with suppress(OSError, ValueError):  # its job may do without
        os.chdir(spec.plain.get("cwd") or ".")
    sys.argv[:] = spec.argv
    run_kept(run_dir)
    return spec.plan(replace(spec.load_again(), run_dir=run_dir))


if __name__ == "__main__":
    sys.exit(main())
