"""Files of `gradstream launch`: shells parse them, schemas accept them, and one of them runs."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream.cli import main
from gradstream.cli.launch_files import ENGINES, LaunchFile
from gradstream.errors import ConfigError

SOURCE = str(Path(gs.__file__).resolve().parents[1])
JOB = """\
import numpy as np
import gradstream as gs

def outputs(parameters, inputs):
    return inputs @ parameters["w"]

def gradients(parameters, inputs, targets):
    error = outputs(parameters, inputs) - targets

    return float((error**2).mean()), {"w": (2 * inputs.T @ error / len(error)).astype(np.float32)}

def job():
    inputs = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    model = gs.from_functions(lambda seed: {"w": np.zeros(3, np.float32)}, outputs, gradients)
    data = gs.from_arrays(inputs, inputs @ np.array([1, 2, 3], np.float32))
    return gs.Job(model, data, batch_size=20, epochs=2, optimizer=gs.optim.SGD(lr=0.1))
"""
FULL: dict[str, Any] = {
    "nodes": 3,
    "gpus": 1,
    "data": "caltech101",
    "spot": True,
    "arguments": ["--it's", "6 4"],
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(JOB)
    return path


def file_of(job: Path, **options: Any) -> LaunchFile:
    return LaunchFile(job=job, name="mine", image="registry.example/gradstream:1", **options)


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("engine", ENGINES)
def test_no_hole_is_left(job: Path, engine: str, options: dict[str, Any]) -> None:
    text = file_of(job, **options).render(engine)
    assert not re.search(r"(?<![\w])@\w+@", text)
    assert "token" in text
    assert ("caltech101" in text) == (bool(options) and engine != "compose")


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("engine", ["torchrun", "slurm", "gce"])
def test_shells_parse_them(job: Path, engine: str, options: dict[str, Any]) -> None:
    text = file_of(job, **options).render(engine)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_directives_of_slurm_come_before_the_first_command(job: Path) -> None:
    lines = file_of(job, **FULL).render("slurm").splitlines()
    begin = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in directives and "#SBATCH --gpus-per-task=1" in directives
    assert not any(line.startswith("#SBATCH") for line in lines[begin:])


@pytest.mark.parametrize("options", [{}, FULL, {"nodes": 8, "least": 2}], ids=["plain", "full", "elastic"])
def test_kubernetes_accepts_the_objects(job: Path, options: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML and kubernetes-validate, of the extra dev")
    validate = pytest.importorskip("kubernetes_validate")
    objects = list(yaml.safe_load_all(file_of(job, **options).render("kubernetes")))
    assert [one["kind"] for one in objects] == ["Service", "PersistentVolumeClaim", "ConfigMap", "Job"]
    for one in objects:
        validate.validate(one, "1.29", strict=True)
    assert objects[2]["data"]["mine.py"] == JOB
    pod = objects[3]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    pods = environment.get("GRADSTREAM_LEAST", environment["GRADSTREAM_NODES"])
    assert pods == str(objects[3]["spec"]["completions"]) == str(objects[3]["spec"]["parallelism"])
    assert ("GRADSTREAM_LEAST" in environment) == ("least" in options)
    assert environment["GRADSTREAM_HOST"] == f"mine-0.{pod['subdomain']}"
    assert container["command"][-3:] == (
        ["--", *FULL["arguments"]] if options is FULL else [*container["command"][-3:]]
    )
    (there,) = (one for one in container["volumeMounts"] if one["mountPath"] == container["workingDir"])
    (volume,) = (one for one in pod["volumes"] if one["name"] == there["name"])
    assert "persistentVolumeClaim" in volume  # joined pods write their logs there
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}


def test_a_config_map_has_the_modules_that_the_job_imports(job: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
    job.write_text("import near\nimport torch\n" + JOB)
    job.with_name("near.py").write_text("x = 1\n")
    _, _, config, _ = yaml.safe_load_all(file_of(job).render("kubernetes"))
    assert config["data"] == {"mine.py": job.read_text(), "near.py": "x = 1\n"}
    job.with_name("inner").mkdir()
    (job.with_name("inner") / "__init__.py").write_text("")
    job.write_text("import inner\n" + JOB)
    with pytest.raises(ConfigError, match=r"imports inner/__init__\.py, and a ConfigMap has no folders"):
        file_of(job).render("kubernetes")


def test_a_compose_file_has_a_service_for_each_node(job: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
    made = yaml.safe_load(file_of(job, **FULL).render("compose"))
    assert list(made["services"]) == ["node-0", "node-1", "node-2"]
    for number, service in enumerate(made["services"].values()):
        assert service["environment"]["JOB_COMPLETION_INDEX"] == str(number)
        assert service["environment"]["GRADSTREAM_HOST"] == "node-0"
        assert service["secrets"] == ["token"]
        assert service["command"][-2:] == FULL["arguments"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Mine_1"}, "--name 'Mine_1': expected small letters"),
        ({"nodes": 1}, "--nodes 1: expected at least 2"),
        ({"memory": 0}, "--memory 0: expected at least 1"),
        ({"least": 3}, "--least 3: expected a number from 1 to --nodes 2"),
        ({"job": Path("a b.py")}, "expected a job file NAME.py"),
    ],
)
def test_what_does_not_fit_is_named(job: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(file_of(job), **options)
    with pytest.raises(ConfigError, match=r"there is no job file .*other\.py"):
        dataclasses.replace(file_of(job), job=job.with_name("other.py")).render("slurm")
    with pytest.raises(ConfigError, match="--emit slurm --least: this engine starts all nodes at once"):
        dataclasses.replace(file_of(job), least=1).render("slurm")
    with pytest.raises(ConfigError, match="--emit kubernetes needs --image"):
        LaunchFile(job=job, name="mine").render("kubernetes")


def test_the_container_file_copies_what_there_is() -> None:
    root = Path(__file__).resolve().parents[2]
    lines = (root / "deploy" / "Containerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names} == kept
    assert all((root / name).exists() for name in kept)


def test_a_plain_machine_gets_what_launch_needs() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
    text = (Path(__file__).resolve().parents[2] / "deploy" / "cloud-init.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    (command,) = yaml.safe_load(text)["runcmd"]
    assert subprocess.run(["bash", "-n", "-c", command[-1]], check=False).returncode == 0


def test_a_command_line_stays_in_its_comment(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["launch", "--emit", "slurm", str(job), "--", "a\nrm b"]
    monkeypatch.setattr(sys, "argv", ["gradstream", *words])
    said = CliRunner().invoke(main, words)
    assert said.exit_code == 0, said.output
    head = said.output.splitlines()[1]
    assert head.startswith("# mine.py on 2 nodes by Slurm.") and head.endswith("-- 'a rm b'")


def test_a_file_is_not_written_over(job: Path) -> None:
    words = ["launch", "--emit", "slurm", str(job), "--output", str(job.with_name("mine.sbatch"))]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert job.with_name("mine.sbatch").read_text().startswith("#!/usr/bin/env bash\n")
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 2
    assert "mine.sbatch is not written: File exists" in again.output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def samples_of_both(processes: list[subprocess.Popen[str]], run: Path) -> int:
    """The samples in a run's model, once both processes have ended as they should."""
    ended = [(one.communicate(timeout=90)[0], one.returncode) for one in processes]
    assert [status for _, status in ended] == [0, 0], ended
    return int(gs.Run.load(run).summary["samples_accounted"])


@pytest.mark.process
def test_the_file_for_torchrun_trains(job: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.sh").write_text(file_of(job, cpus=1).render("torchrun"))
    port = free_port()
    programs = Path(sys.executable).parent
    if not (programs / "torchrun").exists() or shutil.which("openssl") is None:
        pytest.skip("needs torchrun and openssl")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "PYTHONPATH": SOURCE, "MASTER_PORT": str(port)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **more}, "text": True}
    subprocess.run(["bash", "mine.sh", "token"], check=True, **options)
    assert (tmp_path / "gradstream.token").stat().st_mode & 0o077 == 0
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [["bash", "mine.sh", str(number), "127.0.0.1"] for number in range(2)]
    both = [subprocess.Popen(one, **options, **pipes) for one in words]
    assert samples_of_both(both, tmp_path / "runs" / "mine") == 800


@pytest.mark.process
def test_what_skypilot_is_to_run_trains(job: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
    task = yaml.safe_load(file_of(job).render("skypilot"))
    assert (task["num_nodes"], task["secrets"], task["workdir"]) == (2, {"GRADSTREAM_TOKEN": None}, ".")
    programs = Path(sys.executable).parent
    common = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": SOURCE,
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "GRADSTREAM_TOKEN": "0123456789abcdef0123456789abcdef",
        "GRADSTREAM_PORT": str(free_port()),
    }
    both = [
        subprocess.Popen(
            ["bash", "-c", task["run"]],
            cwd=tmp_path,
            env=common | {"SKYPILOT_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    assert samples_of_both(both, tmp_path / "runs" / "mine") == 800


GCLOUD = """#!/usr/bin/env bash
# A recorder in the place of Google's: an instance is a folder in which its start-up script runs.
all="$*"
echo "$all" >> "$CLOUD/calls"
case "$all" in
*"secrets create"*) cat > "$CLOUD/secret" ;;
*"secrets versions access"*) cat "$CLOUD/secret" ;;
*"instance-templates create"*)
    said=${all##*--metadata-from-file=startup-script=}
    cp "${said%%,*}" "$CLOUD/startup" && cp "${said##*,job=}" "$CLOUD/job" ;;
*create-instance*)
    name=${all##*--instance=}
    mkdir -p "$CLOUD/$name/env/bin" && ln -s "$(command -v gradstream)" "$CLOUD/$name/env/bin/"
    sed -i 's/GRADSTREAM_HOST=mine-0/GRADSTREAM_HOST=127.0.0.1/' "$CLOUD/startup"
    NAME=$name JOB_HOME="$CLOUD/$name" bash "$CLOUD/startup" > "$CLOUD/$name/log" 2>&1 &
    echo $! >> "$CLOUD/pids" ;;
*scp*) mkdir -p runs && cp -r "$CLOUD/mine-0/runs/mine" runs/mine ;;
esac
"""
CURL = """#!/usr/bin/env bash
case "$*" in *attributes/job) cat "$CLOUD/job" ;; *name) echo "$NAME" ;; esac
"""
SYSTEMD_RUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do [[ "$1" == --setenv=* ]] && export "${1#--setenv=}"; shift; done
exec "$@"
"""


@pytest.mark.process
def test_the_script_for_gce_starts_what_trains(job: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    cloud, fake = tmp_path / "cloud", tmp_path / "fake"
    for folder in (cloud, fake):
        folder.mkdir()
    for name, text in (("gcloud", GCLOUD), ("curl", CURL), ("systemd-run", SYSTEMD_RUN)):
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    (tmp_path / "mine.sh").write_text(file_of(job, spot=True).render("gce"))
    path = f"{fake}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "PYTHONPATH": SOURCE, "CLOUD": str(cloud), "GRADSTREAM_PORT": str(free_port())}
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **more}, "text": True}
    refused = subprocess.run(["bash", "mine.sh", "up"], input="n\n", check=False, **options)
    assert refused.returncode == 1 and not (cloud / "secret").exists()
    subprocess.run(["bash", "mine.sh", "up"], input="y\n", check=True, timeout=90, **options)
    run = cloud / "mine-0" / "runs" / "mine"
    for pid in (cloud / "pids").read_text().split():
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], check=True, timeout=90)
    said = [(cloud / f"mine-{rank}" / "log").read_text() for rank in range(2)]
    assert gs.Run.load(run).summary["samples_accounted"] == 800, said
    assert (cloud / "mine-1" / "token").stat().st_mode & 0o077 == 0
    subprocess.run(["bash", "mine.sh", "down"], check=True, timeout=90, **options)
    calls = (cloud / "calls").read_text()
    for part in ("--provisioning-model=SPOT", "delete mine --quiet", "secrets delete mine-token"):
        assert part in calls
    assert gs.Run.load(tmp_path / "runs" / "mine").summary["samples_accounted"] == 800
