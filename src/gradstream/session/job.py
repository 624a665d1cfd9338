"""The job of a script with a loop of its own, for the coordinator and the shards.

They do not run the script. The first worker sends them the model's sizes and the update rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.model.base import Reduction
from gradstream.worker.loop import Loop


class ScriptModel:
    """Takes the place of a job's model, which the script makes."""

    reduction: Reduction = "mean"

    def gradient(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ConfigError: the script computes its gradients."""
        raise ConfigError(
            "this job has no model: its script has a training loop of its own, which computes the gradients; start "
            "it with gradstream train script.py"
        )


@dataclass
class OwnLoop:
    """Takes the place of a job's data set: the script has the data.

    Args:
        running: the loop of this process; None if it is no worker.
        optimizer: the update rule that the loop's optimizer asks for, as text.
        gradients_only: whether only gradients are exchanged, under strategies that return their mean.
    """

    running: Loop | None = None
    optimizer: str = ""
    gradients_only: bool = True
    name: str = "the script's own"
    num_samples: int = 0
    num_test_samples: int = 0
    job: str = "gradstream.session.job:job"

    def loop(self, rank: int) -> Loop:
        """The loop of this process."""
        if self.running is None:
            raise ConfigError(
                f"worker-{rank}: this job is a script with a training loop of its own, which this process does not "
                "run: start the job with gradstream train script.py"
            )
        return self.running


def job() -> Job:
    """The job without the settings that the launcher adds."""
    return Job(ScriptModel(), OwnLoop())  # type: ignore[arg-type]  # stand in for model and data
