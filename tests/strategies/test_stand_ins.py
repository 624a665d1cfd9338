"""Under `synchronous` a lost worker's part of each round is computed by another, until a new process takes it over."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.lost_work import StandIns
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.data.ledger import Ledger
from gradstream.data.plan import RoundPlan
from gradstream.job.files import load_job
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK, kill_at, least_squares, replace_at
from gradstream.wire import v1
from gradstream.worker.server.stand_in import StandIn

WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=0.03, jitter=Exponential()), "apply": Cost(base_s=1e-3)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e5),
)
"""A chunk of 64 float64 takes 5 ms on the wire: between the first and the last chunk of a push there is time to die."""

EPOCHS = 2
MODEL, DATA = least_squares(96, 300, whole=False, reduction="mean")
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=0.01, momentum=0.9), "workers": 3, "servers": 2, "batch_size": 4,
    "epochs": EPOCHS, "chunk_elems": 64, "deadlines": QUICK, "config": WORLD,
}  # fmt: skip
UNTIL_S = 1.3
"""About the length of such a run."""


def run_with(script: Any, strategy: gs.Strategy | None = None, **options: Any) -> tuple[gs.Run, list[Any]]:
    events: list[Any] = []
    given = {**JOB, "strategy": strategy or gs.Synchronous(), **options}
    return simulate(MODEL, DATA, script=script, on_event=events.append, **given), events


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """The parameters of a run in which nobody dies."""
    return run_with(None)[0].parameters["w"]


def same(run: gs.Run, parameters: Any) -> bool:
    accounted = run.summary["samples_accounted"] == EPOCHS * 96
    return bool(np.array_equal(run.parameters["w"], parameters)) and accounted


@pytest.mark.parametrize(
    ("strategy", "after_s"),
    [(gs.Synchronous(), None), (gs.Synchronous(), 0.0), (gs.Synchronous(overlap=False), 0.05)],
    ids=["lost", "at-once", "later"],
)
def test_a_death_at_any_instant_changes_no_bit(
    strategy: gs.Strategy, after_s: float | None, undisturbed: Any
) -> None:
    rng, deaths, steps = random.Random(f"{strategy} {after_s}"), 0, 0
    for _ in range(3):
        name, at_s = f"worker-{rng.randrange(3)}", rng.uniform(0.02, UNTIL_S)
        script = kill_at(name, at_s) if after_s is None else replace_at(name, at_s, after_s)
        run, events = run_with(script, strategy)
        assert same(run, undisturbed), (name, at_s)
        deaths += run.summary["workers_lost"] == [name]
        back_s = [e["time_s"] for e in events if e["event"] == "joined" and e["epoch"] > 1]
        steps += sum(
            bool(back_s) and e["event"] == "step" and e["node"] == name and e["time_s"] > back_s[0]
            for e in events
        )
    assert deaths > 1
    assert (steps > 3) == (after_s is not None)


def test_they_die_one_after_the_other_and_the_last_one_ends_as_all_would_have(undisturbed: Any) -> None:
    rng = random.Random(1)
    for _ in range(2):
        order = rng.sample(range(3), 2)

        async def script(cluster: Any, order: list[int] = order) -> None:
            for rank in order:
                await cluster.virtual.runtime("director").sleep(rng.uniform(0.0, 0.6))
                cluster.kill(f"worker-{rank}")

        run, _ = run_with(script)
        assert same(run, undisturbed), order


def test_they_die_and_come_back_again_and_again(undisturbed: Any) -> None:
    """Stand-ins and newcomers that wait among them."""
    for seed in range(2):
        rng = random.Random(seed)

        async def script(cluster: Any, rng: random.Random = rng) -> None:
            director = cluster.virtual.runtime("director")
            for _ in range(4):
                await director.sleep(rng.uniform(0.0, 0.3))
                two = rng.sample(range(3), 2)
                cluster.kill(f"worker-{two[0]}")
                await director.sleep(rng.choice([0.0, 0.003, 0.05]))
                await cluster.restart(f"worker-{two[0]}")
                await director.sleep(rng.choice([0.0, 0.003, 0.05]))
                if cluster.outcomes.keys() & {f"worker-{two[0]}"}:
                    return  # the run is over

        run, _ = run_with(script)
        assert same(run, undisturbed), seed


def test_a_round_may_be_torn_when_its_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: who stands in begins with the next round. A chunk waits then for a gradient that never comes."""
    original = StandIn.hear

    def hear(self: StandIn, notice: v1.Notice) -> None:
        present, self._round = self._round, None
        original(self, notice)
        self._round = present

    monkeypatch.setattr(StandIn, "hear", hear)

    def is_stuck(seed: int) -> bool:

        async def script(cluster: Any, at_s: float = 0.3 + 0.05 * seed) -> None:
            await kill_at("worker-1", at_s)(cluster)
            await cluster.virtual.runtime("director").sleep(5 * UNTIL_S)
            cluster.kill("coordinator")

        try:
            run_with(script)
        except gs.errors.PeerLostError as error:
            return error.peer == "coordinator"
        return False

    assert any(map(is_stuck, range(6)))


def test_another_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch, undisturbed: Any) -> None:
    """Planted: who stands in takes its own minibatch once more."""
    original = StandIn._gradient

    async def gradient(self: StandIn, present: Any, rank: int) -> Any:
        update = await original(self, present, present.ref.partition)
        update.stands_for = rank
        return update

    monkeypatch.setattr(StandIn, "_gradient", gradient)
    assert not same(run_with(kill_at("worker-1", 0.4))[0], undisturbed)


def test_checkpoints_are_made_meanwhile_and_resumed_with_the_same_bits(undisturbed: Any) -> None:
    for seed in range(2):
        script = replace_at("worker-1", 0.2 + 0.1 * seed, 0.02 * seed)
        run, events = run_with(script, checkpoint_every=2, storage=MemoryStorage())
        assert same(run, undisturbed)
        assert len([e for e in events if e["event"] == "checkpoint"]) > 3


# ---- who stands in ----------------------------------------------------------------------


def nodes_of(*ranks: int) -> Nodes:
    nodes = Nodes(num_workers=4, num_servers=0)
    for rank in ranks:
        nodes.add(v1.Node(name=f"worker-{rank}", role="worker", rank=rank, incarnation=7))
    return nodes


def told(stand_ins: StandIns) -> list[tuple[int, str, int]]:
    notice = v1.Notice()
    stand_ins.notice(notice)
    return [(one.rank, one.worker, one.newcomer) for one in notice.stand_ins]


def hands_over(stand_ins: StandIns, rank: int, report: v1.HandOver) -> bool:
    node = v1.Node(name=f"worker-{rank}", role="worker", rank=rank)
    return bool(stand_ins.on_report(node, "handed", report, 0.0))


def test_whoever_has_least_to_do_stands_in() -> None:
    nodes = nodes_of(0, 1, 2, 3)
    stand_ins = StandIns(nodes, SampleProgress(Ledger(RoundPlan(48, 4, 4), epochs=2), None, None))
    for rank in (1, 2):
        nodes.remove(f"worker-{rank}")
        stand_ins.on_absent(rank)
    assert told(stand_ins) == [(1, "worker-0", 0), (2, "worker-3", 0)]
    nodes.remove("worker-0")
    stand_ins.on_absent(0)
    assert told(stand_ins) == [(0, "worker-3", 0), (1, "worker-3", 0), (2, "worker-3", 0)]


def test_a_newcomer_begins_where_its_stand_in_has_handed_over_to_it_and_no_earlier_one() -> None:
    nodes = nodes_of(0, 1)
    stand_ins = StandIns(nodes, SampleProgress(Ledger(RoundPlan(48, 4, 4), epochs=2), None, None))
    nodes.remove("worker-1")
    stand_ins.on_absent(1)
    hand_over = v1.HandOver(rank=1, round=9, newcomer=8)
    assert not hands_over(stand_ins, 0, hand_over)  # nobody is there
    nodes.add(v1.Node(name="worker-1", role="worker", rank=1, incarnation=8))
    nodes.entering.add("worker-1")
    assert told(stand_ins) == [(1, "worker-0", 8)]
    assert nodes.active_workers == ["worker-0"]
    assert not hands_over(stand_ins, 1, hand_over)  # not the one that stands in
    assert not hands_over(stand_ins, 0, v1.HandOver(rank=1, round=7, newcomer=6))  # to one that is lost
    assert hands_over(stand_ins, 0, hand_over)
    assert told(stand_ins) == []
    node = nodes.get("worker-1")
    assert node is not None
    assert node.first_round == 9


def test_a_receipt_tells_of_the_parts_of_lost_workers_too() -> None:
    ledger = Ledger(RoundPlan(48, 4, 3), epochs=2)
    for k in range(4):
        ledger.receipt(ledger.plan.nth(0, k), 0)
    ledger.settle_rounds(1)
    assert [ledger.receipt(ledger.plan.nth(1, k), 1) for k in range(6)] == [False] * 4 + [True] * 2
    assert [ledger.receipt(ledger.plan.nth(2, k), 2) for k in range(6)] == [True] * 6


# ---- processes --------------------------------------------------------------------------

PROCESSES = """
from pathlib import Path
import gradstream as gs
from gradstream.testing.runs import slow

def job():
    model, data = slow(900, pause_s=0.1, until=Path(__file__).with_name("hurry"))
    return gs.Job(
        model, data, strategy="synchronous", optimizer=gs.optim.SGD(lr=1e-6), workers=3, batch_size=5, epochs=2,
        checkpoint_every=None, carrier="{carrier}",
    )
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parameters of a run of these processes in which nobody is killed, whatever the carrier."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "job.py").write_text(PROCESSES.format(carrier="shm"))
    (folder / "hurry").touch()
    return gs.train(load_job(f"{folder / 'job.py'}:job"), run_dir=folder / "run").parameters["w"]


@pytest.mark.parametrize(
    "carrier", ["grpc"]
)  # by which a death is heard of differs; test_regroup.py has others
def test_killed_processes_change_no_bit(carrier: str, tmp_path: Path, expected: Any) -> None:
    """Two kills of worker 1, which the launcher starts again; the rounds are slow until both have happened."""
    (tmp_path / "job.py").write_text(PROCESSES.format(carrier=carrier))
    job = load_job(f"{tmp_path / 'job.py'}:job")
    log = tmp_path / "run" / "logs" / "worker-1.log"
    killed: list[int] = []

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["node"] == "worker-1" and len(killed) < 2:
            pid = int(re.findall(r"worker-1: pid (\d+)", log.read_text())[-1])
            if pid not in killed and event["step"] % 5 == 4:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
                if len(killed) == 2:
                    (tmp_path / "hurry").touch()

    run = gs.train(job, run_dir=tmp_path / "run", on_event=on_event)
    np.testing.assert_array_equal(run.parameters["w"], expected)
    assert len(killed) == 2
    assert run.summary["workers_lost"] == ["worker-1", "worker-1"]
    assert run.summary["samples_accounted"] == 2 * 900
