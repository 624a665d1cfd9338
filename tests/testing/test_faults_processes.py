"""Fault plans on real processes: signals to nodes, and a proxy that harms the links between them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.job.files import load_job
from gradstream.run.remote.address import Address
from gradstream.run.remote.listening import Listening
from gradstream.testing.runs import UNSTEADY, Tokens, check_exactly_once
from kit.faults import (
    Corrupt,
    Cut,
    DiskFull,
    Drain,
    Duplicate,
    Fault,
    FaultPlan,
    Freeze,
    Kill,
    Lose,
    Reorder,
    Slow,
    SlowLink,
    Stop,
)
from kit.link_proxy import LinkProxy
from kit.process_faults import on_processes

SAMPLES, EPOCHS = 64, 8
NODES = ["coordinator", "shard-0", "shard-1", "worker-0", "worker-1", "worker-2"]
JOB = """
import time
import gradstream as gs
from gradstream.testing.runs import Tokens, numbered

class SlowTokens(Tokens):
    def gradient(self, *given, **named):
        time.sleep(0.02)
        return super().gradient(*given, **named)

def job():
    return gs.Job(
        SlowTokens(3), numbered(64), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0), workers=3, servers=2,
        batch_size=2, epochs=8, chunk_elems=64, carrier="tcp", checkpoint_every=None,
        deadlines=gs.Deadlines(lease_s=4.0, silence_s=1.0),
    )
"""
MakeJob = Callable[..., gs.Job]


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    (tmp_path / "job.py").write_text(JOB)
    return lambda **changes: replace(load_job(f"{tmp_path / 'job.py'}:job"), **changes)


def test_one_plan_on_virtual_time_and_on_processes(job: MakeJob, tmp_path: Path) -> None:
    faults: list[Fault] = [
        Cut("worker-1", "shard-0", 0.2, 0.4),
        Cut("worker-2", "*", 0.4, 0.3, both=False),
        Lose("shard-1", "worker-0", 0.03),  # answers
        Duplicate("worker-0", "shard-0", 0.3),
        Reorder("worker-2", "shard-0", 0.03),
        SlowLink("shard-0", "worker-1", 0.005),
        Corrupt("worker-1", "shard-1", 0.03),
        Stop("worker-0", 0.3, 0.3),
        Kill("worker-2", 0.8, 0.01),
    ]
    virtual, real = FaultPlan(faults), FaultPlan(faults)
    simulated = gs.simulate(
        job(model=Tokens(3), carrier="auto"), config=virtual.config(UNSTEADY, NODES), script=virtual
    )
    run = on_processes(real, job(), tmp_path / "run")
    for one in (simulated, run):
        check_exactly_once(one, SAMPLES, EPOCHS)
        assert "worker-2" in one.summary["workers_lost"]
    assert virtual.fired == real.fired == faults
    assert {one["peer"] for one in run.events if one["event"] == "damaged"} == {"worker-1"}


def test_links_of_grpc(job: MakeJob, tmp_path: Path) -> None:
    faults: list[Fault] = [
        Cut("shard-1", "worker-0", 0.2, 0.5, both=False),
        Lose("worker-1", "shard-0", 0.03),
        SlowLink("worker-2", "coordinator", 0.05),
        Corrupt("shard-1", "worker-2", 0.03),
    ]
    run = on_processes(FaultPlan(faults), job(carrier="grpc"), tmp_path / "run")
    check_exactly_once(run, SAMPLES, EPOCHS)


def test_damaged_bytes_over_tls(job: MakeJob, tmp_path: Path) -> None:
    listening = Listening(address=Address("127.0.0.1"), machines=1, workers_per_machine=3)
    plan = FaultPlan([Corrupt("worker-1", "shard-0", 0.04), Corrupt("shard-1", "worker-0", 0.04)])
    run = on_processes(plan, job(carrier="grpc"), tmp_path / "run", listening=listening)
    check_exactly_once(run, SAMPLES, EPOCHS)
    assert plan.kinds == {"corrupt": 2}


def test_a_ring_whose_rank_is_killed_behind_a_slow_link(job: MakeJob, tmp_path: Path) -> None:
    """Its data sockets go through the proxy too."""
    ring = job(
        strategy="allreduce", strategy_options={"algorithm": "ring"}, servers=None, batch_size=2, epochs=4
    )
    faults: list[Fault] = [SlowLink("worker-0", "worker-1", 0.01), Kill("worker-2", 0.3)]
    run = on_processes(FaultPlan(faults), ring, tmp_path / "run")
    alone = gs.simulate(replace(ring, model=Tokens(3), carrier="auto"))
    assert np.array_equal(run.parameters["tokens"], alone.parameters["tokens"])


def test_a_plan_strikes_processes_in_rounds(job: MakeJob, tmp_path: Path) -> None:
    plan = FaultPlan([Kill("worker-1", 0.3), Stop("worker-2", 0.2, 0.5), Drain("worker-0", 0.6)])
    run = on_processes(plan, job(carrier="auto", strategy="synchronous"), tmp_path / "run")
    assert run.summary["samples_accounted"] == SAMPLES * EPOCHS
    assert plan.kinds == {"kill": 1, "stop": 1, "drain": 1}
    assert "worker-1" in run.summary["workers_lost"]
    assert Kill.number == signal.SIGKILL


def test_a_fault_without_effect_is_an_error(job: MakeJob, tmp_path: Path) -> None:
    plan = FaultPlan(
        [Kill("worker-1", 99.0), Lose("shard-0", "shard-1", 1.0), SlowLink("worker-0", "shard-0", 0.001)]
    )
    with pytest.raises(AssertionError, match=r"2 of 3 faults had no effect: \[Kill.*Lose"):
        on_processes(plan, job(epochs=1), tmp_path / "run")
    assert plan.kinds == {"slowlink": 1}


REFUSED: list[tuple[Fault, dict[str, Any], str]] = [
    (Kill("worker-7", 0.1), {}, "no node 'worker-7'; expected one of coordinator, shard-0"),
    (Cut("worker-1", "shard-7", 0.1, 0.1), {}, "no node 'shard-7'"),
    (Cut("worker-1", "*", 0.1, 0.1), {"carrier": "auto"}, "use carrier='tcp' or 'grpc'"),
    (Cut("worker-1", "worker-0", 0.1, 0.1), {"strategy": "allreduce", "servers": None}, "algorithm='ring'"),
    (Duplicate("worker-1", "shard-0", 0.1), {"carrier": "grpc"}, "needs the frames of carrier='tcp'"),
    (Reorder("worker-1", "coordinator", 0.1), {}, "links without the coordinator"),
    (Duplicate("worker-1", "shard-0", 0.1), {"connections": 2}, "connections=1"),
    *(
        (one, {}, "on virtual time alone")
        for one in (
            Freeze("worker-1", 0.1, 0.1),
            DiskFull("coordinator", 0.1, 0.1),
            Slow("worker-1", 0.1, 0.1, 2.0),
        )
    ),
]


@pytest.mark.parametrize(("fault", "changes", "message"), REFUSED)
def test_what_processes_cannot_suffer_is_refused(
    fault: Fault, changes: dict[str, Any], message: str, job: MakeJob, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("*", r"\*")):
        on_processes(FaultPlan([fault]), job(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_proxy_leaves_no_thread(tmp_path: Path) -> None:
    with LinkProxy() as proxy:
        thread = proxy._thread
        assert thread.is_alive()
    assert not thread.is_alive()
