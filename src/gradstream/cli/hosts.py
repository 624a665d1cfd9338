"""Runs on machines that ssh reaches, for the commands `launch`, `attach`, `status`, `logs` and `stop`."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gradstream.errors import RESUMABLE, ConfigError
from gradstream.ext.ssh.data_delivery import DataDelivery
from gradstream.ext.ssh.fleet import Fleet
from gradstream.ext.ssh.host import NO_CONNECTION, HostError, SshHost, lines_of
from gradstream.ext.ssh.places import inspect
from gradstream.ext.ssh.run_files import collect, take_back
from gradstream.job.sources import sources_of
from gradstream.run.files import HOSTS
from gradstream.run.launches import DATA, Launch, is_sealed, runs
from gradstream.run.records import write_spec
from gradstream.run.result import described
from gradstream.untrusted import say, show

LEFT_S = 10.0
"""Longest wait for an ssh client to exit after its output has ended."""

FIRST_S = 10.0
"""Longest wait for the first machine's process to end, once another one has failed before the first step."""


def fleet_of(run: Path) -> Fleet:
    """The machines of a run. Raises ConfigError if it is on none."""
    fleet = Fleet.of(run)
    if fleet is None:
        raise ConfigError(
            f"{run} has no {HOSTS}: the run is over and collected, or `gradstream launch --hosts` did not start it; of "
            "other runs, `gradstream runs` shows the states, and RUN/logs has the logs"
        )
    return fleet


def adopt(run: Path) -> None:
    """Makes commands trust a run folder from elsewhere, as it is now, and prints what they will run.

    Raises:
        ConfigError: this user made the run, or there is no such folder.
    """
    launch = Launch.at(run)
    if os.path.lexists(run / HOSTS):
        if launch.hosts() is not None:
            raise ConfigError(f"{run} is known here: leave --adopt out")
        fleet = Fleet.said_in(run)
        fleet.keep(run, {})
        say(f"{run}: commands run {shlex.join([*fleet.ssh, '…'])} from now on, for {', '.join(fleet.names)}")
        return
    spec = described(run)
    if launch.is_known or is_sealed(run, spec):
        raise ConfigError(f"{run} is known here: leave --adopt out")
    write_spec(dataclasses.replace(spec, run_dir=str(run.resolve())), run)
    if not is_sealed(run, described(run)):
        raise ConfigError(f"{run} was not adopted: see the message above")
    say(f"{run}: resume, evaluate and replay run {runs(spec)} from now on")


def launch_on(
    fleet: Fleet, run: Path, job: Path, more: Sequence[Path], data: Path | None, *, detach: bool
) -> None:
    """Checks the machines, brings files, starts the run, and follows it.

    Raises:
        HostError: a machine cannot take part. Nothing is left on any machine.
        ConfigError: files are missing, or there is a run of that name that cannot continue.
    """
    files = sources_of(job, more)
    goes_on = _check_earlier(run)
    fleet.keep(run, files)
    try:
        warnings = inspect(fleet)
    except BaseException:
        _forget_here(run)
        raise
    for name, warning in warnings.items():
        if warning:
            say(f"{name}: {warning}")
    try:
        say(f"{len(fleet.names)} machines are ready; {len(files)} files to bring")
        fleet.send(files)
        if goes_on:
            say(f"{run} goes on from its newest checkpoint; another --name begins anew")
            take_back(fleet, run)
        if data is not None:
            Launch.at(run).write(DATA, DataDelivery(fleet, say).bring(data))
        fleet.start()
    except BaseException:
        _forget(fleet, run)
        raise
    if detach:
        say(f"the run goes on without this terminal: gradstream attach {run}, gradstream stop {run}")
        return
    sys.exit(follow(fleet, run, starts=True))


def _check_earlier(run: Path) -> bool:
    """Whether there is an earlier start of this run to continue. Raises ConfigError if it cannot be continued."""
    if not run.exists():
        return False
    from gradstream.checkpoint import newest
    from gradstream.run.result import FINAL_MODEL
    from gradstream.runtime.storage import DiskStorage

    if (run / HOSTS).is_file():
        reason = (
            f"goes on: gradstream attach {run}, gradstream stop {run}; if its first machine is gone for good, remove "
            f"{run / HOSTS}"
        )
    elif not (run / "run.json").is_file():
        reason = "is there, and is no run; take another --name"
    elif (run / FINAL_MODEL).is_file():
        reason = "has finished; take another --name"
    elif newest(DiskStorage(run), lambda error: say(f"not used: {error}")) is None:
        reason = "has no checkpoint from which it could go on; take another --name, or remove it"
    else:
        return True
    raise ConfigError(f"{run} {reason}")


def follow(fleet: Fleet, run: Path, *, starts: bool = False) -> int:
    """Shows the run until its end, and brings its results. Returns its exit status.

    Ctrl-C leaves the run alone.

    Args:
        fleet: its machines.
        run: its local folder.
        starts: whether it was started just now: if a machine then fails before the first step, all are stopped.

    Raises:
        HostError: a machine could not start; or the connection to the first one was lost.
    """
    first, *others = fleet.machines
    begun, failed = threading.Event(), list[str]()
    if not starts:
        begun.set()
    shown = _started(fleet.followed(first))
    watched = [_watch(fleet, run, host, begun, failed, shown) for host in others]
    try:
        assert shown.stdout is not None
        for line in lines_of(shown.stdout):
            if line.startswith("step "):
                begun.set()
            say(_as_here(line, fleet, run))
        try:
            status = shown.wait(LEFT_S)  # its output has ended
        except subprocess.TimeoutExpired:
            status = NO_CONNECTION
    except KeyboardInterrupt:
        say(f"the run goes on: gradstream attach {run}, gradstream stop {run}")
        return 130
    finally:
        for process in (shown, *watched):
            process.kill()
    if not begun.is_set() and (failed or (status > 0 and status != NO_CONNECTION and not fleet.has_begun())):
        _forget(fleet, run)
        if status in (-signal.SIGKILL, NO_CONNECTION):
            raise HostError("\n".join(failed))
        for text in failed:
            say(text)
        return status  # of the first machine, which reports what is wrong with the job
    if status == NO_CONNECTION:
        raise HostError(f"{first.name}: the connection was lost; the run goes on: gradstream attach {run}")
    finish(Fleet.of(run) or fleet, run)  # machines may have come and gone meanwhile
    if status == RESUMABLE:
        say(f"stopped, and a checkpoint is in {run}: the same `gradstream launch --hosts` goes on from it")
    return status


def finish(fleet: Fleet, run: Path) -> None:
    """Brings the results of the run, and removes its folders on the machines."""
    lacking = collect(fleet, run)
    left = fleet.clean()
    (run / HOSTS).unlink()
    for line in [*lacking, *left]:
        say(line)
    say(f"collected in {run}" + ("" if left else f"; nothing is left on {', '.join(fleet.names)}"))


def stop(fleet: Fleet, run: Path, *options: str, wait_s: float) -> None:
    """Ends the run with a checkpoint, brings its results, and cleans up."""
    say(f"{fleet.hosts[0]}: {_as_here(fleet.stop(*options, wait_s=wait_s), fleet, run)}")
    finish(fleet, run)


def show_states(fleet: Fleet) -> None:
    """Prints a line for each machine."""
    width = max(map(len, fleet.hosts))
    for name, state in fleet.states().items():
        show(f"{name:{width}}  {state}")
    if free := len(fleet.hosts) - len(fleet.names):
        show(f"room for {free} more: gradstream add")


def show_logs(fleet: Fleet, only: str | None) -> None:
    """Prints the log of each machine, or of one. Raises HostError for missing logs, after printing the others."""
    hosts = [host for host in fleet.machines if only in (None, host.name)]
    if not hosts:
        raise ConfigError(f"the run has no machine {only!r}; expected one of {', '.join(fleet.names)}")
    lacking = list[str]()
    for host in hosts:
        if only is None:
            show(f"==> {host.name}")
        try:
            for line in fleet.log(host):
                show(line)
        except HostError as error:
            lacking.append(str(error))
    if lacking:
        raise HostError("\n".join(lacking))


def _watch(
    fleet: Fleet,
    run: Path,
    host: SshHost,
    begun: threading.Event,
    failed: list[str],
    shown: subprocess.Popen[bytes],
) -> subprocess.Popen[bytes]:
    """Reports when the process of another machine ends before the run does; before the first step, ends the run."""
    process = _started(fleet.followed(host))

    def wait() -> None:
        assert process.stdout is not None
        last = deque((line.strip() for line in lines_of(process.stdout) if line.strip()), maxlen=1)
        status = process.wait()
        if status <= 0 or shown.poll() is not None:
            return
        asked = status == RESUMABLE or host.name not in (Fleet.of(run) or fleet).names
        if asked and begun.is_set():  # before the first step, the others would wait for it
            say(f"{host.name} has left")
            return
        how = "the connection was lost" if status == NO_CONNECTION else f"ended with {status}"
        text = f"{host.name}: {how}" + (f": {last[0]}" if last else "")
        if begun.is_set():
            say(text)
        else:
            failed.append(text)
            with suppress(subprocess.TimeoutExpired):
                shown.wait(FIRST_S)
            shown.kill()

    threading.Thread(target=wait, daemon=True).start()
    return process


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process whose stdout and stderr are read here, so that no control characters reach the terminal."""
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _as_here(text: str, fleet: Fleet, run: Path) -> str:
    """What the first machine prints, with the local folder in place of its run directory, which is brought here."""
    return re.sub(rf"\S*/runs/{re.escape(fleet.name)}\b", lambda place: str(run), text)


def _forget(fleet: Fleet, run: Path) -> None:
    """Removes the traces of a run that did not start."""
    for line in fleet.clean():
        say(line)
    _forget_here(run)


def _forget_here(run: Path) -> None:
    (run / HOSTS).unlink(missing_ok=True)
    if run.is_dir() and not any(run.iterdir()):
        run.rmdir()
        Launch.at(run).forget()
