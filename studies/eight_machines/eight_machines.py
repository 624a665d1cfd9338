"""Question: how soon do eight machines train Caltech-101 together, from nothing, and what is left of it afterwards?

Makes nine machines as network namespaces of this one: an address, 1 Gbit/s, a server of ssh, a disk in memory, and a
limit of memory each. From the first one `gradstream launch --hosts` starts a job on eight of them. One is asked to go
(SIGTERM), one is killed, the ninth takes its place, and the run is stopped. Takes root, `ip`, `tc`, `sshd` and
GRADSTREAM_DATA.

    python studies/eight_machines/eight_machines.py  # three minutes of two cores; writes record.json
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, origin
from kit.machines import Machine, Machines, unavailable
from kit.ssh_machines import SSHD, SshMachines


class Console:
    """Commands that are typed on the first machine."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine, self._folder = machine, folder

    def lines(self, *words: str) -> Generator[str, None, None]:
        """What a command prints."""
        process = self._machine.start(
            [sys.executable, "-m", "gradstream", *words],
            cwd=self._folder,
            env={"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(f"  {line.rstrip()}", flush=True)
                yield line
        finally:
            process.send_signal(signal.SIGINT)  # of one that goes on; it leaves the run alone
            process.wait()

    def until(self, words: list[str], said: str) -> float:
        """Seconds until a command prints something; it is left then, by Ctrl-C."""
        begun = time.monotonic()
        lines = self.lines(*words)
        found = any(said in line for line in lines)
        lines.close()
        if not found:
            raise SystemExit(f"{words[0]} ended without {said!r}")
        return time.monotonic() - begun


def processes(machine: Machine) -> list[int]:
    """Those of the run."""
    kept, found = ("sshd", "sh", "tail", "nohup"), []
    for pid in machine.pids():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if Path(f"/proc/{pid}/comm").read_text().strip() not in kept:
                found.append(pid)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--job", default="small", help="a function of examples/caltech101.py")
    parser.add_argument(
        "--out", default=str(Path(__file__).with_name("record.json")), help='the record; "" for nowhere'
    )
    given = parser.parse_args()
    if reason := unavailable() or ("" if SSHD else "no server of ssh"):
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name, Machines(9, rate="1gbit") as machines:
        folder = Path(name)
        data = Path(os.environ["GRADSTREAM_DATA"])
        (folder / "there").mkdir()
        there = SshMachines(machines, folder, own=[folder / "there", data], own_bytes=4 << 30)
        console = Console(machines[0], folder)
        (folder / "caltech101.py").write_text((ROOT / "examples" / "caltech101.py").read_text())
        segments = set(os.listdir("/dev/shm"))
        ours = ["--ssh", there.ssh, "--python", str(there.python), "--folder", str(folder / "there")]
        job = [f"caltech101.py:{given.job}", "--data", str(data), "--detach"]
        training = [
            "--strategy",
            "local-sgd",
            "--set",
            "strategy.every=10",
            "--batch-size",
            "32",
            "--epochs",
            "1000",
        ]
        run = f"runs/{given.job}"
        found: dict[str, Any] = {"machines": 8, "job": given.job}
        begun = time.monotonic()
        list(console.lines("launch", "--hosts", ",".join(there.hosts[:8]), *ours, *job, *training))
        found["started_s"] = time.monotonic() - begun
        console.until(["attach", run], "step 1/")
        found["first_step_s"] = time.monotonic() - begun
        for pid in processes(machines[3]):
            if b"gradstream train" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                os.kill(pid, signal.SIGTERM)
        found["preempted_s"] = console.until(["attach", run], f"{there.hosts[3]} has left")
        for pid in processes(machines[5]):
            os.kill(pid, signal.SIGKILL)
        found["killed_s"] = console.until(["attach", run], f"{there.hosts[5]}: ended with 137")
        begun = time.monotonic()
        list(console.lines("replace", run, there.hosts[5], there.hosts[8]))
        console.until(["attach", run], "worker-5 is back")
        found["replaced_s"] = time.monotonic() - begun
        begun = time.monotonic()
        list(console.lines("stop", run))
        found["stopped_s"] = time.monotonic() - begun
        found["processes_left"] = sum(len(processes(machine)) for machine in machines.machines)
        folders = [there.path(index, folder / "there").iterdir() for index in range(9)]
        found["folders_left"] = sum(len(list(one)) for one in folders)
        found["segments_left"] = len(set(os.listdir("/dev/shm")) - segments)
        found["checkpoints"] = len(list((folder / run / "checkpoints").iterdir()))
    record = {"question": (__doc__ or "").splitlines()[0], **found, **origin()}
    print(json.dumps(record, indent=1))
    if given.out:
        keep(Path(given.out), record)


if __name__ == "__main__":
    main()
