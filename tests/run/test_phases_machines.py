"""Phases on joined machines: nodes that share no disk go on from each checkpoint, also after a death or a stop."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gradstream as gs
from gradstream.testing.runs import check_exactly_once
from machine_command import Command, Here

JOB = """
import time
from dataclasses import dataclass
from pathlib import Path
import gradstream as gs
from gradstream.testing.runs import Tokens, numbered

WAITS = Path(__file__).with_name("waits")  # its size: the minibatch of a process before which it waits for "hurry"
CALLS = 0

class Sums(Tokens):
    reduction = "sum"

    def gradient(self, *given, **options):
        global CALLS
        CALLS += 1
        while WAITS.exists() and CALLS == WAITS.stat().st_size and not WAITS.with_name("hurry").exists():
            time.sleep(0.02)
        return super().gradient(*given, **options)

@dataclass(frozen=True)
class Rounds(gs.Synchronous):  # a strategy of the job file
    pass

def six(position):  # a schedule of the job file, whose path is another one on each machine
    return 4.0

def job():
    return gs.Job(
        Sums(num_chunks=3), numbered(24), optimizer=gs.optim.SGD(lr=1.0), batch_size=2, chunk_elems=64,
        deadlines=gs.Deadlines(lease_s=10.0),
        phases=[
            gs.Phase(epochs=2, strategy="allreduce", lr=4.0),
            gs.Phase(epochs=2, strategy=Rounds(), lr=six),
            gs.Phase(epochs=1, strategy="allreduce", lr=2.0, workers=1),
            gs.Phase(epochs=2, lr=4.0),
        ],
    )
"""
EPOCHS = 7
Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands, each in a folder of its own; leaves none behind."""
    made: list[Command] = []

    def one(name: str, *arguments: str, waits: int = 0) -> Command:
        if waits:
            (tmp_path / name).mkdir()
            (tmp_path / name / "waits").write_bytes(bytes(waits))
        made.append(Command(Here(), tmp_path / name, *arguments, job=JOB))
        return made[-1]

    yield one
    for command in made:
        command.process.kill()
        command.end()


def launched(start: Start, *options: str, waits: int = 0) -> tuple[Command, list[str]]:
    """A launcher that waits for another machine, and the words that join it."""
    listen = ("--listen", "127.0.0.1", "--wait", "2", "--run-dir", "run")
    launcher = start("a", "train", "job.py", *listen, *options, waits=waits)
    words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
    return launcher, [*words[:1], "--name", "b", "--run-dir", "run", *words[1:]]


def test_nodes_of_two_machines_go_through_all_phases(start: Start, tmp_path: Path) -> None:
    launcher, words = launched(start)
    joined = start("b", *words)
    for command in (launcher, joined):
        status, said = command.end()
        assert status == 0, said
    assert "in as b, with shard-1, worker-1" in said
    run = gs.Run.load(tmp_path / "a" / "run")
    check_exactly_once(run, 24, EPOCHS)
    rows = run.summary["phases"]
    assert [row["strategy"] for row in rows] == ["allreduce", "rounds", "allreduce", "synchronous"]
    assert [(row["workers"], row["servers"]) for row in rows] == [(2, 0), (2, 2), (1, 0), (2, 2)]
    assert not (tmp_path / "b" / "run" / "checkpoints").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_machine_goes_in_a_phase_that_does_not_need_it_and_another_one_comes(
    start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    launcher, words = launched(start, "--servers-on", "launcher", waits=30)
    joined = start("b", *words)
    launcher.line("phase 3 of 4")
    joined.process.send_signal(how)
    launcher.line(r"machine b \(127.0.0.1\) has left")
    assert joined.end()[0] == (75 if how is signal.SIGTERM else -how)
    again = start("again", *words)
    launcher.line(r"machine b \(127.0.0.1\) has joined with worker-1")
    (tmp_path / "a" / "hurry").touch()
    for command in (launcher, again):
        status, said = command.end()
        assert status == 0, said
    run = gs.Run.load(tmp_path / "a" / "run")
    check_exactly_once(run, 24, EPOCHS)
    last = max(number for number, event in enumerate(run.events) if event["event"] == "phase")
    assert any(event["event"] == "step" and event["node"] == "worker-1" for event in run.events[last:])


def test_a_run_that_is_stopped_in_a_later_phase_goes_on_there(start: Start, tmp_path: Path) -> None:
    launcher, words = launched(start, waits=18)
    joined = start("b", *words, waits=18)
    launcher.line("phase 2 of 4")
    launcher.process.send_signal(signal.SIGINT)
    launcher.line("stopping: a checkpoint is made first")
    for name in ("a", "b"):
        (tmp_path / name / "hurry").touch()
    assert [command.end()[0] for command in (launcher, joined)] == [75, 75]
    again = start("a", "resume", "run", "--listen", "127.0.0.1", "--wait", "2")
    words = shlex.split(again.line(r"gradstream (join .*)")[1])
    for command in (start("c", *words), again):
        status, said = command.end()
        assert status == 0, said
    run = gs.Run.load(tmp_path / "a" / "run")
    check_exactly_once(run, 24, EPOCHS)
    assert [event["number"] for event in run.events if event["event"] == "phase"] == [1, 2, 2, 3, 4]
