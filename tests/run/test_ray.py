"""Runs in a Ray cluster: nodes are placed, lost with their machine, started again elsewhere, and scaled."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import gradstream as gs
from gradstream.errors import ConfigError, DeadlineError, PeerLostError, UserCodeError
from gradstream.ext.ray.engine import RayEngine
from gradstream.job.files import load_job
from gradstream.testing import TokenAudit
from kit.machines import Machine, Machines, unavailable
from kit.process_faults import process_tree
from slow_tokens import SAMPLES, events, job_text

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gradstream[ray]'")
from ray.cluster_utils import Cluster

EPOCHS = 16
SOURCE = str(Path(gs.__file__).resolve().parents[1])
with socket.socket() as free:
    free.bind(("", 0))
    CLIENT_PORT = free.getsockname()[1]
NODE_ARGUMENTS = {"num_cpus": 2, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of Ray on this machine, beside one for this program that has no CPUs, as heads often have none."""
    head = {
        **NODE_ARGUMENTS,
        "num_cpus": 0,
        "include_dashboard": False,
        "ray_client_server_port": CLIENT_PORT,
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        made.add_node(**NODE_ARGUMENTS)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    if before is None:
        del os.environ["RAY_ADDRESS"]
    made.shutdown()


@pytest.fixture
def job(tmp_path: Path) -> gs.Job:
    """A job whose model holds how often each sample was used; it hurries once the file "hurry" is there."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.py").write_text(job_text(3, EPOCHS))
    return load_job(str(folder / "job.py"), argv=["job.py", str(tmp_path / "hurry")])


def kill_node_with(cluster: Any, rank: int) -> Any:
    """Kills the Ray node on which a node of the run is with all processes there, as a machine that loses its power."""
    for node in cluster.list_all_nodes():
        (raylet,) = node.all_processes["raylet"]
        there = process_tree(raylet.process.pid)
        for pid in there:
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"GRADSTREAM_NODE={rank}".encode() in variables:
                for one in there:
                    os.kill(one, signal.SIGKILL)
                return node
    raise AssertionError(f"node {rank} is nowhere")


class Story:
    """Notes the events of a run, and does something at some of them."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.told.append(event)
        self.look(event)

    def look(self, event: Mapping[str, Any]) -> None:
        """What a test does at an event."""

    def steps(self, worker: str) -> int:
        return sum(one["event"] == "step" and one["node"] == worker for one in self.told)


@pytest.mark.limit_s(140)
def test_a_lost_ray_node_stops_nobody_and_its_worker_comes_back_on_another(
    cluster: Any, job: gs.Job, tmp_path: Path
) -> None:
    class Kills(Story):
        killed, lost, back = 0, 0, 0

        def look(self, event: Mapping[str, Any]) -> None:
            steps = len(self.told)
            if not self.killed and self.steps("worker-1") > 2:
                self.node = kill_node_with(cluster, 1)
                self.killed = steps
            if not self.lost and event["event"] == "left" and event["who"] == "worker-1":
                self.lost = steps
            if self.lost and not self.back and event["event"] == "joined" and event["who"] == "worker-1":
                self.back = steps
            if self.back and event["event"] == "step" and event["node"] == "worker-1":
                (tmp_path / "hurry").touch()

    story = Kills()
    run = gs.train(job, engine=RayEngine(), run_dir=tmp_path / "run", on_event=story)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact
    times = [story.told[at - 1]["time_s"] for at in (story.killed, story.lost, story.back)]
    print("killed, lost, back at", times)
    meanwhile = [one for one in story.told[story.lost : story.back] if one["event"] == "step"]
    assert len(meanwhile) > 10, "the others have waited for Ray"
    cluster.remove_node(story.node)
    cluster.add_node(**NODE_ARGUMENTS)


@pytest.mark.limit_s(140)
def test_the_loss_of_the_first_node_is_named_and_the_same_call_goes_on(
    cluster: Any, job: gs.Job, tmp_path: Path
) -> None:
    class Kills(Story):
        node: Any = None

        def look(self, event: Mapping[str, Any]) -> None:
            if self.node is None and event["event"] == "checkpoint":
                self.node = kill_node_with(cluster, 0)

    story = Kills()
    given: Any = {"engine": "ray", "run_dir": tmp_path / "run", "checkpoint_every": 20}
    with pytest.raises(PeerLostError, match="node 0: was lost with its machine, and with it the parameters"):
        gs.train(job, **given, on_event=story)
    cluster.remove_node(story.node)
    cluster.add_node(**NODE_ARGUMENTS)
    (tmp_path / "hurry").touch()
    run = gs.train(job, **given)
    assert [one["event"] for one in run.events].count("resumed") == 1
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact


@pytest.mark.limit_s(140)
def test_workers_come_and_go_as_the_run_is_scaled(cluster: Any, job: gs.Job, tmp_path: Path) -> None:
    engine = RayEngine(least=2)
    engine.scale(2)

    class Scales(Story):
        def look(self, event: Mapping[str, Any]) -> None:
            if event["event"] == "step" and self.steps("worker-1") == 2:
                engine.scale(4)
            if event["event"] == "step" and min(map(self.steps, ("worker-2", "worker-3"))) == 2:
                engine.scale(2)
            left = {one["who"] for one in self.told if one["event"] == "left"}
            if left == {"worker-2", "worker-3"}:
                (tmp_path / "hurry").touch()

    story = Scales()
    run = gs.train(job, engine=engine, workers=4, run_dir=tmp_path / "run", on_event=story)
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact
    kinds = [one["event"] for one in story.told]
    assert kinds.count("started") == 1
    assert run.summary["workers_lost"] == []  # they were asked to go
    (begun,) = [at for at, kind in enumerate(kinds) if kind == "started"]
    late = [one["who"] for one in story.told[begun:] if one["event"] == "joined"]
    assert sorted(late) == ["worker-2", "worker-3"]


def test_an_error_of_the_job_is_raised_here(cluster: Any, job: gs.Job, tmp_path: Path) -> None:
    broken = str(job.spec) + ":broken"
    with pytest.raises((UserCodeError, ConfigError), match="no such thing"):
        gs.train(dataclasses.replace(job, spec=broken), engine="ray", run_dir=tmp_path / "run")


def test_too_much_is_refused_with_what_is_free(cluster: Any, job: gs.Job, tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"They ask for CPU 64; .* Free are CPU \d"):
        gs.train(job, engine=RayEngine(cpus=64, wait_s=2.0), run_dir=tmp_path / "run")


def processes() -> list[int]:
    """The processes of nodes of a run."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if b"GRADSTREAM_LEAST=" in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def command(job: gs.Job, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """`gradstream train` of the job, in its folder."""
    words = [sys.executable, "-m", "gradstream", "train", "job.py", "--run-dir", str(tmp_path / "run")]
    return subprocess.Popen(
        [*words, *options, "--", str(tmp_path / "hurry")],
        cwd=Path(str(job.spec)).parent,
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def line(process: subprocess.Popen[str], word: str) -> None:
    """Reads what a process says up to a word."""
    assert process.stdout is not None
    said = []
    for text in process.stdout:
        said.append(text)
        if word in text:
            return
    raise AssertionError("".join(said))


@pytest.mark.limit_s(140)
def test_stopped_by_ctrl_c_it_goes_on_and_leaves_nothing_behind(
    cluster: Any, job: gs.Job, tmp_path: Path
) -> None:
    process = command(job, tmp_path, "--engine", "ray", "--workers", "2")
    line(process, "2/2 workers")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "the run was stopped; it resumes from checkpoints/step-" in said, said
    assert not processes()
    process = command(job, tmp_path, "--engine", "ray", "--workers", "2")
    line(process, "2/2 workers")
    kinds = [one["event"] for one in gs.Run.load(tmp_path / "run").events]
    assert kinds.count("resumed") == 1
    process.kill()
    process.communicate()
    for _ in range(300):
        if not processes():
            return
        time.sleep(0.1)
    raise AssertionError(f"processes {processes()} have outlived the driver by 30 s")


def test_through_ray_client(cluster: Any, job: gs.Job, tmp_path: Path) -> None:
    (tmp_path / "hurry").touch()
    address = f"ray://127.0.0.1:{CLIENT_PORT}"
    process = command(job, tmp_path, "--engine", address, "--workers", "2", "--epochs", "1")
    said, _ = process.communicate(timeout=110)
    assert process.returncode == 0, said
    assert gs.Run.load(tmp_path / "run").summary["samples_accounted"] == SAMPLES


def test_files_are_brought_where_no_disk_is_shared(
    cluster: Any, job: gs.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hurry").touch()
    monkeypatch.setattr(Path, "touch", lambda path: None)  # so the first node does not see the driver's mark
    run = gs.train(job, engine="ray", epochs=1, run_dir=tmp_path / "run")
    assert TokenAudit.of(run, SAMPLES, 1).exact
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"events.jsonl", "run.json", "logs"}
    assert [one["event"] for one in run.events].count("finished") == 1


OWN_JOB = """
import sys
from pathlib import Path
import ray
import gradstream as gs
from gradstream.job.files import load_job

@ray.remote(num_cpus=0)
class Other:
    def double(self, x):
        return 2 * x

ray.init(runtime_env={"working_dir": str(Path(__file__).parent / "job")})
other = Other.remote()
job = load_job(str(Path(__file__).parent / "job" / "job.py"), argv=["job.py", __file__])  # it hurries
run = gs.train(job, engine="ray", epochs=1, run_dir=Path(sys.argv[1]))
print(run.summary["samples_accounted"], ray.get(other.double.remote(21)))
"""
TRAINER = """
import sys
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop(config):
    import gradstream

    session = gradstream.join("synchronous", run_dir=config["run_dir"])
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
    loader = session.shard(torch.utils.data.DataLoader(data, batch_size=8))
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    session.close()
    with open(f"{config['folder']}/{session.rank}", "w") as file:
        file.write(repr([p.tolist() for p in model.parameters()]))

folder = sys.argv[1]
ray.init(log_to_driver=False)
TorchTrainer(
    loop,
    train_loop_config={"folder": folder, "run_dir": f"{folder}/run"},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=f"{folder}/ray"),
).fit()
"""


def script(folder: Path, text: str, *arguments: str) -> str:
    """What a script says that is run by itself, and must not fail."""
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def test_a_run_inside_of_somebodys_own_ray_program(cluster: Any, job: gs.Job, tmp_path: Path) -> None:
    said = script(tmp_path, OWN_JOB, str(tmp_path / "run"))
    assert f"{SAMPLES} 42" in said


def test_a_loop_of_ray_train_makes_the_steps_of_one_process(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="Ray Train is not installed: pip install 'ray[train]'")
    script(tmp_path, TRAINER, str(tmp_path))
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 3), torch.randn(64, 1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in range(0, 64, 16):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.mse_loss(model(inputs[at : at + 16]), targets[at : at + 16])
        loss.backward()
        optimizer.step()
    expected = [p.tolist() for p in model.parameters()]
    for rank in "01":
        found = ast.literal_eval((tmp_path / rank).read_text())
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


OWN_RAY_FOLDER = 'mkdir -p /tmp/ray && mount --bind "$1" /tmp/ray && shift && exec "$@"'


@pytest.mark.limit_s(200)
def test_ray_started_by_hand_on_machines_of_their_own(tmp_path: Path) -> None:
    """The driver, and three machines with CPUs. One of them is killed, and another is started in its place."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    (folder := tmp_path / "job").mkdir()  # Ray packs it: its own folders must not be in it
    (folder / "job.py").write_text(job_text(3, EPOCHS))
    with Machines(4) as machines, (tmp_path / "log").open("w") as log:
        head = machines[0].address
        given: Any = {
            "cwd": folder,
            "env": {"PYTHONPATH": SOURCE, "RAY_ADDRESS": f"{head}:6379", "COLUMNS": "200"},
            "stdout": log,
            "stderr": log,
        }

        def program(machine: Machine, *words: str) -> subprocess.Popen[str]:
            """Runs a program on a machine, which has a folder /tmp/ray of its own."""
            (tmp_path / machine.name).mkdir(exist_ok=True)
            own = ["sh", "-c", OWN_RAY_FOLDER, "sh", str(tmp_path / machine.name)]
            return machine.start([*own, sys.executable, "-m", *words], **given)

        def start(machine: Machine, cpus: int, *words: str) -> None:
            sizes = [
                f"--num-cpus={cpus}",
                "--object-store-memory=80000000",
                f"--node-ip-address={machine.address}",
            ]
            program(machine, "ray.scripts.scripts", "start", "--block", *words, *sizes)

        start(machines[0], 0, "--head", "--port=6379", "--include-dashboard=false")
        while "Ray runtime started" not in (tmp_path / "log").read_text():  # the limit of the test ends it
            time.sleep(0.1)
        for machine in machines.machines[1:]:
            start(machine, 2, f"--address={head}:6379")
        words = ["train", "job.py", "--engine", "ray", "--workers", "3", "--run-dir", str(tmp_path / "run")]
        driver = program(machines[0], "gradstream", *words, "--", str(tmp_path / "hurry"))
        lost = ""
        for event in events(tmp_path / "run" / "events.jsonl", driver):
            if event["event"] == "step" and event["node"] == "worker-2" and not lost:
                (victim,) = (one for one in machines.machines[1:] if has_node(one, 2))
                lost = victim.name
                victim.kill()
            if event["event"] == "left" and event["who"] == "worker-2":
                start(victim, 2, f"--address={head}:6379")
            if event["event"] == "joined" and event["who"] == "worker-2" and lost:
                (tmp_path / "hurry").touch()
        assert driver.wait() == 0, (tmp_path / "log").read_text()[-5000:]
    run = gs.Run.load(tmp_path / "run")
    assert run.summary["workers_lost"] == ["worker-2"]
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact


def has_node(machine: Machine, rank: int) -> bool:
    """Whether a node of the run is on a machine."""
    for pid in machine.pids():
        try:
            if f"GRADSTREAM_NODE={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
        except OSError:  # it has ended
            continue
    return False


def test_a_folder_that_is_too_large_is_refused_before_ray_packs_it(
    cluster: Any, job: gs.Job, tmp_path: Path
) -> None:
    with (Path(str(job.spec)).parent / "data").open("wb") as large:
        large.truncate(1 << 30)
    with pytest.raises(ConfigError, match=r"the folder of the job, .*, has more than 500 MiB"):
        gs.train(job, engine="ray", run_dir=tmp_path / "run")
