"""Strategy "auto": a phase measures the links, and the next one exchanges so that workers hardly wait."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

import gradstream as gs
from gradstream.checkpoint.manifest import JobPhase
from gradstream.coordinator.durable import StateStore
from gradstream.coordinator.link_choice import Chosen, LinkChoice, Links
from gradstream.errors import ConfigError, Interrupted
from gradstream.job.phase_jobs import job_of_phase, measured_first
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.storage import MemoryStorage
from kit.machines import Machines, unavailable
from machine_command import Command
from whole_runs import same

SAMPLES = 2560
COMPUTE_S = 0.016


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def run_of(mbit_s: float, **options: Any) -> gs.Run:
    """A run of four workers that compute for 16 ms; a sum of 0.2 MB takes 30 ms at 100 Mbit/s."""
    images = torch.rand(SAMPLES, 1, 28, 28, generator=torch.Generator().manual_seed(0)).numpy()
    given: dict[str, Any] = {
        "strategy": "auto",
        "optimizer": gs.optim.SGD(lr=0.01),
        "workers": 4,
        "batch_size": 16,
        "epochs": 2,
        "config": gs.sim.SimulationConfig(
            costs={"gradient": gs.sim.Cost(per_sample_s=COMPUTE_S / 16)},
            network=gs.sim.Network(bandwidth_bytes_s=mbit_s / 8e-6, link=gs.sim.Link(latency_s=1e-3)),
        ),
        **options,
    }
    targets = (images.sum((1, 2, 3)) % 10).astype("int64")
    test = given.pop("test_samples", 0)
    held_back = {"test_inputs": images[:test], "test_targets": targets[:test]} if test else {}
    data = gs.from_arrays(images, targets, **held_back)
    return gs.simulate(given.pop("model", None) or gs.from_torch(mlp, F.cross_entropy), data, **given)


def chosen(run: gs.Run) -> list[tuple[str, str]]:
    return [(event["strategy"], event["why"]) for event in run.events if event["event"] == "phase"]


def waited(run: gs.Run) -> float:
    """Seconds that a minibatch took beside its computing, in the middle of the last phase."""
    begun = max((number for number, event in enumerate(run.events) if event["event"] == "phase"), default=0)
    steps = [event for event in run.events[begun:] if event["event"] == "step" and event["rank"] == 0]
    minibatches = sum(event["samples"] for event in steps[1:-1]) / 16
    return float((steps[-2]["time_s"] - steps[0]["time_s"]) / minibatches - COMPUTE_S)


def test_slow_links_become_local_sgd_that_hardly_waits() -> None:
    run = run_of(100)
    (_, nothing), (strategy, why) = chosen(run)
    assert (strategy, nothing) == ("local-sgd", "")
    assert (
        "16 ms of computing" in why and "of waiting for each minibatch, at 100 Mbit/s: local SGD every" in why
    )
    assert run.summary["samples"] == 2 * SAMPLES
    assert waited(run) < 0.15 * COMPUTE_S < waited(run_of(100, strategy="allreduce"))
    assert run.summary["phases"][0]["label"] == "measures"
    assert run.summary["links"] is None  # the seconds of a round are not those of a minibatch


def test_no_round_is_longer_than_a_data_epoch() -> None:
    """Without that bound the period would be longer at this speed."""
    every = {}
    for batch_size, epoch in ((16, 40), (64, 10)):
        phases = [gs.Phase(steps=2, strategy="allreduce"), gs.Phase(epochs=2, strategy="auto")]
        options = {"strategy": "allreduce", "epochs": None, "phases": phases, "batch_size": batch_size}
        why = chosen(run_of(0.15 * batch_size / 16, **options))[1][1]
        every[epoch] = int(why.partition("local SGD every ")[2].split()[0])
    assert every[10] == 10 < every[40] <= 40


@pytest.mark.parametrize(("mbit_s", "most"), [(10, 4), (100, 20)])
def test_slow_links_are_known_after_two_steps(mbit_s: float, most: int) -> None:
    """A sum takes 310 ms at 10 Mbit/s, twenty times as long as the computing. Phases of the user's own stay whole."""
    own = [gs.Phase(steps=20, strategy="allreduce"), gs.Phase(epochs=2, strategy="auto")]
    for options, least, limit in (
        ({}, 2, most),
        ({"strategy": "allreduce", "epochs": None, "phases": own}, 20, 20),
    ):
        run = run_of(mbit_s, **options)
        rows = run.summary["phases"]
        assert least <= rows[1]["samples"] / 64 <= limit  # samples before it
        assert rows[1]["strategy"] == "local-sgd"


class Normalised(nn.Sequential):
    """Running means and dropout: each gradient leaves a trace that `forward` shows."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 10)
        )


def plainly(why: str) -> dict[str, Any]:
    """The options of a run that exchanges as was chosen, from its beginning on."""
    found = re.search(
        r"every (\d+) minibatches with (\S+?)(?: and outer momentum (\S+))?, exchanged behind (\d+)", why
    )
    assert found is not None, why
    every, codec, momentum, delay = found.groups()
    strategy = gs.LocalSGD(every=int(every), delay=int(delay), outer_momentum=float(momentum or 0))
    return {"strategy": strategy, "codec": codec}


def test_a_sum_of_seconds_is_not_waited_for_to_know_it() -> None:
    """And what the workers have computed to know it is nowhere in the model."""
    options = {
        "model": gs.from_torch(Normalised, F.cross_entropy),
        "optimizer": gs.optim.SGD(0.01, momentum=0.9),
    }
    run = run_of(1, **options)
    _, (strategy, why) = chosen(run)
    assert strategy == "local-sgd"
    assert "16 ms of computing for each minibatch, and 1.2" in why
    assert re.search(r" s for a sum, at (0\.99\d|1) Mbit/s", why)  # control messages take some of it
    assert [row["samples"] for row in run.summary["phases"]] == [0, 0]
    plain = run_of(1, **options, **plainly(why))
    assert same(run, plain) and run.summary["samples"] == plain.summary["samples"] == 2 * SAMPLES
    held, labels = np.random.default_rng(1).random((64, 1, 28, 28), np.float32), np.arange(64) % 10
    data = gs.from_arrays(held, labels, held, labels)
    assert run.evaluate(data) == plain.evaluate(data)  # with the running means


class Death:
    """Kills a node at a time, and begins the coordinator again."""

    def __init__(self, victim: str, at_s: float) -> None:
        self._victim, self._at_s = victim, at_s
        self.fired = False

    def store(self, job: str) -> StateStore:
        return StateStore(":memory:", job)

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(self._at_s)
        self.fired = cluster.is_running(self._victim)
        cluster.kill(self._victim)
        if self._victim == "coordinator":
            await director.sleep(0.05)
            await cluster.restart(self._victim)


@pytest.mark.parametrize("victim", ["worker-0", "worker-2", "coordinator"])
@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.15])
def test_who_dies_about_the_look_is_done_without(victim: str, after_s: float) -> None:
    """While gradients are computed, while the coordinator ends the phase, and while that is written."""
    group = next(event for event in run_of(1).events if event["event"] == "group")
    death = Death(victim, group["time_s"] + after_s)
    run = run_of(1, script=death)
    assert death.fired
    assert run.summary["samples"] == 2 * SAMPLES
    assert [strategy for strategy, _ in chosen(run)] == ["allreduce", "local-sgd"]


def test_workers_go_on_where_the_coordinator_does_not_end_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have heard of their look. They wait for it as long as for any answer."""
    monkeypatch.setattr(LinkChoice, "ends", lambda *_: "")
    run = run_of(1)
    assert [event["event"] for event in run.events].count("rehearsed") == 1
    assert run.summary["phases"][1]["samples"] == 20 * 64
    first = next(event for event in run.events if event["event"] == "step")
    assert first["time_s"] > gs.Deadlines().silence_s


def test_on_quick_links_allreduce_goes_on() -> None:
    run = run_of(10_000)
    assert [strategy for strategy, _ in chosen(run)] == ["allreduce", "allreduce"]
    assert chosen(run)[1][1].endswith(" Mbit/s: allreduce after each is quick enough")
    assert same(run, run_of(10_000, strategy="allreduce"))


@pytest.mark.parametrize(("mbit_s", "every"), [(10_000, 12), (100, 12), (1, 50), (1, 3)])
def test_evaluations_come_after_as_many_minibatches_as_asked(mbit_s: float, every: int) -> None:
    """To the nearest round, and after each where a round is longer."""
    run = run_of(mbit_s, evaluate_every=every, test_samples=64, epochs=8)
    period = int(found[1]) if (found := re.search(r"every (\d+) minibatches", chosen(run)[-1][1])) else 1
    in_last_phase = [event for event in run.evaluations if event["samples"] > 2 * SAMPLES]
    steps = [event["step"] for event in in_last_phase]
    assert {later - sooner for sooner, later in pairwise(steps[:-1])} == {max(1, round(every / period))}


@pytest.mark.parametrize(("period", "rounds"), [(20, 2), (3, 1), (None, None), ("epoch", "epoch")])
def test_checkpoints_and_evaluations_are_asked_for_in_minibatches(period: Any, rounds: Any) -> None:
    options: dict[str, Any] = {"evaluate_every": period, "checkpoint_every": period}
    x, y = np.zeros((1000, 4), "f4"), np.zeros(1000, "i8")
    data = gs.from_arrays(x, y, test_inputs=x[:4], test_targets=y[:4])
    model = gs.from_torch(lambda: nn.Linear(4, 2), F.cross_entropy)
    job = measured_first(gs.Job(model, data, strategy="auto", batch_size=4, epochs=1, **options))
    for number, choice, expected in ((0, Chosen(), period), (1, Chosen(every=9), rounds)):
        made = job_of_phase(job, JobPhase(number, chosen=choice.as_json()))
        assert (made.evaluate_every, made.checkpoint_every) == (expected, expected)


def test_links_are_measured_again_at_each_boundary() -> None:
    """In a phase of local SGD too, where a step is a round of many minibatches."""
    phases = [gs.Phase(steps=12, strategy="allreduce"), *[gs.Phase(epochs=1, strategy="auto")] * 2]
    first, again = chosen(run_of(100, strategy="allreduce", epochs=None, phases=phases))[1:]
    assert first[0] == again[0] == "local-sgd"
    assert "16 ms of computing for each minibatch, and " in again[1] and again[1] != first[1]
    assert (
        first[1].partition(": ")[2] == again[1].partition(": ")[2]
    )  # the same period, since nothing has changed


def test_a_phase_behind_auto_does_not_repeat_its_reason() -> None:
    phases = [
        gs.Phase(steps=12, strategy="allreduce"),
        gs.Phase(epochs=1, strategy="auto"),
        gs.Phase(epochs=1, strategy="synchronous", servers=1),
    ]
    _, (_, why), last = chosen(run_of(100, strategy="allreduce", epochs=None, phases=phases))
    assert why
    assert last == ("synchronous", "")


def test_a_run_that_is_stopped_exchanges_as_it_was_chosen() -> None:
    storage = MemoryStorage()
    whole = run_of(100)

    async def stop(cluster: SimulatedCluster) -> None:
        assert cluster.coordinator is not None
        while not cluster.coordinator.membership.life.boundary.number:
            await cluster.virtual.runtime("director").sleep(1e-2)
        cluster.coordinator.stop()

    with pytest.raises(Interrupted):
        run_of(100, storage=storage, script=stop)
    resumed = run_of(100, storage=storage, resume=True)
    assert chosen(resumed) == [chosen(whole)[1]]
    assert same(resumed, whole)


def test_a_new_process_of_the_coordinator_knows_what_was_measured() -> None:
    choice, other = LinkChoice(4), LinkChoice(4)
    choice.event({"event": "group", "alpha_s": 1e-3, "beta_s_byte": 8e-8})
    for seconds in (9.0, 9.0, *[0.1] * 10):  # the first steps are slow
        choice.event({"event": "step", "node": "worker-0", "compute_s": seconds, "wait_s": 2.3})
    for name in LinkChoice.KEPT:
        setattr(other, name, json.loads(json.dumps(getattr(choice, name))))
    links = Links(workers=4, elems=10_000_000, alpha_s=1e-3, beta_s_byte=8e-8, compute_s=0.1, wait_s=2.3)
    found = other.chosen(10_000_000, 4)
    advice = links.advice()
    assert (found.every, found.delay, found.codec) == (advice.every, advice.delay, advice.codec)
    assert (found.every, found.delay, found.codec) == (24, 6, "float4")
    assert Chosen.of_json(found.as_json()) == found
    assert other.chosen(10_000_000, 8).codec is None  # codecs take float32


@pytest.mark.parametrize(
    ("compute_s", "of", "measures", "ends"),
    [(0.1, 2, True, True), (0.1, 1, True, False), (0.1, 2, False, False), (10.0, 2, True, False)],
    ids=["slow links", "one has not come", "no phase that measures", "links that are quick enough"],
)
def test_a_phase_that_measures_ends_with_the_first_step_of_all_over_slow_links(
    compute_s: float, of: int, measures: bool, ends: bool
) -> None:
    choice = LinkChoice(2, only_measures=measures)
    choice.event({"event": "group", "alpha_s": 1e-3, "beta_s_byte": 8e-8})
    assert not choice.ends(10_000_000, 4)
    for rank in range(of):
        choice.event({"event": "step", "node": f"worker-{rank}", "compute_s": compute_s, "wait_s": 3.0})
    assert choice.ends(10_000_000, 4).startswith("a sum takes 3.2 s over these links") is ends


@pytest.mark.parametrize("balanced", [False, True])
def test_who_has_measured_shares_is_not_told_to_take_them(balanced: bool) -> None:
    choice = LinkChoice(2, balanced=balanced)
    choice.event({"event": "group", "alpha_s": 1e-3, "beta_s_byte": 8e-8})
    for node, seconds in (("worker-0", 0.1), ("worker-1", 0.4)):
        choice.event({"event": "step", "node": node, "compute_s": seconds, "wait_s": 2.3})
    assert ("shares=" in choice.chosen(10_000_000, 4).why) is not balanced


def test_what_is_not_measured_is_not_changed() -> None:
    assert LinkChoice(1).chosen(100, 4) == Chosen(why="one worker exchanges with nobody")
    assert LinkChoice(2).chosen(100, 4).every == 1
    assert "no link between machines" in LinkChoice(2).chosen(100, 4).why
    assert replace(Chosen(), why="x").every == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": None, "steps": 100}, "a step of local SGD is a round"),
        ({"codec": "int8"}, "the strategy chooses it; leave codec out"),
        ({"batch_size": 64}, r"measures for 20 steps, which is 5,120 samples, and a data epoch has 2,560"),
        ({"accumulate": 2, "batch_size": 4}, r"accumulate=2 with strategy='auto'"),
        ({"servers": 2}, "servers=2 with strategy='auto': its workers exchange with one another"),
        ({"batch_size": 10.0}, "batch_size must be a whole number, got 10.0"),
        ({"phases": [gs.Phase(epochs=1)], "epochs": None}, "leave it out here"),
        (
            {"strategy": "allreduce", "epochs": None, "phases": [gs.Phase(epochs=1, strategy="auto")]},
            r"phases\[0\]: strategy='auto' goes by what the phase before has measured",
        ),
        (
            {
                "strategy": "downpour",
                "epochs": None,
                "phases": [gs.Phase(epochs=1), gs.Phase(epochs=1, strategy="auto")],
            },
            r"phases\[1\]: strategy='auto' goes by what the phase before has measured",
        ),
    ],
)
def test_what_auto_cannot_have_is_refused_at_the_start(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_of(100, **options)


JOB = """
import torch
from torch import nn
from torch.nn import functional as F
import gradstream as gs

def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))

def job():
    inputs = torch.rand(1280, 784, generator=torch.Generator().manual_seed(0)).numpy()
    data = gs.from_arrays(inputs, (inputs.sum(1) % 10).astype("int64"))
    model = gs.from_torch(mlp, F.cross_entropy)
    return gs.Job(model, data, strategy="auto", optimizer=gs.optim.SGD(lr=0.01), batch_size=16, epochs=1)
"""


@pytest.mark.limit_s(240)
@pytest.mark.parametrize(("rate", "looks"), [("100mbit", False), ("10mbit", True)])
def test_machines_behind_slow_links_change_to_local_sgd(tmp_path: Path, rate: str, looks: bool) -> None:
    """1.6 MB and 100 Mbit/s: a sum takes some 130 ms, and a minibatch a few. At 10 Mbit/s nobody waits for one."""
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(2, rate=rate) as machines:
        a, b = machines.machines
        options = ("--listen", a.address, "--wait", "2", "--run-dir", "run")
        launcher = Command(a, tmp_path / "a", "train", "job.py", *options, job=JOB)
        words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
        joined = Command(b, tmp_path / "b", *words, job=JOB)
        launcher.line(r"phase 2 of 2, local-sgd: .* Mbit/s: local SGD every \d+ minibatches")
        for command in (joined, launcher):
            status, said = command.end()
            assert status == 0, said
    run = gs.Run.load(tmp_path / "a" / "run")
    assert run.summary["samples"] == 1280
    assert any(event["event"] == "rehearsed" for event in run.events) is looks
    assert [strategy for strategy, _ in chosen(run)] == ["allreduce", "local-sgd"]
