"""Three machines of which only the first can be dialled, as network namespaces: a group forms, through the first.

Skipped with the reason where namespaces cannot be made.
"""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.numpy

import gradstream as gs
from gradstream.run.result import FINAL_MODEL
from kit.machines import Machines, unavailable
from machine_command import JOB, Command

GROUP_JOB = JOB.replace('strategy="downpour"', 'strategy="allreduce", strategy_options={"algorithm": "ring"}')


def run(machines: Machines, folder: Path) -> tuple[str, Path]:
    """Trains on all machines; returns what the launcher has said, and its run directory."""
    folder.mkdir()
    a = machines[0]
    arguments = ("train", "job.py", "--listen", a.address, "--wait", "3", "--run-dir", "run")
    launcher = Command(a, folder / "a", *arguments, job=GROUP_JOB)
    words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
    joined = [
        Command(machines[index], folder / name, *words, "--name", name, job=GROUP_JOB)
        for index, name in ((1, "b"), (2, "c"))
    ]
    status, said = launcher.end()
    assert status == 0, said
    for command in joined:
        status, told = command.end()
        assert status == 0, told
    return said, folder / "a" / "run"


@pytest.mark.limit_s(240)
def test_machines_that_cannot_be_dialled_train_as_others_do(tmp_path: Path) -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Machines(3) as machines:
        _, direct = run(machines, tmp_path / "direct")
        with ExitStack() as walls:  # each ends with an error if nobody has run against it
            for index in (1, 2):
                walls.enter_context(machines.wall(index))
            said, relayed = run(machines, tmp_path / "relayed")
    assert re.search(r"worker-0 cannot dial worker-1, which has dialled back", said), said
    assert re.search(r"worker-1 cannot dial worker-2, nor the other way round", said), said
    assert gs.Run.load(direct).summary["relayed"] == {}
    summary = gs.Run.load(relayed).summary
    assert list(summary["relayed"]) == ["worker-1 worker-2"]
    assert summary["relayed"]["worker-1 worker-2"] > summary["steps"] * 4 * summary["num_parameters"] / 3
    assert summary["workers_lost"] == []
    finals = [safetensors.numpy.load_file(path / FINAL_MODEL) for path in (direct, relayed)]
    for name, value in finals[0].items():
        assert value.tobytes() == finals[1][name].tobytes(), name
