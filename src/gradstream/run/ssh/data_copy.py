"""A machine's copy of the data of a run: what `DataDelivery` has each machine do, in the folder of the run there.

    python -m gradstream.run.ssh.data_copy there FOLDER        is the data in that folder already?
    python -m gradstream.run.ssh.data_copy send                prints the copy as an archive
    python -m gradstream.run.ssh.data_copy receive             takes an archive from standard input
    python -m gradstream.run.ssh.data_copy serve PORT          gives the copy to others, until standard input ends
    python -m gradstream.run.ssh.data_copy fetch HOST PORT     takes it from there; the certificate is read from
                                                               standard input

The copy is `data`, and its list of files `data.json`. A copy is made as `data.new`, and has its name once every
checksum is right.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from gradstream.errors import DataError, GradstreamError
from gradstream.run.ssh.archives import Source, unpacked
from gradstream.run.ssh.file_list import MAX_BYTES, FileList, files_in
from gradstream.run.ssh.file_server import FileServer, served_archive, write_archive
from gradstream.untrusted import read_settings

COPY, LIST, TOKEN_FILE = Path("data"), Path("data.json"), Path("token")
ELSEWHERE, NO_ROOM = 45, 46
"""Exit statuses: the folder is not the data; the disk is full, so that the data cannot come from anywhere."""

READY = "ready"
"""First word of the last line that a server prints, after its certificate; its port follows."""


class DiskFullError(DataError):
    """The disk has no room for the data."""


def use(folder: Path) -> None:
    """Has the run use a folder of this machine as its data. Raises DataError if its files are not those of the list."""
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
    """Gives the copy to other machines of the run, until `until` ends."""
    with FileServer(files_in(COPY), _token(), port) as server:
        say(f"{server.certificate.decode().rstrip()}\n{READY} {server.port}\n")
        until.read()


def fetch(host: str, port: int, certificate: str) -> None:
    """Takes the data from a machine that serves it. Raises as `receive` and `served_archive` do."""
    with served_archive(host, port, certificate, _token()) as archive:
        receive(archive)


def _token() -> str:
    return read_settings(TOKEN_FILE, 1 << 10).decode(errors="replace").strip()


def main(words: Sequence[str]) -> int:
    """Does what the command line says. Returns the exit status; the reason of a failure is on standard error."""
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
