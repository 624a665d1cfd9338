"""The job of a script with a loop of its own: what coordinator and shards need to know of it.

They do not run the script. The model's sizes and the update rule reach them with the first worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.model.base import Reduction
from gradstream.worker.replica.loop import Loop

__all__ = ["OwnLoop", "ScriptModel", "job"]


class ScriptModel:
    """Stands where a job has its model: it is made in the script."""

    reduction: Reduction = "mean"

    def gradient(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ConfigError: it is computed in the script."""
        raise ConfigError("a script with a training loop of its own computes its gradients itself")


@dataclass
class OwnLoop:
    """Stands where a job has its data set: the script has the data.

    Args:
        running: the loop of this process, where it is a worker.
        optimizer: the update rule that it asks for, as text.
        joint: it exchanges gradients alone where the strategy gives it the mean.
    """

    running: Loop | None = None
    optimizer: str = ""
    joint: bool = True
    name: str = "the script's own"
    num_samples: int = 0
    num_test_samples: int = 0
    job: str = "gradstream.session.job:job"

    def loop(self, rank: int) -> Loop:
        """The loop of this process."""
        if self.running is None:
            raise ConfigError(
                f"worker {rank}: a script with a training loop of its own is started by gradstream train"
            )
        return self.running


def job() -> Job:
    """The job, but for what the launcher tells its nodes besides."""
    return Job(ScriptModel(), OwnLoop())  # type: ignore[arg-type]  # stand in for model and data
