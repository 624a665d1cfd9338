"""Predictors of parts that train apart go into checkpoints, and a resumed run goes on with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._resume import begins_anew
from gradstream.checkpoint import Resume, to_resume
from gradstream.errors import DataError
from gradstream.pipeline.synthetic import Predictor
from gradstream.run.planning import plan_run
from gradstream.run.result import Run
from gradstream.runtime.storage import MemoryStorage
from gradstream.worker.parts.decoupled import AGO, DecoupledGradients
from split_jobs import data, difference, net, run

HOW = gs.pipeline.SyntheticGradients(hidden=16, lr=0.01)
State = Mapping[str, torch.Tensor]


def apart(pipeline: Any = HOW, **options: Any) -> Run:
    return run(**{"split": 3, "workers": 1, "strategy": "allreduce", "pipeline": pipeline, **options})


def stopped(**options: Any) -> MemoryStorage:
    """The disk of a run whose newest checkpoint is of its seventh minibatch, of 12."""
    storage = MemoryStorage()
    apart(storage=storage, checkpoint_every=5, **options)
    return storage


@cache
def plainly_stopped() -> MemoryStorage:
    """The same without options; take a copy."""
    return stopped()


@cache
def whole() -> Run:
    """The run that was not stopped."""
    return apart(epochs=3)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": replace(HOW, inputs=True)},
        {"pipeline": replace(HOW, labels=False, hidden=0), "split": 2},
        {"strategy": "synchronous", "workers": 2},
        {"strategy": gs.Downpour(overlap=False), "split": 2},
    ],
    ids=["inputs", "linear", "synchronous", "downpour"],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(options: dict[str, Any]) -> None:
    resumed = apart(storage=stopped(**options), resume=True, checkpoint_every=None, epochs=3, **options)
    assert difference(apart(epochs=3, **options), resumed) == 0.0


# ---- planted faults ---------------------------------------------------------------------------


def nothing(load: Any, self: DecoupledGradients, state: State) -> None:
    """Predictors begin at zero, as they did before checkpoints had them."""


def no_lessons(load: Any, self: DecoupledGradients, state: State) -> None:
    """What the last minibatches had yet to teach is lost."""
    load(self, {name: tensor for name, tensor in state.items() if f"/{AGO}" not in name})


def lessons_early(load: Any, self: DecoupledGradients, state: State) -> None:
    """The lessons are learned one minibatch too early."""
    load(self, state)
    self._lessons = {number - 1: lessons for number, lessons in self._lessons.items()}


def no_moments(load: Any, self: DecoupledGradients, state: State) -> None:
    """The optimizer of the predictors begins anew."""
    load(self, state)
    for predictor in self._predictors.values():
        predictor._optimizer.state.clear()


@pytest.mark.parametrize(
    "fault", [nothing, no_lessons, lessons_early, no_moments], ids=lambda fault: fault.__name__
)
def test_what_is_not_restored_shows(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    storage, load = deepcopy(plainly_stopped()), DecoupledGradients.load
    monkeypatch.setattr(DecoupledGradients, "load", lambda self, state: fault(load, self, state))
    resumed = apart(storage=storage, resume=True, checkpoint_every=None, epochs=3)
    assert difference(whole(), resumed) > 1e-9


# ---- other runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, ""),
        ({"split": 2}, r"not used: they were of split=3, .*; split=2, "),
        ({"pipeline": replace(HOW, hidden=8)}, r"hidden=16, .*hidden=8, "),
        ({"pipeline": "gpipe"}, "this run has none"),
        ({"workers": 2}, "new workers begin at zero: worker-1"),
    ],
    ids=["same", "split", "hidden", "gpipe", "workers"],
)
def test_what_begins_anew_is_said_and_the_run_goes_on(options: dict[str, Any], says: str) -> None:
    storage = deepcopy(plainly_stopped())
    model = gs.from_torch(net, nn.functional.cross_entropy)
    given = {"split": 3, "workers": 1, "pipeline": HOW, **options}
    job = gs.Job(model, data(), strategy="allreduce", batch_size=6, epochs=3, **given)
    found = to_resume(storage, lambda _: None)
    assert found is not None
    sentence = begins_anew(plan_run(job, "run", resume=Resume.at(*found)))
    assert re.search(says, sentence) if says else sentence == ""
    done = apart(storage=storage, resume=True, checkpoint_every=None, epochs=3, **options)
    assert done.summary["samples"] == (18 - 7) * 6


def test_predictors_that_do_not_fit_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "state", lambda self: {})
    storage = stopped()
    with pytest.raises(DataError, match=r"predictors in .* do not fit .* under another split"):
        apart(storage=storage, resume=True, checkpoint_every=None, epochs=3)
