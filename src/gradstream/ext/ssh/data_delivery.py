"""`DataDelivery`: brings the data of a run to its machines. The data leaves this machine once, however many there are.

Only machines that lack the data get it: the first one from here, the others from the first one, at the port where the
processes of the run will meet. That they reach it there was checked before. A machine to which the first one cannot
give the data gets it from here, and a message says so.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from gradstream.errors import DataError, GradstreamError
from gradstream.ext.ssh.archives import MAX_BYTES, FileList, Source, files_in, unpacked
from gradstream.ext.ssh.file_server import FileServer, served_archive, write_archive
from gradstream.ext.ssh.fleet import Fleet, for_shell
from gradstream.ext.ssh.host import HostError, SshHost, folder_remedy, last_line
from gradstream.untrusted import read_settings

# ---- data copy ---------------------------------------------------------------------------
# A machine's copy of the data of a run: commands of `DataDelivery` to each machine, in the folder of the run there.
#
#     python -m gradstream.ext.ssh.data_delivery there FOLDER        is the data in that folder already?
#     python -m gradstream.ext.ssh.data_delivery send                prints the copy as an archive
#     python -m gradstream.ext.ssh.data_delivery receive             takes an archive from standard input
#     python -m gradstream.ext.ssh.data_delivery serve PORT          gives the copy to others, until standard input ends
#     python -m gradstream.ext.ssh.data_delivery fetch HOST PORT     takes it from there; the certificate is read from
#                                                                standard input
#
# The copy is `data`, and its list of files `data.json`. A copy is made as `data.new`, and renamed once every
# checksum is right.

COPY, LIST, TOKEN_FILE = Path("data"), Path("data.json"), Path("token")
ELSEWHERE, NO_ROOM = 45, 46
"""Exit statuses: the folder is not the data; the disk is full, so that the data cannot come from anywhere."""

READY = "ready"
"""First word of the last line that a server prints, after its certificate; its port follows."""


class DiskFullError(DataError):
    """The disk has no room for the data."""


def use(folder: Path) -> None:
    """Makes the run use a folder of this machine as its data. Raises DataError unless it matches the list."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if difference := FileList.parse(read_settings(LIST, MAX_BYTES)).difference(folder):
        raise DataError(f"{folder}: {difference}")
    COPY.symlink_to(folder.resolve())


def receive(archive: Source) -> None:
    """Takes the data from an archive.

    Raises:
        DataError: the archive ended early, or a checksum is wrong. There is no copy then.
        DiskFullError: there is no room for it.
    """
    files, new = FileList.parse(read_settings(LIST, MAX_BYTES)), COPY.with_suffix(".new")
    free_bytes = shutil.disk_usage(".").free
    room = f"{Path.cwd()} has {free_bytes / 1e6:,.0f} MB free, and the data takes {files.num_bytes / 1e6:,.0f} MB"
    remedy = "make room, or take another --folder"
    if free_bytes < files.num_bytes:
        raise DiskFullError(f"{room}; {remedy}")
    try:
        unpacked(archive, new, files.expected)
        difference = files.difference(new)
    except (OSError, DataError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(new, ignore_errors=True)
            raise DiskFullError(f"{room}: {error.strerror}; {remedy}") from None
        difference = str(error)
    if difference:
        shutil.rmtree(new, ignore_errors=True)
        raise DataError(f"the data did not arrive whole: {difference}")
    new.rename(COPY)


def serve(port: int, say: Callable[[str], object], until: IO[bytes]) -> None:
    """Serves the copy to other machines of the run, until `until` ends."""
    with FileServer(files_in(COPY), _token(), port) as server:
        say(f"{server.certificate.decode().rstrip()}\n{READY} {server.port}\n")
        until.read()


def fetch(host: str, port: int, certificate: str) -> None:
    """Gets the data from a machine that serves it. Raises as `receive` and `served_archive` do."""
    with served_archive(host, port, certificate, _token()) as archive:
        receive(archive)


def _token() -> str:
    return read_settings(TOKEN_FILE, 1 << 10).decode(errors="replace").strip()


def main(words: Sequence[str]) -> int:
    """Executes the command line. Returns the exit status; the reason for a failure is on standard error."""
    try:
        match words:
            case ["there", folder]:
                use(Path(folder).expanduser())
            case ["send"]:
                write_archive(files_in(COPY), sys.stdout.buffer)
            case ["receive"]:
                receive(sys.stdin.buffer)
            case ["serve", port]:
                serve(int(port), _say, sys.stdin.buffer)
            case ["fetch", host, port]:
                fetch(host, int(port), sys.stdin.read())
            case _:
                raise DataError(f"{words}: expected there, send, receive, serve or fetch")
    except (GradstreamError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return NO_ROOM if isinstance(error, DiskFullError) else ELSEWHERE
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# ---- data delivery -----------------------------------------------------------------------

LONGEST_S = 3600.0
"""Longest time to bring the data to a machine."""

SERVE_S = 60.0
"""Longest time for the first machine to start serving the data, and to end."""

SAID_BYTES = 1 << 16
"""The most bytes of what a machine says meanwhile."""


@dataclass(frozen=True, slots=True)
class DataDelivery:
    """Brings the data.

    Args:
        fleet: the machines; `fleet.data` names the folder that may be there already.
        say: called with lines for people to read.
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
        """Brings the data to a machine that replaces another one, while the run goes on.

        Args:
            host: the machine.
            files: the list of the files, as this machine kept it.

        Raises:
            HostError: the machine has no room for it, or could not get it through this one either.
        """
        if self._without(files, [host]):
            self._pass_on([host], 0, self._relay)

    def _without(self, files: bytes, hosts: Sequence[SshHost]) -> list[SshHost]:
        """The machines among these that do not have the data in the folder of that name already."""
        there = self._command("there", self.fleet.data)

        def lacks(host: SshHost) -> bool:
            script = f"cat > {LIST} || exit {NO_ROOM}; [ -d {for_shell(self.fleet.data)} ] && {there}"
            done = host.ask(self.fleet.inside(host, script), files, LONGEST_S)
            if done.returncode == NO_ROOM:
                said = last_line(done.stderr)
                raise HostError(f"{host.name}: {said}; {folder_remedy(said)}")
            return done.returncode != 0

        lacking = self.fleet.at_once(lacks, hosts)
        return [host for host in hosts if lacking[host.name]]

    def _pass_on(self, others: Sequence[SshHost], port: int, instead: Callable[[SshHost], None]) -> None:
        """Makes machines get the data from the first one or, if that is impossible, in another way."""
        first = self.fleet.machines[0]
        with contextlib.ExitStack() as stack:
            try:
                served_port, certificate = stack.enter_context(self._served(first, port))
            except HostError as error:
                self.say(f"{error}; the data comes from here to each machine")
                self.fleet.at_once(instead, others)
                return

            def get(host: SshHost) -> None:
                fetch = self._command("fetch", first.address, str(served_port))
                done = host.ask(self.fleet.inside(host, fetch), certificate, LONGEST_S)
                if done.returncode == NO_ROOM:
                    raise HostError(f"{host.name}: {last_line(done.stderr)}")
                if done.returncode:
                    why = last_line(done.stderr)
                    self.say(f"{host.name}: no data from {first.name} ({why}); it comes from here")
                    instead(host)

            self.fleet.at_once(get, others)

    @contextlib.contextmanager
    def _served(self, first: SshHost, port: int) -> Iterator[tuple[int, bytes]]:
        """Makes the first machine serve the data inside the context, at this port and with this certificate, PEM.

        It does so as long as the standard input of its server is open.
        """
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
                yield int(ready[1]), certificate
            finally:
                assert server.stdin is not None
                server.stdin.close()  # ends the server
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
                except OSError as error:  # on a file here; the machine finds the archive too short
                    self.say(f"{folder}: {error}")
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                said, status = process.stderr.read(SAID_BYTES), process.wait()
        if status:
            raise HostError(f"{host.name}: {last_line(said) or f'exit status {status}'}")

    def _relay(self, host: SshHost) -> None:
        """Sends the first machine's copy, through this machine."""
        first = self.fleet.machines[0]
        words = first.words(self.fleet.inside(first, self._command("send")))
        pipe = subprocess.PIPE
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.DEVNULL
        ) as archive:
            assert archive.stdout is not None
            sent: IO[bytes] = archive.stdout
            try:
                host.do(self.fleet.inside(host, self._command("receive")), sent, LONGEST_S)
            finally:
                archive.kill()

    def _command(self, *words: str) -> str:
        """A command of `data_copy` for the shell of a machine."""
        return f"{self.fleet.program} {shlex.join(['-P', '-m', 'gradstream.ext.ssh.data_delivery', *words])}"


@contextlib.contextmanager
def _ended_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a process if the context lasts longer than this many seconds."""
    late = threading.Timer(seconds, process.kill)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
