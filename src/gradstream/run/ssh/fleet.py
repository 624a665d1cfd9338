"""A job on several machines that ssh reaches: looked at, started, followed, stopped, collected, cleaned up.

The first machine trains and the others join it, as `run/place.py` describes. This process only starts them: the run
goes on without it. Everything on a machine is in one folder of its own:

    JOB.py, modules     what the job needs
    token               what admits the machines to the run; only its owner can read it
    log, status         what `gradstream train` says, and its exit status when it has ended
    runs/NAME           the run directory
"""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from gradstream._version import __version__
from gradstream.errors import ConfigError
from gradstream.run.place import HOST, NODE, NODES, PORT, RUN
from gradstream.run.ssh.host import HostError, SshHost, last_line
from gradstream.run.ssh.sources import file_sum, packed, unpacked

FILE = "hosts.json"
"""In the local folder of a run: the machines on which it is."""

NO_PROGRAM, NO_GRADSTREAM, IS_THERE, NO_FOLDER = 41, 42, 43, 44
"""Exit statuses of the script that looks at a machine."""

NOT_IN_TIME = 4
"""Exit status of `gradstream stop`."""

END_S = 20.0
"""Longest wait for the processes of a machine, once the run has ended."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines of a run.

    Args:
        name: name of the run.
        hosts: the machines, at least 2; the first one trains, and must be reachable by the others.
        ssh: the ssh client and its options.
        python: program on the machines that has gradstream.
        folder: folder for runs there.
        port: port of the first machine at which they meet.
        job: name of the job file.
        arguments: options of `gradstream train`, and arguments of the job file.
        data: whether data was brought along.
    """

    name: str
    hosts: Sequence[str]
    ssh: Sequence[str]
    python: str
    folder: str
    port: int
    job: str
    arguments: Sequence[str]
    data: bool = False

    @classmethod
    def of(cls, run: Path) -> Self | None:
        """The machines of a run whose local folder this is; None if it is no run on machines."""
        try:
            said = json.loads((run / FILE).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {run / FILE}: {error}") from None
        return cls(**said)

    def keep(self, run: Path) -> None:
        """Writes which machines a run is on, so that other commands find them."""
        try:
            run.mkdir(parents=True)
            (run / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot make {run}: {error.strerror}; take another --name") from None

    @property
    def machines(self) -> list[SshHost]:
        """The machines."""
        return [SshHost(name, tuple(self.ssh)) for name in self.hosts]

    def home(self, host: SshHost) -> str:
        """The folder of this run on a machine. Machines may share a disk, so each has its own."""
        return f"{self.folder}/{self.name}/{host.name.replace('/', '_')}"

    def inside(self, host: SshHost, script: str) -> str:
        """A script that runs in the folder of this run, and not at all if that is not there."""
        return f"cd {self._quoted(host)} && {{ {script}\n}}"

    def _quoted(self, host: SshHost) -> str:
        """The folder of this run for the shell, which expands a ~ at its beginning."""
        home = self.home(host)
        return f"~/{shlex.quote(home[2:])}" if home.startswith("~/") else shlex.quote(home)

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
        errors = [error for one in tasks.values() if (error := one.exception())]
        for error in errors:
            if not isinstance(error, HostError):
                raise error
        if errors:
            raise HostError("\n".join(map(str, errors)))
        return {name: one.result() for name, one in tasks.items()}

    # ---- before the start -----------------------------------------------------------------

    def look(self) -> dict[str, str]:
        """Makes the folders, and looks at every machine. Returns the doctor's warnings, by machine.

        Raises:
            HostError: a machine lacks something. Nothing but empty folders is left on any.
        """
        made: list[SshHost] = []
        try:
            found = self.at_once(lambda host: self._look(host, made))
            self.at_once(self._reach)
        except HostError:
            self.clean(made)
            raise
        return found

    def _look(self, host: SshHost, made: list[SshHost]) -> str:
        quoted, python = self._quoted(host), shlex.quote(self.python)
        says = "import gradstream._version as v; print(v.__version__)"
        done = host.ask(
            f'umask 077; mkdir -p "$(dirname {quoted})" || exit {NO_FOLDER}; [ ! -e {quoted} ] || exit {IS_THERE}; '
            f"mkdir {quoted} && cd {quoted} || exit {NO_FOLDER}; command -v {python} >&2 || exit {NO_PROGRAM}; "
            f"{python} -c {shlex.quote(says)} || exit {NO_GRADSTREAM}; {python} -m gradstream doctor"
        )
        if done.returncode == NO_FOLDER:
            raise HostError(f"{host.name}: {last_line(done.stderr)}; take another --folder")
        if done.returncode == IS_THERE:
            raise HostError(
                f"{host.name}: {self.home(host)} is there, from another run of that name; take another --name, or "
                "remove it"
            )
        made.append(host)
        text = done.stdout.decode(errors="replace")
        version, _, checks = text.partition("\n")
        if done.returncode == NO_PROGRAM:
            raise HostError(
                f"{host.name}: there is no program {self.python!r}; install Python 3.11 or newer there, or --python"
            )
        if done.returncode == NO_GRADSTREAM:
            raise HostError(
                f"{host.name}: {self.python} has no gradstream ({last_line(done.stderr)}); `ssh {host.name} "
                f"{self.python} -m pip install gradstream=={__version__}`, or --python"
            )
        if version != __version__:
            raise HostError(
                f"{host.name}: has gradstream {version}, and this machine {__version__}; install the same one"
            )
        bad = [" ".join(line[1:].split()) for line in checks.splitlines() if line.startswith("✗")]
        if done.returncode:
            raise HostError(f"{host.name}: {'; '.join(bad) or last_line(done.stderr)}")
        return "; ".join(" ".join(line[1:].split()) for line in checks.splitlines() if line.startswith("!"))

    def _reach(self, host: SshHost) -> None:
        """Connects from a machine to the first one, at the port where they will meet."""
        first, python = self.machines[0], shlex.quote(self.python)
        if host.name == first.name:
            listen = f"import socket, time; s = socket.create_server(('', {self.port})); s.settimeout(20)\n"
            listen += f"for _ in range({len(self.hosts) - 1}): s.accept()"
            done = first.ask(f"{python} -c {shlex.quote(listen)}")
            if done.returncode and b"timed out" not in done.stderr:
                raise HostError(
                    f"{first.name}: port {self.port}: {last_line(done.stderr)}; take another --port"
                )
            return
        dial = (
            "import socket, sys, time\nfor last in range(19, -1, -1):\n"
            f"    try: socket.create_connection(({first.address!r}, {self.port}), 5); break\n"
            "    except ConnectionRefusedError as e: time.sleep(0.5); why = e\n"
            "    except OSError as e: sys.exit(str(e))\n"
            "else: sys.exit(str(why))"
        )
        done = host.ask(f"{python} -c {shlex.quote(dial)}")
        if done.returncode:
            raise HostError(
                f"{host.name}: does not reach {first.address}:{self.port}: {last_line(done.stderr)}; name {first.name} "
                "as the others know it, open the port in its firewall, or take another --port"
            )

    def send(self, files: Mapping[str, Path]) -> None:
        """Brings the files of the job, and a new token."""
        archive = packed(files, {"token": secrets.token_hex(16).encode() + b"\n"})
        self.at_once(lambda host: host.do(self.inside(host, "umask 077; tar -xzf -"), archive, 600.0))

    def send_data(self, folder: Path) -> None:
        """Brings a folder of data, which GRADSTREAM_DATA will name, and compares checksums there."""
        sums = {path: file_sum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        listed = "".join(
            f"{digest}  data/{path.relative_to(folder)}\n" for path, digest in sums.items()
        ).encode()

        def bring(host: SshHost) -> None:
            with subprocess.Popen(
                ["tar", "-cf", "-", "-C", str(folder), "."], stdout=subprocess.PIPE
            ) as archive:
                assert archive.stdout is not None
                into = self.inside(host, "umask 077; mkdir -p data && tar -xf - -C data")
                host.do(into, archive.stdout, 3600.0)
            host.do(self.inside(host, "sha256sum --check --quiet -"), listed, 600.0)

        self.at_once(bring)

    # ---- the run --------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the run on all machines. It goes on without this process."""
        self.at_once(self._start)

    def _start(self, host: SshHost) -> None:
        first, rank = self.machines[0], self.hosts.index(host.name)
        place = {NODES: len(self.hosts), NODE: rank, HOST: first.address, PORT: self.port, RUN: self.name}
        place |= {"GRADSTREAM_TOKEN_FILE": "token"} | ({"GRADSTREAM_DATA": "data"} if self.data else {})
        words = ["env", *(f"{name}={value}" for name, value in place.items())]
        words += [self.python, "-m", "gradstream", "train", self.job, *self.arguments]
        inner = f"echo $$ > group; {shlex.join(words)} > log 2>&1; echo $? > status.new; mv status.new status"
        script = f"rm -f status; setsid nohup sh -c {shlex.quote(inner)} > /dev/null 2>&1 < /dev/null &"
        host.do(self.inside(host, script))

    def replaced(self, old: str, new: str, run: Path) -> Self:
        """Has another machine, or the same one anew, take the place of one whose process is gone.

        Args:
            old: name of the machine that is gone; not the first one.
            new: name of the machine that takes its place.
            run: the local folder of the run, where the new list of machines is written.

        Raises:
            ConfigError: there is no such machine, or its process runs.
            HostError: the new one lacks something; the run is as before.
        """
        if old not in self.hosts[1:]:
            raise ConfigError(
                f"the run has no machine {old!r} that joined it; expected one of {', '.join(self.hosts[1:])}"
            )
        if new != old and new in self.hosts:
            raise ConfigError(f"{new} has a part in the run already; name another machine")
        if self.states()[old].startswith("runs"):
            raise ConfigError(
                f"{old} trains; end its `gradstream train` there before another machine takes its place"
            )
        first = self.machines[0]
        after = replace(self, hosts=[new if name == old else name for name in self.hosts])
        host = after.machines[after.hosts.index(new)]
        if new == old:
            self.clean([host])
        made: list[SshHost] = []
        try:
            after._look(host, made)
            with subprocess.Popen(
                first.words(self.inside(first, "tar -cf - $(ls | grep -vxE 'log|status|group|runs')")),
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
            ) as archive:
                assert archive.stdout is not None
                host.do(after.inside(host, "umask 077; tar -xf -"), archive.stdout, 3600.0)
            after._start(host)
        except HostError:
            after.clean(made)
            raise
        (run / FILE).write_text(json.dumps(asdict(after), indent=1) + "\n")
        if new != old:
            self.clean([self.machines[self.hosts.index(old)]])  # if it can be reached
        return after

    def log(self, host: SshHost, *, follow: bool) -> list[str]:
        """The command line that prints the log of a machine; with `follow`, until its process has ended."""
        show = "cat log"
        if follow:
            show = (
                "while [ ! -s group ]; do sleep 0.1; done; tail -n +1 -F --pid=$(cat group) log 2>/dev/null; "
                "exit $(cat status 2>/dev/null || echo 1)"
            )
        return host.words(self.inside(host, show))

    def states(self) -> dict[str, str]:
        """What each machine says: its process trains, or has ended; and the last line of its log."""
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

    def stop(self, *options: str) -> str:
        """Ends the run, with a checkpoint if the job has any. Returns what `gradstream stop` says there.

        Raises:
            HostError: it has not ended in time; it may still.
        """
        first = self.machines[0]
        words = [self.python, "-m", "gradstream", "stop", f"runs/{self.name}", *options]
        done = first.ask(self.inside(first, shlex.join(words)), timeout_s=3600.0)
        said = last_line(done.stdout) or last_line(done.stderr)
        if done.returncode == NOT_IN_TIME:
            raise HostError(f"{first.name}: {said}")
        return said

    # ---- after its end --------------------------------------------------------------------

    def collect(self, run: Path) -> list[str]:
        """Brings what the first machine has in its run directory, and the log of each machine, into a local folder.

        Returns:
            Why the logs of some machines are not there, a line for each.

        Raises:
            HostError: the run directory could not be brought.
        """
        home = shlex.quote(f"runs/{self.name}")
        first, *_ = self.machines
        _bring(first, self.inside(first, f"mkdir -p {home} && tar -cf - -C {home} ."), run)

        def logs(host: SshHost) -> str:
            into = run / "hosts" / host.name.replace("/", "_")
            into.mkdir(parents=True, exist_ok=True)
            try:
                _bring(host, self.inside(host, "tar -cf - $(ls -d log status 2>/dev/null)"), into)
            except HostError as error:
                return str(error)
            return ""

        return list(filter(None, self.at_once(logs).values()))

    def clean(self, hosts: Sequence[SshHost] | None = None) -> list[str]:
        """Ends what is left of the run on all machines, or some, and removes its folders there.

        Returns:
            On which machines that was not possible, and why, a line for each.
        """
        script = (
            'group=$(cat group 2>/dev/null); for _ in $(seq {tries}); do [ -n "$group" ] && [ ! -s status ] && '
            'kill -0 $group 2>/dev/null || break; sleep 0.1; done; [ -n "$group" ] && kill -9 -- -$group 2>/dev/null; '
            'cd / && rm -rf {home} && rmdir "$(dirname {home})" 2>/dev/null; true'
        ).replace("{tries}", str(int(END_S / 0.1)))

        def remove(host: SshHost) -> str:
            try:
                ending = script.replace("{home}", self._quoted(host))
                host.ask(self.inside(host, ending), timeout_s=2 * END_S)
            except HostError as error:
                return f"{error}; {self.home(host)} is left there"
            return ""

        return list(filter(None, self.at_once(remove, hosts).values()))


def _bring(host: SshHost, script: str, into: Path) -> None:
    """Unpacks the archive that a script prints."""
    words = host.words(script)
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        try:
            unpacked(archive.stdout, into)
        except (OSError, tarfile.TarError) as error:
            raise HostError(f"{host.name}: cannot unpack what it has sent in {into}: {error}") from None
    if archive.returncode:
        raise HostError(f"{host.name}: its files did not come: exit status {archive.returncode} of ssh")
