"""What tests do with whole runs: train on nodes of a warm cluster, and compare what two runs have learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.planning import plan_run


def train(spec: str | Path, run_dir: Path, cluster: LocalCluster, **options: Any) -> gs.Run:
    """Trains the job of a file in a new run directory, on nodes that `cluster` forks."""
    run_dir.mkdir()
    return launch(plan_run(load_job(str(spec)), run_dir.name), run_dir, cluster=cluster, **options)


def same(one: gs.Run, other: gs.Run) -> bool:
    """Whether two runs end with the same parameters to the bit."""
    return all(
        np.array_equal(array, other.parameters[name], equal_nan=True)
        for name, array in one.parameters.items()
    )


def unexpected(error: Exception) -> None:
    """Fails with an error that was only to be told of."""
    raise AssertionError(error)
