"""A job on several machines that ssh reaches: started, followed, stopped, collected, cleaned up.

The first machine trains and the others join it, as `run/place.py` describes. This process only starts them: the run
goes on without it. Everything on a machine is in one folder:

    JOB.py, modules     what the job needs
    token               what admits the machines to the run; only its owner can read it
    data, data.json     the data, or a link to where it was already, and the list of its files
    group               number of its process group
    log, status         what `gradstream train` says, and its exit status when it has ended
    runs/NAME           the run directory
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from gradstream.errors import ConfigError
from gradstream.ext.ssh.archives import packed
from gradstream.ext.ssh.host import HostError, SshHost, last_line, lines_of
from gradstream.run.files import HOSTS
from gradstream.run.launches import Launch, read_hosts
from gradstream.run.place import HOST, LEAST, NODE, NODES, PORT, RUN
from gradstream.runtime.storage import DiskStorage
from gradstream.untrusted import MismatchError, check_record, escaped

NOT_IN_TIME = 4
"""Exit status of `gradstream stop`."""

END_S = 20.0
"""Longest wait for the processes of a machine, once the run has ended."""

STOP_S = 120.0
"""Longest time for `gradstream stop` on a machine besides its wait: importing torch takes a minute on a busy one."""

LOG_S = 600.0
"""Longest time for a log to come."""

LEAVE_S = 60.0
"""Longest wait for a machine that was asked to leave."""

_UNPACK = "umask 077; tar -xzf -"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines of a run.

    Args:
        hosts: the machines, at least 2; the first one trains, and must be reachable by the others. "" is a free place,
            for a machine that joins later.
        ssh: the ssh client and its options.
        python: program on the machines that has gradstream; a relative path is in the home folder there.
        folder: folder for runs there.
        port: port of the first machine at which they meet.
        job: name of the job file.
        arguments: options of `gradstream train`, and arguments of the job file.
        data: where the data of the run may be on the machines already; "" for a run without any.
        least: number of machines with which training begins; 0 for all.
    """

    name: str
    hosts: Sequence[str]
    ssh: Sequence[str]
    python: str
    folder: str
    port: int
    job: str
    arguments: Sequence[str]
    data: str = ""
    least: int = 0

    @classmethod
    def of(cls, run: Path) -> Self | None:
        """The machines of the run with this local folder; None if it is not a run on machines, or over.

        Raises:
            ConfigError: this machine did not start the run, so commands in the folder are not executed; or the list
                is damaged.
        """
        if not os.path.lexists(run / HOSTS):
            return None
        said = Launch.at(run).hosts()
        if said is not None:
            return cls._checked(said, run)
        there = cls.said_in(run)
        raise ConfigError(
            f"{run} comes from elsewhere: this machine has not started it. {HOSTS} in it would have "
            f"{escaped(shlex.join([*there.ssh, '…']), 400)} run here, for {escaped(', '.join(there.names), 400)}. If "
            f"that is what you want: gradstream status {run} --adopt"
        )

    @classmethod
    def said_in(cls, run: Path) -> Self:
        """The machines as the run's own folder names them. Raises ConfigError if it does not."""
        said = read_hosts(run / HOSTS)
        if said is None:
            raise ConfigError(f"{run} has no {HOSTS}")
        return cls._checked(said, run)

    @classmethod
    def _checked(cls, said: Mapping[str, Any], run: Path) -> Self:
        try:
            check_record(cls, said)
        except MismatchError as error:
            raise ConfigError(f"the list of machines of {run} is damaged: {error}") from None
        fleet = cls(**said)
        if not fleet.ssh or len(fleet.names) < 1 or any(name.startswith("-") for name in fleet.names):
            raise ConfigError(
                f"the list of machines of {run} is damaged: no client, or no name that ssh takes"
            )
        if not re.fullmatch(r"[a-z0-9-]+", fleet.name) or not 0 <= fleet.port < 1 << 16:
            raise ConfigError(f"the list of machines of {run} is damaged: its name or its port")
        return fleet

    def keep(self, run: Path, files: Mapping[str, Path]) -> None:
        """Writes the machines of a run, and keeps the files of its job, so that other commands find them."""
        Launch.at(run).begin(files)
        try:
            run.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.write(run)
        except OSError as error:
            raise ConfigError(f"cannot make {run}: {error.strerror}; take another --name") from None

    def write(self, run: Path) -> None:
        """Writes the list of machines, for commands and, into the local folder of the run, for people."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        Launch.at(run).write(HOSTS, text)
        DiskStorage(run).write(HOSTS, text.encode())

    @property
    def machines(self) -> list[SshHost]:
        """The machines."""
        return [SshHost(name, tuple(self.ssh)) for name in self.names]

    @property
    def names(self) -> list[str]:
        """Names of the machines, without free places."""
        return list(filter(None, self.hosts))

    def home(self, host: SshHost) -> str:
        """The folder of this run on a machine. Machines may share a disk, so each has its own."""
        return f"{self.folder}/{self.name}/{host.name.replace('/', '_')}"

    def inside(self, host: SshHost, script: str) -> str:
        """A script that runs in the folder of this run, and not at all if that is not there."""
        return f"cd {self.place(host)} && {{ {script}\n}}"

    @property
    def program(self) -> str:
        """The program that has gradstream, for the shell. A script may run it in any folder."""
        relative = "/" in self.python and not self.python.startswith(("/", "~/"))
        return for_shell(f"~/{self.python}" if relative else self.python)

    def place(self, host: SshHost) -> str:
        """The folder of this run, for the shell."""
        return for_shell(self.home(host))

    @property
    def run_dir(self) -> str:
        """The run directory, relative to the folder of this run on the first machine."""
        return f"runs/{self.name}"

    def at_once(
        self, task: Callable[[SshHost], Answer], hosts: Sequence[SshHost] | None = None
    ) -> dict[str, Answer]:
        """Does something with all machines, or some, at the same time.

        Raises:
            HostError: it failed on some of them: the message has a line for each.
        """
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            tasks = {
                host.name: pool.submit(task, host) for host in self.machines if hosts is None or host in hosts
            }
        errors = [error for task in tasks.values() if (error := task.exception())]
        for error in errors:
            if not isinstance(error, HostError):
                raise error
        if errors:
            raise HostError("\n".join(map(str, errors)))
        return {name: task.result() for name, task in tasks.items()}

    # ---- the start ------------------------------------------------------------------------

    def send(self, files: Mapping[str, Path]) -> None:
        """Brings the files of the job, and a new token."""
        archive = packed(files, {"token": secrets.token_hex(16).encode() + b"\n"})
        self.at_once(lambda host: host.do(self.inside(host, _UNPACK), archive, 600.0))

    def send_to(self, host: SshHost, files: Mapping[str, Path]) -> None:
        """Brings the files of the job to a machine that joins later, and the first machine's token.

        Raises:
            HostError: a machine cannot be reached, or the first one has no valid token.
        """
        first = self.machines[0]
        token = first.do(self.inside(first, "head -c 64 token"))
        if not re.fullmatch(rb"[0-9a-f]{32}\n", token):
            raise HostError(f"{first.name}: its file token is none; end the run by gradstream stop")
        host.do(self.inside(host, _UNPACK), packed(files, {"token": token}), 600.0)

    def start(self) -> None:
        """Starts the run on all machines. It goes on without this process."""
        self.at_once(self.start_on)

    def start_on(self, host: SshHost) -> None:
        """Starts the process of one machine."""
        first, rank = self.machines[0], self.hosts.index(host.name)
        place = {NODES: len(self.hosts), NODE: rank, HOST: first.address, PORT: self.port, RUN: self.name}
        place |= {"GRADSTREAM_TOKEN_FILE": "token"} | ({"GRADSTREAM_DATA": "data"} if self.data else {})
        place |= {LEAST: self.least} if self.least else {}
        words = ["env", *(f"{name}={value}" for name, value in place.items())]
        train = ["-P", "-m", "gradstream", "train", self.job, *self.arguments]
        command = f"{shlex.join(words)} {self.program} {shlex.join(train)}"
        inner = (
            f"trap : TERM; echo $$ > group; {command} > log 2>&1; echo $? > status.new; mv status.new status"
        )
        script = f"rm -f status; setsid nohup sh -c {shlex.quote(inner)} > /dev/null 2>&1 < /dev/null &"
        host.do(self.inside(host, script))

    # ---- the run --------------------------------------------------------------------------

    def followed(self, host: SshHost) -> list[str]:
        """The command line that prints the log of a machine until its process has ended."""
        show = (
            "while [ ! -s group ]; do sleep 0.1; done; tail -n +1 -F --pid=$(cat group) log 2>/dev/null; "
            "exit $(cat status 2>/dev/null || echo 1)"
        )
        return host.words(self.inside(host, show))

    def log(self, host: SshHost) -> Iterator[str]:
        """The lines of a machine's log so far. Raises HostError if they do not come, or not in time."""
        with host.printed(self.inside(host, "cat log"), LOG_S) as said:
            yield from lines_of(io.BufferedReader(said))

    def states(self) -> dict[str, str]:
        """The state of each machine: whether its process trains or has ended; and the last line of its log."""
        script = (
            "if [ -s status ]; then echo ended with $(cat status); elif kill -0 $(cat group) 2>/dev/null; "
            "then echo runs; else echo gone; fi; tail -n 1 log"
        )

        def state(host: SshHost) -> str:
            try:
                done = host.ask(self.inside(host, script), timeout_s=30.0)
            except HostError as error:
                return str(error).removeprefix(f"{host.name}: ")
            said = done.stdout.decode(errors="replace").splitlines()
            return ": ".join(filter(None, said)) or last_line(done.stderr)

        return self.at_once(state)

    def has_begun(self) -> bool:
        """Whether the run has written its description on the first machine. Raises HostError without an answer."""
        first = self.machines[0]
        script = f"[ -e {self.run_dir}/run.json ] && echo begun"
        return first.ask(self.inside(first, script)).stdout.strip() == b"begun"

    def stop(self, *options: str, wait_s: float) -> str:
        """Ends the run, with a checkpoint if the job has any. Returns what `gradstream stop` says there.

        Args:
            options: of that command.
            wait_s: longest wait for the end of the run.

        Raises:
            HostError: it has not ended in time, but it still may.
        """
        first = self.machines[0]
        words = shlex.join(
            ["-P", "-m", "gradstream", "stop", self.run_dir, "--wait-s", str(wait_s), *options]
        )
        done = first.ask(self.inside(first, f"{self.program} {words}"), timeout_s=wait_s + STOP_S)
        said = last_line(done.stdout) or last_line(done.stderr)
        if done.returncode == NOT_IN_TIME:
            raise HostError(f"{first.name}: {said}")
        return said

    def leave(self, host: SshHost) -> bool:
        """Asks the process of a machine to hand in what it has, and to leave. Returns whether it has ended in time."""
        script = (
            f"group=$(cat group); kill -s TERM -- -$group; for _ in $(seq {int(LEAVE_S / 0.1)}); do "
            f"[ ! -s status ] && kill -0 $group 2>/dev/null || exit 0; sleep 0.1; done; exit {NOT_IN_TIME}"
        )
        return host.ask(self.inside(host, script), timeout_s=LEAVE_S + END_S).returncode != NOT_IN_TIME

    def clean(self, hosts: Sequence[SshHost] | None = None) -> list[str]:
        """Ends what is left of the run on all machines, or some, and removes its folders there.

        Returns:
            On which machines that failed, and why, a line for each.
        """
        script = (
            'group=$(cat group 2>/dev/null); for _ in $(seq {tries}); do [ -n "$group" ] && [ ! -s status ] && '
            "kill -0 $group 2>/dev/null || break; sleep 0.1; done; "
            '[ -n "$group" ] && kill -s KILL -- -$group 2>/dev/null; '
            'cd / && rm -rf {home} && rmdir "$(dirname {home})" 2>/dev/null; true'
        ).replace("{tries}", str(int(END_S / 0.1)))

        def remove(host: SshHost) -> str:
            try:
                ending = script.replace("{home}", self.place(host))
                host.ask(self.inside(host, ending), timeout_s=2 * END_S)
            except HostError as error:
                return f"{error}; {self.home(host)} is left there"
            return ""

        return list(filter(None, self.at_once(remove, hosts).values()))


def for_shell(path: str) -> str:
    """A path for the shell, which expands a ~ at its beginning."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
