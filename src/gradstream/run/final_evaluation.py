"""The evaluation of a run that has ended, and its place in the events of the run."""

from __future__ import annotations

from contextlib import ExitStack

from gradstream.errors import GradstreamError
from gradstream.job.code import run_kept
from gradstream.run.reopen import reopen
from gradstream.run.result import Run
from gradstream.runtime.event_log import disk_error, disk_remedy
from gradstream.telemetry.events import EvaluatedEvent, encode
from gradstream.untrusted import say
from gradstream.worker.evaluation import Evaluation


def evaluate(run: Run) -> Evaluation | None:
    """The run's evaluation on held-out samples; None if there are none, or no parameters."""
    if run.model is None or run.data is None or not run.data.num_test_samples or not run.parameters:
        return None
    with ExitStack() as stack:
        if run.path is not None:
            stack.callback(run_kept(run.path))  # it may import more of the user's
        found = run.evaluate()
    keep_evaluation(run, found)
    return found


def evaluation_of_run(run: Run) -> Evaluation | None:
    """The evaluation of a run that another process has trained: as it has kept it, or computed again, and not kept.

    None if the job cannot be read again (a message says so), or without held-out samples or parameters.
    """
    final = [row for row in run.evaluations if row["final"]]
    if final and final[-1]["accuracy"] is not None:  # else the event does not say which loss it has
        kept = final[-1]
        own = kept["loss"] is not None
        return Evaluation(kept["accuracy"], kept["loss"], kept["held_out"], kept["metrics"], own_loss=own)
    assert run.path is not None
    try:
        opened, _ = reopen(run.path)
        return opened.evaluate() if opened.data is not None and opened.data.num_test_samples else None
    except GradstreamError as error:
        say(f"not evaluated: {error}")
        return None


def keep_evaluation(run: Run, found: Evaluation) -> None:
    """Adds the evaluation of the final parameters to the run's events, unless they have one.

    Then `gradstream runs` and reports show it. Where the directory cannot be written, a message says so.
    """
    if run.path is None or any(row["final"] for row in run.evaluations):
        return
    last = run.history[-1] if run.history else {"epoch": 0, "step": -1}
    event = EvaluatedEvent(
        step=last["step"] + 1,
        epoch=last["epoch"],
        samples=run.summary["samples"],
        accuracy=found.accuracy,
        loss=found.loss,
        metrics=found.metrics,
        held_out=found.num_samples,
        final=True,
    )
    time_s = max((one["time_s"] for one in run.events), default=0.0)
    try:
        with (run.path / "events.jsonl").open("ab") as file:
            file.write(encode(event, node="launcher", time_s=time_s))
    except OSError as error:
        say(f"{run.path} does not keep the evaluation: {disk_error(error)}; {disk_remedy(error)}")
