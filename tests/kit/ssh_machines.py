"""Machines of `kit.machines` with a server of ssh each, and a key for whoever made them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gradstream
from kit.machines import Machines

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin:/bin") or ""
"""The server of ssh; "" if there is none (Debian: openssh-server)."""

START_S = 20.0


class SshMachines:
    """Starts a server of ssh on each machine. They end with the machines.

    Args:
        machines: the machines.
        folder: for keys and settings; everybody who reads it gets in.
        own: folders in which each machine sees a disk of its own, in memory, empty at first.
        own_bytes: size of each of these disks.

    Attributes:
        hosts: addresses of the machines.
        ssh: the client's command line, for `gradstream launch --ssh`.
        python: this Python with the source of this gradstream, which a server of ssh would not pass on.
    """

    def __init__(
        self, machines: Machines, folder: Path, *, own: Sequence[Path] = (), own_bytes: int = 1 << 28
    ) -> None:
        key, host_key = folder / "key", folder / "host_key"
        for path in (key, host_key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        mounts = "".join(
            f"mount -t tmpfs -o size={own_bytes} tmpfs {shlex.quote(str(path))} && " for path in own
        )
        self._servers: list[subprocess.Popen[str]] = []
        for machine in machines.machines:
            settings, log = folder / f"sshd_{machine.name}", folder / f"sshd_{machine.name}.log"
            # Its own home folder: what the user's shell does as it starts may wait for others that start.
            (home := folder / f"home_{machine.name}").mkdir()
            settings.write_text(
                f"ListenAddress {machine.address}\nHostKey {host_key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\n"
                "PasswordAuthentication no\nPidFile none\nUsePAM no\nPermitRootLogin yes\nMaxStartups 100\n"
                f"SetEnv HOME={home}\n"
            )
            # Each program that `ip netns exec` starts has mounts of its own, so nobody else sees these disks.
            server = [
                "sh",
                "-c",
                f'{mounts} exec "$@"',
                "sh",
                SSHD,
                "-D",
                "-E",
                str(log),
                "-f",
                str(settings),
            ]
            self._servers.append(machine.start(server, cwd=folder))
            ready = f"until grep -sq listening {log}; do sleep 0.05; done"
            machine.start(["sh", "-c", ready], cwd=folder).wait(START_S)
        source = Path(gradstream.__file__).resolve().parents[1]
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {sys.executable} "$@"\n')
        self.python.chmod(0o755)
        self.hosts = [machine.address for machine in machines.machines]
        options = "-o LogLevel=ERROR -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        self.ssh = f"ssh -F none -i {key} {options}"

    def path(self, index: int, path: Path) -> Path:
        """A path of one machine, as it is reached from here, while its server runs."""
        return Path(f"/proc/{self._servers[index].pid}/root{path}")
