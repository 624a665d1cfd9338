"""The progress line from recorded events, and when it is shown."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rich.console import Console

from gradstream.report import progress_line
from gradstream.report.progress_line import Display, ProgressLine

STARTED = {"event": "started", "node": "coordinator", "time_s": 0.0, "workers": 2, "strategy": "downpour"}
STARTED |= {"total_steps": 40}


def joined(who: str) -> dict[str, Any]:
    return {"event": "joined", "node": "coordinator", "time_s": 0.0, "who": who}


def left(who: str, lost: bool) -> dict[str, Any]:
    return {
        "event": "left",
        "node": "coordinator",
        "time_s": 1.0,
        "who": who,
        "lost": lost,
        "reason": "silent",
    }


def step(rank: int, time_s: float, loss: float | None = 1.0, samples: int = 10) -> dict[str, Any]:
    record = {"event": "step", "node": f"worker-{rank}", "time_s": time_s, "rank": rank}
    return {**record, "samples": samples, "loss": loss, "compute_s": 1.0}


def exchange(time_s: float, size: int, staleness: dict[str, int]) -> dict[str, Any]:
    record = {"event": "exchange", "node": "worker-0", "time_s": time_s, "pushed_bytes": size}
    return {**record, "fetched_bytes": size, "staleness": staleness}


def fed(*events: dict[str, Any]) -> ProgressLine:
    progress = ProgressLine()
    for event in events:
        progress.update(event)
    return progress


def test_before_the_first_step_it_says_who_is_in() -> None:
    progress = fed(joined("worker-0"), joined("shard-0"))
    assert progress.line() == "starting: 1/? workers are in"
    progress.update(STARTED)
    assert progress.line() == "starting: 1/2 workers are in"


def test_the_whole_line() -> None:
    both = [joined("worker-0"), joined("worker-1"), STARTED]
    progress = fed(*both, step(0, 2.0), step(1, 2.0), step(0, 3.0), step(1, 3.0))
    progress.update(exchange(3.0, 1_000_000, {"0": 1, "3": 1}))
    # 40 samples and 4 steps in 2 s from the start of the first gradient (1 s) to 3 s.
    assert progress.line() == (
        "step 4/40 · loss 1 · 20 samples/s · ETA 0:18 · 2/2 workers · 1.0 MB/s · staleness 1.5"
    )


def test_rates_forget_what_is_long_ago() -> None:
    slow = [step(0, float(second), samples=1) for second in range(1, 51)]
    fast = [step(0, 50 + second / 10, samples=1) for second in range(1, 101)]
    assert fed(*slow).samples_per_s == pytest.approx(1.0)
    assert fed(*slow, *fast).samples_per_s == pytest.approx(10.0)


def test_a_round_of_all_workers_is_one_step() -> None:
    progress = fed({**STARTED, "in_rounds": True}, step(0, 1.0), step(1, 1.0), step(0, 2.0))
    assert progress.step == 2


def test_loss_is_smoothed_and_unknown_losses_are_passed_over() -> None:
    progress = fed(step(0, 1.0, loss=4.0))
    assert progress.loss == 4.0
    progress.update(step(0, 2.0, loss=None))
    assert progress.loss == 4.0
    progress.update(step(0, 3.0, loss=2.0))
    assert progress.loss is not None
    assert 2.0 < progress.loss < 4.0


def test_a_lost_worker_is_not_alive() -> None:
    progress = fed(joined("worker-0"), joined("worker-1"), STARTED, step(0, 1.0), left("worker-1", lost=True))
    assert "1/2 workers" in progress.line()


def test_machines_count_while_a_node_of_theirs_is_there() -> None:
    come = {"event": "machine", "node": "launcher", "time_s": 0.0, "who": "c", "state": "joined"}
    progress = fed(
        joined("worker-0"), come | {"nodes": ["worker-1"]}, joined("worker-1"), STARTED, step(0, 1.0)
    )
    assert "2/2 workers on 2 machines" in progress.line()
    progress.update(left("worker-1", lost=True))
    assert "1/2 workers ·" in f"{progress.line()} ·"
    progress.update(joined("worker-1"))
    assert "2/2 workers on 2 machines" in progress.line()


def test_what_is_not_known_is_left_out() -> None:
    progress = fed(joined("worker-0"), STARTED, step(0, 1.0))
    assert progress.line() == "step 1/40 · loss 1 · 10 samples/s · ETA 0:39 · 1/2 workers"
    progress.update(left("worker-0", lost=False))  # as all do at the end
    assert "workers" not in progress.line()


def shown(*events: dict[str, Any], terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, soft_wrap=True)
    with Display(console, now=lambda: 0.0) as made:
        for event in events:
            made.on_event(event)
    return out.getvalue()


def test_plain_lines_come_each_tenth_and_at_the_end() -> None:
    lines = shown(STARTED, *[step(0, float(n)) for n in range(1, 10)]).splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 4/40", "step 8/40", "step 9/40"]
    assert all("\x1b" not in line for line in lines)


def test_a_loss_of_a_node_is_said_at_once() -> None:
    assert "lost worker-1: silent" in shown(left("worker-1", lost=True))
    assert "worker-1 has left: silent" in shown(left("worker-1", lost=False))
    ruling = {"event": "coordinator", "node": "coordinator", "time_s": 1.0, "members": [], "epoch": 1}
    assert "the coordinator had died: a new process" in shown({**ruling, "ruling": 2})
    assert "the coordinator" not in shown({**ruling, "ruling": 1})


def test_a_process_that_a_signal_has_killed_is_told_with_the_signal() -> None:
    said = {"event": "exited", "node": "launcher", "time_s": 1.0, "who": "worker-1", "status": -11}
    how = "was killed by signal 11 (SIGSEGV)"
    assert f"the process of worker-1 {how}" in shown(said | {"how": how})
    assert shown(said | {"status": 0, "how": "ended with status 0"}) == shown(said | {"how": ""}) == ""


def test_only_a_node_that_was_lost_is_back() -> None:
    """A later phase begins with workers that were not there before, and with those that it has in common."""
    again = [{**joined(f"worker-{rank}"), "epoch": 2} for rank in (0, 1)]
    assert "back" not in shown(joined("worker-0") | {"epoch": 0}, left("worker-0", lost=False), *again)
    assert "worker-0 is back" in shown(joined("worker-0") | {"epoch": 0}, left("worker-0", lost=True), *again)


def test_a_terminal_gets_one_live_line() -> None:
    text = shown(STARTED, step(0, 1.0), terminal=True)
    assert "step 1/40" in text
    assert "\x1b[" in text


# ---- in a program of one's own ----------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Kernel:
    """IPython, as the kernel of a notebook has imported it."""

    kernel = None

    def get_ipython(self) -> Kernel:
        return self


def said(
    stderr: io.StringIO | None,
    progress: bool | None = None,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", stderr)
        with progress_line.shown(on_event, progress) as each:
            if each is None:
                return ""
            for event in (STARTED, *[step(0, float(n)) for n in range(1, 10)], left("worker-1", lost=True)):
                each(event)
    return "" if stderr is None else stderr.getvalue()


def test_progress_is_shown_where_somebody_looks_on_and_nowhere_else() -> None:
    heard: list[Mapping[str, Any]] = []
    assert "step 9/40" in said(Terminal()) and "lost worker-1" in said(Terminal())
    assert said(io.StringIO()) == said(None) == ""
    assert said(Terminal(), progress=False) == ""
    assert said(Terminal(), on_event=heard.append) == "" and len(heard) == 11, "one of his own"
    assert "step 9/40" in said(io.StringIO(), progress=True, on_event=heard.append) and len(heard) == 22


def test_a_notebook_has_one_line_that_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", Kernel())
    monkeypatch.setattr(progress_line, "NOTEBOOK_EVERY_S", 0.0)
    text = said(io.StringIO())
    assert "\x1b" not in text and "<" not in text
    lines = text.splitlines()  # \r ends one as well
    assert [line.split(" ")[1] for line in lines if line.startswith("step ")] == [
        *[f"{n}/40" for n in range(1, 10)],
        "9/40",
        "9/40",
    ]
    assert text.count("\n") == 2 and text.endswith("\n"), "the loss of a worker, and the end"
    assert any(line.startswith("lost worker-1") for line in lines)
