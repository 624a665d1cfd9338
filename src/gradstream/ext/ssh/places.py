"""Changes the machines of a run while it trains: one takes the place of another, joins in a free one, or leaves.

A run has as many places as it began with, plus those for which it made room. A machine that joins later gets the job
from this machine, which kept it, and token and data from the first machine; the data is compared with the list kept
here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradstream._version import __version__
from gradstream.errors import ConfigError
from gradstream.ext.ssh.data_delivery import DataDelivery
from gradstream.ext.ssh.fleet import Fleet
from gradstream.ext.ssh.host import HostError, SshHost, folder_remedy, last_line
from gradstream.ext.ssh.run_files import bring_log
from gradstream.run.launches import Launch

# ---- inspection --------------------------------------------------------------------------
# Checks machines before a run starts on them: if one of them lacks something, a line says so, with the remedy.

NO_PROGRAM, NO_GRADSTREAM, IS_THERE, NO_FOLDER = 41, 42, 43, 44
"""Exit statuses of the script that checks a machine."""

LOOK_S = 120.0
"""Longest time for a check: Python, torch and the doctor take seconds, and a minute on a busy machine."""


def inspect(fleet: Fleet) -> dict[str, str]:
    """Makes the folders of a run, and checks every machine. Returns the doctor's warnings, by machine.

    Raises:
        HostError: a machine lacks something. Nothing but empty folders is left on any.
    """
    made: list[SshHost] = []
    try:
        places = fleet.at_once(lambda host: inspect_machine(fleet, host, made))
        fleet.at_once(partial(_reach, fleet))
    except HostError:
        fleet.clean(made)
        raise
    return places


def inspect_machine(fleet: Fleet, host: SshHost, made: list[SshHost]) -> str:
    """Makes the folder of a run on a machine, and checks the machine. Returns the doctor's warnings.

    Args:
        fleet: the machines of the run.
        host: one of them.
        made: receives the machine once it has a folder.

    Raises:
        HostError: it lacks something.
    """
    quoted, python = fleet.place(host), fleet.program
    says = "import gradstream._version as v; print(v.__version__)"
    done = host.ask(
        f'umask 077; mkdir -p "$(dirname {quoted})" || exit {NO_FOLDER}; [ ! -e {quoted} ] || exit {IS_THERE}; '
        f"mkdir {quoted} && cd {quoted} || exit {NO_FOLDER}; command -v {python} >&2 || exit {NO_PROGRAM}; "
        f"{python} -P -c {shlex.quote(says)} || exit {NO_GRADSTREAM}; {python} -P -m gradstream doctor",
        timeout_s=LOOK_S,
    )
    if done.returncode == NO_FOLDER:
        said = last_line(done.stderr)
        raise HostError(f"{host.name}: {said}; {folder_remedy(said)}")
    if done.returncode == IS_THERE:
        raise HostError(
            f"{host.name}: {fleet.home(host)} is there, from another run of that name; take another --name, or "
            "remove it"
        )
    made.append(host)
    text = done.stdout.decode(errors="replace")
    version, _, checks = text.partition("\n")
    if done.returncode == NO_PROGRAM:
        raise HostError(
            f"{host.name}: there is no program {fleet.python!r}; install Python 3.11 or newer there, or --python"
        )
    if done.returncode == NO_GRADSTREAM:
        raise HostError(
            f"{host.name}: {fleet.python} has no gradstream ({last_line(done.stderr)}); `ssh {host.name} "
            f"{fleet.python} -m pip install gradstream=={__version__}`, or --python"
        )
    if version != __version__:
        raise HostError(
            f"{host.name}: has gradstream {version}, and this machine {__version__}; install the same one"
        )
    bad = [" ".join(line[1:].split()) for line in checks.splitlines() if line.startswith("✗")]
    if done.returncode:
        remedy = f"`ssh {host.name} {fleet.python} -m gradstream doctor` says more"
        if any(line.startswith("disk ") for line in bad):
            remedy = folder_remedy("; ".join(bad))
        raise HostError(f"{host.name}: {'; '.join(bad) or last_line(done.stderr)}; {remedy}")
    return "; ".join(" ".join(line[1:].split()) for line in checks.splitlines() if line.startswith("!"))


def _reach(fleet: Fleet, host: SshHost) -> None:
    """Connects from a machine to the first one, at the port where they will meet."""
    first, python, port = fleet.machines[0], fleet.program, fleet.port
    if host.name == first.name:
        listen = f"import socket, time; s = socket.create_server(('', {port})); s.settimeout(20)\n"
        listen += f"for _ in range({len(fleet.names) - 1}): s.accept()"
        done = first.ask(f"{python} -c {shlex.quote(listen)}")
        if done.returncode and b"timed out" not in done.stderr:
            raise HostError(f"{first.name}: port {port}: {last_line(done.stderr)}; take another --port")
        return
    dial = (
        "import socket, sys, time\nfor last in range(19, -1, -1):\n"
        f"    try: socket.create_connection(({first.address!r}, {port}), 5); break\n"
        "    except ConnectionRefusedError as e: time.sleep(0.5); why = e\n"
        "    except OSError as e: sys.exit(str(e))\n"
        "else: sys.exit(str(why))"
    )
    done = host.ask(f"{python} -c {shlex.quote(dial)}")
    if done.returncode:
        raise HostError(
            f"{host.name}: does not reach {first.address}:{port}: {last_line(done.stderr)}; name {first.name} "
            "as the others know it, open the port in its firewall, or take another --port"
        )


# ---- places ------------------------------------------------------------------------------


def replace_machine(fleet: Fleet, old: str, new: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Makes another machine, or the same one again, replace one whose process is gone.

    Args:
        fleet: the machines of the run.
        old: name of the machine that is gone; not the first one.
        new: name of the machine that takes its place.
        run: the local folder of the run, where the new list of machines is written.
        say: called with lines for people to read.

    Returns:
        The machines from now on.

    Raises:
        ConfigError: there is no such machine, or its process runs.
        HostError: the new one lacks something; the run is as before.
    """
    rank = _rank_of(fleet, old)
    if new != old:
        _check_new(fleet, new)
    if fleet.states()[old].startswith("runs"):
        raise ConfigError(
            f"{old} trains; end its `gradstream train` there before another machine takes its place"
        )
    if new == old:
        fleet.clean([_machine(fleet, old)])
    after = _begun(fleet, rank, new, run, say)
    after.write(run)
    if new != old:
        fleet.clean([_machine(fleet, old)])  # if it can be reached
    return after


def add_machine(fleet: Fleet, new: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Makes a machine join in a free place. Arguments, result and errors as for `replace_machine`."""
    _check_new(fleet, new)
    if "" not in fleet.hosts:
        raise ConfigError(
            f"the run has no free place: its machines are {', '.join(fleet.names)}; start it with --room N for N "
            "machines more, or take one out first: gradstream remove"
        )
    after = _begun(fleet, list(fleet.hosts).index(""), new, run, say)
    after.write(run)
    return after


def remove_machine(fleet: Fleet, old: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Makes a machine hand in what it has computed, and leave; its place is then free.

    Arguments, result and errors as for `replace_machine`. Its log is brought into the local folder of the run.
    """
    rank, host = _rank_of(fleet, old), _machine(fleet, old)
    if not fleet.leave(host):
        say(f"{old} has not left in time, and is ended: the others compute its last minibatches again")
    after = _with(fleet, rank, "")
    after.write(run)
    for line in filter(None, [bring_log(fleet, run, host), *fleet.clean([host])]):
        say(line)
    return after


def _rank_of(fleet: Fleet, name: str) -> int:
    if name == fleet.hosts[0]:
        raise ConfigError(f"{name} is the first machine, which has the parameters: the run ends without it")
    if not name or name not in fleet.hosts[1:]:
        raise ConfigError(
            f"the run has no machine {name!r} that joined it; expected one of {', '.join(fleet.names[1:])}"
        )
    return list(fleet.hosts).index(name)


def _check_new(fleet: Fleet, name: str) -> None:
    if name in fleet.names:
        raise ConfigError(f"{name} has a part in the run already; name another machine")
    if not name or name.startswith("-"):
        raise ConfigError(f"{name!r} is no name of a machine that ssh takes")


def _machine(fleet: Fleet, name: str) -> SshHost:
    return fleet.machines[fleet.names.index(name)]


def _with(fleet: Fleet, rank: int, name: str) -> Fleet:
    return replace(fleet, hosts=[*fleet.hosts[:rank], name, *fleet.hosts[rank + 1 :]])


def _begun(fleet: Fleet, rank: int, name: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Checks a machine, brings what it needs, and starts its process in a place. Raises HostError."""
    after, made = _with(fleet, rank, name), list[SshHost]()
    host = _machine(after, name)
    try:
        inspect_machine(after, host, made)
        launch = Launch.at(run)
        after.send_to(host, launch.files())
        if after.data:
            DataDelivery(after, say).bring_anew(host, launch.data())
        after.start_on(host)
    except (HostError, ConfigError):
        after.clean(made)
        raise
    return after
