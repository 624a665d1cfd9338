"""`RayNode`: the actor of one node, which keeps a process of gradstream running on the machine that Ray chose."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradstream._version import __version__
from gradstream.job.sources import sha256_of
from gradstream.run.local.environment import python_environment
from gradstream.run.local.forkserver import die_with_parent

OWN_FOLDER = "{own}"
"""Placeholder for a folder that the actor makes, a new one for each of its processes."""

TAIL_BYTES = 4096
"""The end of a process's output that its actor returns."""

PIECE_BYTES = 64 << 10
"""Bytes of a file per answer. Ray puts answers of 100 kB or more into its object store, but not smaller ones."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """The first node's view of its machine before the run.

    Args:
        host: address of the machine, by which Ray's other nodes reach it.
        port: a free port there.
        version: version of gradstream.
        job: place of the job file there; "" if no file is the driver's.
        run_dir: folder of the run there.
        shared: whether that is the folder that the driver uses, on the same disk.
        events_bytes: size of the events that the run already has.
    """

    host: str
    port: int
    version: str
    job: str
    run_dir: str
    shared: bool
    events_bytes: int


def digest_of_file(file: Path) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        return sha256_of(file)
    except OSError:
        return ""


class RayNode:
    """A node of a run, as a Ray actor with several threads: it answers while its process runs.

    The process gets what Ray gives to an actor: the working directory, the environment, and the GPUs.
    """

    def __init__(self) -> None:
        self._cwd = os.getcwd()
        self._folder = Path(tempfile.mkdtemp(prefix="gradstream-"))
        self._run_dir = self._folder
        self._process: subprocess.Popen[bytes] | None = None
        self._leaving = threading.Event()
        self._starts = 0

    def look(self, files: Sequence[str], digest: str, run_dir: str, mark: str) -> NodeView:
        """Looks at this machine for the first node.

        Args:
            files: where the job file may be.
            digest: its SHA-256.
            run_dir: folder of the run, as the driver names it.
            mark: name of a file that the driver has made beside that folder.
        """
        from ray.util import get_node_ip_address

        shared = Path(run_dir).with_name(mark).is_file()
        self._run_dir = Path(run_dir) if shared else self._folder / "run"
        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        events = self._run_dir / "events.jsonl"
        return NodeView(
            host=get_node_ip_address(),
            port=port,
            version=__version__,
            job=next((file for file in files if digest_of_file(Path(file)) == digest), ""),
            run_dir=str(self._run_dir),
            shared=shared,
            events_bytes=events.stat().st_size if events.is_file() else 0,
        )

    def run(self, words: Sequence[str], environment: Mapping[str, str], wait_s: float) -> tuple[int, str]:
        """Runs the command line of gradstream to its end. Returns its exit status, and the end of its output.

        If this machine is lost, Ray calls it again on another one.

        Args:
            words: the command line.
            environment: variables of the process besides those of this actor.
            wait_s: seconds to wait first.
        """
        if self._leaving.wait(wait_s):
            return 0, ""
        self._starts += 1
        own, log = str(self._folder / f"run-{self._starts}"), self._folder / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m"),
                    "gradstream.ext.ray.actor",
                    str(os.getpid()),
                    *(own if word == OWN_FOLDER else word for word in words),
                ],
                cwd=self._cwd,  # by name: another node of Ray on this machine may have made the folder anew
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=python_environment(environment),
            )
            status = self._process.wait()
        with log.open("rb") as written:
            written.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return status, written.read().decode(errors="replace")

    def stop(self) -> None:
        """Asks the process to stop: the first node's makes a checkpoint, others hand in what they have, and leave."""
        self._leaving.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def events(self, start: int) -> bytes:
        """A piece of the run's events from a byte on."""
        return self.piece("events.jsonl", start)

    def files(self) -> list[str]:
        """The files of the run's folder, by their names in it."""
        files = sorted(path for path in self._run_dir.rglob("*") if path.is_file() and not path.is_symlink())
        return [str(path.relative_to(self._run_dir)) for path in files]

    def piece(self, name: str, start: int) -> bytes:
        """A piece of a file of the run's folder from a byte on; empty at its end, or if it does not exist yet."""
        try:
            with (self._run_dir / name).open("rb") as file:
                file.seek(start)
                return file.read(PIECE_BYTES)
        except FileNotFoundError:
            return b""

    def clean(self) -> None:
        """Removes what this actor has made."""
        shutil.rmtree(self._folder, ignore_errors=True)


# ---- process -----------------------------------------------------------------------------
# The command line of gradstream as a process of an actor: `python -m gradstream.ext.ray.actor PARENT WORDS…`.


def main() -> None:
    """Runs the command line that follows the process id of the actor.

    The kernel kills the process if the actor is gone, since Ray kills an actor without asking its processes.
    """
    die_with_parent(int(sys.argv.pop(1)))
    sys.argv[0] = "gradstream"
    runpy.run_module("gradstream", run_name="__main__")


if __name__ == "__main__":
    main()
