"""A machine that the system's ssh client reaches."""

from __future__ import annotations

import io
import os
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from gradstream.errors import GradstreamError

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
"""ssh asks for no password here, whatever the user's own options: keys, an agent, or ~/.ssh/config have to do."""

NO_CONNECTION = 255
"""Exit status of ssh itself."""

SILENCE_S = 60.0
"""A machine that is to send files, and sends nothing for this long, is given up."""

ANSWER_BYTES = 16 << 20
"""Most bytes of an answer; files come in another way."""

LINE_BYTES = 8000
"""The most bytes of a line that is shown."""

END_S = 2.0
"""Longest wait for the last output of a process that has ended."""


class HostError(GradstreamError):
    """Machines cannot be reached, or cannot do what they are asked; the message names each, and the remedy."""

    exit_status = 3


@dataclass(frozen=True, slots=True)
class SshHost:
    """A machine.

    Args:
        name: in ssh's form: "b", "user@10.0.0.2".
        ssh: the client, and options of the user, which go before `OPTIONS`.
    """

    name: str
    ssh: Sequence[str] = ("ssh",)

    @property
    def address(self) -> str:
        """Its host name or address, without the user."""
        return self.name.rpartition("@")[2]

    @property
    def trial(self) -> str:
        """The command line that shows what is wrong with the connection."""
        return shlex.join([*self.ssh, self.name, "true"])

    def words(self, script: str) -> list[str]:
        """The command line that runs a script of the shell there, whatever the user's own shell is."""
        return [*self.ssh, *OPTIONS, self.name, f"sh -c {shlex.quote(script)}"]

    def ask(
        self, script: str, sent: bytes | IO[bytes] = b"", timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a script there, to its end.

        Args:
            script: for the shell.
            sent: its standard input, or a pipe from which that comes.
            timeout_s: longest time.

        Raises:
            HostError: the machine cannot be reached, prints too much, or the script does not end in time.
        """
        words = self.words(script)
        pipe = subprocess.PIPE
        with self._started(words, stdin=pipe if isinstance(sent, bytes) else sent, stdout=pipe) as process:
            said, errors = _Pipe(process.stdout, process), _Pipe(process.stderr, process)
            if isinstance(sent, bytes):
                threading.Thread(target=_feed, args=(process.stdin, sent), daemon=True).start()
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise self._silent(timeout_s) from None
            done = subprocess.CompletedProcess(words, status, said.text(), errors.text())
        if said.is_full or errors.is_full:
            raise HostError(f"{self.name}: it says more than {ANSWER_BYTES:,} bytes, and is not heard")
        if done.returncode == NO_CONNECTION:
            raise HostError(f"{self.name}: {last_line(done.stderr)}; try `{self.trial}`")
        return done

    @contextmanager
    def printed(self, script: str, longest_s: float) -> Iterator[Printed]:
        """The output of a script there, as it comes.

        Args:
            script: for the shell.
            longest_s: longest time for the whole output.

        Raises:
            HostError: the machine cannot be reached, was silent for `SILENCE_S`, was not done in time, or the script
                failed. The process here is gone by then.
        """
        with self._started(self.words(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            errors = _Pipe(process.stderr, process)
            yield Printed(self, process.stdout, time.monotonic() + longest_s)
            try:
                status = process.wait(SILENCE_S)
            except subprocess.TimeoutExpired:
                raise self._silent(SILENCE_S) from None
        if status:
            why = last_line(errors.text()) or f"exit status {status}"
            raise HostError(f"{self.name}: its files did not come: {why}; try `{self.trial}`")

    @contextmanager
    def _started(self, words: Sequence[str], **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the client, which is killed if it has not ended by the end of the context."""
        try:
            process = subprocess.Popen(words, stderr=subprocess.PIPE, **pipes)
        except OSError as error:
            raise HostError(
                f"{self.ssh[0]}: {error.strerror}; install an ssh client, or name one by --ssh"
            ) from None
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _silent(self, seconds: float) -> HostError:
        return HostError(f"{self.name}: no answer within {seconds:g} s; try `{self.trial}`")

    def do(self, script: str, sent: bytes | IO[bytes] = b"", timeout_s: float = 60.0) -> bytes:
        """As `ask`. Returns the output of the script. Also raises HostError if its exit status is not 0."""
        done = self.ask(script, sent, timeout_s)
        if done.returncode:
            raise HostError(f"{self.name}: {last_line(done.stderr) or f'exit status {done.returncode}'}")
        return done.stdout


class _Pipe:
    """Reads a pipe of a process to its end, beside others. A process that prints too much is killed."""

    def __init__(self, pipe: IO[bytes] | None, process: subprocess.Popen[bytes]) -> None:
        assert pipe is not None
        self.is_full, self._kept = False, bytearray()
        self._thread = threading.Thread(target=self._read, args=(pipe, process), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes], process: subprocess.Popen[bytes]) -> None:
        while piece := os.read(pipe.fileno(), 1 << 16):
            self._kept += piece
            if len(self._kept) > ANSWER_BYTES:
                self.is_full = True
                process.kill()
                break
        pipe.close()

    def text(self) -> bytes:
        """The output so far. Others may hold the pipe open when the process is gone; they are not waited for."""
        self._thread.join(END_S)
        return bytes(self._kept)


class Printed(io.RawIOBase):
    """The output of a machine, which may not be silent for long."""

    def __init__(self, host: SshHost, pipe: IO[bytes], end_s: float) -> None:
        self._host, self._pipe, self._end_s = host, pipe, end_s
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, into: Any) -> int:
        """Takes the next bytes, at most as many as there is room for; none at the end. Raises HostError."""
        wait_s = min(SILENCE_S, self._end_s - time.monotonic())
        if wait_s <= 0 or not self._poll.poll(1e3 * wait_s):
            why = f"silent for {SILENCE_S:g} s" if wait_s == SILENCE_S else "not done in time"
            raise HostError(f"{self._host.name}: {why} while its files came; try `{self._host.trial}`")
        return os.readv(self._pipe.fileno(), [into])


def _feed(pipe: IO[bytes], sent: bytes) -> None:
    with suppress(OSError), pipe:  # a process that does not read it says why
        pipe.write(sent)


def lines_of(stream: IO[bytes] | io.BufferedReader) -> Iterator[str]:
    """The lines that a machine prints. A line longer than `LINE_BYTES` comes in several pieces."""
    while line := stream.readline(LINE_BYTES):
        yield line.decode(errors="replace").rstrip("\r\n")


def folder_remedy(said: str) -> str:
    """The remedy if a machine cannot use a folder: making room helps only if its disk is full."""
    is_full = "No space left" in said or "quota exceeded" in said.lower()
    return "make room, or take another --folder" if is_full else "take a --folder in which you may write"


def last_line(text: bytes) -> str:
    """The last line of a text that is not empty; "" if there is none."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
