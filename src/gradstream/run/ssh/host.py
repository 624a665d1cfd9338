"""A machine that the system's ssh client reaches."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from gradstream.errors import GradstreamError

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
"""ssh asks for no password here, whatever the user's own options are: keys, an agent, or what ~/.ssh/config says."""

NO_CONNECTION = 255
"""Exit status of ssh itself."""


class HostError(GradstreamError):
    """Machines cannot be reached, or cannot do what they are asked; the message names each, and the remedy."""

    exit_status = 3


@dataclass(frozen=True, slots=True)
class SshHost:
    """A machine.

    Args:
        name: as ssh takes it: "b", "user@10.0.0.2".
        ssh: the client, and options of the user, which go before `OPTIONS`.
    """

    name: str
    ssh: Sequence[str] = ("ssh",)

    @property
    def address(self) -> str:
        """Its host name or address, without the user."""
        return self.name.rpartition("@")[2]

    @property
    def _trial(self) -> str:
        """The line that shows what is amiss with the connection."""
        return shlex.join([*self.ssh, self.name, "true"])

    def words(self, script: str) -> list[str]:
        """The command line that runs a script of the shell there, whatever the user's own shell is."""
        return [*self.ssh, *OPTIONS, self.name, f"sh -c {shlex.quote(script)}"]

    def ask(
        self, script: str, given: bytes | IO[bytes] = b"", timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a script there, to its end.

        Args:
            script: for the shell.
            given: its standard input, or a pipe from which that comes.
            timeout_s: longest time.

        Raises:
            HostError: the machine cannot be reached, or the script does not end in time.
        """
        try:
            source: dict[str, Any] = {"input": given} if isinstance(given, bytes) else {"stdin": given}
            done = subprocess.run(
                self.words(script), capture_output=True, check=False, timeout=timeout_s, **source
            )
        except subprocess.TimeoutExpired:
            raise HostError(f"{self.name}: no answer within {timeout_s:g} s; try `{self._trial}`") from None
        except OSError as error:
            raise HostError(
                f"{self.ssh[0]}: {error.strerror}; install an ssh client, or name one by --ssh"
            ) from None
        if done.returncode == NO_CONNECTION:
            raise HostError(f"{self.name}: {last_line(done.stderr)}; try `{self._trial}`")
        return done

    def do(self, script: str, given: bytes | IO[bytes] = b"", timeout_s: float = 60.0) -> bytes:
        """As `ask`. Returns what the script prints. Raises HostError if its exit status is not 0, too."""
        done = self.ask(script, given, timeout_s)
        if done.returncode:
            raise HostError(f"{self.name}: {last_line(done.stderr) or f'exit status {done.returncode}'}")
        return done.stdout


def last_line(text: bytes) -> str:
    """The last line of a text that is not empty; "" if there is none."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
