"""Recorded runs of real processes, replayed bit for bit, also past a SIGKILL, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gradstream as gs
from gradstream.cli import main
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from killing import Killer
from whole_runs import train

JOB = """
import numpy as np
import torch
from torch import nn
import gradstream as gs

rng = np.random.default_rng(0)
X = rng.standard_normal((240, 60)).astype("float32")
Y = (X[:, :4].argmax(axis=1)).astype("int64")

def build():
    return nn.Sequential(nn.Linear(60, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 4))

def job():
    return gs.Job(
        gs.from_torch(build, nn.functional.cross_entropy), gs.from_arrays(X, Y, X[:40], Y[:40]),
        strategy=gs.Downpour(), optimizer=gs.optim.Adagrad(lr=0.02), workers=3, servers=2, batch_size=5, epochs=2,
        chunk_elems=512, record=True, deadlines=gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5),
    )

def other():
    import dataclasses
    return dataclasses.replace(job(), record=False)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with the job and two runs of it: one whole, one in which worker-1 was killed."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "small.py").write_text(JOB)
    with LocalCluster(folder / "logs", node_environment(3)) as warm:
        for name, victims in (("whole", []), ("killed", ["worker-1"])):
            killer = Killer(warm, "step", 40, *victims) if victims else None
            train(folder / "small.py", folder / name, warm, on_event=killer)
            if killer is not None:
                killer.bury()
    return folder / "whole", folder / "killed"


def asked(*words: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, words)])


def test_three_workers_and_two_shards_are_replayed_bit_for_bit(made: tuple[Path, Path]) -> None:
    whole, _ = made
    done = asked(whole, "--watch", "--json")
    assert done.exit_code == 0, done.output
    *lines, last = done.output.splitlines()
    assert json.loads(last)["ended"] == "the run is over"
    assert json.loads(last)["parameters"] == "the same bits as the run's own"
    run = gs.Run.load(whole)
    updates = [json.loads(line) for line in lines]
    assert len(updates) == run.summary["steps"] == 3 * 16 * 2
    losses = {
        (event["rank"], event["step"]): event["loss"] for event in run.events if event["event"] == "step"
    }
    assert {(one["worker"], one["steps"][0]): one["loss"] for one in updates} == losses
    assert max(tau for one in updates for tau in one["staleness"]) == run.summary["staleness_max"]


def test_a_worker_killed_by_sigkill_is_replayed_up_to_its_end(made: tuple[Path, Path]) -> None:
    _, killed = made
    assert gs.Run.load(killed).summary["workers_lost"] == ["worker-1"]
    done = asked(killed)
    assert done.exit_code == 0, done.output
    assert "the same bits as the run's own" in done.output


def test_the_command_stops_where_it_is_told(made: tuple[Path, Path]) -> None:
    whole, _ = made
    record = json.loads(asked(whole, "--worker", 2, "--step", 20, "--json").output)
    assert (record["worker"], record["steps"]) == (2, [20])
    assert len(record["samples"]) == 5 and len(record["computed_on"]) == 6
    shown = asked(whole, "--until-update", record["update"]).output
    ((epoch, partition, batch),) = record["batches"]
    where = f"batch {batch} of partition {partition} in data epoch {epoch}"
    for what in ("worker-2, step 20", where, str(record["samples"][0])):
        assert what in shown
    there = asked(whole, "--version", record["applied_to"][3] + 1, "--chunk", 3, "--json")
    assert json.loads(there.output) == record
    watched = asked(whole, "--until-update", 7, "--watch").output.splitlines()
    assert [line.split()[0] for line in watched[:7]] == list("1234567")
    assert "none" in asked(whole, "--find", "nan").output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--worker", 1], "--worker and --step go together"),
        (["--until-update", 3, "--find", "nan"], "places at which to stop; expected one"),
        (["--worker", 7, "--step", 1], "--worker 7 --step 1: none of the 96 updates"),
        (["--version", 2, "--chunk", 9], "chunks 0 to 5"),
        (["--chunk", 2], "--chunk goes with --version"),
    ],
)
def test_contradicting_options_are_refused(made: tuple[Path, Path], words: list[object], why: str) -> None:
    done = asked(made[0], *words)
    assert done.exit_code == 2, done.output
    assert why in done.output


def test_another_job_file_is_refused_and_so_is_a_run_without_a_recording(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, _ = made
    assert "not the directory of a run" in asked(tmp_path).output
    job = whole.parent / "small.py"
    before = job.read_text()
    try:
        job.write_text(before + "# another\n")
        done = asked(whole)
        assert done.exit_code == 2 and "has changed since" in done.output
    finally:
        job.write_text(before)
    spec = json.loads((whole / "nodes.json").read_text())
    (tmp_path / "nodes.json").write_text(json.dumps({**spec, "id": "none"}))
    assert "holds no recording" in asked(tmp_path).output
