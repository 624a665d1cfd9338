"""Runs without servers survive the death of a worker: the others form another group, and do the lost round again."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.durable import StateStore
from gradstream.errors import Interrupted
from gradstream.job.files import load_job
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, Partition, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK, kill_at, least_squares, replace_at
from gradstream.worker.group.exchange import GroupExchange
from gradstream.worker.group.peers import GroupPeers
from gradstream.worker.group.setup import GroupAssembly

WORKERS, EPOCHS, SAMPLES = 4, 1, 64
WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=0.03, jitter=Exponential()), "apply": Cost(base_s=2e-3)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e5),
)
MODEL, GIVEN = least_squares(SAMPLES, 150, grid=2.0**-6)
"""Whole numbers, and 16 samples a round: every sum is exact in any order, also where another number of ranks sums."""
DATA = gs.from_arrays(GIVEN.inputs, GIVEN.targets, GIVEN.inputs[:8], GIVEN.targets[:8])
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=2.0**-12, momentum=0.5), "workers": WORKERS, "batch_size": 4, "epochs": EPOCHS,
    "chunk_elems": 64, "deadlines": QUICK, "config": WORLD,
}  # fmt: skip
ALGORITHMS = (
    "ring", "butterfly", "binomial-tree", "complete-tree", "halving-doubling", "naive", "direct"
)  # fmt: skip


def by(algorithm: str, *, overlap: bool = True) -> gs.AllReduce:
    return gs.AllReduce(algorithm=algorithm, overlap=overlap, bucket_mib=64 * 8 / (1 << 20))


def run_with(script: Any, strategy: gs.Strategy | None = None, **options: Any) -> tuple[gs.Run, list[Any]]:
    events: list[Any] = []
    given = {**JOB, "strategy": strategy or by("ring"), **options}
    return simulate(MODEL, DATA, script=script, on_event=events.append, **given), events


Finals = dict[str, tuple[int, torch.Tensor]]
"""Version and parameters of each worker that has come to its end."""


@pytest.fixture(autouse=True)
def finals(monkeypatch: pytest.MonkeyPatch) -> Finals:
    found: Finals = {}
    close = GroupExchange.close

    async def noted(self: GroupExchange) -> None:
        found[self._context.runtime.node] = self.replica.version, self.replica.parameters.tensor.clone()
        await close(self)

    monkeypatch.setattr(GroupExchange, "close", noted)
    return found


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """The parameters of a run in which nobody dies."""
    return run_with(None)[0].parameters["w"]


def check(run: gs.Run, finals: Finals, expected: Any, epochs: int = EPOCHS) -> None:
    """Parameters and samples are those of a run without faults, and all workers at the end have the same."""
    newest = max(version for version, _ in finals.values())
    assert run.summary["samples_accounted"] == epochs * SAMPLES
    np.testing.assert_array_equal(run.parameters["w"], expected)
    for version, parameters in finals.values():
        if version == newest:
            np.testing.assert_array_equal(parameters.numpy(), np.asarray(expected).reshape(-1))
    finals.clear()


def rounds_of(strategy: gs.Strategy) -> list[float]:
    """When each round of an undisturbed run ends, in seconds."""
    _, events = run_with(None, strategy)
    return sorted(
        event["time_s"] for event in events if event["event"] == "step" and event["node"] == "worker-0"
    )


# ---- one death ----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_death_at_any_instant_of_a_round_changes_nothing(
    algorithm: str, undisturbed: Any, finals: Finals
) -> None:
    """4 instants of one round for each algorithm, every worker among the dead, also that of rank 0."""
    ends = rounds_of(by(algorithm))
    begin_s, end_s = ends[1], ends[2]
    for number in range(WORKERS):
        at_s = begin_s + (end_s - begin_s) * (number + 0.5) / WORKERS
        name = f"worker-{number}"
        run, _ = run_with(kill_at(name, at_s), by(algorithm, overlap=number % 3 > 0))
        assert run.summary["workers_lost"] == [name], at_s
        check(run, finals, undisturbed)


def kills_in_the_middle_of_the_updates() -> Iterator[tuple[Any, gs.Strategy]]:
    """Kills in the 4 ms in which the first worker makes the update of round 2, and others wait for parts of sums."""
    update = GroupPeers.update
    for algorithm in ("ring", "direct"):
        made_ns: list[int] = []

        async def noted(self: GroupPeers, gradient: Any, made_ns: list[int] = made_ns) -> None:
            await update(self, gradient)
            if self._replica.version == 2:
                made_ns.append(self._runtime.now())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupPeers, "update", noted)
            run_with(None, by(algorithm))
        for victim in range(WORKERS):
            yield kill_at(f"worker-{victim}", min(made_ns) / 1e9 - 0.001 * (1 + victim)), by(algorithm)


def test_some_have_made_the_update_of_a_round_and_others_get_it(
    undisturbed: Any, finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    like, got = GroupExchange._like, list[int]()

    def received(self: GroupExchange, vector: Any) -> Any:
        got.append(self.replica.rank)
        return like(self, vector)

    monkeypatch.setattr(GroupExchange, "_like", received)
    moved = 0
    for script, strategy in kills_in_the_middle_of_the_updates():
        finals.clear()
        got.clear()
        run, _ = run_with(script, strategy)
        moved += bool(got)
        check(run, finals, undisturbed)
    assert moved > 1


def test_one_of_two_stays(undisturbed: Any, finals: Finals) -> None:
    rng = random.Random(0)
    for number in range(2):
        script = kill_at(f"worker-{number}", rng.uniform(0.01, 0.6))
        run, _ = run_with(script, workers=2, batch_size=8)
        check(run, finals, undisturbed)


def test_real_numbers_differ_by_rounding_alone(finals: Finals) -> None:
    """Three ranks sum in another order than four. All of them have the same bits."""
    model, data = least_squares(SAMPLES, 150, whole=False, reduction="mean")
    job = {**JOB, "optimizer": gs.optim.Adam(lr=0.01), "clip_norm": 5.0, "strategy": by("ring")}
    whole = simulate(model, data, **job).parameters["w"]
    for seed in range(2):
        finals.clear()
        run = simulate(model, data, script=kill_at(f"worker-{seed}", 0.1 + 0.2 * seed), **job)
        np.testing.assert_allclose(run.parameters["w"], whole, rtol=1e-12)
        check(run, finals, run.parameters["w"])


# ---- several ------------------------------------------------------------------------------


def test_more_die_while_the_others_meet(undisturbed: Any, finals: Finals) -> None:
    """Two and three deaths, many within the milliseconds in which a group is formed. The last worker ends the run."""
    for seed in range(4):
        rng = random.Random(seed)
        waits_s = [rng.uniform(0.01, 0.4), *(rng.uniform(0.0, 0.03 if seed % 3 else 0.3) for _ in range(2))]
        deaths = list(zip(waits_s, rng.sample(range(WORKERS), rng.choice([2, 3])), strict=False))

        async def script(cluster: Any, deaths: list[tuple[float, int]] = deaths) -> None:
            for wait_s, rank in deaths:
                await kill_at(f"worker-{rank}", wait_s)(cluster)

        run, _ = run_with(script, by(rng.choice(ALGORITHMS)))
        check(run, finals, undisturbed)


@pytest.mark.parametrize("after_s", [0.0, 0.05])
def test_a_new_process_takes_the_place(after_s: float, undisturbed: Any, finals: Finals) -> None:
    rng, steps = random.Random(str(after_s)), 0
    for number in range(3):
        name = f"worker-{number}"
        script = replace_at(name, rng.uniform(0.05, 0.5), after_s)
        run, events = run_with(script, by(ALGORITHMS[number]))
        check(run, finals, undisturbed)
        back_s = [event["time_s"] for event in events if event["event"] == "joined" and event["epoch"] > 1]
        steps += sum(
            bool(back_s) and e["event"] == "step" and e["node"] == name and e["time_s"] > back_s[0]
            for e in events
        )
    assert steps > 3


def test_a_newcomer_goes_on_alone_only_if_it_has_the_parameters(finals: Finals) -> None:
    """All others die while it comes. It never begins the run again with the first parameters."""
    ended, expected = 0, run_with(None, epochs=2)[0].parameters["w"]
    for number in range(5):

        async def script(cluster: Any, wait_s: float = 0.002 + 0.12 * number) -> None:
            await replace_at("worker-1", 0.4)(cluster)
            await cluster.virtual.runtime("director").sleep(wait_s)
            for rank in (0, 2, 3):
                cluster.kill(f"worker-{rank}")

        finals.clear()
        try:
            run, _ = run_with(script, epochs=2)
        except gs.errors.PeerLostError:
            ended += 1
        else:
            check(run, finals, expected, epochs=2)
    assert 0 < ended < 5


def test_they_die_and_come_back_while_checkpoints_are_made(finals: Finals) -> None:
    made, expected = 0, run_with(None, epochs=3)[0].parameters["w"]
    for seed in range(3):
        rng = random.Random(seed)

        async def script(cluster: Any, rng: random.Random = rng) -> None:
            director = cluster.virtual.runtime("director")
            for _ in range(4):
                await director.sleep(rng.uniform(0.01, 0.3))
                victim = f"worker-{rng.randrange(WORKERS)}"
                if cluster.over:
                    return
                cluster.kill(victim)
                await director.sleep(rng.choice([0.0, 0.003, 0.05]))
                if cluster.over:
                    return
                await cluster.restart(victim)

        options = {"epochs": 3, "checkpoint_every": 2, "evaluate_every": 2, "storage": MemoryStorage()}
        run, events = run_with(script, by(rng.choice(ALGORITHMS)), **options)
        check(run, finals, expected, epochs=3)
        made += sum(event["event"] == "checkpoint" for event in events)
    assert made > 3


def test_a_run_is_stopped_and_resumed_after_a_death(undisturbed: Any, finals: Finals) -> None:
    for kill_s, stop_s in ((0.15, 0.25), (0.15, 0.16), (0.2, 0.5)):
        storage = MemoryStorage()

        async def script(cluster: Any, kill_s: float = kill_s, stop_s: float = stop_s) -> None:
            await kill_at("worker-1", kill_s)(cluster)
            await cluster.virtual.runtime("director").sleep(stop_s - kill_s)
            cluster.stop()

        with pytest.raises(Interrupted):
            run_with(script, storage=storage)
        finals.clear()
        run, _ = run_with(kill_at("worker-0", 0.1), storage=storage, resume=True)
        check(run, finals, undisturbed)


def test_parts_of_steps_and_a_worker_that_is_asked_to_go(finals: Finals) -> None:
    """Joined minibatches (`accumulate`). A worker that leaves in order is replaced by the others too."""

    async def drained(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(0.2)
        cluster.drain("worker-2")

    expected = run_with(None, accumulate=2, epochs=2)[0].parameters["w"]
    for script in (kill_at("worker-1", 0.2), kill_at("worker-0", 0.31), drained):
        finals.clear()
        run, _ = run_with(script, accumulate=2, epochs=2)
        check(run, finals, expected, epochs=2)


def test_one_that_is_cut_off_is_left_out_and_a_slow_one_is_not(undisturbed: Any, finals: Finals) -> None:
    others = frozenset({"coordinator", "worker-0", "worker-2", "worker-3"})
    one = frozenset({"worker-1"})
    cuts = [Partition(0.15, 1e9, one, others), Partition(0.15, 1e9, others, one)]
    network = Network(link=Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e5, partitions=cuts)
    run, _ = run_with(None, config=SimulationConfig(costs=WORLD.costs, network=network))
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    np.testing.assert_array_equal(run.parameters["w"], undisturbed)
    # Each gradient takes 3 s: 15 times as long as a rank may be silent, and longer than a lease.
    slow = SimulationConfig(costs={**WORLD.costs, "gradient": Cost(base_s=3.0)}, network=WORLD.network)
    finals.clear()
    run, _ = run_with(replace_at("worker-3", 4.0, 2.0), config=slow)
    assert run.summary["workers_lost"] == ["worker-3"]
    check(run, finals, undisturbed)


def parted(one: str, other: str, start_s: float, stop_s: float) -> SimulationConfig:
    """A network on which these two do not reach each other, and all else goes on."""
    first, second = frozenset({one}), frozenset({other})
    cuts = [Partition(start_s, stop_s, first, second), Partition(start_s, stop_s, second, first)]
    network = Network(link=Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e5, partitions=cuts)
    return SimulationConfig(costs=WORLD.costs, network=network)


@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling"])
def test_where_a_connection_breaks_while_both_live_the_same_workers_form_a_group_again(
    algorithm: str, undisturbed: Any, finals: Finals
) -> None:
    for one, other, at_s, for_s in (
        ("worker-0", "worker-1", 0.15, 0.4),
        ("worker-3", "worker-2", 0.2, 1.0),
        ("worker-1", "worker-2", 0.31, 3.5),  # the group that is formed again fails, too
    ):
        run, events = run_with(None, by(algorithm), config=parted(one, other, at_s, at_s + for_s))
        assert not run.summary["workers_lost"]
        assert len({event["epoch"] for event in events if event["event"] == "group"}) >= 2
        check(run, finals, undisturbed)


def test_a_connection_that_stays_broken_ends_the_run_by_name() -> None:
    with pytest.raises((gs.errors.PeerLostError, gs.errors.DeadlineError), match=r"worker-[12]"):
        run_with(None, config=parted("worker-1", "worker-2", 0.2, 1e9))


def test_the_coordinator_dies_with_a_worker(undisturbed: Any, finals: Finals) -> None:
    """The others learn of the worker a lease after the new process of the coordinator has begun."""

    class Both:
        def store(self, job: str) -> StateStore:
            return StateStore(":memory:", job)

        async def __call__(self, cluster: Any) -> None:
            director = cluster.virtual.runtime("director")
            await director.sleep(0.45)
            cluster.kill("coordinator")
            cluster.kill("worker-2")
            await director.sleep(0.3)
            await cluster.restart("coordinator")

    run, _ = run_with(Both())
    assert run.summary["workers_lost"] == ["worker-2"]
    check(run, finals, undisturbed)


# ---- what is refused, and what the checks find ----------------------------------------------


def test_what_cannot_go_on_ends_by_name() -> None:
    with pytest.raises(gs.errors.PeerLostError, match="worker-1"):
        run_with(kill_at("worker-1", 0.3), gs.AllReduce(sharded=True))


def test_a_survivor_that_keeps_an_update_which_the_others_redo_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: whoever has finished the round says that it has not, and keeps the update."""
    tell = GroupPeers.tell

    async def lie(self: GroupPeers, first: float, second: float = 0.0) -> Any:
        told = await tell(self, first, second)
        if second or first > 100:  # a digest
            return told
        if first > min(version for version, _ in told):
            self._replica.version -= 1
        return [(min(version for version, _ in told), 0.0)] * len(told)

    monkeypatch.setattr(GroupPeers, "tell", lie)
    found = 0
    for script, strategy in islice(kills_in_the_middle_of_the_updates(), WORKERS):  # by a ring
        try:
            run_with(script, strategy)
        except gs.errors.GradstreamError as error:
            found += "got other parameters" in str(error)
    assert found


def test_a_part_that_nobody_computes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, undisturbed: Any, finals: Finals
) -> None:
    """Planted: nobody stands in, so the dead worker's samples are in no round."""
    monkeypatch.setattr(GroupAssembly, "_joint", lambda self, lost: None)
    run, _ = run_with(kill_at("worker-1", 0.3))
    with pytest.raises(AssertionError):
        check(run, finals, undisturbed)


# ---- processes ------------------------------------------------------------------------------

PROCESSES = """
from pathlib import Path
import gradstream as gs
from gradstream.testing.runs import slow

def job():
    model, data = slow(900, pause_s=0.1, until=Path(__file__).with_name("hurry"))
    return gs.Job(
        model, data, strategy=gs.AllReduce(algorithm="{algorithm}"), optimizer=gs.optim.SGD(lr=1e-6, momentum=0.5),
        workers=3, batch_size=5, epochs=2, checkpoint_every=None, carrier="{carrier}",
    )
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parameters of a run of these processes in which nobody is killed: algorithms differ by rounding too."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "job.py").write_text(PROCESSES.format(algorithm="auto", carrier="shm"))
    (folder / "hurry").touch()
    return gs.train(load_job(f"{folder / 'job.py'}:job"), run_dir=folder / "run").parameters["w"]


@pytest.mark.parametrize(("algorithm", "carrier"), [("auto", "shm"), ("halving-doubling", "tcp")])
def test_killed_processes_change_the_result_by_rounding_alone(
    algorithm: str, carrier: str, tmp_path: Path, expected: Any
) -> None:
    """A SIGKILL of worker 0, and one of the process in its place; the rounds are slow until both have happened."""
    (tmp_path / "job.py").write_text(PROCESSES.format(algorithm=algorithm, carrier=carrier))
    job = load_job(f"{tmp_path / 'job.py'}:job")
    log = tmp_path / "run" / "logs" / "worker-0.log"
    killed: list[int] = []

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["node"] == "worker-0" and len(killed) < 2:
            pid = int(re.findall(r"worker-0: pid (\d+)", log.read_text())[-1])
            if pid not in killed and event["step"] % 5 == 4:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
                if len(killed) == 2:
                    (tmp_path / "hurry").touch()

    run = gs.train(job, run_dir=tmp_path / "run", on_event=on_event)
    np.testing.assert_allclose(run.parameters["w"], expected, rtol=1e-9)
    assert run.summary["workers_lost"] == ["worker-0"] * 2
    assert run.summary["samples_accounted"] == 2 * 900
