"""gradstream's Downpour, AllReduce, Synchronous and SSP do what the naive ones of `examples/naive` do.

Both get the same gradient function, minibatches and rate. Where several workers race, gradstream goes first,
on virtual time. Then the naive one's threads go on one at a time, in the order of gradstream's steps.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig

Array = np.ndarray[Any, Any]
Minibatch = tuple[Array, Array]
Gradient = Callable[[Array, Array, Array], Array]

PROGRAMS = ("downpour", "allreduce", "ssp")
RATE, SPEEDS = 0.05, (1.0, 0.73, 0.31)
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((96, 130)), RNG.standard_normal(96)
W = np.zeros(X.shape[1])


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
    strategy: gs.Strategy, workers: int, **options: Any
) -> tuple[Array, list[tuple[int, Minibatch]]]:
    """What gradstream's strategy ends with, and rank and minibatch of each step, in the order of their ends.

    Workers have fixed speeds, and an exchange takes no time beside a gradient: so steps have one order, and
    an exchange ends before another worker's begins. The loss of a step is the number of its minibatch.
    """
    minibatches: list[Minibatch] = []

    def gradients(parameters: Any, x: Array, y: Array) -> tuple[float, Any]:
        minibatches.append((x.copy(), y.copy()))
        return float(len(minibatches) - 1), {"w": gradient(parameters["w"], x, y)}

    model = gs.from_functions(
        init=lambda seed: {"w": W}, outputs=lambda p, x: x @ p["w"], gradients=gradients, dtype="float64"
    )
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1.0)},
        speeds={f"worker-{rank}": SPEEDS[rank] for rank in range(workers)},
        network=Network(bandwidth_bytes_s=1e15, link=Link(latency_s=1e-5)),
    )
    options = {"optimizer": gs.optim.SGD(lr=RATE), "chunk_elems": 64, "config": config, **options}
    run = gs.simulate(
        model, gs.from_arrays(X, Y), strategy=strategy, workers=workers, batch_size=4, epochs=1, **options
    )
    steps = sorted((e["time_s"], e["rank"], int(e["loss"])) for e in run.events if e["event"] == "step")
    assert len(steps) == len(minibatches) == len(X) / 4
    return run.parameters["w"], [(rank, minibatches[number]) for _, rank, number in steps]


def same(ours: Array, theirs: Array) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert np.abs(theirs).max() > 0.01


def started(targets: Sequence[Callable[[], object]]) -> None:
    """Runs these in threads, to their end."""
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


class Turns:
    """Threads that go on one at a time: each stands at its gradient until it is its turn.

    Args:
        steps: rank and minibatch of each step, in the order in which they are to end.
        gradient: what is computed.
    """

    def __init__(self, steps: Sequence[tuple[int, Minibatch]], gradient: Gradient) -> None:
        self._steps = steps
        self._gradient = gradient
        self._changed = threading.Condition()
        self._states = ["running"] * (1 + max(rank for rank, _ in steps))
        self._ranks: dict[int, int] = {}  # by thread

    def tell(self, state: str) -> None:
        """The calling thread is "standing" at its gradient, "waiting" for others, or "through"."""
        with self._changed:
            self._states[self._ranks[threading.get_ident()]] = state
            self._changed.notify_all()

    def _until(self, rank: int, *states: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._states[rank] in states, timeout=20):
                raise AssertionError(f"worker {rank} is {self._states[rank]}, expected {' or '.join(states)}")

    def _stand(self, rank: int, w: Array, x: Array, y: Array) -> Array:
        found = self._gradient(w, x, y)
        self.tell("standing")
        self._until(rank, "running")
        return found

    def play(self, target: Callable[[int, Gradient, list[Minibatch]], object]) -> None:
        """Calls `target(rank, gradient, minibatches)` in threads, and lets them go on in the given order."""

        def run(rank: int) -> None:
            self._ranks[threading.get_ident()] = rank
            target(rank, partial(self._stand, rank), [batch for r, batch in self._steps if r == rank])
            self.tell("through")

        ranks = range(len(self._states))
        for rank in ranks:
            threading.Thread(target=run, args=(rank,), daemon=True).start()
        for rank, _ in self._steps:
            for other in ranks:
                self._until(other, "standing", "waiting", "through")
            self._until(rank, "standing")
            with self._changed:
                self._states[rank] = "running"
                self._changed.notify_all()
        for rank in ranks:
            self._until(rank, "through")


# ---- the strategies ------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_push", "n_fetch", "local_rate"), [(1, 1, None), (2, 3, 0.01), (3, 2, 0.01)])
@pytest.mark.parametrize("workers", [1, 3])
def test_downpour(
    naive: dict[str, Any], workers: int, n_push: int, n_fetch: int, local_rate: float | None
) -> None:
    """Algorithm 1.1 with Adagrad on two shards; minibatches go to whoever asks for the next one."""
    strategy = gs.Downpour(n_push, n_fetch, overlap=False, local_lr=local_rate)
    ours, steps = simulated(strategy, workers, optimizer=gs.optim.Adagrad(lr=RATE), servers=2)
    server = naive["downpour"].Server(W, RATE, num_shards=2)
    periods = {"local_rate": local_rate or 0.0, "n_push": n_push, "n_fetch": n_fetch}
    replica = partial(naive["downpour"].replica, server, **periods)
    Turns(steps, gradient).play(lambda rank, gradient, minibatches: replica(gradient, minibatches))
    same(ours, server.fetch())


def test_another_order_of_pushes_would_be_noticed(naive: dict[str, Any]) -> None:
    ours, steps = simulated(gs.Downpour(overlap=False), 3, optimizer=gs.optim.Adagrad(lr=RATE))
    server = naive["downpour"].Server(W, RATE, num_shards=2)
    replica = partial(naive["downpour"].replica, server)
    other = sorted(steps, key=lambda step: step[0])
    Turns(other, gradient).play(lambda rank, gradient, minibatches: replica(gradient, minibatches))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same(ours, server.fetch())


@pytest.mark.parametrize("workers", [1, 3])
def test_allreduce(naive: dict[str, Any], workers: int) -> None:
    """Without a server and with one: the sums of the naive ring, to rounding."""
    ours, steps = simulated(gs.AllReduce(algorithm="ring"), workers)
    found: dict[int, Array] = {}

    def target(place: Any) -> None:
        minibatches = [batch for rank, batch in steps if rank == place.rank]
        found[place.rank] = naive["allreduce"].worker(place, gradient, minibatches, W, RATE)

    started([partial(target, place) for place in naive["allreduce"].ring(workers)])
    assert len(found) == workers
    assert all(np.array_equal(found[0], w) for w in found.values())
    same(ours, found[0])
    same(simulated(gs.Synchronous(), workers)[0], found[0])


class Noticed:
    """The inbox of the naive SSP server; it tells when a read is in it, which may have to wait."""

    def __init__(self, inbox: Any, turns: Turns) -> None:
        self.get, self._put, self._turns = inbox.get, inbox.put, turns

    def put(self, message: tuple[str, int, Any]) -> None:
        self._put(message)
        if message[0] == "read":
            self._turns.tell("waiting")


def naive_ssp(module: Any, turns: Turns, workers: int, bound: int, rate: float) -> Array:
    """The parameters after a run of the naive SSP."""
    server = module.Server(W, rate, workers)
    inbox, server.inbox = server.inbox, Noticed(server.inbox, turns)
    turns.play(partial(module.worker, server, bound=bound))
    server.inbox = inbox
    return np.asarray(server.read(0)[0])


@pytest.mark.parametrize(("workers", "bound"), [(1, 0), (1, 3), (3, 1), (3, 2)])
def test_ssp(naive: dict[str, Any], workers: int, bound: int) -> None:
    """Workers wait for the slowest one, and their reads are answered at the same events."""
    ours, steps = simulated(gs.SSP(bound), workers)
    same(ours, naive_ssp(naive["ssp"], Turns(steps, gradient), workers, bound, RATE))


# ---- the bound of SSP ----------------------------------------------------------------------------

Reads = list[tuple[int, Array]]


def witness(reads: Reads, w: Array, x: Array, y: Array) -> Array:
    """Notes what worker x sees. At a rate of 1 parameter r is the number of worker r's updates."""
    reads.append((int(x[0]), w[:3].copy()))
    found: Array = -np.eye(len(w))[int(x[0])]
    return found


def minibatches_of(rank: int) -> list[Minibatch]:
    return [(np.array([rank]), np.zeros(1))] * 8


def check_bound(reads: Reads, bound: int) -> float:
    """Returns how far, in clocks, what a worker saw of another one was behind its own clock, at most.

    Raises:
        AssertionError: that was more than the bound, or a worker did not see its own updates.
    """
    clocks, furthest = [0, 0, 0], 0.0
    for rank, seen in reads:
        where = f"worker {rank} at clock {clocks[rank]} sees {seen}"
        assert seen[rank] == clocks[rank], f"{where}: not its own updates"
        behind = clocks[rank] - float(seen.min())
        assert behind <= bound, f"{where}: {behind:g} clocks behind it"
        furthest = max(furthest, behind)
        clocks[rank] += 1
    assert clocks == [8, 8, 8]
    return furthest


def test_a_bound_too_many_is_found(naive: dict[str, Any]) -> None:
    """Worker 0 goes as far ahead as a bound of 2 lets it, which a bound of 1 would not have."""
    order = [0, 0, 0, *[1, 2] * 3, *[2, 1, 0] * 5]
    reads: Reads = []
    turns = Turns([(rank, minibatches_of(rank)[0]) for rank in order], partial(witness, reads))
    assert np.array_equal(naive_ssp(naive["ssp"], turns, 3, 2, 1.0)[:4], [8, 8, 8, 0])
    assert check_bound(reads, 2) == 2
    with pytest.raises(AssertionError, match=r"worker 0 at clock 2 .* 2 clocks behind it"):
        check_bound(reads, 1)


@pytest.mark.parametrize("bound", [0, 1])
def test_threads_that_race_keep_to_the_bound(naive: dict[str, Any], bound: int) -> None:
    reads: Reads = []
    server = naive["ssp"].Server(W, 1.0, 3)
    work = partial(naive["ssp"].worker, server, gradient=partial(witness, reads), bound=bound)
    started([partial(work, rank, batches=minibatches_of(rank)) for rank in range(3)])
    assert check_bound(reads, bound) <= bound


# ---- the programs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_the_weights(name: str, repository: Path) -> None:
    file = repository / "examples/naive" / f"{name}.py"
    assert "gradstream" not in file.read_text()
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    before, after = (float(line.split()[1].rstrip(",")) for line in done.stdout.splitlines())
    assert before > 2
    assert after < 0.2
