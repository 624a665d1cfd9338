"""HOGWILD!'s machine code on memory that several processes share: the safe ways lose no update."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradstream.machine.description import num_cores
from gradstream.memory.segments import Segment, supported
from gradstream.sparse import from_csr, from_samples, linear
from gradstream.sparse.data import CsrTable, SparseDataset, SparseRows
from gradstream.sparse.model import SparseModel, SweepState
from gradstream.sparse.updates import FIRST, LOOKS, RANKS, TURN, UPDATES, WHOLE, LockAccess, num_locks

pytest.importorskip("numba", reason="numba is not installed: pip install 'gradstream[fast]'")
pytestmark = pytest.mark.skipif(not supported(), reason="shared memory needs Linux")

ADDS = 1_000_000
COMPONENTS = 64  # few, so that workers meet
FORK = multiprocessing.get_context("fork")
PROMISED = [update for update in UPDATES if update != "plain"]


def touched(table: Any, i: int, where: Any) -> int:
    where[0] = table.indices[i]
    return 1


def minus_one(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
    into[0] = -1.0
    return 0.0


def shared_vector(elems: int, dtype: torch.dtype) -> torch.Tensor:
    return Segment.create(max(1, elems * dtype.itemsize), "test").tensor(0, elems, dtype)


def in_processes(num: int, work: Callable[[int], None]) -> list[int]:
    """Forks, lets all processes begin together, and returns how each ended."""
    start, children = FORK.Barrier(num), []
    for rank in range(num):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                start.wait()
                work(rank)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def go_through(model: SparseModel, rows: SparseRows, rate: float, update: str, at: SweepState) -> float:
    """A sweep to its end, by a worker with peers that are all alive."""
    at.state[:] = 0
    loss = model.sweep(rows, rate, update, LOOKS, at)
    while at.blocked(len(rows)):
        loss += model.sweep(rows, rate, update, LOOKS, at)
    return loss


class Shared:
    """A vector of all processes, and the locks."""

    def __init__(self, elems: int, workers: int = 4) -> None:
        self.parameters = shared_vector(elems, torch.float32)
        self.locks = shared_vector(num_locks(elems, workers), torch.int32).numpy()

    def place(self, rank: int) -> SweepState:
        return SweepState(self.parameters, self.locks, rank + 1)

    def held(self) -> list[int]:
        """Numbers of the locks that are held."""
        return [int(number) for number in np.flatnonzero(self.locks) if number not in (TURN, RANKS)]


def counted(update: str, workers: int, times: int = 1, adds: int = ADDS) -> float:
    """Σ of a vector to whose random components each worker has added 1 `adds` times, `times` over."""
    rng = np.random.default_rng(0)
    components = rng.integers(0, COMPONENTS, adds).astype(np.int32)
    empty = np.zeros(0, np.float32)
    table = CsrTable(np.zeros(1, np.int64), components, empty, empty, empty)
    model = from_samples([("w", (COMPONENTS,))], touched, minus_one, most=1)
    go_through(model, SparseRows(table, np.zeros(1, np.int64)), 1.0, update, Shared(COMPONENTS).place(0))
    shared = Shared(COMPONENTS)

    def work(rank: int) -> None:
        ids = np.random.default_rng(rank).permutation(adds)
        for _ in range(times):
            go_through(model, SparseRows(table, ids), 1.0, update, shared.place(rank))

    assert in_processes(workers, work) == [0] * workers
    assert not shared.held()
    return float(shared.parameters.double().sum())


@pytest.mark.parametrize("update", PROMISED)
def test_no_update_is_lost(update: str) -> None:
    workers = 4 if update == "atomic" else 2
    adds = ADDS // (40 if update == "round_robin" else 8)  # of which each waits for the other worker's
    assert counted(update, workers, adds=adds) == adds * workers


@pytest.mark.skipif(num_cores() < 2, reason="on one core two stores hardly ever meet")
def test_plain_stores_lose_updates() -> None:
    assert counted("plain", 1) == ADDS
    # Where the machine is busy, one of the two may be done before the other has a core.
    assert any(counted("plain", 2, times=10) < 20 * ADDS for _ in range(10))


def touched_one_of_two(table: Any, i: int, where: Any) -> int:
    where[0] = table.indices[0]
    return 1


def counts_and_looks(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
    """Adds 1 to the worker's own component. The loss is 1 if the other's is not what the order says it is."""
    into[0] = -1.0
    ahead = w[1 - where[0]] - w[where[0]]
    return 0.0 if ahead == (-1.0 if where[0] == 0 else 1.0) or ahead == 0.0 else 1.0


def out_of_order(update: str, updates: int = 20_000) -> float:
    """How often one of two workers, about to compute, sees the other where the order forbids it."""
    from gradstream.sparse.update_schemes import take_part

    empty, shared = np.zeros(0, np.float32), Shared(2)
    model = from_samples([("w", (2,))], touched_one_of_two, counts_and_looks, most=1)
    losses = shared_vector(2, torch.float64)
    for rank in range(2):
        take_part(shared.locks, np.int32(rank + 1))  # before either begins, so that none is passed over

    def work(rank: int, num: int = updates, shared: Shared = shared) -> None:
        table = CsrTable(np.zeros(1, np.int64), np.full(1, rank, np.int32), empty, empty, empty)
        rows, at = SparseRows(table, np.zeros(num, np.int64)), shared.place(rank)
        losses[rank] = model.sweep(rows, 1.0, update, 1 << 40, at)

    work(0, 1, Shared(2))  # compiles
    assert in_processes(2, work) == [0, 0]
    assert shared.parameters.tolist() == [updates, updates]
    return float(losses.sum())


def test_in_round_robin_workers_write_in_turn() -> None:
    assert out_of_order("round_robin") == 0


def test_that_check_sees_another_order() -> None:
    assert out_of_order("lock") > 0


def test_a_turn_that_is_passed_on_too_late_allows_no_concurrent_writes() -> None:
    from gradstream.sparse.update_schemes import GOT, SCHEMES, leave, pass_turn, take_part

    scheme, locks, where = SCHEMES["round_robin"], Shared(1).locks, np.zeros(1, np.uint32)
    first, second = np.int32(1), np.int32(2)
    take_part(locks, second)
    leave(locks, second)
    take_part(locks, first)
    assert scheme.take(locks, where, 0, first, 10) == GOT
    scheme.give(locks, where, 0, first)
    assert (
        locks[TURN] == 1
    )  # the first finds the second away, and is about to pass its turn on; but meanwhile
    take_part(locks, second)
    assert scheme.take(locks, where, 0, second, 10) == GOT
    pass_turn(locks, 1)
    assert scheme.take(locks, where, 0, first, 10) == WHOLE
    scheme.give(locks, where, 0, second)
    assert locks[TURN] == 0, "a turn that it no longer has it does not pass on"
    assert scheme.take(locks, where, 0, first, 10) == GOT


@pytest.mark.parametrize("update", PROMISED)
def test_whole_gradients_are_added_without_loss(update: str) -> None:
    from gradstream.sparse.sweep import adder_of

    add, elems, times = adder_of(update), 1000, 200
    ones, rate = np.ones(elems, np.float32), np.float32(-1)
    shared = Shared(elems)
    w = shared.parameters.numpy()

    def work(rank: int) -> None:
        for _ in range(times):
            state = np.zeros(2, np.int64)
            while state[0] < elems:
                add(w, ones, rate, LockAccess(shared.locks, np.int32(rank + 1), LOOKS), state)

    add(
        np.zeros(elems, np.float32),
        ones,
        rate,
        LockAccess(Shared(elems).locks, np.int32(1), LOOKS),
        np.zeros(2, np.int64),
    )
    assert in_processes(2, work) == [0, 0]
    assert (w == 2 * times).all()


# ---- the same result ----------------------------------------------------------------------


def separable(num_samples: int = 4000, num_features: int = 500) -> SparseDataset:
    """Least squares in which each sample has one feature: Σ (w_v - y_i)²/2."""
    rng = np.random.default_rng(1)
    features = rng.integers(0, num_features, num_samples)
    targets = rng.standard_normal(num_features)[features] + 0.5 * rng.standard_normal(num_samples)
    return from_csr(
        np.arange(num_samples + 1), features, np.ones(num_samples), targets, num_features=num_features
    )


def objective_after(data: SparseDataset, update: str, workers: int, *, fault: bool = False) -> float:
    """f after 6 epochs, each cut among the workers, who begin it together.

    Args:
        fault: they update vectors of their own.
    """
    model = linear(data.num_features, loss="squared")
    shared, order = Shared(data.num_features), np.random.default_rng(2)
    orders = [order.permutation(data.num_samples) for _ in range(6)]
    model.objective(shared.parameters, data)
    go_through(model, data.batch(np.arange(2)).inputs, 0.0, update, Shared(data.num_features).place(0))

    together = FORK.Barrier(workers)

    def work(rank: int) -> None:
        at = shared.place(rank)
        if fault:
            at.parameters = at.parameters.clone()
        for epoch, ids in enumerate(orders):
            together.wait()
            go_through(model, data.batch(ids[rank::workers]).inputs, 0.1 * 0.7**epoch, update, at)
        if fault and rank == 0:
            shared.parameters.copy_(at.parameters)

    assert in_processes(workers, work) == [0] * workers
    return model.objective(shared.parameters, data)


@pytest.mark.parametrize("update", ["atomic", "plain"])
def test_separable_least_squares_is_as_good_with_any_number_of_workers(update: str) -> None:
    data = separable()
    alone = objective_after(data, update, 1)
    for workers in (2, 4):
        assert objective_after(data, update, workers) == pytest.approx(alone, rel=0.01)


def test_that_check_sees_workers_that_do_not_share() -> None:
    data = separable()
    assert objective_after(data, "plain", 2, fault=True) > 1.01 * objective_after(data, "plain", 1)


def serial(data: SparseDataset, ids: Any, rate: float, l2: float = 0.0) -> Any:
    """SGD as a plain loop in float32: w ← w - η·(x·w - y)·x, sample by sample."""
    table, w = data.tables[0], np.zeros(data.num_features, np.float32)
    for i in ids:
        e = slice(table.indptr[i], table.indptr[i + 1])
        where, x = table.indices[e], table.values[e]
        margin = 0.0
        for v, value in zip(where, x, strict=True):
            margin += float(w[v] * value)
        gradient = np.float32(margin - float(table.targets[i])) * x
        if l2:
            gradient = gradient + np.float32(l2) * table.scale[where] * w[where]
        w[where] -= np.float32(rate) * gradient
    return w


def rows_of_five(num_samples: int = 300, num_features: int = 60) -> SparseDataset:
    rng = np.random.default_rng(3)
    indices = np.stack([rng.choice(num_features, 5, replace=False) for _ in range(num_samples)]).ravel()
    return from_csr(
        np.arange(num_samples + 1) * 5,
        indices,
        rng.standard_normal(5 * num_samples),
        rng.standard_normal(num_samples),
        num_features=num_features,
    )


@pytest.mark.parametrize("update", UPDATES)
def test_one_worker_is_serial_sgd_bit_for_bit(update: str) -> None:
    data = rows_of_five()
    ids = np.random.default_rng(4).permutation(data.num_samples)
    expected = serial(data, ids, 0.05)
    shared, model = Shared(data.num_features), linear(data.num_features, loss="squared")
    go_through(model, data.batch(ids).inputs, 0.05, update, shared.place(0))
    assert shared.parameters.numpy().tobytes() == expected.tobytes()
    other = serial(data, ids[::-1], 0.05)
    assert shared.parameters.numpy().tobytes() != other.tobytes(), "another order is to be seen"


def test_the_penalty_is_of_touched_components_alone() -> None:
    data = rows_of_five()
    ids = np.arange(data.num_samples)
    shared, model = Shared(data.num_features), linear(data.num_features, loss="squared", l2=0.01)
    go_through(model, data.batch(ids).inputs, 0.05, "plain", shared.place(0))
    np.testing.assert_allclose(
        shared.parameters.numpy(), serial(data, ids, 0.05, l2=0.01), rtol=1e-5, atol=1e-7
    )
    assert np.abs(shared.parameters.numpy() - serial(data, ids, 0.05)).max() > 1e-3


# ---- locks of the dead ------------------------------------------------------------------------


def neighbours() -> SparseDataset:
    """Ten samples: sample i has the features i and i + 1."""
    features = np.array([[v, v + 1] for v in range(10)]).ravel()
    return from_csr(np.arange(11) * 2, features, np.ones(20), np.random.default_rng(5).random(10))


@pytest.mark.parametrize(
    ("update", "lock"), [("lock", WHOLE), ("short_lock", WHOLE), ("component_locks", FIRST + 7)]
)
def test_a_lock_of_a_dead_worker_stops_the_sweep_there_and_can_be_taken(update: str, lock: int) -> None:
    from gradstream.sparse.atomics import acquire
    from gradstream.sparse.sweep import free

    data = neighbours()
    model, shared = linear(data.num_features, loss="squared"), Shared(data.num_features)
    acquire(Shared(1).locks, WHOLE, 1, 1)

    def die(rank: int) -> None:
        acquire(shared.locks, lock, rank + 2, LOOKS)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_processes(1, die) == [-signal.SIGKILL]
    rows, at = data.batch(np.arange(10)).inputs, shared.place(0)
    model.sweep(rows, 0.1, update, 100, at)
    assert at.blocked(10)
    assert at.state.tolist() == [0 if lock == WHOLE else 6, lock]  # sample 6 is the first that touches 7
    assert shared.held() == [lock], "a worker that cannot go on keeps nothing"
    assert not free(shared.locks, lock, 1)
    assert free(shared.locks, lock, 2)
    model.sweep(rows, 0.1, update, 100, at)
    assert not at.blocked(10)
    assert not shared.held()
    assert shared.parameters.numpy().tobytes() == serial(data, range(10), 0.1).tobytes()


def test_a_dead_workers_turn_passes() -> None:
    from gradstream.sparse.atomics import acquire
    from gradstream.sparse.sweep import free
    from gradstream.sparse.update_schemes import part_of, take_part

    data = neighbours()
    model, shared = linear(data.num_features, loss="squared"), Shared(data.num_features)
    acquire(Shared(1).locks, WHOLE, 1, 1)
    take_part(Shared(1).locks, 1)

    def die(rank: int) -> None:
        take_part(shared.locks, rank + 2)
        acquire(shared.locks, WHOLE, rank + 2, LOOKS)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_processes(1, die) == [-signal.SIGKILL]
    rows, at = data.batch(np.arange(10)).inputs, shared.place(0)
    for stop in ([0, WHOLE], [1, part_of(shared.locks, 1)]):  # its own turn comes first, and then the dead's
        model.sweep(rows, 0.1, "round_robin", 100, at)
        assert at.state.tolist() == stop
        assert not shared.locks[part_of(shared.locks, 0)], "while it is stopped it is passed over itself"
        assert free(shared.locks, stop[1], 2)
    model.sweep(rows, 0.1, "round_robin", 100, at)
    assert not at.blocked(10)
    assert not shared.held()
    assert shared.parameters.numpy().tobytes() == serial(data, range(10), 0.1).tobytes()


@pytest.mark.parametrize("update", [update for update in PROMISED if update != "atomic"])
def test_a_worker_may_be_killed_at_any_instant(update: str) -> None:
    from gradstream.sparse.sweep import free

    data = rows_of_five()
    model, ids = linear(data.num_features, loss="squared"), np.arange(data.num_samples)
    rows = data.batch(ids).inputs
    go_through(model, rows, 0.0, update, Shared(data.num_features).place(0))
    free(Shared(1).locks, WHOLE, 1)
    for attempt in range(20):
        shared = Shared(data.num_features)
        victim = os.fork()
        if victim == 0:
            while True:
                go_through(model, rows, 0.0, update, shared.place(1))
        for _ in range(attempt):
            go_through(model, rows, 0.0, update, shared.place(0))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        at = shared.place(0)
        model.sweep(rows, 0.05, update, 100, at)
        while at.blocked(len(rows)):
            assert free(shared.locks, int(at.state[1]), 2), "only the dead can be in its way"
            model.sweep(rows, 0.05, update, 100, at)
        assert {int(shared.locks[lock]) for lock in shared.held()} <= {2}
        assert shared.parameters.numpy().tobytes() == serial(data, ids, 0.05).tobytes()
