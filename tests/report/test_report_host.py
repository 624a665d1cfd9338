"""Causes that lie in the machine: simulated runs, whose events say what a machine with that fault does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.report.figures import figures_of
from gradstream.report.reason import Reason, reason_of
from gradstream.runtime.simulation import Cost, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import Sized, least_squares, numbered

Events = Sequence[Mapping[str, Any]]
CHUNK = 4096
NODES = ("worker-0", "worker-1", "worker-2", "worker-3", "shard-0")


def simulated(
    strategy: Any = None, *, bytes_s: float = 1.25e9, speeds: Mapping[str, float] | None = None
) -> Events:
    """Four workers, eight steps; a gradient takes a second."""
    network = Network(bandwidth_bytes_s=bytes_s)
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1.0)}, speeds=speeds or {}, network=network, shape_only=True
    )
    run = simulate(
        Sized([CHUNK] * 8), numbered(64), config=config, strategy=strategy or gs.Synchronous(),
        workers=4, batch_size=1, chunk_elems=CHUNK, steps=8, seed=1,
    )  # fmt: skip
    return run.events


def on_machines(
    events: Events,
    hosts: Mapping[str, str] | str = "127.0.0.1",
    *,
    carrier: str = "tcp",
    cpu: Mapping[str, float] | float = 1.0,
    queued: bool = True,
    **told: Any,
) -> Events:
    """The same run on real machines.

    Args:
        hosts: by node.
        carrier: between all nodes.
        cpu: of a node's time of arithmetic, how much it had a core; by node, 1 where missing.
        queued: the rest is waiting for one, and the system says so.
        told: other fields of the events `cpu`.
    """
    made: list[Mapping[str, Any]] = []
    for event in events:
        node = event["node"]
        if event["event"] == "joined":
            host = hosts if isinstance(hosts, str) else hosts[event["who"]]
            event = {**event, "address": f"{host}:4000"}
        elif event["event"] == "cpu":
            part = cpu if isinstance(cpu, float) else cpu.get(node, 1.0)
            total_s = sum(event["compute_s"].values())
            event = {
                **event,
                "compute_s": {kind: part * seconds for kind, seconds in event["compute_s"].items()},
                "user_s": part * event["user_s"],
                "queued_s": (1 - part) * total_s if queued else None,
                **told,
            }
        made.append(event)
    by_peer = dict.fromkeys(NODES, carrier)
    return [
        *made,
        *({"event": "carriers", "node": node, "time_s": 0.0, "by_peer": by_peer} for node in NODES),
    ]


def reason(events: Events, cores: int | None = 2, *, processes: bool = True) -> Reason:
    return reason_of(figures_of(events), cores, processes=processes)


@pytest.mark.parametrize("strategy", [gs.Synchronous(), gs.Downpour(), gs.AllReduce()])
def test_other_processes_hold_the_cores(strategy: Any) -> None:
    """32 gradients of a second each, of which a tenth was computing: 3.2 s of CPU in the run's 8 s or so."""
    found = reason(on_machines(simulated(strategy), cpu=0.1, load=14.2, cores=2))
    assert (found.kind, found.culprit) == ("busy host", "")
    assert found.text == (
        "Other processes hold the cores: gradients took 32.0 s, and computed for 3.2 s of them; the "
        "machine's load was 14.2 on 2 cores, of which this run used 0.4."
    )
    assert "End the other processes" in found.remedy


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_the_exchange_on_a_busy_machine_is_not_to_blame(carrier: str) -> None:
    """The workers wait for the exchange longer than they compute, as a shard has no core either."""
    events = simulated(bytes_s=2.5e5)
    waiting = reason(on_machines(events, carrier=carrier))
    assert waiting.kind == {"shm": "memory", "tcp": "loopback"}[carrier]
    assert reason(on_machines(events, carrier=carrier, cpu=0.2)).kind == "busy host"


def test_where_the_system_does_not_tell_the_load_does() -> None:
    events = simulated()
    busy = reason(on_machines(events, cpu=0.1, queued=False, load=14.2, cores=2))
    assert busy.kind == "busy host"
    told = on_machines(events, cpu=0.1, load=14.2, cores=2, queued_s=0.2)
    assert reason(told).kind == "blocked"  # where it tells, the load does not count
    idle = reason(on_machines(events, cpu=0.1, queued=False, load=0.5, cores=2))
    assert idle.kind == "blocked"
    assert "Gradients wait, and not for a core" in idle.text
    assert "the machine's load was 0.5 on 2 cores" in idle.text
    assert "a device, a lock, a sleep" in idle.remedy


def test_a_loop_of_the_users_computes_on_a_thread_of_its_own() -> None:
    """What that had of a core is what its process had, at most; how long it waited, nobody says."""

    def looping(part: float) -> Events:
        events = on_machines(simulated(), cpu=part, load=14.2, cores=2)
        return [{**event, "compute_s": {}} if event["event"] == "cpu" else event for event in events]

    assert reason(looping(1.0), 8).kind == "compute"
    found = reason(looping(0.1))
    assert found.kind == "busy host"
    assert "gradients took 32.0 s, and computed for 3.2 s of them" in found.text


def test_a_machine_that_this_run_fills_is_another_reason_than_other_processes() -> None:
    """Four workers with half a core each fill two."""
    found = reason(on_machines(simulated(), cpu=0.5, load=4.4, cores=2))
    assert found.kind == "machine"
    assert "this run keeps its 2 cores busy; gradients took 32.0 s, and computed for 16.0 s" in found.text
    assert reason(on_machines(simulated(), cpu=0.5, load=4.4, cores=8), 8).kind == "busy host"


def test_nodes_that_are_threads_compute_by_turns() -> None:
    found = reason(on_machines(simulated(), cpu=0.25, queued=False), processes=False)
    assert found.kind == "machine"
    assert "threads of one process, and compute one after the other" in found.text


def test_one_busy_machine_of_several_is_named_with_its_worker() -> None:
    hosts = {node: f"10.0.0.{number}" for number, node in enumerate(NODES)}
    events = simulated(speeds={"worker-2": 0.2})
    found = reason(on_machines(events, hosts, cpu={"worker-2": 0.2}, load=9.0, cores=2), None)
    assert (found.kind, found.culprit) == ("busy host", "worker-2")
    assert found.text.startswith(
        "worker-2 computes 5.0 times slower than the median; the others waited 80% of their time for it; "
        "other processes hold the cores: gradients took 40.0 s, and computed for 8.0 s of them"
    )
    slow = reason(on_machines(events, hosts, load=0.9, cores=2), None)
    assert (slow.kind, slow.culprit) == ("slow worker", "worker-2")


def reading(events: Events, part: Mapping[str, float] | float) -> Events:
    """Such a part of each gradient is reading samples, in which nothing is computed."""
    made = []
    for event in events:
        of_node = part if isinstance(part, float) else part.get(event["node"], 0.0)
        is_step = event["event"] == "step"
        made.append({**event, "read_s": of_node * event["compute_s"]} if is_step else event)
    return made


def test_a_slow_disk_is_named() -> None:
    events = on_machines(simulated(gs.Downpour()), cpu=0.4, queued=False, load=1.0, cores=2)
    found = reason(reading(events, 0.6))
    assert (found.kind, found.culprit) == ("reading", "")
    assert "Reading samples takes 60% of the workers' time (19.2 s)" in found.text
    assert "or the disk below it" in found.text


def test_a_slow_disk_of_one_worker_is_named_with_it() -> None:
    cpu = {"worker-1": 0.25}
    events = on_machines(simulated(speeds={"worker-1": 0.25}), cpu=cpu, queued=False, load=1.0, cores=2)
    found = reason(reading(events, {"worker-1": 0.75}))
    assert (found.kind, found.culprit) == ("reading", "worker-1")
    assert "worker-1 computes 4.0 times slower than the median; the others waited" in found.text
    assert "for it; reading samples takes 75% of its time" in found.text


def test_checkpoints_that_pause_workers_are_named() -> None:
    model, data = least_squares(64, 4)
    config = SimulationConfig(costs={"gradient": Cost(base_s=0.1), "snapshot": Cost(base_s=2.0)})
    run = simulate(
        model, data, config=config, strategy="synchronous", workers=2, batch_size=4, steps=8, chunk_elems=64,
        checkpoint_every=2, storage=MemoryStorage(),
    )  # fmt: skip
    found = reason_of(figures_of(run.events))
    assert found.kind == "checkpoints"
    assert "for checkpoints" in found.text and "checkpoint_every" in found.remedy


@pytest.mark.parametrize("costs", [{}, {"apply": Cost(base_s=1e-4)}])
def test_tiny_chunks_are_named(costs: Mapping[str, Cost]) -> None:
    """512 chunks of 256 bytes: the shard, and the network's cards, do nothing but pass messages."""
    network = Network(bandwidth_bytes_s=3e6, header_bytes=640)
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1e-3), **costs}, network=network, shape_only=True
    )
    options: dict[str, Any] = {"workers": 4, "batch_size": 1, "steps": 2, "seed": 1}
    tiny, large = (
        reason_of(figures_of(simulate(
            Sized([CHUNK] * 8), numbered(64), config=config, strategy="downpour", chunk_elems=elems, **options
        ).events))
        for elems in (64, CHUNK)
    )  # fmt: skip
    assert tiny.kind == "chunks"
    assert "as 512 chunks of 256 bytes, and each costs a message" in tiny.text
    assert "chunk_elems" in tiny.remedy
    assert large.kind != "chunks"


def test_shared_memory_is_not_called_a_network() -> None:
    found = reason(on_machines(simulated(bytes_s=2.5e5), carrier="shm"))
    assert found.text.startswith("Shared memory, and no network: the workers waited")
    assert "network" not in found.remedy
    sockets = reason(on_machines(simulated(bytes_s=2.5e5)))
    assert sockets.text.startswith("This machine's own sockets (carrier tcp): the workers waited")
    hosts = {node: f"10.0.0.{number}" for number, node in enumerate(NODES)}
    apart = reason(on_machines(simulated(bytes_s=2.5e5), hosts), None)
    assert apart.text.startswith("The network: the workers waited")
