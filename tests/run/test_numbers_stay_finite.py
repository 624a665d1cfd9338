"""A gradient that is not finite is refused and counted, the others go on, and no parameter is ever NaN."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.lead import Emit, Instruction
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import RefusedGradients, SampleProgress
from gradstream.data.base import BatchRef, PartitionSpec
from gradstream.data.feed import plan_of
from gradstream.data.ledger import Ledger
from gradstream.data.plan import PartitionPlan
from gradstream.errors import ConfigError, GradientError, NonFiniteError, RefusedError
from gradstream.ext.replay import replay
from gradstream.model.base import Batch, finite, usable
from gradstream.run.result import Run
from gradstream.runtime.base import Report
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.telemetry.events import GradientRefusedEvent
from gradstream.testing.runs import TOKENS_PER_CHUNK, Tokens, least_squares, numbered, token_counts
from gradstream.wire import v1

NUM_SAMPLES, WORKERS, CHUNKS = 48, 3, 3
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=3e-3, jitter=Exponential()), "apply": Cost(base_s=1e-4)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=2e-3)),
)
SGD = gs.optim.SGD(lr=1.0)


class Broken(Tokens):
    """`Tokens` of which the gradients of some workers are spoilt. Each copy of the model is the next worker's.

    Args:
        spoils: whether the gradient of this rank and call is spoilt.
        value: number that one element of it becomes.
        where: which element: 0 is the first, -1 the last.
        loss: whether the loss is spoilt, too, so that it is noticed before a gradient is computed.
    """

    def __init__(
        self,
        spoils: Callable[[int, int], bool],
        value: float = math.nan,
        where: int = 0,
        *,
        loss: bool = False,
        next_rank: list[int] | None = None,
    ) -> None:
        super().__init__(CHUNKS)
        self.spoils, self.value, self.where, self.loss = spoils, value, where, loss
        self.next_rank = [0] if next_rank is None else next_rank
        self.rank = self.calls = 0
        self.refused: list[int] = []  # samples of spoilt gradients, of all copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Broken:
        del memo
        twin = copy.copy(self)
        twin.rank, self.next_rank[0] = self.next_rank[0], self.next_rank[0] + 1
        return twin

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        assert torch.isfinite(parameters).all()
        self.calls += 1
        spoilt = self.spoils(self.rank, self.calls)
        if spoilt:
            self.refused += [int(one) for one in batch.ids]
            if self.loss:
                raise NonFiniteError(f"loss is {self.value}")
        gradient.zero_()
        gradient.view(CHUNKS, TOKENS_PER_CHUNK)[:, torch.as_tensor(batch.ids)] = -1.0
        if spoilt:
            gradient[self.where] = self.value
        for chunk in range(CHUNKS):  # as a backward pass does
            report((chunk + 1) * TOKENS_PER_CHUNK)
        return 0.0


def sums(strategy: Any, model: Any, **options: Any) -> Run:
    """A run of tokens whose parameters count how often each sample was applied, whatever the strategy weighs."""
    given: dict[str, Any] = {"workers": WORKERS, "servers": 2, "epochs": 2, "batch_size": 4, "optimizer": SGD}
    given |= options
    if isinstance(strategy, gs.AllReduce):
        del given["servers"]
    run = simulate(model, numbered(NUM_SAMPLES), strategy=strategy, chunk_elems=64, config=UNEVEN, **given)
    assert all(np.isfinite(one).all() for one in run.parameters.values())
    return run


def once(rank: int, call: int) -> bool:
    return (rank, call) in ((1, 2), (2, 3))


PLAIN = [
    gs.Downpour(),
    gs.Downpour(push_every=2, fetch_every=2),
    gs.SSP(bound=1),
    gs.SSP(bound=0),
    gs.strategies.AsySG(gradients=2),
]


@pytest.mark.parametrize("strategy", PLAIN, ids=str)
@pytest.mark.parametrize(
    "how",
    [{"where": 0}, {"where": -1}, {"where": 100}, {"value": math.inf}, {"value": 3e38}, {"loss": True}],
    ids=str,
)
def test_a_refused_gradient_leaves_no_trace_and_its_samples_are_dropped(strategy: Any, how: Any) -> None:
    """Every other sample of every epoch is in every chunk, to the last one."""
    model = Broken(once, **how)
    run = sums(strategy, model)
    counts, expected = token_counts(run, NUM_SAMPLES), np.full(NUM_SAMPLES, 2)
    np.subtract.at(expected, model.refused, 1)
    assert len(model.refused) == 8
    assert (counts == expected).all()
    assert run.summary["samples_dropped"] == 8
    assert run.summary["samples_accounted"] == 2 * NUM_SAMPLES - 8
    assert run.summary["gradients_refused"] == {"worker-1": 1, "worker-2": 1}
    told = [event for event in run.events if event["event"] == "gradient_refused"]
    assert {(one["who"], one["samples"], one["in_a_row"]) for one in told} == {
        ("worker-1", 4, 1),
        ("worker-2", 4, 1),
    }
    assert all(f"{one['who']}, step {one['step']}" in one["what"] for one in told)


LEAVES_OUT = [gs.Synchronous(overlap=False), gs.Synchronous(overlap=False, backup=1)]


@pytest.mark.parametrize("loss", [True, False])
def test_in_a_round_the_contribution_is_left_out_on_all_chunks_alike(loss: bool) -> None:
    """The mean is over the others: worker 1 and 2 have 8 samples of 12 in the round in which 0 is refused."""
    model = Broken(lambda rank, call: (rank, call) == (0, 2), where=-1, loss=loss)
    run = sums(gs.Synchronous(overlap=False), model, optimizer=gs.optim.SGD(lr=6.0), epochs=1)
    counts = token_counts(run, NUM_SAMPLES)  # in a round of 12 each sample counts 2, in one of 8 it counts 3
    assert (counts == counts[0]).all()
    assert sorted(np.bincount(counts[0], minlength=4).tolist()) == sorted([4, 0, NUM_SAMPLES - 12, 8])
    assert (counts[0][model.refused] == 0).all()
    assert run.summary["samples_dropped"] == 4


def test_backup_workers_and_refused_gradients_go_together() -> None:
    run = sums(gs.Synchronous(backup=1), Broken(once, loss=True))
    summary = run.summary
    assert summary["samples_accounted"] + summary["samples_dropped"] == 2 * NUM_SAMPLES
    assert sum(summary["gradients_refused"].values()) == 2


def test_what_left_during_backprop_stays_whatever_the_speeds() -> None:
    """A finite loss, and a NaN in the last chunk: the first two had left. It is a matter of content, not of time."""
    found = []
    for seconds in (0.0, 1e-4, 1e-1):
        world = SimulationConfig(
            costs={"gradient": Cost(base_s=1e-3)}, network=Network(link=Link(latency_s=seconds))
        )
        model = Broken(lambda rank, call: (rank, call) == (0, 2), where=-1)
        run = simulate(
            model,
            numbered(NUM_SAMPLES),
            strategy="synchronous",
            workers=WORKERS,
            batch_size=4,
            epochs=1,
            chunk_elems=64,
            config=world,
            optimizer=gs.optim.SGD(lr=6.0),
        )
        found.append(token_counts(run, NUM_SAMPLES))
    first, second, last = found[0]
    assert (first == 2).all() and (second == 2).all()
    assert sorted(set(last.tolist())) == [0, 2, 3]
    assert all((one == found[0]).all() for one in found)


GROUPS = [
    gs.AllReduce(),
    gs.AllReduce(algorithm="ring"),
    gs.AllReduce(overlap=False),
    gs.AllReduce(sharded=True, bucket_mib=1e-4),
    gs.AllReduce(sharded=True),
]


@pytest.mark.parametrize("strategy", GROUPS, ids=str)
@pytest.mark.parametrize("how", [{"where": 0}, {"where": -1}, {"loss": True}, {"value": -math.inf}], ids=str)
def test_without_servers_all_workers_leave_the_round_out(strategy: Any, how: Any) -> None:
    model = Broken(lambda rank, call: (rank, call) == (0, 2), **how)
    run = sums(strategy, model, optimizer=gs.optim.SGD(lr=4.0), epochs=1, workers=4, batch_size=3)
    counts = token_counts(run, NUM_SAMPLES)
    assert (counts == counts[0]).all()
    assert np.bincount(counts[0]).tolist() == [12, NUM_SAMPLES - 12]
    assert run.summary["samples_dropped"] == 12
    assert run.summary["gradients_refused"] == {"worker-0": 1}


def test_the_last_bucket_is_held_back_and_more_where_it_is_short() -> None:
    from gradstream.collectives.group import Buckets

    assert Buckets(1000, 256, 4).first_held == 768  # 232 elements: a slice of 64 at least for each of four
    assert Buckets(1088, 512, 4).first_held == 512  # 64 elements are one rank's alone
    assert Buckets(64, 64, 4).first_held == 0


OWN = [
    gs.ElasticAveraging(every=3),
    gs.ParameterAveraging(every=3),
    gs.ParameterAveraging(every=3, state="averaged"),
    gs.DiLoCo(every=3),
    gs.Softsync(splits=2),
    gs.strategies.StalenessAware(),
    gs.strategies.DCASGD(),
]


@pytest.mark.parametrize("strategy", OWN, ids=str)
def test_other_strategies_go_on_as_well(strategy: Any) -> None:
    run = sums(strategy, Broken(once), optimizer=gs.optim.SGD(lr=0.1))
    assert run.summary["samples_dropped"] == 8
    assert run.summary["samples_accounted"] == 2 * NUM_SAMPLES - 8


# ---- repeated offences --------------------------------------------------------------------


def test_a_worker_with_repeated_offences_is_quarantined_and_the_others_take_over() -> None:
    run = sums("downpour", Broken(lambda rank, call: rank == 1 and call > 2), quarantine_after=2)
    assert run.summary["workers_lost"] == ["worker-1"]
    (left,) = (one for one in run.events if one["event"] == "left" and one["lost"])
    assert "quarantined, since its last 2 gradients were not finite (worker-1, step 3" in left["reason"]
    summary = run.summary
    assert summary["samples_accounted"] + summary["samples_dropped"] == 2 * NUM_SAMPLES
    assert summary["samples_dropped"] <= 4 * summary["gradients_refused"]["worker-1"]


def test_a_finite_gradient_ends_the_row() -> None:
    run = sums("downpour", Broken(lambda rank, call: rank == 1 and call % 3 > 0), quarantine_after=3)
    assert run.summary["workers_lost"] == []


@pytest.mark.parametrize(("strategy", "left_out"), [("synchronous", 1), ("allreduce", 3)])
def test_in_rounds_another_worker_computes_the_part_of_a_quarantined_one(
    strategy: str, left_out: int
) -> None:
    """Without servers, the whole round is left out with a part that is not finite."""
    served: dict[str, Any] = {"servers": None} if strategy == "allreduce" else {}
    run = sums(strategy, Broken(lambda rank, _: rank == 1), **served)
    assert run.summary["workers_lost"] == ["worker-1"]
    dropped = run.summary["samples_dropped"]
    assert left_out * 3 * 4 <= dropped <= left_out * 4 * run.summary["gradients_refused"]["worker-1"]
    assert run.summary["samples_accounted"] == 2 * NUM_SAMPLES - dropped


@pytest.mark.parametrize("strategy", [gs.AllReduce(sharded=True), gs.Synchronous(aggregate="krum")], ids=str)
def test_where_no_worker_can_be_spared_the_run_ends_with_the_gradients_error(strategy: Any) -> None:
    with pytest.raises(NonFiniteError, match="quarantined, since its last 3 gradients"):
        sums(strategy, Broken(lambda rank, _: rank == 1))


@pytest.mark.parametrize("strategy", [gs.Synchronous(), gs.Downpour(), gs.AllReduce()], ids=str)
def test_a_model_that_has_diverged_ends_the_run_with_the_parameters_before(strategy: Any) -> None:
    seen: list[tuple[int, bytes]] = []

    class Diverging(Broken):
        def gradient(self, parameters: torch.Tensor, *args: Any, **options: Any) -> float:
            seen.append((self.calls, parameters.numpy().tobytes()))
            return super().gradient(parameters, *args, **options)

    with pytest.raises(GradientError, match=r"3 in a row: the model has diverged. Lower the learning rate"):
        sums(strategy, Diverging(lambda _, call: call > 2), epochs=9)
    if not isinstance(strategy, gs.Downpour):
        last = {content for calls, content in seen if calls >= 3}
        assert len(last) == 1


def test_refused_gradients() -> None:
    ledger, nodes = Ledger(PartitionPlan(8, 2, 2), epochs=1), Nodes(2, 0)
    workers = [v1.Node(name=f"worker-{rank}", role="worker", rank=rank) for rank in range(2)]
    for node in workers:
        nodes.add(node)
    ends: list[str] = []

    def abort(who: str, error: str, message: str) -> list[Instruction]:
        ends.append(message)
        return []

    gradients = RefusedGradients(SampleProgress(ledger, 8, None), nodes, 2, abort)

    def refused(rank: int, in_a_row: int) -> int:
        one = v1.Refused(batch=v1.Receipt(partition=rank), what="a NaN", in_a_row=in_a_row)
        (emit,) = gradients.on_report(workers[rank], "refused", one, 0.0)
        assert isinstance(emit, Emit) and isinstance(emit.event, GradientRefusedEvent)
        return emit.event.in_a_row

    assert refused(0, 1) == 1
    assert not nodes.expelled
    assert not gradients.on_report(workers[0], "sound", True, 0.0)
    assert (refused(1, 1), nodes.expelled) == (1, {})
    assert refused(1, 2) == 2
    assert nodes.expelled == {"worker-1": "quarantined, since its last 2 gradients were not finite (a NaN)"}
    assert refused(0, 1) == 1
    assert not ends
    assert refused(1, 3) == 3
    assert len(ends) == 1 and "3 in a row: the model has diverged" in ends[0]


def test_the_ledger_drops_a_refused_minibatch_once() -> None:
    spec = PartitionSpec(
        partitioning="queue", batch_size=4, workers=2, seed=0, shares=None, epochs=1, steps=None
    )
    ledger = Ledger(plan_of(numbered(16), spec), epochs=1)
    one, other, *_ = ledger.leases.hand_out(0, 2)
    ledger.refuse(one, 4)
    assert (ledger.num_samples, dict(ledger.dropped)) == (0, {})
    ledger.receipt(one, 0)
    ledger.receipt(one, 0)
    assert (ledger.num_samples, dict(ledger.dropped)) == (0, {0: 4})
    ledger.refuse(other, 4)
    ledger.lost(0)  # another worker computes it, and its gradient is good
    (again,) = (ref for ref in ledger.leases.hand_out(1, 4) if ref == other)
    ledger.receipt(again, 1)
    assert (ledger.num_samples, dict(ledger.dropped)) == (4, {0: 4})
    with pytest.raises(gs.errors.InternalError):
        ledger.refuse(BatchRef(0, 0, 99), 4)


# ---- sums and rates -----------------------------------------------------------------------


def test_a_gradient_whose_squares_overflow_is_none() -> None:
    assert usable(torch.full((4,), 9e18)) and not usable(torch.full((4,), 1e19))
    assert usable(torch.full((4,), 1e19, dtype=torch.float64))
    assert not usable(torch.tensor([[0.0, math.nan]])) and usable(torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("planted", [(math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf)], ids=str)
def test_what_is_not_finite_is_found_wherever_it_is(planted: tuple[float, ...], dtype: torch.dtype) -> None:
    """The checks look at sums, of which only opposite infinities could seem to cancel."""
    size = 1031  # no multiple of what processors add up at a time
    for place in range(size):
        vector = torch.linspace(-1.0, 1.0, size, dtype=dtype)
        assert usable(vector) and finite(vector)
        for shift, value in enumerate(planted):
            vector[(place + shift * 7) % size] = value
        assert not usable(vector) and not finite(vector), place
        assert not usable(vector[::2]) or not usable(vector[1::2])  # of rows that do not lie side by side


def test_a_finite_vector_whose_sum_overflows_is_finite() -> None:
    assert finite(torch.full((8,), 3e38)) and not usable(torch.full((8,), 3e38))


@pytest.mark.parametrize("strategy", [gs.Synchronous(), gs.Downpour(), gs.AllReduce()], ids=str)
@pytest.mark.parametrize("optimizer", [gs.optim.SGD(lr=1e38), gs.optim.SGD(lr=1e38, momentum=0.9)], ids=str)
def test_a_rate_beyond_measure_ends_the_run_and_not_in_the_parameters(strategy: Any, optimizer: Any) -> None:
    steep = gs.from_functions(
        init=lambda _: {"w": np.zeros(200)},
        outputs=lambda p, x: x,
        gradients=lambda p, x, y: {"w": np.full(200, 100.0, np.float32)},
    )
    served: dict[str, Any] = {} if isinstance(strategy, gs.AllReduce) else {"servers": 2}
    with pytest.raises(NonFiniteError, match=r"update 1, .* at learning rate 1e\+38"):
        simulate(
            steep,
            numbered(NUM_SAMPLES),
            strategy=strategy,
            workers=2,
            batch_size=8,
            epochs=1,
            optimizer=optimizer,
            chunk_elems=64,
            **served,
        )


@pytest.mark.parametrize("lr", [math.inf, math.nan])
def test_a_rate_that_is_not_finite_is_refused_before_anything_starts(lr: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        sums("synchronous", Tokens(CHUNKS), optimizer=gs.optim.SGD(lr=lr))


# ---- the choice ---------------------------------------------------------------------------


def test_error_ends_the_run_at_the_first_one() -> None:
    with pytest.raises(NonFiniteError, match=r"worker-[12], step \d .*clip the gradient"):
        sums("downpour", Broken(once), non_finite="error")
    with pytest.raises(gs.errors.UnknownNameError, match="non_finite"):
        sums("downpour", Broken(once), non_finite="ignore")
    with pytest.raises(ConfigError, match="quarantine_after=0"):
        sums("downpour", Broken(once), quarantine_after=0)


def test_a_run_in_which_nothing_was_learnt_fails() -> None:
    with pytest.raises(NonFiniteError, match="No gradient of this run was finite"):
        sums("synchronous", Broken(lambda *_: True), steps=1, epochs=None)


def test_three_lines_of_defence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not look is refused by the shard; a shard that does not look at pushes looks at updates.

    It does so after every `LOOK_EVERY` updates, where the lengths of the pushes give no reason to do it earlier.
    """
    monkeypatch.setattr("gradstream.worker.gradient.usable", lambda _: True)
    with pytest.raises(RefusedError, match="NON_FINITE"):
        sums("downpour", Broken(once))
    monkeypatch.setattr("gradstream.server.shard.inspection.length", lambda _: 1.0)
    monkeypatch.setattr("gradstream.server.shard.store.LOOK_EVERY", 2)
    with pytest.raises(NonFiniteError, match="although no gradient was"):
        sums("downpour", Broken(once))
    monkeypatch.setattr("gradstream.server.shard.store.Headroom.updated", lambda *_, **__: None)
    with pytest.raises(gs.errors.GradstreamError):  # `Broken` itself finds a parameter that is not finite
        sums("downpour", Broken(once))


@pytest.mark.parametrize("strategy", [gs.Downpour(), gs.Synchronous()], ids=str)
def test_a_replay_repeats_refused_gradients(strategy: Any) -> None:
    model, data = least_squares(48, 300, whole=False, dtype="float32")
    assert isinstance(data.inputs, np.ndarray)
    data.inputs[7] = 3e30  # the loss overflows wherever this sample is
    run = simulate(
        model,
        data,
        strategy=strategy,
        workers=3,
        batch_size=4,
        epochs=2,
        servers=2,
        chunk_elems=64,
        record=True,
        config=UNEVEN,
        optimizer=gs.optim.SGD(lr=1e-3),
    )
    assert run.summary["samples_dropped"] == 8
    again = replay(run)
    for _ in again:
        pass
    assert again.parameters["w"].tobytes() == run.parameters["w"].tobytes()
