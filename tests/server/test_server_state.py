"""The state machine of a shard: events by hand, without I/O, time or arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradstream.server.aggregation import EveryPush, FetchTerms, Median, PushHeader
from gradstream.server.shard.state import (
    Acknowledge,
    Apply,
    Instruction,
    Parked,
    Release,
    ShardState,
    Supersede,
)
from gradstream.strategies.synchronous import SynchronousRound
from gradstream.wire.frames import SequenceWindow


def contribution(
    rank: int, sequence: int, *, number: int = 0, samples: int = 4, base_version: int = 0, lr: float = 0.0
) -> PushHeader:
    return PushHeader(
        sender=f"worker-{rank}",
        rank=rank,
        incarnation=1,
        sequence=sequence,
        samples=samples,
        round=number,
        base_version=base_version,
        lr=lr,
    )


def initialised(state: ShardState) -> ShardState:
    for chunk in state.chunks:
        (apply,) = state.push(chunk, Parked(contribution(0, 1), "init", assign=True))
        assert isinstance(apply, Apply)
        state.applied(chunk)
    return state


def outcomes(instructions: list[Instruction]) -> list[tuple[int, str]]:
    return [(i.sequence, i.outcome) for i in instructions if isinstance(i, Acknowledge)]


@given(st.lists(st.integers(1, 300), max_size=400))
def test_window_is_a_set(numbers: list[int]) -> None:
    window, seen = SequenceWindow(), set()
    for number in numbers:
        assert (number in window) == (number in seen)
        assert window.add(number) == (number not in seen)
        seen.add(number)
    for number in range(1, 301):
        assert (number in window) == (number in seen)
    assert all(number in seen for number in range(1, window.low + 1))


def test_window_gives_up_on_the_very_old_and_stays_small() -> None:
    window = SequenceWindow()
    window.add(5 * SequenceWindow.WIDTH)
    assert 1 in window
    assert 5 * SequenceWindow.WIDTH - 1 not in window


def test_push_is_applied_once_whatever_is_sent_again() -> None:
    state = initialised(ShardState([0], EveryPush()))
    (first,) = state.push(0, Parked(contribution(1, 7), "a"))
    assert isinstance(first, Apply)
    assert state.push(0, Parked(contribution(1, 7), "b")) == []  # the chunk is busy: queues
    assert outcomes(state.applied(0)) == [(7, "applied"), (7, "duplicate")]
    assert outcomes(state.push(0, Parked(contribution(1, 7), "c"))) == [(7, "duplicate")]
    assert state.version(0) == 1


def test_pushes_that_overtake_one_another_all_count() -> None:
    state = initialised(ShardState([0], EveryPush()))
    for sequence in (9, 8, 10, 7):
        (apply,) = state.push(0, Parked(contribution(1, sequence), sequence))
        assert isinstance(apply, Apply)
        assert outcomes(state.applied(0)) == [(sequence, "applied")]
    assert state.version(0) == 4


def test_round_waits_for_everybody_and_sums_by_rank() -> None:
    state = initialised(ShardState([0], SynchronousRound(3, "mean")))
    for rank in (2, 0):
        assert state.push(0, Parked(contribution(rank, 5, samples=rank + 1), rank)) == []
    assert state.awaited([0]) == ["worker-1"]
    assert state.fetch(0, FetchTerms("worker-0", 1, min_version=1), "fetch") == []
    (apply,) = state.push(0, Parked(contribution(1, 5, samples=2), 1))
    assert isinstance(apply, Apply)
    assert [held.header.rank for held in apply.update] == [0, 1, 2]
    assert SynchronousRound(3, "mean").weights(0, [held.header for held in apply.update]) == [
        1 / 6,
        2 / 6,
        3 / 6,
    ]
    assert state.applied(0)[-1] == Release("fetch", 0)


def test_retry_takes_the_place_of_the_parked_push() -> None:
    state = initialised(ShardState([0], SynchronousRound(2, "mean")))
    assert state.push(0, Parked(contribution(1, 5), "first")) == []
    assert state.push(0, Parked(contribution(1, 5), "second")) == [Supersede("first", 0, "second")]
    (apply,) = state.push(0, Parked(contribution(0, 5), "other"))
    assert isinstance(apply, Apply)
    assert [held.token for held in apply.update] == ["other", "second"]


def test_a_retry_keeps_what_the_first_copy_said() -> None:
    """Distances may have been measured on it; a busy chunk's queue is no exception."""
    state = initialised(ShardState([0], SynchronousRound(2, "mean")))
    state.push(0, Parked(contribution(1, 5, samples=3), "first"))
    state.push(0, Parked(contribution(1, 5, samples=9), "second"))
    (apply,) = state.push(0, Parked(contribution(0, 5), "other"))
    assert isinstance(apply, Apply)
    assert [held.header.samples for held in apply.update] == [4, 3]
    assert state.push(0, Parked(contribution(1, 6, number=1), "next")) == []
    assert state.push(0, Parked(contribution(1, 6, number=1), "again")) == [Supersede("next", 0, "again")]


def test_the_first_push_of_a_worker_in_a_round_counts() -> None:
    state = initialised(ShardState([0], SynchronousRound(2, "mean")))
    state.push(0, Parked(contribution(1, 5), "first"))
    state.push(0, Parked(contribution(1, 6), "second"))
    (apply,) = state.push(0, Parked(contribution(0, 5), "other"))
    assert isinstance(apply, Apply)
    assert [held.token for held in apply.update] == ["other", "first"]
    assert outcomes(state.applied(0))[-1] == (6, "dropped")


def test_a_rate_of_a_robust_round_is_the_median() -> None:
    state = initialised(ShardState([0], SynchronousRound(3, "mean", robust=Median())))
    state.push(0, Parked(contribution(0, 5, lr=1e6), 0))
    state.push(0, Parked(contribution(1, 5, lr=0.1), 1))
    (apply,) = state.push(0, Parked(contribution(2, 5, lr=0.1), 2))
    assert isinstance(apply, Apply)
    assert apply.lr == 0.1


def test_late_round_is_dropped_once_and_told() -> None:
    state = initialised(ShardState([0], SynchronousRound(1, "mean")))
    state.push(0, Parked(contribution(0, 2), "a"))
    state.applied(0)
    late = contribution(0, 3)
    assert outcomes(state.push(0, Parked(late, "b"))) == [(3, "dropped")]
    assert outcomes(state.push(0, Parked(late, "c"))) == [(3, "duplicate")]
    assert state.version(0) == 1


def test_fetch_waits_for_initial_parameters_and_for_own_push() -> None:
    state = ShardState([0], EveryPush())
    assert state.fetch(0, FetchTerms("worker-1", 1), "early") == []
    assert state.awaited([0]) == ["the worker of the lowest rank (initial parameters)"]
    state.push(0, Parked(contribution(0, 1), "init", assign=True))
    assert state.applied(0)[-1] == Release("early", 0)
    assert state.fetch(0, FetchTerms("worker-1", 1, after_sequence=1), "own") == []
    state.push(0, Parked(contribution(1, 1), "push"))
    assert state.applied(0)[-1] == Release("own", 0)
    assert state.fetch(0, FetchTerms("worker-1", 2, after_sequence=1), "another life") == []


def test_staleness_counts_updates_since_the_base_version() -> None:
    state = initialised(ShardState([0], EveryPush()))
    for sequence in range(2, 5):
        state.push(0, Parked(contribution(0, sequence), sequence))
        state.applied(0)
    state.push(0, Parked(contribution(1, 1, base_version=1), "late"))
    (acknowledged,) = state.applied(0)
    assert isinstance(acknowledged, Acknowledge)
    assert (acknowledged.version, acknowledged.staleness) == (4, 2)


def test_forgotten_fetch_is_not_released() -> None:
    state = initialised(ShardState([0], EveryPush()))
    assert state.fetch(0, FetchTerms("worker-1", 1, min_version=1), "gone") == []
    state.forget("gone")
    state.push(0, Parked(contribution(0, 2), "push"))
    assert not any(isinstance(i, Release) for i in state.applied(0))
