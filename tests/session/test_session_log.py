"""What a loop of a user's own says of itself: figures that it logs, losses that are heard, and the end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.cli.report import figures
from gradstream.errors import ConfigError
from gradstream.report.page import PageSource, page
from gradstream.report.progress_line import ProgressLine
from gradstream.report.summary import summary_of, surviving
from gradstream.session import log as module
from gradstream.session.log import MAX_NAMES, MAX_WAITING, SessionLog
from gradstream.telemetry.event_lines import parse_event, read_events
from gradstream.telemetry.events import LogEvent, encode
from gradstream.testing.sessions import loop_in_threads
from gradstream.trackers.tensorboard import Scalars

BACKWARD, SCALE = torch.Tensor.backward, torch.amp.GradScaler.scale


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stands still, and goes on by so many seconds."""
    now = [1]
    monkeypatch.setattr(module, "monotonic_ns", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    return passes


@pytest.fixture
def log() -> Iterator[SessionLog]:
    made = SessionLog(0)
    made.open()
    yield made
    made.close()
    assert (torch.Tensor.backward, torch.amp.GradScaler.scale) == (BACKWARD, SCALE)


def reports(log: SessionLog) -> list[LogEvent]:
    return [event for event in log.take() if isinstance(event, LogEvent)]


def differentiate(value: float, scaled: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> None:
    loss = torch.tensor([value], requires_grad=True).sum()
    scaled(loss).backward()  # type: ignore[no-untyped-call]
    loss.data.fill_(-1.0)  # what becomes of the tensor afterwards is nobody's loss


# ---- figures ------------------------------------------------------------------------------


def test_what_comes_soon_becomes_a_mean_and_is_counted(clock: Callable[[float], None]) -> None:
    log = SessionLog(3, lambda: 9)
    log.log(loss=1.0, lr=0.5)
    log.log(loss=torch.tensor(2.0, requires_grad=True), accuracy=np.float32(0.5))
    log.step()
    log.log(loss=np.array([4]), accuracy=True)
    assert [event.values for event in reports(log)] == [{"loss": 1.0, "lr": 0.5}]
    clock(0.1)
    log.step()
    (event,) = reports(log)
    assert event == LogEvent(rank=3, step=9, values={"loss": 3.0, "accuracy": 0.75}, merged=2)
    log.log(loss=math.nan)
    log.close()  # what is left is said at the end
    (event,) = reports(log)
    assert math.isnan(event.values["loss"] or 0.0)
    line = encode(event, node="worker-3", time_s=1.0).rstrip()
    assert parse_event(line, member="worker-3")["values"] == {"loss": None}


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2), torch.zeros(1, dtype=torch.complex64), [1.0]])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"session\.log\(accuracy=\.\.\.\): got .*expected a number"):
        SessionLog(0).log(accuracy=value)


@pytest.mark.parametrize("name", ["", "a" * 65, "é", "a\nb", "/a", "a:b"])
def test_names_are_those_that_every_tracker_takes(name: str) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 64 letters"):
        SessionLog(0).log(**{name: 1.0})


def test_names_and_waiting_reports_are_bounded(clock: Callable[[float], None]) -> None:
    log = SessionLog(0)
    for _ in range(3 * MAX_WAITING):
        log.log(**{f"n{index}": 1.0 for index in range(MAX_NAMES + 2)})
        clock(1.0)
    waiting = reports(log)
    assert len(waiting) == MAX_WAITING
    assert {len(event.values) for event in waiting} == {MAX_NAMES}
    log.close()
    (rest,) = reports(log)
    assert rest.merged == MAX_NAMES * (2 * MAX_WAITING - 1)  # nothing is lost, but for the names
    assert sum(event.dropped for event in [*waiting, rest]) == 2 * 3 * MAX_WAITING


@pytest.mark.parametrize("steps", [0, -1, 1.5, "many"])
def test_a_total_is_a_whole_number(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"session\.total"):
        SessionLog(0).total(steps)


def test_alone_nothing_is_done() -> None:
    session = gs.Session()
    session.log(loss=1.0)
    session.total(3)


# ---- the loss of backward() -----------------------------------------------------------------


def test_a_loss_is_heard_and_parts_of_a_step_are_averaged(log: SessionLog) -> None:
    assert torch.Tensor.backward is not BACKWARD
    assert math.isnan(log.step())
    differentiate(2.0)
    assert log.step() == 2.0
    differentiate(1.0)
    differentiate(4.0)
    assert log.step() == 2.5
    differentiate(1.0)
    assert log.step(9.0) == 9.0  # a closure's
    assert math.isnan(log.step())
    torch.ones(2, requires_grad=True).exp().backward(torch.ones(2))  # type: ignore[no-untyped-call]
    assert math.isnan(log.step())
    differentiate(math.nan)
    assert math.isnan(log.step())


def test_it_is_heard_before_the_hooks_of_the_gradient_run(log: SessionLog) -> None:
    weight, seen = torch.tensor(3.0, requires_grad=True), list[float]()
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(log.step()))  # type: ignore[no-untyped-call]
    (weight * 2).backward()  # type: ignore[no-untyped-call]
    assert seen == [6.0]


def test_a_scaled_loss_is_not_taken_for_the_loss(log: SessionLog) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    differentiate(2.0, scaler.scale)
    assert log.step() == 2.0
    differentiate(2.0, lambda loss: scaler.scale(loss) / 4)  # neither the loss nor its scaled value
    assert math.isnan(log.step())
    one, other = scaler.scale([torch.tensor(1.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)])
    one.backward()  # type: ignore[no-untyped-call]
    other.backward()  # type: ignore[no-untyped-call]
    assert log.step() == 3.0


def test_a_scaler_that_does_nothing_changes_nothing(log: SessionLog) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    differentiate(2.0, scaler.scale)
    assert log.step() == 2.0


def test_what_has_no_value_ends_no_loop(log: SessionLog) -> None:
    with torch.device("meta"):
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    assert math.isnan(log.step())


def test_loops_in_threads_hear_their_own_losses() -> None:
    logs, both, found = [SessionLog(0), SessionLog(1)], threading.Barrier(2), dict[int, float]()

    def loop(rank: int) -> None:
        logs[rank].open()
        both.wait(30)
        differentiate(float(rank + 5))
        found[rank] = logs[rank].step()
        both.wait(30)
        logs[rank].close()

    threads = [threading.Thread(target=loop, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: 5.0, 1: 6.0}
    assert torch.Tensor.backward is BACKWARD


def test_somebody_who_wraps_it_meanwhile_stays() -> None:
    first = SessionLog(0)
    first.open()
    ours, calls = torch.Tensor.backward, list[int]()

    def theirs(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        calls.append(1)
        ours(tensor, *args, **options)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = theirs  # type: ignore[method-assign, assignment]
    first.close()
    second = SessionLog(0)
    second.open()
    differentiate(2.0)
    differentiate(4.0)
    assert second.step() == 3.0  # each once
    assert len(calls) == 2
    torch.Tensor.backward = ours  # type: ignore[method-assign]
    second.close()
    assert torch.Tensor.backward is BACKWARD


# ---- a run ------------------------------------------------------------------------------------

STEPS = 12


def loop(session: gs.Session) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapped, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
    session.total(STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(torch.ones(4, 2)), torch.full((4, 1), 2.0))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        session.log(accuracy=step / STEPS, worst=math.nan)
    session.log(last=session.rank)


@pytest.fixture(scope="module", params=["synchronous", "downpour"])
def events(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of a run whose loops join gradients, and of one whose loops exchange parameters."""
    path = tmp_path_factory.mktemp("logged") / "run"

    def kept(session: gs.Session) -> None:
        loop(session)
        session.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory", lambda: _Kept(path.parent))
        loop_in_threads(kept, trackers=["tensorboard"], strategy=request.param)
    assert list((path / "tensorboard").glob("events.out.tfevents.*"))
    return list(read_events(path / "events.jsonl"))


class _Kept:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> str:
        return str(self.path)

    def __exit__(self, *_: object) -> None:
        pass


def test_steps_of_a_loop_have_losses_and_what_it_logs_is_in_its_events(events: list[Any]) -> None:
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 2 * STEPS
    assert all(event["loss"] is not None for event in steps)
    # Under Downpour, the other worker's report of a later step may come first.
    assert max(event["loss"] for event in steps) == 4.0
    logs = [event for event in events if event["event"] == "log"]
    assert {event["node"] for event in logs} == {"worker-0", "worker-1"}
    assert sum(len(event["values"]) + event["merged"] for event in logs) == 2 * (2 * STEPS + 1)
    assert all(event["total_steps"] == STEPS for event in logs)


def test_the_progress_line_shows_them(events: list[Any]) -> None:
    progress, lines = ProgressLine(), list[str]()
    for event in sorted(events, key=lambda event: event["time_s"]):
        progress.update(event)
        lines.append(progress.line())
    in_rounds = next(event for event in events if event["event"] == "started")["in_rounds"]
    total = STEPS if in_rounds else 2 * STEPS
    assert progress.total_steps == total
    assert f"step {total}/{total} · loss " in lines[-1]
    assert " · worst nan · " in lines[-1]
    assert any(" · ETA " in line for line in lines)


def test_the_table_and_the_report_show_them(events: list[Any]) -> None:
    summary = summary_of(events)
    assert summary["loss"] is not None
    assert math.isnan(summary["logged"]["worst"])
    row = dict(figures(summary))["logged"]
    assert "accuracy 0." in row
    assert "worst nan" in row
    html = page(PageSource(events=events, title="loop"))
    assert "accuracy over samples, as logged" in html
    assert "loss over samples" in html


def test_tensorboard_has_their_curves(events: list[Any]) -> None:
    scalars = Scalars(every_s=0.0)
    ordered = sorted(events, key=lambda event: event["time_s"])
    points = [point for event in ordered for point in scalars.update(event)]
    tags = {point.tag for point in points}
    assert {"loss/train", "log/accuracy", "log/worst", "log/last"} <= tags
    assert all(math.isnan(point.value) for point in points if point.tag == "log/worst")


# ---- without a run ------------------------------------------------------------------------------


def logged(time_s: float, rank: int = 0, total: int = 0, step: int = 0, **values: float | None) -> Any:
    record = {"event": "log", "node": f"worker-{rank}", "time_s": time_s, "rank": rank, "step": step}
    return {**record, "values": values, "merged": 0, "dropped": 0, "total_steps": total}


def stepped(time_s: float, rank: int = 0, loss: float | None = None) -> Any:
    record = {"event": "step", "node": f"worker-{rank}", "time_s": time_s, "rank": rank, "samples": 5}
    return {**record, "loss": loss, "compute_s": 1.0, "wait_s": 0.0, "step": 0, "epoch": 0}


def test_without_rounds_the_end_is_that_of_all_workers() -> None:
    progress = ProgressLine()
    started = {"event": "started", "node": "coordinator", "time_s": 0.0, "workers": 2, "total_steps": 0}
    for event in (started, stepped(2.0, loss=1.0), stepped(2.0, rank=1, loss=1.0)):
        progress.update(event)
    assert progress.line() == "step 2 · loss 1 · 10 samples/s · 0:01 so far"
    progress.update(logged(2.0, total=10, loss=0.25))
    assert progress.line() == "step 2/20 · loss 0.25 · 10 samples/s · ETA 0:09"
    progress.update(logged(2.0, rank=1, total=6))
    assert progress.total_steps == 16


def test_a_report_says_where_figures_are_not_finite() -> None:
    events = [stepped(1.0), logged(1.0, a=1.0), stepped(2.0), logged(2.0, a=None), logged(3.0, a=2.0)]
    assert "a over samples, as logged (1 of 3 points not finite)" in page(
        PageSource(events=events, title="loop")
    )


def test_what_is_logged_again_after_a_resume_is_not_counted_twice() -> None:
    started = {"event": "started", "node": "coordinator", "time_s": 0.0}
    resumed = {"event": "resumed", "time_s": 3.0, "step": 2, "steps": {"worker-0": 2}}
    first = [started, logged(1.0, step=1, a=1.0), logged(2.0, step=2, a=2.0), logged(3.0, step=3, a=3.0)]
    kept = surviving([*first, started, resumed, logged(4.0, step=3, a=4.0)])
    assert [event["values"]["a"] for event in kept if event["event"] == "log"] == [1.0, 2.0, 4.0]
    assert [e["values"]["a"] for e in surviving([*first, started]) if e["event"] == "log"] == []
