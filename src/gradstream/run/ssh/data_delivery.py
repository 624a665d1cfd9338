"""`DataDelivery`: brings the data of a run to its machines. It leaves this one once, however many they are.

Only machines that lack the data get it: the first one from here, the others from the first one, at the port where the
processes of the run will meet. That they reach it there was tried before. A machine to which the first one cannot give
the data gets it from here, and a line says so.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from gradstream.run.ssh.data_copy import LIST, NO_ROOM, READY
from gradstream.run.ssh.file_list import FileList, files_in
from gradstream.run.ssh.file_server import write_archive
from gradstream.run.ssh.fleet import Fleet, for_shell
from gradstream.run.ssh.host import HostError, SshHost, folder_remedy, last_line

LONGEST_S = 3600.0
"""Longest time in which the data comes to a machine."""

SERVE_S = 60.0
"""Longest time in which the first machine begins to serve it, and in which it ends."""

SAID_BYTES = 1 << 16
"""The most bytes of what a machine says meanwhile."""


@dataclass(frozen=True, slots=True)
class DataServer:
    """A machine that serves the data.

    Args:
        address: its address, as the others know it.
        port: its port.
        certificate: its certificate, PEM.
    """

    address: str
    port: int
    certificate: bytes


@dataclass(frozen=True, slots=True)
class DataDelivery:
    """Brings the data.

    Args:
        fleet: the machines; `fleet.data` names the folder that may be there already.
        say: is given a line for people to read.
    """

    fleet: Fleet
    say: Callable[[str], object]

    def bring(self, folder: Path) -> str:
        """Brings the files of a folder to all machines that lack them.

        Returns:
            The list of the files.

        Raises:
            HostError: a machine has no room for it, or could not get it from here either.
        """
        files = FileList.of(folder)
        lack = self._without(str(files).encode(), self.fleet.machines)
        size = f"{files.num_bytes / 1e6:,.0f} MB of data"
        if not lack:
            self.say(f"{size}: all machines have it")
            return str(files)
        first, others = self.fleet.machines[0], [host for host in lack if host.name != self.fleet.hosts[0]]
        send = partial(self._send, folder)
        if first in lack:
            self.say(f"{size}: from here to {first.name}")
            send(first)
        if others:
            self.say(f"{size}: from {first.name} to {', '.join(host.name for host in others)}")
            self._pass_on(others, self.fleet.port, send)
        return str(files)

    def bring_anew(self, host: SshHost, files: bytes) -> None:
        """Brings the data to a machine that takes the place of another one, while the run goes on.

        Args:
            host: the machine.
            files: the list of the files, as this machine has kept it.

        Raises:
            HostError: the machine has no room for it, or could not get it by way of this one either.
        """
        if self._without(files, [host]):
            self._pass_on([host], 0, self._relay)

    def _without(self, files: bytes, hosts: Sequence[SshHost]) -> list[SshHost]:
        """Those machines where the data is not in the folder of that name already."""
        there = self._command("there", self.fleet.data)

        def lacks(host: SshHost) -> bool:
            script = f"cat > {LIST} || exit {NO_ROOM}; [ -d {for_shell(self.fleet.data)} ] && {there}"
            done = host.ask(self.fleet.inside(host, script), files, LONGEST_S)
            if done.returncode == NO_ROOM:
                said = last_line(done.stderr)
                raise HostError(f"{host.name}: {said}; {folder_remedy(said)}")
            return done.returncode != 0

        found = self.fleet.at_once(lacks, hosts)
        return [host for host in hosts if found[host.name]]

    def _pass_on(self, others: Sequence[SshHost], port: int, instead: Callable[[SshHost], None]) -> None:
        """Has machines get the data from the first one, or, where that is not possible, in another way."""
        first = self.fleet.machines[0]
        with contextlib.ExitStack() as stack:
            try:
                source = stack.enter_context(self._served(first, port))
            except HostError as error:
                self.say(f"{error}; the data comes from here to each machine")
                self.fleet.at_once(instead, others)
                return

            def get(host: SshHost) -> None:
                fetch = self._command("fetch", source.address, str(source.port))
                done = host.ask(self.fleet.inside(host, fetch), source.certificate, LONGEST_S)
                if done.returncode == NO_ROOM:
                    raise HostError(f"{host.name}: {last_line(done.stderr)}")
                if done.returncode:
                    why = last_line(done.stderr)
                    self.say(f"{host.name}: no data from {first.name} ({why}); it comes from here")
                    instead(host)

            self.fleet.at_once(get, others)

    @contextlib.contextmanager
    def _served(self, first: SshHost, port: int) -> Iterator[DataServer]:
        """The first machine serves the data inside the context: as long as the standard input of its server is open."""
        words = first.words(self.fleet.inside(first, self._command("serve", str(port))))
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as server:
            assert server.stdout is not None and server.stderr is not None
            with _ended_after(SERVE_S, server):
                certificate, line = b"", server.stdout.readline(SAID_BYTES)
                while line and not line.startswith(READY.encode()) and len(certificate) < SAID_BYTES:
                    certificate += line
                    line = server.stdout.readline(SAID_BYTES)
            ready = re.fullmatch(rf"{READY} (\d{{1,5}})\n".encode(), line)
            if ready is None:
                server.kill()
                why = last_line(server.stderr.read(SAID_BYTES)) or f"not ready in {SERVE_S:g} s"
                raise HostError(f"{first.name}: cannot serve the data: {why}")
            try:
                yield DataServer(first.address, int(ready[1]), certificate)
            finally:
                assert server.stdin is not None
                server.stdin.close()  # ends it
                with _ended_after(SERVE_S, server):
                    server.wait()  # the run needs the port

    def _send(self, folder: Path, host: SshHost) -> None:
        """Sends the files of a folder from here."""
        words = host.words(self.fleet.inside(host, self._command("receive")))
        with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stderr is not None
            with _ended_after(LONGEST_S, process):
                try:
                    write_archive(files_in(folder), process.stdin)
                except BrokenPipeError:
                    pass  # the machine says why
                except OSError as error:  # one of the files here; the machine finds the archive too short
                    self.say(f"{folder}: {error}")
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                said, status = process.stderr.read(SAID_BYTES), process.wait()
        if status:
            raise HostError(f"{host.name}: {last_line(said) or f'exit status {status}'}")

    def _relay(self, host: SshHost) -> None:
        """Sends what the first machine has, by way of this one."""
        first = self.fleet.machines[0]
        words = first.words(self.fleet.inside(first, self._command("send")))
        pipe = subprocess.PIPE
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.DEVNULL
        ) as archive:
            assert archive.stdout is not None
            given: IO[bytes] = archive.stdout
            try:
                host.do(self.fleet.inside(host, self._command("receive")), given, LONGEST_S)
            finally:
                archive.kill()

    def _command(self, *words: str) -> str:
        """A command of `data_copy` for the shell of a machine."""
        return f"{self.fleet.program} {shlex.join(['-P', '-m', 'gradstream.run.ssh.data_copy', *words])}"


@contextlib.contextmanager
def _ended_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a process if the context lasts longer than so many seconds."""
    late = threading.Timer(seconds, process.kill)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
