"""Figures of a run that was resumed, once or several times: what each part has made counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradstream.cli.report import figures
from gradstream.data.open_ledger import OpenLedger
from gradstream.report.summary import history_of, summary_of

Events = list[dict[str, Any]]


def part(number: int, resumed: dict[str, Any] | None = None, **options: Any) -> Events:
    """What the coordinator reports at the beginning of a part; `resumed`: where it goes on."""
    head = {"node": "coordinator", "time_s": float(number)}
    started = {"event": "started", **head, "workers": 2, "servers": 0, "strategy": "allreduce", **options}
    return [started] if resumed is None else [started, {"event": "resumed", **head, **resumed}]


def steps(number: int, numbers: Sequence[int], samples: int = 16, ranks: int = 2) -> Events:
    figures = {"epoch": 0, "loss": 1.0, "compute_s": 0.01, "wait_s": 0.0, "samples": samples}
    return [
        {"event": "step", "node": f"worker-{rank}", "rank": rank, "step": n, "time_s": number + n / 100, **figures}
        for n in numbers
        for rank in range(ranks)
    ]  # fmt: skip


def finished(samples: int) -> Events:
    return [{"event": "finished", "node": "coordinator", "samples": samples, "train_s": 9.0, "time_s": 9.0}]


def saved(own: int, steps_each: int) -> dict[str, Any]:
    """A checkpoint of a user's loop, in which each of two workers has so many samples, and steps of its own."""
    each = {"worker-0": own, "worker-1": own}
    return {
        "step": steps_each + 1,
        "samples": 2 * own,
        "steps": dict.fromkeys(each, steps_each),
        "by_worker": each,
    }


def test_a_loop_counts_its_own_steps_and_those_before_a_resume_count_all() -> None:
    # The round at `wrap` has number 0, and is none of the loop's steps.
    events = [
        *part(0),
        *steps(0, range(1, 6)),
        *part(1, saved(64, 4)),
        *steps(1, range(5, 8)),
        *finished(224),
    ]
    summary = summary_of(events)
    assert (summary["samples"], summary["steps"], summary["samples_accounted"]) == (224, 14, 224)


@pytest.mark.parametrize("made", [[], [5], [5, 6]])
def test_a_resume_that_failed_counts_nothing(made: list[int]) -> None:
    begin = [*part(0), *steps(0, range(1, 6))]
    tries = [*part(1, saved(64, 4)), *steps(1, made), *part(2, saved(64, 4)), *steps(2, made)]
    events = [*begin, *tries, *part(3, saved(64, 4)), *steps(3, range(5, 8)), *finished(224)]
    assert summary_of(events)["samples"] == 224
    assert [row["time_s"] > 3 for row in history_of(events)] == [False] * 8 + [True] * 6


def test_steps_of_several_minibatches_count_as_far_as_the_checkpoint_has_them() -> None:
    events = [
        *part(0),
        *steps(0, range(1, 8)),
        *part(1, saved(96, 3)),
        *steps(1, range(4, 6)),
        *finished(256),
    ]
    assert summary_of(events)["samples"] == 256


def test_minibatches_of_a_data_set_count_by_their_numbers() -> None:
    resumed = {"step": 3, "samples": 96, "steps": {"worker-0": 3, "worker-1": 3}, "by_worker": {}}
    events = [*part(0), *steps(0, range(5)), *part(1, resumed), *steps(1, range(3, 6)), *finished(192)]
    assert summary_of(events)["samples"] == 192


@pytest.mark.parametrize(("workers", "shown"), [(1, False), (2, True)])
def test_one_worker_exchanges_nothing(workers: int, shown: bool) -> None:
    exchange = {
        "pushed_bytes": 100,
        "fetched_bytes": 0,
        "pushes": 4,
        "fetches": 0,
        "retries": 0,
        "staleness": {},
    }
    sums = {"event": "exchange", "node": "worker-0", "time_s": 1.0, **exchange}
    summary = summary_of([*part(0, workers=workers), *steps(0, [0], ranks=workers), sums, *finished(16)])
    assert ("exchanged" in dict(figures(summary))) is shown


def test_a_loop_is_named_with_its_own_minibatches() -> None:
    ledger = OpenLedger(2, rounds=True, first=1)
    ledger.ended(0, batches=4, samples=48, next_round=4)
    ledger.ended(1, batches=6, samples=80, next_round=6)
    assert ledger.brief() == {0: (3, 5)}
    both = OpenLedger(2, rounds=True, first=1)
    both.ended(0, batches=0, samples=0, next_round=0)
    both.ended(1, batches=1, samples=0, next_round=1)
    assert both.brief() == {}
