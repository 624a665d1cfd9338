"""A real Slurm of two nodes runs the file of `gradstream launch --emit slurm`, and preempts it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gradstream as gs
from kit.machines import Machines, unavailable
from kit.slurm_machines import SlurmMachines, slurm_missing

JOB = """
import pathlib
import gradstream as gs
from gradstream.testing.runs import slow

def job():
    model, data = slow(240, pause_s=0.1, until=pathlib.Path("hurry"))
    return gs.Job(
        model, data, optimizer=gs.optim.SGD(lr=1e-5), strategy="synchronous", batch_size=8, epochs=10
    )
"""
EMIT = ("launch", "--emit", "slurm", "job.py", "--cpus", "1", "--memory", "1", "--output", "job.sbatch")
LONGEST_S = 60.0


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmMachines]:
    if reason := unavailable() or slurm_missing():
        pytest.skip(reason)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "urgent.sbatch").write_text(
        "#!/bin/sh\n#SBATCH --partition=urgent --nodes=2 --output=urgent.log\ndate\n"
    )
    subprocess.run([sys.executable, "-m", "gradstream", *EMIT], cwd=tmp_path, check=True)
    (tmp_path / "slurm").mkdir()
    with Machines(2) as machines:
        yield SlurmMachines(machines, tmp_path / "slurm")


def test_a_job_that_is_preempted_goes_on_by_itself_and_ends_like_one_that_never_was(
    slurm: SlurmMachines, tmp_path: Path
) -> None:
    log = tmp_path / "job-1.log"
    in_slurm = "slurmctld.log"
    assert slurm.ask("sbatch", "job.sbatch", cwd=tmp_path) == "Submitted batch job 1"
    slurm.wait(
        "../job-1.log",
        LONGEST_S,
        lambda: log.exists() and re.search(r"step \d\d/", log.read_text()) is not None,
    )
    assert slurm.ask("sbatch", "urgent.sbatch", cwd=tmp_path) == "Submitted batch job 2"
    slurm.wait(in_slurm, LONGEST_S, lambda: slurm.state("2") == "COMPLETED")
    assert list((tmp_path / "runs" / "slurm-1" / "checkpoints").iterdir())
    (tmp_path / "hurry").touch()
    # After a requeue Slurm waits two minutes. In the second in which it has revoked a credential it takes no other.
    slurm.ask("scontrol", "update", "JobId=1", "StartTime=now+3")
    slurm.wait("../job-1.log", LONGEST_S, lambda: slurm.state("1") == "COMPLETED")
    assert slurm.ask("sbatch", "job.sbatch", cwd=tmp_path) == "Submitted batch job 3"
    slurm.wait("../job-3.log", LONGEST_S, lambda: slurm.state("3") == "COMPLETED")
    preempted, whole = (gs.Run.load(tmp_path / "runs" / f"slurm-{number}") for number in (1, 3))
    assert [one.summary["samples_accounted"] for one in (preempted, whole)] == [2400, 2400]
    ours, theirs = (one.parameters["w"] for one in (preempted, whole))
    assert np.array_equal(ours, theirs) and np.any(ours)
    assert [path.name for path in tmp_path.glob(".gradstream-*")] == []
