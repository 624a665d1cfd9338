"""The end of a run names the one slow worker that the others waited for: on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

import gradstream as gs
from gradstream.cli.report import figures
from gradstream.report.straggler import straggler_of
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Network, SimulationConfig
from gradstream.testing.runs import Sized, kill_at, numbered

SLOW = {"worker-3": 0.2}
GRADIENT = {"gradient": Cost(per_sample_s=1.0)}


def ended(strategy: Any, speeds: dict[str, float] = SLOW, **options: Any) -> Run:
    given: dict[str, Any] = {"workers": 4, "batch_size": 1, "steps": 5, "seed": 1, "chunk_elems": 64}
    config = SimulationConfig(
        costs=GRADIENT, speeds=speeds, shape_only=True, network=options.pop("network", Network())
    )
    return gs.simulate(Sized([64] * 4), numbered(64), config=config, strategy=strategy, **(given | options))


@pytest.mark.parametrize(
    "strategy", [gs.Synchronous(), gs.AllReduce(), gs.AllReduce(overlap=False)], ids=repr
)
def test_in_rounds_the_others_wait_for_it(strategy: Any) -> None:
    """Five steps of 5 s beside gradients of 1 s: four of each five seconds are waiting."""
    run = ended(strategy)
    found = run.summary["straggler"]
    assert (found["who"], found["slower"]) == ("worker-3", pytest.approx(5.0))
    assert found["waited_s"] == pytest.approx(20.0, rel=0.01)
    line = "worker-3 is 5.0 × slower; the others waited 20.0 s for it"
    assert ("slow worker", line) in figures(run.summary)
    assert line in repr(run)


def test_where_staleness_is_bounded_they_wait_once_the_bound_is_reached() -> None:
    """With a bound of 3 clocks the others are 3 steps ahead, and wait for the rest."""
    found = ended(gs.SSP(bound=3), steps=20).summary["straggler"]
    assert (found["who"], found["slower"]) == ("worker-3", pytest.approx(5.0))
    assert 0.5 * 80 < found["waited_s"] < 80


@pytest.mark.parametrize(
    ("strategy", "waited_s"),
    [
        (gs.Downpour(), 50 - 19 / 3),  # for its only minibatch
        (gs.SSP(bound=30), 5 * 50 - 5),  # for its part, which nobody else does
    ],
)
def test_waiting_at_the_end_of_the_run_counts(strategy: Any, waited_s: float) -> None:
    """It takes 50 s for a minibatch, the others 1 s."""
    found = ended(strategy, {"worker-3": 0.02}).summary["straggler"]
    assert (found["who"], found["slower"]) == ("worker-3", pytest.approx(50.0))
    assert found["waited_s"] == pytest.approx(waited_s, abs=0.5)


def test_lost_workers_do_not_wait_for_the_end() -> None:
    run = ended(gs.Downpour(), {"worker-3": 0.5}, steps=20, script=kill_at("worker-0", 2.0))
    assert run.summary["straggler"] is None


@pytest.mark.parametrize(
    ("strategy", "speeds", "network"),
    [
        (gs.Downpour(), SLOW, Network()),  # nobody waits for it
        (gs.Synchronous(), {"worker-3": 0.75}, Network()),  # 1.33 times slower
        (
            gs.Synchronous(),
            {},
            Network(cards={"worker-3": 1e4}),
        ),  # its network is, and it computes as the others
        (gs.Synchronous(), {f"worker-{rank}": 0.2 for rank in range(4)}, Network()),
    ],
)
def test_no_worker_is_named(strategy: Any, speeds: dict[str, float], network: Network) -> None:
    run = ended(strategy, speeds, network=network)
    assert run.summary["straggler"] is None
    assert "slow worker" not in dict(figures(run.summary))


def test_a_smaller_share_is_no_slowness() -> None:
    """It computes a fifth of the samples in a fifth of the speed: nobody waits."""
    assert ended(gs.Synchronous(), batch_size=[5, 5, 5, 1]).summary["straggler"] is None


def test_events_that_do_not_tell_name_nobody() -> None:
    assert straggler_of([], 1.0) is None
    step = {"event": "step", "node": "worker-0", "time_s": 1.0, "rank": 0, "step": 0, "samples": 0}
    step |= {"compute_s": 0.0, "wait_s": 0.0}
    assert straggler_of([step, {**step, "node": "worker-1"}], 1.0) is None
