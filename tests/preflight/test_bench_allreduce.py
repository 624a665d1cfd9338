"""`gradstream bench allreduce`: real processes, and machines behind cards of 100 Mbit/s."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gradstream.cli import main
from gradstream.collectives.autotune import Choice, MeasuredCosts
from gradstream.collectives.group import Group
from gradstream.collectives.message_group import MessageGroup
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.preflight.allreduce import AllreducePlan, AllreduceResult, measure_here, result_of
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from kit.group_runs import VirtualRanks
from kit.machines import Machines, unavailable


def test_four_processes() -> None:
    options = [
        "--ranks",
        "4",
        "--elements",
        "5000",
        "--algorithm",
        "ring",
        "--carrier",
        "tcp",
        "--times",
        "3",
    ]
    done = CliRunner().invoke(main, ["bench", "allreduce", *options, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["ranks"], found["elements"], found["algorithm"], found["kind"]) == (
        4,
        5000,
        "ring",
        "messages",
    )
    assert (found["carrier"], found["carriers"]) == ("tcp", ["tcp"])
    assert found["min_s"] <= found["median_s"] <= found["max_s"]
    assert found["bytes_s"] == pytest.approx(4 * 5000 / found["median_s"])
    alphas = 6 * found["alpha_s"]
    per_byte_s = 1.5 * found["beta_s_byte"] + 0.75 * found["gamma_s_byte"]
    assert found["predicted_s"] == pytest.approx(alphas + 4 * 5000 * per_byte_s)
    assert found["predicted_over_median"] == found["predicted_s"] / found["median_s"]
    assert found["messages"] is None  # it is what these are


@pytest.mark.parametrize("carrier", ["auto", "grpc"])
def test_what_a_strategy_does_is_measured_and_messages_beside_it(carrier: str) -> None:
    """On one host that is in place, whatever the carrier of the run."""
    options = ["--elements", "1000", "--times", "1", "--carrier", carrier]
    done = CliRunner().invoke(main, ["bench", "allreduce", *options])
    assert done.exit_code == 0, done.output
    own, messages = (
        line for line in done.stdout.splitlines() if line.startswith("allreduce of 1,000 float32")
    )
    assert own.endswith("2 ranks, shared: in place, as a strategy calls it")
    by = "(shm|tcp)" if carrier == "auto" else carrier
    assert re.search(f"2 ranks, messages: [a-z-]+ over {by}$", messages), messages
    assert done.stdout.count("median ") == 2 and done.stdout.count("GB/s of the vector") == 2
    assert re.search(r"predicted  .* of the median, by alpha .*, beta .* s/GB", done.stdout)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--algorithm", "messages", "--carrier", "grpc"], "2 ranks, messages: [a-z-]+ over grpc$"),
        (["--algorithm", "shared"], "2 ranks, shared: in place$"),
        (["--algorithm", "hierarchical", "--ranks", "3"], "3 ranks, messages: hierarchical over (shm|tcp)$"),
        (["--ranks", "1"], "1 ranks, messages: [a-z-]+, as a strategy calls it$"),
    ],
)
def test_what_is_asked_for_is_all_that_is_measured(options: list[str], line: str) -> None:
    done = CliRunner().invoke(main, ["bench", "allreduce", "--elements", "1000", "--times", "1", *options])
    assert done.exit_code == 0, done.output
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("median ") == 1


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_prediction_is_of_the_links_that_carry_it(ranks: int) -> None:
    """Measured on virtual time in pieces, as operations go: the formula then says what they take."""
    network = Network(bandwidth_bytes_s=1e8, link=Link(latency_s=2e-4), header_bytes=0)
    config = SimulationConfig(costs={"reduce": Cost(per_elem_s=4e-10)}, network=network)
    elems = 1_200_000

    async def work(group: Group) -> tuple[MeasuredCosts, float]:
        assert isinstance(group, MessageGroup)
        vector = group.allocate(elems, torch.float32, "v")
        figures = await group.measure(elems // group.size)
        begun_s = asyncio.get_running_loop().time()
        await group.allreduce(vector.all, algorithm="ring")
        return figures, asyncio.get_running_loop().time() - begun_s

    for figures, took_s in VirtualRanks(ranks, config=config).run(work, how="messages"):
        assert figures.alpha_s == pytest.approx(2e-4, rel=1e-2)
        assert figures.beta_s_byte == pytest.approx(1e-8, rel=1e-3)
        assert Choice(ranks, figures).seconds("ring", 4 * elems) == pytest.approx(
            took_s, rel=0.03
        )  # pieces hide latency


def test_what_cannot_be_measured() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        AllreducePlan(algorithm="rings")
    with pytest.raises(ConfigError, match="ranks = 0"):
        AllreducePlan(ranks=0)
    with pytest.raises(UnknownNameError, match="did you mean 'tcp'"):
        AllreducePlan(carrier="tpc")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="need no carrier; leave one of the two out"):
        AllreducePlan(algorithm="shared", carrier="tcp")
    with pytest.raises(ConfigError, match=r"2 ranks hold 80,000\.0 GB"):
        measure_here(AllreducePlan(elements=10**13))


def on_machines(machines: Machines, folder: Path, plan: AllreducePlan) -> AllreduceResult:
    """A rank on each machine."""
    plan.save(folder)
    paths = [str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "gradstream.preflight.allreduce_rank", str(folder)]
    ranks = [
        machine.start(
            [*command, str(rank)],
            cwd=folder,
            env={"PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
        )
        for rank, machine in enumerate(machines.machines)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=100)
        assert rank.returncode == 0, said
    return result_of(folder)


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")
def test_a_slow_network_sets_the_pace(tmp_path: Path) -> None:
    """Cards of 100 Mbit/s, of which headers take 5 %: a ring of 3 sends 4/3 of the vector each."""
    with Machines(3, rate="100mbit") as machines:
        listen = [machine.address for machine in machines.machines]
        plan = AllreducePlan(
            ranks=3, elements=600_000, algorithm="ring", carrier="tcp", times=3, listen=listen, hosts="abc"
        )
        found = on_machines(machines, tmp_path, plan)
    possible_s = 4 / 3 * 4 * 600_000 / 12.5e6
    assert found.median_s > 0.9 * possible_s  # how near it comes, `bench/collectives.py` measures
