"""`gradstream train --dry-run`: checks a job by a few real minibatches, before hours are spent.

Everything that a run needs is tried once, cheapest first; the first check that fails is the last one.
Of a job: the configuration, the model, memory and disk by estimate, then real processes (`job_trial.py`).
Of a script with a training loop of its own, which must run to say how large its model is: real processes
first, then what they have needed against what is there (`script_trial.py`).
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from gradstream.job.job import Job, is_script
from gradstream.preflight.estimates import estimate, samples_per_s
from gradstream.preflight.job import JobDryRun
from gradstream.preflight.results import CheckResult, carry_out
from gradstream.preflight.script import ScriptDryRun

__all__ = ["CheckResult", "dry_run", "estimate", "samples_per_s"]


def dry_run(job: Job) -> list[CheckResult]:
    """Checks a job by running a little of it. Leaves no files.

    Returns:
        The results of the checks, in order; only the last can be a failure.
    """
    kind = ScriptDryRun if is_script(job) else JobDryRun
    with tempfile.TemporaryDirectory(prefix="gradstream-") as folder, ExitStack() as stack:
        return carry_out(kind(job, Path(folder) / "run", stack).checks)
