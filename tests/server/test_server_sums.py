"""Sums of contributions on a shard: each is in the model once, whatever ends the sum. And corrections."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import UserCodeError
from gradstream.memory import Memory
from gradstream.model.base import Reduction
from gradstream.run.result import Run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import (
    MOST_COPIES,
    AggregationRule,
    Correction,
    EveryN,
    FetchTerms,
    PushHeader,
    SenderStates,
)
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.pushes import PendingFetch
from gradstream.server.shard.state import Acknowledge, Apply, Instruction, Parked, Release, ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.strategies import ServerWorker
from gradstream.testing.runs import QUICK, Tokens, check_exactly_once, kill_at, least_squares, numbered
from gradstream.testing.trials import bad_world
from gradstream.wire.chunks import ChunkMap
from gradstream.wire.frames import SequenceWindow
from gradstream.worker.server.replica import ServerReplica

NUM_SAMPLES = 24


def contribution(sequence: int, *, rank: int = 0, base_version: int = 0, **fields: Any) -> PushHeader:
    return PushHeader(f"worker-{rank}", rank, 1, sequence, samples=1, base_version=base_version, **fields)


def initialised(rule: AggregationRule, window: type[SequenceWindow] = SequenceWindow) -> ShardState:
    state = ShardState([0], rule, window)
    state.push(0, Parked(contribution(1), "init", assign=True))
    state.applied(0)
    return state


def pushed(state: ShardState, sequence: int, **fields: Any) -> tuple[Apply, list[Instruction]]:
    """Pushes one contribution and carries its update out."""
    (due,) = state.push(0, Parked(contribution(sequence, **fields), sequence))
    assert isinstance(due, Apply)
    return due, state.applied(0)


# ---- the state machine ----------------------------------------------------------------------------


def test_a_contribution_is_done_with_once_it_is_in_the_sum() -> None:
    state = initialised(EveryN(3))
    steps = [pushed(state, sequence) for sequence in range(2, 9)]
    assert [due.completes for due, _ in steps] == [False, False, True, False, False, True, False]
    assert [due.summed for due, _ in steps] == [0, 1, 2, 0, 1, 2, 0]
    assert [due.step for due, _ in steps] == [1, 1, 1, 2, 2, 2, 3]
    answers = [out[0] for _, out in steps]
    assert all(isinstance(one, Acknowledge) and one.outcome == "applied" for one in answers)
    assert [one.version for one in answers if isinstance(one, Acknowledge)] == [0, 0, 1, 1, 1, 2, 2]
    assert [one.staleness for one in answers if isinstance(one, Acknowledge)] == [0, 0, 0, 1, 1, 1, 2]
    assert state.chunks[0].parked == []


def test_a_retry_of_what_is_in_the_sum_is_a_duplicate() -> None:
    state = initialised(EveryN(3))
    pushed(state, 2)
    (again,) = state.push(0, Parked(contribution(2), "again"))
    assert isinstance(again, Acknowledge)
    assert again.outcome == "duplicate"
    assert state.chunks[0].summed == 1


def test_an_own_push_in_the_sum_holds_up_no_fetch() -> None:
    state = initialised(EveryN(3))
    assert state.fetch(0, FetchTerms("worker-0", 1, after_sequence=2), "fetch") == []
    _, out = pushed(state, 2)
    assert Release("fetch", 0) in out
    assert state.version(0) == 0


def test_a_fetch_that_flushes_waits_for_the_sum() -> None:
    state = initialised(EveryN(3))
    flush = FetchTerms("worker-0", 1, flush=True)
    assert state.fetch(0, flush, "nothing to flush") == [Release("nothing to flush", 0)]
    pushed(state, 2, lr=0.5)
    (due,) = state.fetch(0, flush, "flush")
    assert due == Apply(0, (), step=1, lr=0.5, summed=1, completes=True)
    assert state.applied(0) == [Release("flush", 0)]
    assert (state.version(0), state.chunks[0].summed) == (1, 0)
    assert pushed(state, 3)[0].summed == 0


def test_a_flush_that_comes_while_the_sum_grows_waits_for_that() -> None:
    state = initialised(EveryN(3))
    state.push(0, Parked(contribution(2), "push"))
    assert state.chunks[0].unapplied
    assert state.fetch(0, FetchTerms("worker-0", 1, flush=True), "flush") == []
    *_, due = state.applied(0)
    assert isinstance(due, Apply) and due.update == () and due.completes
    assert Release("flush", 0) in state.applied(0)


def test_nothing_joins_no_sum() -> None:
    state = initialised(EveryN(2))
    due, _ = pushed(state, 2, empty=True)
    assert not due.completes
    assert state.chunks[0].summed == 0


class Interpreter:
    """Carries instructions out on two lists of sequence numbers, for the sum and for the parameters."""

    def __init__(self, state: ShardState) -> None:
        self.state = state
        self.sum: list[int] = []
        self.parameters: list[int] = []
        self.doing: Apply | None = None
        self.released: set[object] = set()

    def carry_out(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Apply):
                assert self.doing is None, "two updates of one chunk at once"
                assert one.summed == len(self.sum)
                self.doing = one
            elif isinstance(one, Release):
                self.released.add(one.token)

    def finish(self) -> None:
        """Ends the arithmetic that is under way."""
        if self.doing is None:
            return
        due, self.doing = self.doing, None
        self.sum += [held.header.sequence for held in due.update]
        if due.completes:
            self.parameters += self.sum
            self.sum = []
        self.carry_out(self.state.applied(0))

    def finish_all(self) -> None:
        while self.doing is not None:
            self.finish()


EVENTS = st.lists(st.one_of(st.integers(2, 12), st.sampled_from(["done", "flush"])), max_size=60)


@given(EVENTS, st.integers(1, 5))
def test_whatever_comes_when_each_contribution_is_in_once(events: list[int | str], count: int) -> None:
    """Pushes and their retries in any order, while sums grow or are applied, and flushes at any time."""
    check_once(events, count, SequenceWindow)


def test_a_retry_that_is_taken_in_again_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_once([2, "done", 3, "done", 2], 2, HighestAlone)


def check_once(events: list[int | str], count: int, window: type[SequenceWindow]) -> None:
    there = Interpreter(initialised(EveryN(count), window))
    flushes: list[str] = []
    for index, event in enumerate(events):
        if event == "done":
            there.finish()
        elif event == "flush":
            flushes.append(f"flush-{index}")
            there.carry_out(there.state.fetch(0, FetchTerms("reader", 1, flush=True), flushes[-1]))
        else:
            assert isinstance(event, int)
            there.carry_out(there.state.push(0, Parked(contribution(event), index)))
    there.finish_all()  # no flush waits for pushes that are not acknowledged yet
    there.carry_out(there.state.fetch(0, FetchTerms("reader", 1, flush=True), "last"))
    there.finish_all()
    assert sorted(there.parameters) == sorted({event for event in events if isinstance(event, int)})
    assert not there.sum
    assert there.released == {*flushes, "last"}


# ---- arithmetic -----------------------------------------------------------------------------------


def store_of(optimizer: Any, elems: int = 100) -> ShardStore:
    return ShardStore(Memory(), ChunkMap(elems, 64, 1), 0, torch.float32, optimizer)


@pytest.mark.parametrize("optimizer", [gs.optim.SGD(lr=1.0, momentum=0.9), gs.optim.Adagrad(lr=1.0)], ids=str)
def test_a_sum_has_the_bits_of_one_update_of_its_parts(optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    at_once, in_turn = store_of(optimizer), store_of(optimizer)
    for step in (1, 2):
        parts = [torch.randn(64, generator=generator) for _ in range(4)]
        weights = [0.25, 1 / 3, 1.0, 0.1]
        at_once.update(0, parts, weights, lr=0.1, step=step)
        for index in range(3):
            in_turn.gather(0, parts[index : index + 1], weights[index : index + 1], summed=index > 0)
        in_turn.update(0, parts[3:], weights[3:], lr=0.1, step=step, summed=True)
    assert torch.equal(at_once.parameters.tensor, in_turn.parameters.tensor)
    assert in_turn.parameters.tensor[:64].abs().min() > 0


def test_a_sum_takes_memory_only_where_there_is_one() -> None:
    memory = Memory()
    store = ShardStore(memory, ChunkMap(100, 64, 1), 0, torch.float32, gs.optim.SGD(lr=1.0))
    store.update(0, [torch.ones(64)], [0.5], lr=1.0, step=1)
    assert "sums" not in memory.allocated_bytes
    store.gather(0, [torch.ones(64)], [0.5], summed=False)
    assert memory.allocated_bytes["sums"] == 400


# ---- whole runs -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Summing(gs.strategies.AsySG):
    """AsySG whose sums rarely end with the last gradient."""

    gradients: int = 5


WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01, jitter=Exponential()), "apply": Cost(base_s=1e-3)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)


def tokens_run(seed: int, *, workers: int = 3, **options: Any) -> Run:
    options = {"config": WORLD, "epochs": 2, "strategy": Summing(), **options}
    return simulate(
        Tokens(num_chunks=4),
        numbered(NUM_SAMPLES),
        optimizer=gs.optim.SGD(lr=1.0),
        workers=workers,
        servers=2,
        batch_size=2,
        chunk_elems=64,
        seed=seed,
        deadlines=QUICK,
        **options,
    )


@pytest.mark.parametrize("gradients", [1, 5, 7, 1000])
def test_what_is_left_in_the_sum_is_in_the_model_at_the_end(gradients: int) -> None:
    check_exactly_once(
        tokens_run(0, strategy=gs.strategies.AsySG(gradients=gradients)), NUM_SAMPLES, epochs=2
    )


def test_a_final_fetch_that_does_not_flush_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the final fetch does not flush."""
    pull = ServerReplica.pull
    monkeypatch.setattr(ServerReplica, "pull", lambda self, own=True, flush=False: pull(self, own=own))
    with pytest.raises(AssertionError, match=r"was applied [01] times"):
        check_exactly_once(tokens_run(0), NUM_SAMPLES, epochs=2)


def stopping_at(seconds: float) -> Any:
    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    return script


def stopped_and_resumed(seed: int, seconds: float) -> tuple[Run, int]:
    storage, stops = MemoryStorage(), 0
    try:
        run = tokens_run(seed, storage=storage, script=stopping_at(seconds))
    except gs.errors.Interrupted:
        stops, run = 1, tokens_run(seed, storage=storage, resume=True)
    return run, stops


def test_what_is_left_in_the_sum_at_a_cut_is_in_the_checkpoint() -> None:
    stops = 0
    for seed, seconds in itertools.product(range(4), (0.02, 0.035, 0.05)):
        run, stopped = stopped_and_resumed(seed, seconds)
        check_exactly_once(run, NUM_SAMPLES, epochs=2)
        stops += stopped
    assert stops > 8


def test_a_cut_that_does_not_flush_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: shards do not flush before a snapshot."""

    async def nothing(self: ShardExecutor) -> None: ...

    monkeypatch.setattr(ShardExecutor, "flush", nothing)
    run, stops = stopped_and_resumed(0, 0.035)
    assert stops
    with pytest.raises(AssertionError, match=r"was applied [01] times"):
        check_exactly_once(run, NUM_SAMPLES, epochs=2)


def test_a_goal_ends_the_run_with_all_that_was_summed() -> None:
    run = tokens_run(0, epochs=50, until=gs.until(seconds=0.05))
    applied = np.rint(run.parameters["tokens"]).sum(axis=1)
    assert applied.tolist() == [run.summary["samples_accounted"]] * 4


def test_a_worker_that_is_killed_leaves_its_part_of_the_sum() -> None:
    lost = 0
    for seed in range(6):
        run = tokens_run(seed, epochs=3, script=kill_at(f"worker-{seed % 3}", 0.01 + 0.01 * seed))
        check_exactly_once(run, NUM_SAMPLES, epochs=3)
        lost += len(run.summary["workers_lost"])
    assert lost >= 5


class HighestAlone(SequenceWindow):
    """The planted fault: a number is a duplicate only if it is the highest that was applied."""

    def __contains__(self, number: int) -> bool:
        return number == self.low

    def add(self, number: int) -> bool:
        self.low, before = max(self.low, number), self.low
        return number != before


@pytest.mark.parametrize("window", [SequenceWindow, HighestAlone])
def test_sums_count_once_on_a_bad_network_and_only_with_a_window(
    monkeypatch: pytest.MonkeyPatch, window: type[SequenceWindow]
) -> None:
    monkeypatch.setattr("gradstream.server.shard.service.ShardState", partial(ShardState, window=window))

    def check() -> None:
        for seed in range(6):
            run = tokens_run(seed, workers=2, config=bad_world(2, 2))
            check_exactly_once(run, NUM_SAMPLES, epochs=2)

    if window is SequenceWindow:
        check()
    else:
        with pytest.raises(AssertionError, match=r"applied [3-9] times"):
            check()


def test_a_shape_only_world_sums_nothing_and_comes_to_its_end() -> None:
    run = tokens_run(0, config=dataclasses.replace(WORLD, shape_only=True))
    assert run.summary["samples_accounted"] == 2 * NUM_SAMPLES


# ---- corrections ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """Adds the change of the parameters since the sender read them."""

    state_names: Sequence[str] = ("seen",)

    def correct(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        base_version: torch.Tensor,
        state: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        state["seen"].add_(1.0)
        return gradient + (parameters - base_version)


FETCHES = itertools.count(1)


def copy(states: SenderStates, sender: str, version: int, value: float) -> bool:
    """Whether the shard made a copy of the parameters that a sender reads."""
    place = states.place(sender, 0, version, (next(FETCHES), 0))
    if place is not None:
        place.tensor.fill_(value)
    return place is not None


def test_a_correction_sees_what_the_gradient_was_computed_on() -> None:
    """Also where the sender has read a later version since, or the same version twice."""
    memory = Memory()
    states = SenderStates(memory, ChunkMap(100, 64, 1), 100, torch.float32, Drift())
    assert copy(states, "worker-0", 3, 2.0)
    assert not copy(states, "worker-0", 3, 0.0), "there is one"
    assert copy(states, "worker-1", 5, 7.0)
    assert copy(states, "worker-0", 6, 4.0)
    now = torch.full((64,), 10.0)
    for base_version, expected in ((3, 9.0), (3, 9.0), (6, 7.0)):
        one = contribution(1, base_version=base_version)
        assert torch.equal(states.corrected(one, 0, torch.ones(64), now), torch.full((64,), expected))
        states.used(one, 0)
    for wrong in (contribution(1, base_version=6), contribution(1, rank=2)):
        with pytest.raises(UserCodeError, match=r"computed on version .*, of which the shard has no copy"):
            states.corrected(wrong, 0, torch.ones(64), torch.ones(64))


def test_a_fetch_that_tries_again_needs_no_copy_of_what_was_lost() -> None:
    memory = Memory()
    states = SenderStates(memory, ChunkMap(64, 64, 1), 64, torch.float32, Drift())
    assert copy(states, "worker-0", 1, 1.0)  # which the worker computes on meanwhile
    number = next(FETCHES)
    for attempt in range(2 * MOST_COPIES):
        assert states.place("worker-0", 0, 2 + attempt, (number, attempt)) is not None
        assert states.place("worker-0", 0, 99, (number, attempt)) is None  # the same message, once more
    states.spans(contribution(1, base_version=1), 0)
    states.spans(contribution(1, base_version=1 + 2 * MOST_COPIES), 0)


def test_copies_take_memory_as_they_are_needed_at_once() -> None:
    memory = Memory()
    states = SenderStates(memory, ChunkMap(64, 64, 1), 64, torch.float32, Drift())
    spans = set()
    for version in range(20):
        place = states.place("worker-0", 0, version, (next(FETCHES), 0))
        assert place is not None
        spans.add(place.tensor.data_ptr())
        states.used(contribution(1, base_version=version), 0)
    assert len(spans) == 1
    for version in range(20, 20 + 2 * MOST_COPIES):  # fetches that the sender does not swap in
        place = states.place("worker-0", 0, version, (next(FETCHES), 0))
        assert place is not None
        spans.add(place.tensor.data_ptr())
    assert len(spans) == MOST_COPIES
    states.spans(contribution(1, base_version=version), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Drifting(gs.strategies.AsySG):
    """AsySG with this correction."""

    def correction(self) -> Correction:
        return Drift()


@dataclasses.dataclass(frozen=True, slots=True)
class Lazy(Drifting):
    """The planted fault: pushes two gradients of the same parameters."""

    async def train(self, worker: ServerWorker) -> None:
        async for batch in worker.batches():
            if worker.step % 2 == 0:
                await worker.pull()
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())


def learnt(strategy: gs.Strategy, **options: Any) -> np.ndarray[Any, Any]:
    model, data = least_squares(64, 100, whole=False)
    options = {"workers": 3, "servers": 2, "batch_size": 4, "steps": 6, "config": WORLD, **options}
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=2.0**-7), chunk_elems=64, **options
    )
    return run.parameters["w"]


def test_a_correction_changes_what_was_overtaken_and_nothing_else() -> None:
    alone = [learnt(strategy, workers=1) for strategy in (gs.strategies.AsySG(), Drifting())]
    assert np.array_equal(alone[0], alone[1])
    together = [learnt(strategy) for strategy in (gs.strategies.AsySG(), Drifting())]
    assert not np.array_equal(together[0], together[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Looking(Drifting):
    """Reads the newest parameters, as for an evaluation, while it has a gradient of older ones."""

    async def train(self, worker: ServerWorker) -> None:
        assert isinstance(worker, ServerReplica)
        async for batch in worker.batches():
            await worker.pull()
            await worker.accumulate(await worker.gradient(batch))
            for _ in range(5 * MOST_COPIES if worker.rank == 0 else 0):  # other workers continue meanwhile
                await worker.newest()
            await worker.server.push_soon(worker.take_accumulated())


def test_an_evaluation_is_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.isfinite(learnt(Looking())).all()
    monkeypatch.setattr("gradstream.server.shard.requests.PendingFetch", numbered_fetch)
    with pytest.raises(gs.errors.GradstreamError, match="pushes one gradient for each fetch"):
        learnt(Looking())


def numbered_fetch(reader: str, number: int, *fields: Any) -> PendingFetch:
    """The planted fault: every fetch has a number, and so counts as a read."""
    return PendingFetch(reader, number or next(FETCHES), *fields)


def test_a_strategy_that_pushes_twice_for_one_fetch_is_told() -> None:
    with pytest.raises(gs.errors.GradstreamError, match="pushes one gradient for each fetch"):
        learnt(Lazy())


def test_a_fetch_may_overtake_own_pushes() -> None:
    """On a slow link to the shard, a fetch with own=False does not wait for the previous push."""
    slow = Network(links={("worker-0", "shard-0"): Link(latency_s=0.05, jitter_s=0.05)})

    @dataclasses.dataclass(frozen=True, slots=True)
    class Hasty(gs.strategies.AsySG):
        own: bool = False

        async def train(self, worker: ServerWorker) -> None:
            async for batch in worker.batches():
                await worker.pull(own=self.own)
                await worker.accumulate(await worker.gradient(batch))
                await worker.server.push_soon(worker.take_accumulated())

        def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
            return EveryN(1)

    def stale(own: bool) -> Mapping[str, int]:
        config = SimulationConfig(costs={"gradient": Cost(base_s=1e-3)}, network=slow)
        model, data = least_squares(64, 100, whole=False)
        run = simulate(
            model,
            data,
            strategy=Hasty(own=own),
            optimizer=gs.optim.SGD(lr=2.0**-7),
            workers=1,
            steps=8,
            config=config,
        )
        exchanged = [event for event in run.events if event["event"] == "exchange"]
        return {key: value for event in exchanged for key, value in event["staleness"].items()}

    assert set(stale(own=True)) == {"0"}
    assert max(map(int, stale(own=False))) >= 1
