from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradstream.machine.description import describe_machine
from gradstream.run.local import LocalCluster
from gradstream.run.local.cluster import modules_of
from gradstream.run.local.environment import node_environment
from gradstream.session.node import job as session_job

pytestmark = pytest.mark.cold  # of the forkserver itself, and of what it has loaded

DUMMY = """
import json, os, signal, sys, threading

def say(**message):
    os.write(3, json.dumps(message).encode() + b"\\n")

def quick(argv):
    say(argv=argv, threads=threading.active_count(), omp=os.environ["OMP_NUM_THREADS"])
    print("printed", *argv)
    return 7

def loaded(argv):
    say(loaded="colorsys" in sys.modules)

def stuck(argv):
    say(pid=os.getpid(), threads=len(os.listdir(f"/proc/{os.getppid()}/task")))
    signal.pause()

def broken(argv):
    raise LookupError("no such thing")
"""

WAIT_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    (tmp_path / "dummy_nodes.py").write_text(DUMMY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LocalCluster(tmp_path / "logs", node_environment(workers=2)) as cluster:
        yield cluster


def hear(cluster: LocalCluster, key: str) -> dict[str, Any]:
    while (message := cluster.message(WAIT_S)) is not None:
        if key in message:
            return message
    raise AssertionError(f"never heard {key}")


def wait_until_dead(pids: list[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([descriptor], [], [], WAIT_S)
        os.close(descriptor)
        assert ended, f"process {pid} outlives the run"


def test_the_forkserver_imports_what_a_script_would_import_with_its_first_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports 821 modules then, in 2 to 4 s: for a new process, ten times what all else takes until it trains."""
    assert "torch._dynamo" in modules_of(session_job())
    (tmp_path / "dummy_nodes.py").write_text(DUMMY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LocalCluster(tmp_path / "logs", node_environment(1), modules=["colorsys"]) as cluster:
        cluster.start("n", [], main="dummy_nodes:loaded")
        assert hear(cluster, "loaded")["loaded"]


def test_nodes_report_log_and_exit(cluster: LocalCluster) -> None:
    cluster.start("worker-0", ["--rank", "0"], main="dummy_nodes:quick")
    assert hear(cluster, "started")["started"] == "worker-0"
    said = hear(cluster, "argv")
    assert said["from"] == "worker-0"
    assert said["argv"] == ["--rank", "0", "--report-fd", "3"]
    assert said["threads"] == 1
    assert int(said["omp"]) >= 1
    assert hear(cluster, "exited").items() >= {"exited": "worker-0", "status": 7}.items()
    assert cluster.running == {}
    assert "printed --rank 0" in cluster.log_tail("worker-0")


def test_an_exception_ends_a_node_with_its_traceback_in_the_log(cluster: LocalCluster) -> None:
    cluster.start("worker-0", [], main="dummy_nodes:broken")
    assert hear(cluster, "exited")["status"] != 0
    assert "LookupError: no such thing" in cluster.log_tail("worker-0")


def test_a_killed_node_is_reported_with_its_signal_and_the_others_go_on(cluster: LocalCluster) -> None:
    for name in ("a", "b"):
        cluster.start(name, [], main="dummy_nodes:stuck")
        said = hear(cluster, "pid")
        if "threads" not in said:  # that was "started"
            said = hear(cluster, "threads")
        assert said["threads"] == 1, "what it imports starts threads: it must not fork"
    pids = dict(cluster.running)
    cluster.signal("a", signal.SIGKILL)
    said = hear(cluster, "exited")
    assert said.items() >= {"exited": "a", "status": -signal.SIGKILL}.items()
    assert "its launcher ended it" in said["cause"]
    assert list(cluster.running) == ["b"]
    os.kill(cluster.running["b"], signal.SIGKILL)
    assert hear(cluster, "exited")["cause"] == ""
    cluster.close()
    wait_until_dead(list(pids.values()))


DRIVER = """
import json, sys
from pathlib import Path
from gradstream.run.local import LocalCluster

cluster = LocalCluster(Path(sys.argv[1]), {})
for name in ("a", "b"):
    cluster.start(name, [], main="dummy_nodes:stuck")
while len(cluster.running) < 2:
    cluster.message(60)
print(json.dumps([cluster.forkserver.pid, *cluster.running.values()]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["driver", "forkserver"])
def test_nothing_outlives_a_killed_launcher_or_forkserver(tmp_path: Path, victim: str) -> None:
    (tmp_path / "dummy_nodes.py").write_text(DUMMY)
    source = str(Path(__file__).resolve().parents[2] / "src")
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path / "logs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, str(tmp_path)])},
    )
    try:
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        os.kill(driver.pid if victim == "driver" else pids[0], signal.SIGKILL)
        wait_until_dead(pids)
    finally:
        driver.kill()
        driver.communicate()


def test_threads_spin_only_where_no_shard_needs_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert node_environment(1, shards=True)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in node_environment(1)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert node_environment(1, shards=True)["OMP_WAIT_POLICY"] == "ACTIVE"  # the user's


def test_the_machine_is_described_in_json() -> None:
    described = describe_machine(node_environment(workers=1))
    assert json.loads(json.dumps(described)) == described
    assert described["machine"]["cores"] >= 1
    assert described["versions"]["torch"]
