"""A command line of gradstream on another machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradstream as gs
from kit.machines import Machine

SOURCE = str(Path(gs.__file__).resolve().parents[1])
JOB = """
import time
import numpy as np
import torch
from torch import nn
import gradstream as gs

class Slow(nn.Module):
    def forward(self, inputs):
        time.sleep(0.02)  # so that a machine can die on the way
        return inputs

def build():
    return nn.Sequential(Slow(), nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Flatten(0))

def job():
    inputs = np.random.default_rng(0).normal(size=(800, 3)).astype(np.float32)
    targets = inputs @ np.array([1, 2, 3], np.float32)
    return gs.Job(
        gs.from_torch(build, nn.functional.mse_loss),
        gs.from_arrays(inputs, targets, inputs, targets),
        strategy="downpour", batch_size=10, epochs=3, optimizer=gs.optim.SGD(lr=0.02), chunk_elems=64,
    )
"""


class Here:
    """This machine, beside whatever else runs on it."""

    def start(self, argv: Sequence[str], *, cwd: Path, **options: Any) -> subprocess.Popen[str]:
        """See `Machine.start`."""
        options["env"] = {**os.environ, **options["env"]}
        return subprocess.Popen(argv, cwd=cwd, stdin=subprocess.DEVNULL, text=True, **options)


class Command:
    """A command line of gradstream on one of the machines."""

    def __init__(self, machine: Machine | Here, folder: Path, *arguments: str, job: str = JOB) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "job.py").write_text(job)
        self.process = machine.start(
            [sys.executable, "-m", "gradstream", *arguments],
            cwd=folder,
            env={"PYTHONPATH": SOURCE, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.said: list[str] = []

    def line(self, pattern: str) -> re.Match[str]:
        """The first line from here on in which the pattern is found."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(self.said))

    def end(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        rest = self.process.stdout.read()  # not communicate(): that loses what `line` has read ahead
        return self.process.wait(), "".join(self.said) + rest
