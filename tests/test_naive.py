"""gradstream's Downpour, AllReduce, Synchronous and SSP do what the naive ones of `examples/naive` do.

Both get the same gradient function, minibatches and rate. Where several workers race, gradstream goes first, on
virtual time. Then the naive one's threads are let go on one at a time, in the order of gradstream's steps.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan, RoundPlan
from gradstream.runtime.world import Constant, Cost, Exponential, Link, Network, World

Array = np.ndarray[Any, Any]
Gradient = Callable[[Array, Array, Array], Array]
PROGRAMS = ("downpour", "allreduce", "ssp")
SIZE, SEED, RATE, EPOCHS = 4, 3, 0.05, 2
ALIKE = 1e-12

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((48, 130)), RNG.standard_normal(48)

UNEVEN = World(
    costs={"gradient": Cost(base_s=1.0, spread=Constant())},
    speeds={"worker-0": 1.0, "worker-1": 0.73, "worker-2": 0.31},
    network=Network(bandwidth_bytes_s=1e15, link=Link(latency_s=1e-5)),
)
"""Workers of fixed speeds, and exchanges that take no time beside a gradient: so events have one order."""


@pytest.fixture(scope="module")
def naive(repository: Path) -> Iterator[dict[str, Any]]:
    """The programs as modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "examples/naive"))
        yield {name: importlib.import_module(name) for name in PROGRAMS}


def gradient(w: Array, x: Array, y: Array) -> Array:
    found: Array = (x @ w - y) @ x / len(y)
    return found


def simulated(
    strategy: gs.Strategy, workers: int, *, gradient: Gradient = gradient, **options: Any
) -> gs.Run:
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(X.shape[1])},
        outputs=lambda parameters, x: x @ parameters["w"],
        gradients=lambda parameters, x, y: {"w": gradient(parameters["w"], x, y)},
        dtype="float64",
    )
    options = {"optimizer": gs.SGD(lr=RATE), "world": UNEVEN, "chunk_elems": 64, **options}
    return gs.simulate(
        model, gs.from_arrays(X, Y), strategy=strategy, workers=workers, batch_size=SIZE, epochs=EPOCHS,
        seed=SEED, **options,
    )  # fmt: skip


def batches_of(plan: PartitionPlan | RoundPlan, rank: int) -> Iterator[tuple[Array, Array]]:
    """A worker's minibatches, as gradstream's plan has them."""
    for epoch in range(EPOCHS):
        for batch in range(plan.batches_in(rank, epoch)):
            ids = plan.ids(BatchRef(epoch, rank, batch))
            yield X[ids], Y[ids]


def same(run: gs.Run, expected: Array) -> None:
    np.testing.assert_allclose(run.parameters["w"], expected, rtol=0, atol=ALIKE)
    assert np.abs(expected).max() > 0.01


# ---- threads that go on in a given order ---------------------------------------------------------


class Turns:
    """Lets one thread at a time take its gradient further; the others stand at theirs.

    Args:
        workers: number of threads; each calls `gradient` with its rank.
        gradient: what it computes.
    """

    def __init__(self, workers: int, gradient: Gradient) -> None:
        self._gradient = gradient
        self._changed = threading.Condition()
        self._state = ["running"] * workers  # or "standing" at a gradient, "waiting" for a clock, "through"

    def tell(self, rank: int, state: str) -> None:
        with self._changed:
            self._state[rank] = state
            self._changed.notify_all()

    def _until(self, rank: int, *states: str) -> None:
        done = self._changed.wait_for(lambda: self._state[rank] in states, timeout=20)
        assert done, f"worker {rank} is {self._state[rank]}, expected {states}"

    def gradient(self, rank: int, w: Array, x: Array, y: Array) -> Array:
        """The gradient at these parameters, given when it is this worker's turn."""
        found = self._gradient(w, x, y)
        with self._changed:
            self._state[rank] = "standing"
            self._changed.notify_all()
            self._until(rank, "running")
        return found

    def play(self, order: Iterable[int], target: Callable[[int], None]) -> None:
        """Runs `target(rank)` in threads, which end their steps in this order of ranks."""

        def run(rank: int) -> None:
            try:
                target(rank)
            finally:
                self.tell(rank, "through")

        threads = [
            threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self._state))
        ]
        for thread in threads:
            thread.start()
        for rank in order:
            with self._changed:
                for other in range(len(self._state)):
                    self._until(other, "standing", "waiting", "through")
                self._until(rank, "standing")
                self._state[rank] = "running"
                self._changed.notify_all()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a step is missing in the order"


def order_of(run: gs.Run) -> list[int]:
    """Ranks in the order in which their steps ended."""
    steps = sorted((event["time_s"], event["rank"]) for event in run.events if event["event"] == "step")
    gaps = np.diff([time_s for time_s, _ in steps])
    assert gaps.min() > 1e-3, "two steps end together: their order is not known"
    return [rank for _, rank in steps]


# ---- the strategies ------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("workers", [1, 3])
def test_downpour(naive: dict[str, Any], workers: int, n_push: int, n_fetch: int) -> None:
    """Algorithm 1.1 with Adagrad on two shards."""
    local_rate = 0.0 if n_fetch == 1 else 0.01
    strategy = gs.Downpour(n_push, n_fetch, overlap=False, local_lr=local_rate or None)
    rule = gs.Adagrad(lr=RATE)
    run = simulated(strategy, workers, optimizer=rule, servers=2, assignment="partitions")
    plan, turns = PartitionPlan(len(X), SIZE, workers, seed=SEED), Turns(workers, gradient)
    server = naive["downpour"].Server(np.zeros(X.shape[1]), RATE, num_shards=2)

    def target(rank: int) -> None:
        naive["downpour"].replica(
            server, partial(turns.gradient, rank), batches_of(plan, rank),
            local_rate=local_rate, n_push=n_push, n_fetch=n_fetch,
        )  # fmt: skip

    turns.play(order_of(run), target)
    same(run, server.fetch())


@pytest.mark.parametrize("workers", [1, 3])
def test_allreduce(naive: dict[str, Any], workers: int) -> None:
    """Three workers without a server, and with one: the naive ring's sums, to rounding."""
    plan = RoundPlan(len(X), SIZE, workers, seed=SEED)
    found: dict[int, Array] = {}

    def target(place: Any) -> None:
        batches = batches_of(plan, place.rank)
        found[place.rank] = naive["allreduce"].worker(place, gradient, batches, np.zeros(X.shape[1]), RATE)

    threads = [
        threading.Thread(target=target, args=(place,), daemon=True)
        for place in naive["allreduce"].ring(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == workers
    for rank in range(workers):
        assert np.array_equal(found[rank], found[0])
    same(simulated(gs.AllReduce(algorithm="ring"), workers), found[0])
    same(simulated(gs.Synchronous(), workers), found[0])


class Noticed:
    """The inbox of the naive SSP server. It tells when a worker's read is in it."""

    def __init__(self, inbox: Any, noticed: Callable[[], None]) -> None:
        self._inbox = inbox
        self._noticed = noticed

    def put(self, message: tuple[str, int, Any]) -> None:
        self._inbox.put(message)
        if message[0] == "read":
            self._noticed()


def naive_ssp(
    naive: dict[str, Any], order: Iterable[int], workers: int, bound: int, gradient: Gradient, rate: float
) -> Array:
    """The parameters after a run of the naive SSP whose steps end in this order."""
    plan, turns = PartitionPlan(len(X), SIZE, workers, seed=SEED), Turns(workers, gradient)
    server = naive["ssp"].Server(np.zeros(X.shape[1]), rate, workers)
    ranks: dict[int, int] = {}
    inbox = server.inbox
    server.inbox = Noticed(inbox, lambda: turns.tell(ranks[threading.get_ident()], "waiting"))

    def target(rank: int) -> None:
        ranks[threading.get_ident()] = rank
        naive["ssp"].worker(server, rank, partial(turns.gradient, rank), batches_of(plan, rank), bound=bound)

    turns.play(order, target)
    server.inbox = inbox
    return np.asarray(server.read(0)[0])


@pytest.mark.parametrize(("workers", "bound"), [(1, 0), (1, 3), (3, 1), (3, 2)])
def test_ssp(naive: dict[str, Any], workers: int, bound: int) -> None:
    run = simulated(gs.SSP(bound), workers)
    same(run, naive_ssp(naive, order_of(run), workers, bound, gradient, RATE))


def witness(reads: list[tuple[int, Array]], workers: int) -> Gradient:
    """A gradient that, at a rate of 1, makes parameter r the number of worker r's updates; it notes what it sees."""
    plan = PartitionPlan(len(X), SIZE, workers, seed=SEED)
    first = {
        X[plan.ids(BatchRef(epoch, rank, batch))][0, 0]: rank
        for rank in range(workers)
        for epoch in range(EPOCHS)
        for batch in range(plan.batches_in(rank, epoch))
    }

    def seen(w: Array, x: Array, y: Array) -> Array:
        rank = first[x[0, 0]]
        reads.append((rank, w[:workers].copy()))
        return -np.eye(len(w))[rank]

    return seen


def check_bound(reads: list[tuple[int, Array]], workers: int, bound: int) -> float:
    """Returns by how many clocks, at most, what a worker saw of another one was behind its own clock.

    Raises:
        AssertionError: that was more than the bound, or a worker did not see its own updates.
    """
    clocks, furthest = [0] * workers, 0.0
    for rank, seen in reads:
        assert seen[rank] == clocks[rank], (
            f"worker {rank} at clock {clocks[rank]} sees {seen}: not its own updates"
        )
        behind = clocks[rank] - float(seen.min())
        assert behind <= bound, (
            f"worker {rank} at clock {clocks[rank]} sees {seen}: {behind} clocks behind it"
        )
        furthest = max(furthest, behind)
        clocks[rank] += 1
    return furthest


def test_nobody_is_further_ahead_than_the_bound_and_a_bound_too_many_is_found(naive: dict[str, Any]) -> None:
    """Both give the same reads: those of bound 2 keep to 2, and the checker says that they do not keep to 1."""
    theirs: list[tuple[int, Array]] = []
    ours: list[tuple[int, Array]] = []
    run = simulated(gs.SSP(2), 3, gradient=witness(ours, 3), optimizer=gs.SGD(lr=1.0))
    naive_ssp(naive, order_of(run), 3, 2, witness(theirs, 3), 1.0)
    for reads in (theirs, ours):
        assert check_bound(reads, 3, 2) == 2
        with pytest.raises(AssertionError, match="clocks behind it"):
            check_bound(reads, 3, 1)


@pytest.mark.parametrize("bound", [0, 1])
def test_threads_that_race_keep_to_the_bound(naive: dict[str, Any], bound: int) -> None:
    reads: list[tuple[int, Array]] = []
    plan = PartitionPlan(len(X), SIZE, 3, seed=SEED)
    server = naive["ssp"].Server(np.zeros(X.shape[1]), 1.0, 3)
    threads = [
        threading.Thread(
            target=naive["ssp"].worker,
            args=(server, rank, witness(reads, 3), batches_of(plan, rank)),
            kwargs={"bound": bound},
            daemon=True,
        )
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(reads) == sum(1 for rank in range(3) for _ in batches_of(plan, rank))
    assert check_bound(reads, 3, bound) <= bound


# ---- the programs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_the_weights(name: str, repository: Path) -> None:
    file = repository / "examples/naive" / f"{name}.py"
    assert "gradstream" not in file.read_text()
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    before, after = (float(line.split()[1].rstrip(",")) for line in done.stdout.splitlines())
    assert before > 2
    assert after < 0.2
