"""`gradstream launch --hosts`: machines with an address and a server of ssh each, a driver beside them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import gradstream as gs
from gradstream.checkpoint import newest
from gradstream.run.launches import Launch
from gradstream.runtime.storage import DiskStorage
from kit.machines import Machine, Machines, unavailable
from kit.ssh_machines import SSHD, SshMachines

pytestmark = pytest.mark.limit_s(300)  # many processes that import torch, on cores that others may use too

JOB = """
import gradstream as gs
from helper import rows

def job():
    model, data = rows()
    return gs.Job(model, data, optimizer=gs.optim.SGD(lr=1e-6), batch_size=8, epochs=2)
"""
HELPER = """
import os
from gradstream.testing.runs import slow

def rows():
    assert os.path.exists(os.path.join(os.environ["GRADSTREAM_DATA"], "deep", "numbers"))
    return slow(400, pause_s=0.002)
"""

PYTHON = """#!/bin/sh
# A machine with one of these files has another Python.
[ -e {there}/bare ] && exec {bare} -I -S "$@"
[ -e {there}/older ] && case "$*" in *_version*) echo 0.0.1; exit ;; esac
exec {usual} "$@"
"""


class Cluster:
    """Machines with ssh, and a folder on the first one from which commands are typed."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder = machines, folder
        disks = [folder / "there", folder / "data"]
        self.there = SshMachines(machines, folder, own=disks, own_bytes=1 << 27)
        self.hosts = self.there.hosts
        self.python = folder / "a-python"
        places = {"there": folder / "there", "bare": sys.executable, "usual": self.there.python}
        self.python.write_text(PYTHON.format(**places))
        self.python.chmod(0o755)

    def on(self, index: int, name: str) -> Path:
        """A file in the folder of runs of a machine, on its own disk."""
        return self.there.path(index, self.folder / "there" / name)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A command, typed on the first machine."""
        pipe = subprocess.PIPE
        words = (sys.executable, "-m", "gradstream", *words)
        return self.machines[0].start(list(words), cwd=self.folder, stdout=pipe, stderr=subprocess.STDOUT)

    def run(self, *words: str, timeout_s: float = 200.0) -> tuple[int, str]:
        process = self.start(*words)
        said, _ = process.communicate(timeout=timeout_s)
        return process.returncode, said

    def launch(self, *words: str, hosts: list[str] | None = None) -> list[str]:
        ours = ["--ssh", self.there.ssh, "--python", str(self.python), "--folder", str(self.folder / "there")]
        return ["launch", "--hosts", ",".join(hosts or self.hosts), *ours, "job.py", *words]

    def left(self) -> list[str]:
        """Processes of gradstream on the machines, and folders there."""
        folders = [path for index in range(len(self.hosts)) for path in self.on(index, ".").glob("*")]
        found = [str(path) for path in folders]
        for pid in [pid for machine in self.machines.machines for pid in machine.pids()]:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [line] * ("gradstream" in line)
        return found


@contextmanager
def machines_with_ssh(folder: Path, count: int) -> Iterator[Cluster]:
    if reason := unavailable():
        pytest.skip(reason)
    if not SSHD:
        pytest.skip("no server of ssh: apt-get install openssh-server")
    (folder / "job.py").write_text(JOB)
    (folder / "helper.py").write_text(HELPER)
    (folder / "there").mkdir()
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "deep" / "numbers").write_text("1 2 3")
    with Machines(count) as machines:
        yield Cluster(machines, folder)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with machines_with_ssh(tmp_path, 3) as made:
        yield made


def test_one_command_brings_starts_collects_and_cleans_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = cluster.run(*cluster.launch("--data", "data", "--strategy", "allreduce"))
    assert status == 0, said
    assert "3 machines are ready; 2 files to bring" in said
    assert "3 workers" in said and "800 samples" in said
    assert f"run directory {Path('runs') / 'job'}" in " ".join(said.split()) and "/runs/job" not in said
    run = cluster.folder / "runs" / "job"
    assert "AllReduce" in (run / "run.json").read_text() or "allreduce" in (run / "config.toml").read_text()
    assert list(run.glob("checkpoints/*"))
    assert [(run / "hosts" / host / "status").read_text() for host in cluster.hosts] == ["0\n"] * 3
    assert cluster.left() == []
    kept = Launch.at(run).folder / "job"
    assert (
        sorted(path.name for path in kept.iterdir()) == ["helper.py", "job.py"] and not (run / "job").exists()
    )
    monkeypatch.setenv("GRADSTREAM_DATA", str(cluster.folder / "data"))
    status, said = cluster.run("evaluate", "runs/job")
    assert "has no held-out samples" in said, said  # so it has read the job again


def test_what_a_machine_lacks_is_said_in_a_line_and_nothing_is_left(cluster: Cluster) -> None:
    a, b, c = cluster.hosts
    away = "10.77.0.99"
    status, said = cluster.run(*cluster.launch("--data", "data", hosts=[a, b, away]))
    assert (status, said.count("\n")) == (3, 1), said
    assert (
        f"{away}: ssh: connect to host" in said
        and f" {away} true`" in said
        and f"try `{cluster.there.ssh}" in said
    )
    status, said = cluster.run(*cluster.launch("--python", "python9.9"))
    assert status == 3
    assert [line.partition(" there is no program 'python9.9'")[1] != "" for line in said.splitlines()] == [
        True
    ] * 3
    status, said = cluster.run(*cluster.launch("--eppochs", "2"))
    assert status == 2 and "--eppochs" in said
    with cluster.machines.wall(0):
        status, said = cluster.run(*cluster.launch())
    assert status == 3
    assert {f"{one}: does not reach {a}:29400" in said for one in (b, c)} == {True}, said
    for first_alone in (False, True):  # else it is chance whose end is noticed first
        waits = f"import os, time; time.sleep(60.0 * ({a!r} not in os.getcwd()))\n" if first_alone else ""
        (cluster.folder / "job.py").write_text(f"{waits}import nothing_of_that_name\n")
        status, said = cluster.run(*cluster.launch())
        assert status == gs.errors.UserCodeError.exit_status, said
        assert "No module named 'nothing_of_that_name'" in said
        assert cluster.left() == []
        assert list((cluster.folder / "runs").iterdir()) == []


def test_what_is_amiss_on_one_machine_is_said_with_its_name_and_the_remedy(cluster: Cluster) -> None:
    a, b, c = cluster.hosts
    cluster.on(0, "bare").touch()
    with suppress(OSError), cluster.on(1, "everything").open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
    cluster.on(2, "older").touch()
    status, said = cluster.run(*cluster.launch())
    lines = said.splitlines()
    assert (status, len(lines)) == (3, 3), said
    assert (
        f"{a}: {cluster.python} has no gradstream" in lines[0] and "-m pip install gradstream==" in lines[0]
    )
    assert f"{b}: " in lines[1] and "No space left on device; make room, or take another --folder" in lines[1]
    assert f"{c}: has gradstream 0.0.1" in lines[2] and "install the same one" in lines[2]
    cluster.on(0, "bare").unlink()
    cluster.on(2, "older").unlink()
    with cluster.on(1, "everything").open("r+b") as file:
        file.truncate((1 << 27) - (40 << 20))
    (cluster.folder / "data" / "large").write_bytes(os.urandom(60 << 20))
    status, said = cluster.run(*cluster.launch("--data", "data"))
    assert status == 3
    assert f"{b}: " in said and "and the data takes 63 MB; make room, or take another --folder" in said
    cluster.on(1, "everything").unlink()
    assert cluster.left() == []


def test_data_leaves_the_driver_once_for_all_machines(tmp_path: Path) -> None:
    size = 30_000_000
    with machines_with_ssh(tmp_path, 4) as cluster:
        (tmp_path / "data" / "large").write_bytes(os.urandom(size))
        before = [sent_bytes(one) for one in cluster.machines.machines]
        _, a, b, c = cluster.hosts
        status, said = cluster.run(*cluster.launch("--data", "data", hosts=[a, b, c]))
        assert status == 0, said
        assert f"30 MB of data: from here to {a}" in said
        assert f"30 MB of data: from {a} to {b}, {c}" in said
        sent = [sent_bytes(one) - was for one, was in zip(cluster.machines.machines, before, strict=True)]
        assert size < sent[0] < 1.3 * size, sent
        assert 2 * size < sent[1], sent
        assert cluster.left() == []


def test_machines_join_and_leave_while_the_others_train(cluster: Cluster) -> None:
    a, b, c = cluster.hosts
    words = ["--data", "data", "--strategy", "downpour", "--epochs", "100000", "--detach", "--room", "1"]
    status, said = cluster.run(*cluster.launch(*words, hosts=[a, b]))
    assert status == 0, said
    status, said = cluster.run("add", "runs/job", b)
    assert status == 2 and f"{b} has a part in the run already" in said
    status, said = cluster.run("add", "runs/job", c)
    assert status == 0 and f"{c} joins" in said, said
    attached = cluster.start("attach", "runs/job")
    assert attached.stdout is not None
    next(line for line in attached.stdout if "worker-2" in line)
    status, said = cluster.run("add", "runs/job", "another")
    assert status == 2 and "the run has no free place" in said and "--room N" in said
    status, said = cluster.run("remove", "runs/job", a)
    assert status == 2 and f"{a} is the first machine, which has the parameters" in said
    status, said = cluster.run("remove", "runs/job", "another")
    assert status == 2 and f"no machine 'another' that joined it; expected one of {b}, {c}" in said
    status, said = cluster.run("remove", "runs/job", b)
    assert status == 0 and f"{b} has left, and nothing of the run is on it" in said, said
    assert not list(cluster.on(1, ".").glob("*"))
    assert (cluster.folder / "runs" / "job" / "hosts" / b / "log").is_file()
    status, said = cluster.run("status", "runs/job")
    assert [line.split()[0] for line in said.splitlines()] == [a, c, "room"], said
    status, said = cluster.run("add", "runs/job", b)
    assert status == 0, said
    next(line for line in attached.stdout if "has joined with worker-1" in line)
    attached.send_signal(signal.SIGINT)
    attached.communicate(timeout=30)
    status, said = cluster.run("stop", "runs/job")
    assert status == 0 and "nothing is left on" in said, said
    assert cluster.left() == []
    events = [
        json.loads(line) for line in (cluster.folder / "runs/job/events.jsonl").read_text().splitlines()
    ]
    assert [one["event"] for one in events].count("started") == 1


def test_a_stopped_run_goes_on_by_the_same_line_on_other_machines(cluster: Cluster) -> None:
    a, b, c = cluster.hosts
    words = ["--data", "data", "--strategy", "downpour"]
    first = cluster.start(*cluster.launch(*words, "--epochs", "100000", hosts=[a, b]))
    assert first.stdout is not None
    next(line for line in first.stdout if line.startswith("step "))
    status, said = cluster.run("stop", "runs/job")
    assert status == 0, said
    first.communicate(timeout=60)
    run = cluster.folder / "runs" / "job"
    [before] = [path.name for path in run.glob("checkpoints/step-*")]
    assert cluster.left() == []

    (run / "checkpoints" / before).rename(run / "kept")
    status, said = cluster.run(*cluster.launch(*words, hosts=[c, b]))
    assert status == 2 and "runs/job has no checkpoint from which it could go on" in said, said
    (run / "kept").rename(run / "checkpoints" / before)

    kept = newest(DiskStorage(run), lambda error: None)
    assert kept is not None
    epochs = kept[1].done.horizon + 2
    status, said = cluster.run(*cluster.launch(*words, "--epochs", str(epochs), hosts=[c, b]))
    assert status == 0, said
    assert "runs/job goes on from its newest checkpoint; another --name begins anew" in said
    assert f"the run goes on from checkpoints/{before}" in said
    assert f"from here on: epochs = {epochs}, before 100000" in said
    summary = gs.Run.load(run).summary
    assert summary["samples_accounted"] == 400 * epochs
    assert sorted(path.name for path in (run / "hosts").iterdir()) == sorted([a, b, c])
    assert "final" in [path.name for path in run.glob("checkpoints/*")]
    assert cluster.left() == []
    status, said = cluster.run(*cluster.launch(*words))
    assert status == 2 and "runs/job has finished; take another --name" in said, said


def sent_bytes(machine: Machine) -> int:
    """Bytes that have left a machine by its network card."""
    words = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    said, _ = machine.start(words, cwd=Path("/"), stdout=subprocess.PIPE).communicate(timeout=20)
    return int(said)


def test_a_run_goes_on_without_the_terminal_and_without_a_machine_and_stop_leaves_nothing(
    cluster: Cluster,
) -> None:
    a, b, c = cluster.hosts
    launch = cluster.launch("--data", "data", "--strategy", "allreduce", "--epochs", "100000", "--detach")
    status, said = cluster.run(*launch)
    assert status == 0 and "gradstream stop runs/job" in said
    status, said = cluster.run(*launch)
    assert status == 2 and "runs/job goes on: gradstream attach runs/job" in said
    attached = cluster.start("attach", "runs/job")
    assert attached.stdout is not None
    next(line for line in attached.stdout if line.startswith("step "))
    for pid in cluster.machines[2].pids():
        if Path(f"/proc/{pid}/comm").read_text().strip() not in ("sshd", "sh", "tail", "nohup"):
            os.kill(pid, signal.SIGKILL)
    told = next(line for line in attached.stdout if line.startswith(f"{c}: ended with"))
    assert "137" in told
    next(line for line in attached.stdout if line.startswith("step "))
    attached.send_signal(signal.SIGINT)
    said, _ = attached.communicate(timeout=30)
    assert attached.returncode == 130 and "the run goes on" in said
    status, said = cluster.run("status", "runs/job")
    assert [line.split()[:2] for line in said.splitlines()] == [[a, "runs:"], [b, "runs:"], [c, "ended"]]
    status, said = cluster.run("resume", "runs/job")
    assert status == 2 and "this run goes on on other machines" in said, said
    status, said = cluster.run("replace", "runs/job", b, c)
    assert status == 2 and f"{c} has a part in the run already" in said
    status, said = cluster.run("replace", "runs/job", c, c)
    assert status == 0, said
    attached = cluster.start("attach", "runs/job")
    assert attached.stdout is not None
    lines = list[str]()
    for line in attached.stdout:
        lines.append(line)
        if "worker-2 is back" in line:
            break
    assert "worker-2 is back" in lines[-1], lines[-12:]
    attached.send_signal(signal.SIGINT)
    attached.communicate(timeout=30)
    status, said = cluster.run("logs", "runs/job", b)
    assert status == 0 and "worker-1" in said
    status, said = cluster.run("stop", "runs/job")
    assert status == 0 and "nothing is left on" in said, said
    assert list((cluster.folder / "runs" / "job").glob("checkpoints/*"))
    assert cluster.left() == []
    status, said = cluster.run("status", "runs/job")
    assert status == 2 and "the run is over and collected" in said
