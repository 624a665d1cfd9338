"""Looks at machines before a run starts on them: what one of them lacks is said in a line, with the remedy."""

from __future__ import annotations

import shlex
from functools import partial

from gradstream._version import __version__
from gradstream.run.ssh.fleet import Fleet
from gradstream.run.ssh.host import HostError, SshHost, folder_remedy, last_line

NO_PROGRAM, NO_GRADSTREAM, IS_THERE, NO_FOLDER = 41, 42, 43, 44
"""Exit statuses of the script that looks at a machine."""

LOOK_S = 120.0
"""Longest time for a look: Python, torch and the doctor take seconds, and a minute on a machine that is busy."""


def inspect(fleet: Fleet) -> dict[str, str]:
    """Makes the folders of a run, and looks at every machine. Returns the doctor's warnings, by machine.

    Raises:
        HostError: a machine lacks something. Nothing but empty folders is left on any.
    """
    made: list[SshHost] = []
    try:
        found = fleet.at_once(lambda host: inspect_machine(fleet, host, made))
        fleet.at_once(partial(_reach, fleet))
    except HostError:
        fleet.clean(made)
        raise
    return found


def inspect_machine(fleet: Fleet, host: SshHost, made: list[SshHost]) -> str:
    """Makes the folder of a run on a machine, and looks at it. Returns the doctor's warnings.

    Args:
        fleet: the machines of the run.
        host: one of them.
        made: gets the machine once it has a folder.

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
