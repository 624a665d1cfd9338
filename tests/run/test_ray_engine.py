"""What a run asks of a Ray cluster, and what is refused before it asks. Without Ray."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream._train import words_of
from gradstream.cli import main
from gradstream.errors import ConfigError
from gradstream.ext.ray.actor import PIECE_BYTES, RayNode
from gradstream.ext.ray.cluster import RunFiles, folder_of, job_files
from gradstream.ext.ray.engine import RayEngine
from gradstream.job.files import load_job

JOB = """
import numpy as np
import gradstream as gs
from gradstream.testing import Tokens, numbered

def job():
    return gs.Job(Tokens(4, 8), numbered(8), epochs=1, batch_size=2)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("ray", RayEngine()),
        ("ray?cpus=4&least=2", RayEngine(cpus=4, least=2)),
        ("ray://head:10001", RayEngine(address="ray://head:10001")),
        (
            "ray://10.0.0.1:10001?gpus=1&first_cpus=0.5&workers_per_node=2&memory_gib=3&wait_s=9",
            RayEngine(
                address="ray://10.0.0.1:10001",
                gpus=1,
                first_cpus=0.5,
                workers_per_node=2,
                memory_gib=3,
                wait_s=9,
            ),
        ),
    ],
)
def test_an_engine_in_words(text: str, engine: RayEngine) -> None:
    assert RayEngine.parse(text) == engine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rays", r"engine 'rays': expected ray, or ray://HOST:PORT"),
        ("head:10001", r"engine 'head:10001': expected ray"),
        ("ray://head", r"engine 'ray://head': expected ray"),
        ("ray?cpu=4", r"there is no option 'cpu'; did you mean cpus\?"),
        ("ray?address=x", r"there is no option 'address'; expected one of cpus"),
        ("ray?cpus=many", r"cpus='many'; expected a number"),
        ("ray?least=1.5", r"least='1.5'; expected a whole number"),
        ("ray?cpus=0", r"cpus=0: a node has to ask Ray for something"),
        ("ray?gpus=-1", r"gpus=-1.0; expected 0 or more"),
        ("ray?workers_per_node=0", r"workers_per_node=0; expected at least 1"),
    ],
)
def test_an_engine_that_there_is_not(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayEngine.parse(text)


def test_an_engine_of_no_known_name_is_refused(job: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine 'mars://head:1': expected ray"):
        gs.train(load_job(str(job)), engine="mars://head:1")


@pytest.mark.parametrize(
    ("engine", "workers", "message"),
    [
        (RayEngine(workers_per_node=2), 3, "workers=3 do not divide among nodes with workers_per_node=2"),
        (RayEngine(least=5), 4, "least=5; expected 1 to 4, the number of nodes"),
        (RayEngine(), 1, "a single node would be a run on one machine"),
    ],
)
def test_numbers_that_do_not_fit(engine: RayEngine, workers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.nodes_for(workers)


def test_what_each_node_asks_for() -> None:
    engine = RayEngine(cpus=2, gpus=1, memory_gib=1.5, first_cpus=3, resources={"fast": 1})
    other = {"CPU": 2, "GPU": 1, "memory": 1.5 * 2**30, "fast": 1}
    assert (engine.bundle(0), engine.bundle(1)) == ({**other, "CPU": 3}, other)
    assert RayEngine().bundle(0) == {"CPU": 1.0}


def test_the_number_of_nodes_that_is_wanted() -> None:
    engine = RayEngine()
    before = engine.wanted
    engine.scale(2)
    assert (before, engine.wanted) == (None, 2)
    with pytest.raises(ConfigError, match="nodes=0; expected at least 1"):
        engine.scale(0)


def test_options_of_a_call_as_words() -> None:
    given = {"epochs": 3, "record": True, "strategy": "downpour", "strategy_options": {"push_every": 10}}
    words = ["epochs=3", "record=true", "strategy=downpour", "strategy.push_every=10"]
    assert words_of(given) == [word for one in words for word in ("--set", one)]
    with pytest.raises(
        ConfigError, match=r"train\(optimizer=..., engine=...\): the nodes read the job's file"
    ):
        words_of({"optimizer": gs.optim.SGD(lr=0.1)})


def test_where_nodes_look_for_the_job_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.parent / "sub").mkdir()
    near = job.rename(job.parent / "sub" / "job.py")
    monkeypatch.chdir(job.parent)
    files, digest, function = job_files(f"{near}:job")
    assert files == ["sub/job.py", "job.py", str(near)]
    assert digest == hashlib.sha256(JOB.encode()).hexdigest()
    assert (function, folder_of(f"{near}:job")) == (":job", near.parent)
    assert (job_files("package.module:job"), folder_of("package.module:job")) == (([], "", ""), job.parent)


@pytest.mark.parametrize(
    ("option", "name"),
    [({"listen": "127.0.0.1"}, "listen"), ({"detach": True}, "detach"), ({"processes": False}, "processes")],
)
def test_what_the_engine_decides_is_refused(job: Path, option: dict[str, Any], name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"the engine runs the nodes, on machines of its choice; leave {name}"
    ):
        gs.train(load_job(str(job)), engine="ray", **option)


def test_without_ray_the_extra_is_named(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = CliRunner().invoke(
        main, ["train", str(job), "--engine", "ray", "--workers", "2", "--run-dir", str(tmp_path / "run")]
    )
    assert said.exit_code == 2
    assert "pip install 'gradstream[ray]'" in said.output
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_options_of_the_command_line_that_do_not_go_together(job: Path) -> None:
    said = CliRunner().invoke(main, ["train", str(job), "--engine", "ray", "--listen", "127.0.0.1"])
    assert said.exit_code == 2
    assert "--listen with --engine: the engine decides that" in said.output


def test_an_actor_gives_files_in_pieces(tmp_path: Path) -> None:
    node = RayNode()
    node._run_dir = tmp_path
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a").write_bytes(bytes(PIECE_BYTES) + b"end")
    assert node.files() == ["logs/a"]
    assert [len(node.piece("logs/a", at)) for at in (0, PIECE_BYTES, PIECE_BYTES + 3)] == [PIECE_BYTES, 3, 0]
    assert node.events(0) == b""  # there are none yet
    node.stop()
    assert node.run(["train"], {}, 60.0) == (0, "")  # it does not start what was asked to stop
    node.clean()


class Direct:
    """Calls the methods of an actor in this process."""

    def __init__(self, node: RayNode) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._node, name))


def test_files_and_events_are_put_together(tmp_path: Path) -> None:
    node, cluster = RayNode(), SimpleNamespace(answer=lambda found, *_: found)
    node._run_dir = tmp_path / "there"
    (tmp_path / "there" / "logs").mkdir(parents=True)
    data = bytes(range(256)) * (PIECE_BYTES // 128)
    (tmp_path / "there" / "logs" / "a").write_bytes(data)
    log = tmp_path / "there" / "events.jsonl"
    log.write_text('{"event": "before"}\n{"event": "a"}\n{"eve')
    files = RunFiles(cluster, Direct(node), len('{"event": "before"}\n'))  # type: ignore[arg-type]
    assert list(files.events()) == [{"event": "a"}]
    with log.open("a") as more:
        more.write('nt": "b"}\n')
    assert list(files.events()) == [{"event": "b"}]
    files.bring(tmp_path / "here")
    assert (tmp_path / "here" / "logs" / "a").read_bytes() == data
    assert (tmp_path / "here" / "events.jsonl").read_text() == log.read_text()
    node.clean()
    outside = SimpleNamespace(files=SimpleNamespace(remote=lambda: ["../x"]))
    with pytest.raises(ConfigError, match=r"node 0 names a file outside of its run: \.\./x"):
        RunFiles(cluster, outside, 0).bring(tmp_path / "here")  # type: ignore[arg-type]


def test_the_process_of_an_actor_says_how_it_ended() -> None:
    node = RayNode()
    status, said = node.run(["train", "no-such-job.py"], {}, 0.0)
    node.clean()
    assert status == 2
    assert "no-such-job.py" in said
