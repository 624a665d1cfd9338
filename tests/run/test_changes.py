"""What a run that goes on says of options that are not those of its beginning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream._resume import changes
from gradstream.run.node_spec import NodeSpec
from gradstream.run.planning import plan_run
from gradstream.testing.runs import slow


def spec_of(**options: Any) -> NodeSpec:
    """As nodes.json has it: through JSON."""
    model, data = slow(40)
    defaults: dict[str, Any] = {"strategy": "downpour", "batch_size": 8, "epochs": 2, "spec": "job.py"}
    job = gs.Job(model, data, **(defaults | options))
    spec = NodeSpec.of(plan_run(job, "0"), Path("here"))
    return NodeSpec(**json.loads(json.dumps(dataclasses.asdict(spec))))


def test_a_job_as_it_was_has_no_changes() -> None:
    again = spec_of(run_dir=Path("elsewhere"), argv=("/other/job.py",), name="mine", chunk_elems=128)
    assert changes(spec_of(), again) == ""


def test_each_value_that_is_another_one_is_named() -> None:
    before = spec_of(optimizer=gs.optim.SGD(lr=0.1))
    assert changes(before, spec_of(optimizer=gs.optim.SGD(lr=0.2), epochs=3)) == (
        "epochs = 3, before 2; optimizer.lr = 0.2, before 0.1"
    )
    assert "strategy = Synchronous, before Downpour" in changes(before, spec_of(strategy="synchronous"))
    assert changes(spec_of(argv=("job.py", "--deep")), spec_of(argv=("job.py",))) == (
        "arguments of the job file = [], before ['--deep']"
    )
