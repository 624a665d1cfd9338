"""Workers of machines that have joined are lost, and come back: over TLS, with real processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.errors import DeadlineError, GradstreamError, JoinRefusedError, PeerLostError
from gradstream.run.remote.address import Address
from gradstream.run.remote.join import Joining, _come_back, _CutOffError
from gradstream.testing import TokenAudit
from kit.machines import Machines, unavailable
from machine_command import Command, Here

SAMPLES, EPOCHS = 256, 3
JOB = f"""
import sys
import time
from pathlib import Path
import gradstream as gs
from gradstream.testing import Tokens, numbered

LEASE_S = float(sys.argv[2])
ROUNDS = sys.argv[1] != "downpour"  # a round is the mean over its samples

class Slow(Tokens):
    reduction = "sum" if ROUNDS else "mean"

    def gradient(self, *given, **options):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.4)  # so that the run goes on until all that is to happen has happened
        return super().gradient(*given, **options)

def job():
    rate = 4.0 if ROUNDS else 1.0
    return gs.Job(
        Slow(4, {SAMPLES}), numbered({SAMPLES}), strategy=sys.argv[1], optimizer=gs.optim.SGD(lr=rate), batch_size=2,
        epochs=int(sys.argv[3]), chunk_elems={SAMPLES},
        deadlines=gs.Deadlines(lease_s=LEASE_S, coordinator_s=2 * LEASE_S),
    )
"""
Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands, each in a folder of its own; leaves none behind."""
    made: list[Command] = []

    def one(machine: Any, name: str, *arguments: str) -> Command:
        made.append(Command(machine, tmp_path / name, *arguments, job=JOB))
        return made[-1]

    yield one
    for command in made:
        command.process.kill()
        command.end()


def launched(
    start: Start,
    machine: Any,
    address: str,
    strategy: str,
    lease_s: float = 10.0,
    *,
    servers_on: str = "launcher",
    epochs: int = EPOCHS,
) -> tuple[Command, list[str]]:
    """A launcher that waits for another machine, and the words that join it."""
    options = ("--listen", address, "--wait", "2", "--servers-on", servers_on, "--run-dir", "run")
    launcher = start(machine, "a", "train", "job.py", *options, "--", strategy, str(lease_s), str(epochs))
    words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
    assert "--fingerprint" in words  # TLS
    return launcher, [*words[:1], "--name", "b", "--run-dir", "run", *words[1:]]


def finished(folder: Path, *commands: Command, times: int, epochs: int = EPOCHS) -> None:
    """Lets the run go on to its end, and checks that every sample is in the model exactly once an epoch."""
    for path in folder.iterdir():
        (path / "hurry").touch()
    for command in commands:
        status, said = command.end()
        assert status == 0, said
    run = gs.Run.load(folder / "a" / "run")
    assert TokenAudit.of(run, SAMPLES, epochs).exact, TokenAudit.of(run, SAMPLES, epochs)
    assert run.summary["samples_accounted"] == epochs * SAMPLES
    assert run.summary["workers_lost"].count("worker-1") >= times  # more where the machine is very busy
    # What the newcomer has done is told in the time of the run, although its clock may be another one.
    mine = [i for i, e in enumerate(run.events) if e.get("who") == "worker-1"]
    back = [i for i in mine if run.events[i]["event"] == "joined" and run.events[i]["epoch"] > 1]
    lost_s = [run.events[i]["time_s"] for i in mine if i < back[-1] and run.events[i]["event"] == "left"]
    made_s = [e["time_s"] for e in run.events[back[-1] :] if e["event"] == "step" and e["node"] == "worker-1"]
    (end_s,) = [e["time_s"] for e in run.events if e["event"] == "finished"]
    assert len(back) >= times
    assert lost_s[-1] < made_s[0] <= made_s[-1] <= end_s


SAID = PeerLostError("launcher", "is gone")


def come_back(address: Address, outcomes: Sequence[int | GradstreamError], notes: list[str]) -> int:
    """A machine that was cut off, and what its attempts to join again end with, one after the other."""
    left = iter(outcomes)

    def once(again: bool) -> int:
        assert again
        outcome = next(left)
        if isinstance(outcome, GradstreamError):
            raise outcome
        return outcome

    cut_off = _CutOffError()
    cut_off.__cause__ = SAID
    joining = Joining(address=address, job="job.py", token="", insecure=True)
    return _come_back(once, joining, cut_off, 60.0, notes.append)


def test_a_machine_tries_to_come_back_until_there_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits while nothing answers, or while the launcher has not noticed yet that it was gone."""
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = Address("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(PeerLostError) as caught:
        come_back(nobody, [], notes)
    assert caught.value is SAID and "nobody listens at 127.0.0.1" in notes[-1]
    assert not any("trying to come back" in note for note in notes)
    monkeypatch.setattr("gradstream.run.remote.join.AGAIN_S", 0.0)
    monkeypatch.setattr("gradstream.run.remote.join.reach", lambda *_, **__: None)
    early, silent = JoinRefusedError("launcher", "NOT_MEMBER", "not yet"), DeadlineError("launcher", "silent")
    assert come_back(nobody, [early, silent, PeerLostError("launcher", "no route"), early, 75], notes) == 75
    assert sum("trying to come back, for 60 s at most" in note for note in notes) == 1
    with pytest.raises(JoinRefusedError, match="BAD_SECRET"):
        come_back(nobody, [early, JoinRefusedError("launcher", "BAD_SECRET", "no")], notes)


@pytest.mark.limit_s(240)
def test_kill_9_of_a_worker_and_then_of_its_machine(start: Start, tmp_path: Path) -> None:
    """The worker is started again by its machine; the machine comes back by the line that had joined it.

    In a group without servers: the tests below have servers.
    """
    launcher, words = launched(start, Here(), "127.0.0.1", "allreduce")
    joined = start(Here(), "b", *words)
    launcher.line(r"^step \d+")
    pids = re.findall(r"worker-1: pid (\d+)", (tmp_path / "b" / "run" / "logs" / "worker-1.log").read_text())
    os.kill(int(pids[-1]), signal.SIGKILL)
    launcher.line("lost worker-1 on b")
    joined.line("starting worker-1 again")
    launcher.line("worker-1 is back")
    joined.process.kill()
    launcher.line(r"machine b \(127.0.0.1\) has left")
    again = start(Here(), "again", *words)
    launcher.line(r"machine b \(127.0.0.1\) has joined with worker-1")
    launcher.line("worker-1 is back")
    finished(tmp_path, again, launcher, times=2)


@pytest.mark.limit_s(240)
def test_kill_9_of_a_machine_that_has_a_shard(start: Start, tmp_path: Path) -> None:
    """The launcher's machine starts the shard from its backup; the machine comes back with its worker alone."""
    launcher, words = launched(start, Here(), "127.0.0.1", "downpour", servers_on="all", epochs=2)
    joined = start(Here(), "b", *words)
    launcher.line(r"machine b \(127.0.0.1\) has joined with shard-1, worker-1")
    launcher.line(r"^step \d+")
    joined.process.kill()
    launcher.line(r"machine b \(127.0.0.1\) has left")
    launcher.line("shard-1 is back")
    again = start(Here(), "again", *words)
    launcher.line(r"machine b \(127.0.0.1\) has joined with worker-1")
    launcher.line("worker-1 is back")
    finished(tmp_path, again, launcher, times=1, epochs=2)


@pytest.mark.limit_s(240)
def test_a_machine_that_has_a_shard_is_cut_off(start: Start, tmp_path: Path) -> None:
    """A new shard takes the place of its own, which is there still and changes nothing any more."""
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(2) as machines:
        a, b = machines.machines
        launcher, words = launched(start, a, a.address, "downpour", 3.0, servers_on="all", epochs=2)
        joined = start(b, "b", *words)
        launcher.line(r"^step \d+")
        with machines.cut(1, "to"), machines.cut(1, "from"):
            launcher.line("shard-1 is back")
            joined.line("trying to come back")
        joined.line("in as b, with worker-1")
        launcher.line("worker-1 is back")
        finished(tmp_path, joined, launcher, times=1, epochs=2)


@pytest.mark.limit_s(240)
def test_a_machine_that_was_silent_takes_part_again_each_time(start: Start, tmp_path: Path) -> None:
    """It cannot send until its worker counts as lost; all its processes stand still; it hears nothing for long."""
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(2) as machines:
        a, b = machines.machines
        launcher, words = launched(start, a, a.address, "downpour", lease_s=3.0)
        joined = start(b, "b", *words)
        launcher.line(r"^step \d+")
        with machines.cut(1, "from"):
            launcher.line("lost worker-1 on b")
        joined.line("worker-1 has ended: EvictedError")
        joined.line("starting worker-1 again")
        launcher.line("worker-1 is back")

        assert b.signal(signal.SIGSTOP) >= 3  # join, its forkserver, its worker
        launcher.line("lost worker-1 on b")
        b.signal(signal.SIGCONT)
        joined.line("starting worker-1 again")
        launcher.line("worker-1 is back")

        with machines.cut(1, "to"):
            launcher.line("lost worker-1 on b")
            joined.line("trying to come back")
        joined.line("in as b, with worker-1")
        launcher.line("worker-1 is back")
        finished(tmp_path, joined, launcher, times=3)


@pytest.mark.limit_s(240)
def test_another_machine_takes_the_place_of_one_that_vanished(start: Start, tmp_path: Path) -> None:
    """Its cable is pulled: no connection breaks. When it is back, its place is taken, and it hears that."""
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(3) as machines:
        a, b, c = machines.machines
        launcher, words = launched(start, a, a.address, "allreduce", lease_s=3.0)
        vanished = start(b, "b", *words)
        launcher.line(r"^step \d+")
        with machines.cut(1, "to"), machines.cut(1, "from"):
            launcher.line(r"machine b \(.*\) has left: .* silent for 6 s")
            joined = start(c, "c", *words)
            launcher.line(r"machine b \(.*\) has joined with worker-1")
            launcher.line("worker-1 is back")
            vanished.line("trying to come back")
        vanished.line("the launcher has refused this machine: no machine can join now")
        assert vanished.end()[0] == 4
        finished(tmp_path, joined, launcher, times=1)


@pytest.mark.limit_s(240)
def test_machines_join_a_job_beyond_its_number_and_leave_it(start: Start, tmp_path: Path) -> None:
    launcher, words = launched(start, Here(), "127.0.0.1", "downpour", epochs=2)
    second = start(Here(), "b", *words)
    launcher.line(r"^step \d+")
    third, fourth = (start(Here(), name, *words) for name in ("c", "d"))
    for _ in range(2):
        launcher.line(r"machine b-\d \(127.0.0.1\) has joined with worker-[23]")
    launcher.line(r"^step .* 4/4 workers on 4 machines")
    fourth.process.kill()
    launcher.line(r"machine b-\d \(127.0.0.1\) has left")
    for path in tmp_path.iterdir():
        (path / "hurry").touch()
    for command in (second, third, launcher):
        status, said = command.end()
        assert status == 0, said
    run = gs.Run.load(tmp_path / "a" / "run")
    assert TokenAudit.of(run, SAMPLES, 2).exact, TokenAudit.of(run, SAMPLES, 2)
    made = {event["node"] for event in run.events if event["event"] == "step"}
    assert made >= {"worker-0", "worker-1", "worker-2"}
