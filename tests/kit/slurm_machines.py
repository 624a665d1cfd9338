"""Machines of `kit.machines` as the nodes of Slurm: a real one, of which they are the whole cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gradstream.errors import DeadlineError
from kit.machines import Machine, Machines

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare", "mount")
WAYS = "/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 20.0
POLL_S = 0.1

SETTINGS = """\
ClusterName=machines
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
{nodes}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def slurm_missing() -> str:
    """The reason why there is no Slurm here; "" if there is one."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=WAYS) is None]
    return f"there is no {', '.join(lacking)}: apt-get install slurm-wlm munge" if lacking else ""


class SlurmMachines:
    """Starts Slurm's controller on the first machine, and a node on each. They end with the machines.

    Each node has one core to give. Jobs of the partition `urgent` preempt those of `usual`, which are queued again.
    Nothing outside of the folder is changed: each process sees host names of its own in place of /etc/hosts.

    Args:
        machines: the machines.
        folder: for settings, state, logs, and a key that only these machines use.

    Raises:
        DeadlineError: the nodes were not ready in time; the message has the end of a log.
    """

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines, self._folder = machines.machines, folder
        first = machines[0]
        known = "".join(f"{one.address} {one.name}\n" for one in self._machines)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        nodes = [
            f"NodeName={one.name} NodeAddr={one.address} CPUs=1 RealMemory=8000" for one in self._machines
        ]
        self._settings = folder / "slurm.conf"
        self._settings.write_text(
            SETTINGS.format(folder=folder, first=first.name, address=first.address, nodes="\n".join(nodes))
        )
        # `ip netns exec` gives a machine a /sys of its own, where no cgroups are mounted; Slurm asks for them early.
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        places = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log"}
        places |= {"pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in places.items()]
        self._begin(first, "munged", "--foreground", "--force", *options)
        self.wait("munge.log", START_S, lambda: (folder / "munge.socket").exists())
        self._begin(first, "slurmctld", "-D", "-f", str(self._settings))
        for one in self._machines:
            self._begin(one, "slurmd", "-D", "-N", one.name, "-f", str(self._settings))
        idle = ("sinfo", "--noheader", "--partition=usual", "--format=%T")
        self.wait("slurmctld.log", START_S, lambda: self.ask(*idle) == "idle")

    def ask(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints on the first machine."""
        process = self._start(self._machines[0], words, cwd or self._folder, subprocess.PIPE)
        said, _ = process.communicate(timeout=START_S)
        return said.strip()

    def state(self, job: str) -> str:
        """The state of a job: "PENDING", "RUNNING", "COMPLETED", "FAILED"."""
        said = self.ask("scontrol", "--oneliner", "show", "job", job)
        return said.partition("JobState=")[2].partition(" ")[0]

    def wait(self, log: str, longest_s: float, ready: Callable[[], bool]) -> None:
        """Waits until something is so. Raises DeadlineError, with the end of a log in the folder, if it never is."""
        end_s = time.monotonic() + longest_s
        while not ready():
            if time.monotonic() > end_s:
                told = self._folder / log
                text = told.read_text(errors="replace")[-3000:] if told.exists() else "no log"
                raise DeadlineError("Slurm", f"not so within {longest_s:g} s; the end of {told}:\n{text}")
            time.sleep(POLL_S)

    def _begin(self, machine: Machine, *words: str) -> None:
        self._start(machine, words, self._folder, subprocess.DEVNULL)

    def _start(
        self, machine: Machine, words: tuple[str, ...], cwd: Path, stdout: int
    ) -> subprocess.Popen[str]:
        """Starts a program on a machine, where it sees that one's host name and those of the others."""
        begin = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        inside = [
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            begin,
            "sh",
            str(self._folder / "hosts"),
            machine.name,
        ]
        path = f"{Path(sys.executable).parent}:{WAYS}"
        more = {"SLURM_CONF": str(self._settings), "PATH": path}
        return machine.start([*inside, *words], cwd=cwd, env=more, stdout=stdout, stderr=subprocess.STDOUT)
