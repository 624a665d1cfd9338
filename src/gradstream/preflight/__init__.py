"""`gradstream train --dry-run`: checks a job with a few real minibatches, before hours are spent.

A dry run tries everything that a run needs, cheapest first, up to the first check that fails. `job.py` checks the
configuration and the model of a job, estimates memory and disk, then starts real processes. `script.py` checks a
script with a training loop of its own. Only the script knows the size of its model, while it runs; so real
processes come first, and their needs are then compared with the free memory and disk.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from gradstream.job.job import Job, is_script
from gradstream.preflight.base import CheckResult, JobDryRun, ScriptDryRun, carry_out, estimate, samples_per_s

__all__ = ["CheckResult", "dry_run", "estimate", "samples_per_s"]


def dry_run(job: Job) -> list[CheckResult]:
    """Checks a job by running a little of it. Leaves no files.

    Returns:
        The results of the checks, in order; only the last can be a failure.
    """
    kind = ScriptDryRun if is_script(job) else JobDryRun
    with tempfile.TemporaryDirectory(prefix="gradstream-") as folder, ExitStack() as stack:
        return carry_out(kind(job, Path(folder) / "run", stack).checks)
