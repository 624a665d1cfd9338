"""Reports of what stood in the environment of a process: proxies, ports, Slurm's variables, numbers of threads."""

from __future__ import annotations

import os

import pytest
import torch

import gradstream as gs
from acted_loops import DEADLINES, alone, close, flat, joined, line, part, samples, sgd, step
from gradstream.run.local.environment import node_environment
from gradstream.run.place import Place, place_of
from gradstream.run.remote.address import Address
from gradstream.session.torchrun import StoreRendezvous
from gradstream.testing.sessions import loop_in_threads

STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_JOB_ID": "77",
}


@pytest.mark.parametrize("carrier", ["grpc", "tcp"])
def test_a_proxy_of_the_web_is_not_asked_for_a_run(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc/grpc#9989: with http_proxy set, processes of one machine sought each other through the proxy of the web."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    data = samples(16)

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        for number in range(2):
            start = 8 * number + 4 * session.rank
            step(model, optimizer, part(data, start, start + 4))
        session.close()
        return flat(made)

    found = loop_in_threads(loop, strategy="synchronous", carrier=carrier, deadlines=DEADLINES)
    close(found, alone(joined(part(data, 8 * number, 8 * number + 8)) for number in range(2)))


def test_a_step_without_the_number_of_tasks_of_its_job() -> None:
    """EleutherAI/gpt-neox#1069: where only tasks per node are asked for, Slurm sets no SLURM_NTASKS."""
    place = place_of({**STEP, "SLURM_NTASKS_PER_NODE": "1"})
    assert place is not None
    assert (place.rank, place.size, place.host) == (1, 2, "n3")


def test_a_step_that_is_smaller_than_its_job() -> None:
    """Benzoin96485/Enerzyme#107: the size was that of the whole job, and processes that nobody started were awaited."""
    job = {
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_JOB_NODELIST": "n[1-4]",
    }
    place = place_of({**STEP, **job})
    assert place is not None
    assert (place.size, place.host) == (2, "n3")
    assert (
        place_of({**job, "SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}) is None
    )  # the batch script is one process


def test_two_jobs_on_one_machine_do_not_meet_at_one_port() -> None:
    """facebookresearch/XLM#53: a second run on the machine found the fixed port of the first one taken."""
    ports = set()
    for job in range(30000, 30100):
        place = place_of({**STEP, "SLURM_JOB_ID": str(job)})
        assert place is not None
        ports.add(place.port)
    assert len(ports) == 100
    assert min(ports) >= 1024 and max(ports) < 32768  # below those that Linux gives out itself


def test_process_0_is_where_it_is_and_not_where_the_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#137402: the process of rank 0 was on another machine than the one that MASTER_ADDR named."""
    ways = {"10.0.0.1": "10.0.0.2"}  # the address of this machine on the way to that one
    monkeypatch.setattr("gradstream.session.torchrun.local_address", lambda address: ways[address.host])
    monkeypatch.setattr("gradstream.session.torchrun._store", lambda place, limit_s: None)
    place = Place(engine="torchrun", rank=0, size=4, host="10.0.0.1", port=29500)
    assert StoreRendezvous(place, 1.0, "token").own_address("10.0.0.1") == Address("10.0.0.2")


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_processes_of_a_machine_share_its_cores(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """horovod/horovod#2295: each of the processes of a machine made as many threads as the machine has cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of the machine; a container has twelve of them
    assert node_environment(nodes)["OMP_NUM_THREADS"] == str(12 // nodes)
