"""Callbacks are told of a run; they can neither break nor slow it down."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError, UserCodeError
from gradstream.job import callbacks as module
from gradstream.job.callbacks import QUEUE_EVENTS, Callbacks
from gradstream.job.overrides import overrides
from gradstream.run.result import Run
from gradstream.testing.runs import least_squares

STEP = {"event": "step", "node": "worker-0", "time_s": 0.0}


class Recorder:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, info: Any) -> None:
        self.told.append(("start", info["name"], info["workers"], info["run_dir"]))

    def on_step(self, event: Any) -> None:
        self.told.append(("step", event["rank"], event["step"]))

    def on_evaluate(self, event: Any) -> None:
        self.told.append(("evaluate", event["step"]))

    def on_end(self, run: Run) -> None:
        self.told.append(("end", run.summary["failed"] is not None, sorted(run.parameters)))


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, event: Any) -> None:
        self.calls += 1
        raise ValueError("I am broken")


def problem() -> tuple[Any, Any]:
    model, data = least_squares(40, 3, whole=False)
    return model, gs.from_arrays(data.inputs[:20], data.targets[:20], data.inputs[20:], data.targets[20:])


OPTIONS: Any = {"workers": 2, "batch_size": 5, "steps": 4, "evaluate_every": 2, "name": "mine"}


def test_they_are_told_in_order_with_the_run_at_the_end() -> None:
    recorder = Recorder()
    simulate(*problem(), callbacks=[recorder], **OPTIONS)
    told = recorder.told
    assert told[0] == ("start", "mine", 2, None)
    assert told[-1] == ("end", False, ["w"])
    assert sorted(entry for entry in told if entry[0] == "step") == [
        ("step", rank, step) for rank in (0, 1) for step in range(4)
    ]
    assert [entry for entry in told if entry[0] == "evaluate"] == [("evaluate", 2), ("evaluate", 4)]


def test_one_that_raises_is_dropped_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    broken, recorder = Broken(), Recorder()
    run = simulate(*problem(), callbacks=[broken, recorder], **OPTIONS)
    plain = simulate(*problem(), **OPTIONS)
    assert np.array_equal(run.parameters["w"], plain.parameters["w"])
    assert broken.calls == 1
    assert len(recorder.told) == 1 + 8 + 2 + 1
    said = capsys.readouterr().err
    assert said.count("the callback Broken raised in on_step and is not called any more") == 1
    assert "ValueError: I am broken" in said


def test_the_end_is_told_of_a_failed_run_too() -> None:
    recorder, (_, data) = Recorder(), problem()
    model = gs.from_functions(lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], lambda p, x, y: 1 / 0)
    with pytest.raises(UserCodeError):
        simulate(model, data, callbacks=[recorder], **OPTIONS)
    assert recorder.told[-1] == ("end", True, [])


class Slow:
    """Waits in its first step until it is let go."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def on_step(self, event: Any) -> None:
        self.calls.append("step")
        self.entered.set()
        self.let_go.wait()

    def on_end(self, run: Run) -> None:
        self.calls.append("end")


def test_a_slow_one_misses_events_which_is_said() -> None:
    slow, said = Slow(), list[str]()
    callbacks = Callbacks([slow], {}, complain=said.append)
    callbacks.tell(STEP)
    assert slow.entered.wait(30)
    for _ in range(QUEUE_EVENTS + 7):  # returns at once, though nobody takes them
        callbacks.tell(STEP)
    slow.let_go.set()
    callbacks.end(Run)
    assert slow.calls == ["step"] * (1 + QUEUE_EVENTS) + ["end"]
    assert said == ["gradstream: the callback Slow was slower than the run and has missed 7 events\n"]


def test_one_that_hangs_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    slow, said = Slow(), list[str]()
    callbacks = Callbacks([slow], {}, complain=said.append)
    callbacks.tell(STEP)
    callbacks.end(Run)
    assert len(said) == 1
    assert "still busy 0.05 s after the end of the run" in said[0]
    slow.let_go.set()


def test_threads_tell_in_order_and_drop_what_raises() -> None:
    recorder, broken, said = Recorder(), Broken(), list[str]()
    callbacks = Callbacks([recorder, broken], {"name": "n", "run_dir": "r"}, complain=said.append)
    callbacks.tell({"event": "started", "workers": 3})
    for step in range(100):
        callbacks.tell({**STEP, "rank": 0, "step": step})
    callbacks.end(Run)
    steps = [("step", 0, step) for step in range(100)]
    assert recorder.told == [("start", "n", 3, "r"), *steps, ("end", False, [])]
    assert broken.calls == 1
    assert len(said) == 1


def test_without_a_run_to_show_only_the_threads_end() -> None:
    def nothing() -> Run:
        raise ConfigError("no such directory")

    recorder, said = Recorder(), list[str]()
    callbacks = Callbacks([recorder], {}, complain=said.append)
    callbacks.tell({**STEP, "rank": 0, "step": 0})
    callbacks.end(nothing)
    assert recorder.told == [("step", 0, 0)]
    assert not said


@pytest.mark.parametrize("bad", [[object()], [Recorder], "loud", [print]])
def test_what_would_never_be_called_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks.*expected"):
        simulate(*problem(), callbacks=bad, **OPTIONS)


def test_they_stay_where_they_are() -> None:
    job = gs.Job(*problem(), epochs=1, callbacks=[Recorder()])
    assert "callbacks" not in overrides(job)
