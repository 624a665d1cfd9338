"""Each pair of a strategy, codec, source of data or feature runs, or is refused by the table before anything starts."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, Interrupted, PeerLostError
from gradstream.job.job import strategy_of
from gradstream.job.phase_jobs import traits_of_phase
from gradstream.job.registry import FAMILIES, find_codec, find_optimizer, find_strategy
from gradstream.job.traits import traits_of, traits_of_job, traits_of_strategy
from gradstream.run.planning import plan_run
from gradstream.runtime.storage import MemoryStorage
from gradstream.session.node import job as session_job
from gradstream.testing.runs import QUICK, kill_at
from gradstream.testing.sessions import loop_in_threads
from gradstream.traits import Rule, conflicts, obstacle, refuse, rules
from small_loops import DEADLINES

SAMPLES = 16
RNG = np.random.default_rng(5)
X, WORDS = RNG.standard_normal((SAMPLES, 6)).astype("float32"), RNG.integers(0, 9, (SAMPLES, 3))
Y = RNG.integers(0, 3, SAMPLES)


def net() -> nn.Module:
    """A network that can be split."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def words() -> nn.Module:
    """A network with a row-sparse tensor."""
    return nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Flatten(), nn.Linear(6, 3))


def stream(rank: int, world: int, epoch: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Minibatches of nobody knows how many."""
    del epoch, seed
    for at in range(rank * 4, SAMPLES, world * 4):
        yield X[at : at + 4], Y[at : at + 4]


def classes(inputs: Any) -> Any:
    """The samples, some of them held out."""
    return gs.from_arrays(inputs, Y, test_inputs=inputs[:8], test_targets=Y[:8])


@dataclass(frozen=True)
class Mortal(gs.Downpour):
    """A strategy that needs all of its workers."""

    survives_worker_loss: ClassVar[bool] = False


MANY = gs.from_arrays(np.tile(X, (11, 1)), np.tile(Y, 11))
"""Enough for the phase by which "auto" measures."""
MODEL = gs.from_torch(net, nn.functional.cross_entropy)
METHODS = ("conjugate-gradient", "gradient-descent", "lbfgs")
VARIANTS: Mapping[str, gs.Strategy] = {
    "backup": gs.Synchronous(backup=1),
    "median": gs.Synchronous(aggregate="median"),
    "centered clipping": gs.Synchronous(aggregate="centered-clipping", radius=1.0),
    "worker momentum": gs.Synchronous(worker_momentum=0.9),
    "touched rows": gs.Synchronous(sparse=True),
    "sharded": gs.AllReduce(sharded=True),
    "torch": gs.AllReduce(exchange="torch"),
    "significance": gs.Downpour(significance=0.1),
    "local momentum": gs.Downpour(local_momentum=0.5),
    "delayed": gs.LocalSGD(every=2, delay=1),
    "fragments": gs.StreamingDiLoCo(every=2, fragments=2),
    "elastic, synchronous": gs.ElasticAveraging(synchronous=True),
    "mortal": Mortal(),
    "averaged state": gs.ParameterAveraging(every=2, state="averaged"),
}
STRATEGIES: Mapping[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in FAMILIES["strategy"]},
    **{f"{name} in a group": {"strategy": name, "servers": 0} for name in METHODS},
    **{name: {"strategy": strategy} for name, strategy in VARIANTS.items()},
}
CODECS: Mapping[str, dict[str, Any]] = {
    **{f"codec {name}": {"codec": name} for name in FAMILIES["codec"]},
    "codec dgc, no momentum": {"codec": "dgc", "optimizer": gs.optim.SGD(0.01)},
    "codec EF21": {"codec": gs.codecs.EF21(gs.codecs.TopK(0.1))},
}
SOURCES: Mapping[str, dict[str, Any]] = {
    "stream": {"data": gs.from_stream(stream), "steps": 2},
    "rows": {"data": classes(WORDS), "model": gs.from_torch(words, nn.functional.cross_entropy)},
}
GROWTH = [gs.Phase(epochs=1, accumulate=2, variance_test=0.5, largest=4), gs.Phase(epochs=1)]
FEATURES: Mapping[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "split": {"split": 2},
    "micro-batches": {"split": 2, "micro_batches": 2},
    "micro-batches without parts": {"micro_batches": 2},
    "pipeline 2bw": {"split": 2, "pipeline": "2bw", "micro_batches": 3},
    "pipeline pipedream": {"split": 2, "pipeline": "pipedream"},
    "pipeline delayed": {"split": 2, "pipeline": "delayed"},
    "pipeline without parts": {"pipeline": "1f1b"},
    "hybrid": {"split": 2, "pipeline": gs.pipeline.Hybrid()},
    "parts apart": {"split": 2, "pipeline": gs.pipeline.SyntheticGradients(hidden=4)},
    "recompute": {"recompute": True},
    "pipeline dtype": {"pipeline_dtype": "bfloat16"},
    "record": {"record": True},
    "logged": {"acknowledge": "logged"},
    "replicated": {"acknowledge": "replicated"},
    "noise scale": {"noise_scale": True},
    "balanced shares": {"shares": "measured"},
    "queue": {"assignment": "queue"},
    "partitions": {"assignment": "partitions"},
    "clip norm": {"clip_norm": 1.0},
    "clip value": {"clip_value": 1.0},
    "groups": {"groups": [{"match": "*bias", "lr_scale": 0.1}]},
    "non-finite is an error": {"non_finite": "error"},
    "evaluations": {"evaluate_every": "epoch"},
    "until": {"evaluate_every": 2, "until": gs.until(test_loss=0.001)},
    "until alone": {"until": gs.until(test_loss=0.001)},
    "fetch codec": {"fetch_codec": "int8"},
    "checkpoints": {"checkpoint_every": "epoch"},
    "no samples": {"batch_size": [0, 8]},
    "other sizes": {"batch_size": [2, 6]},
    "no servers": {"servers": 0},
    "one server": {"servers": 1},
    "two servers": {"servers": 2},
    "one epoch": {"epochs": 1},
    "phases": {"phases": [gs.Phase(epochs=1), gs.Phase(epochs=1)]},
    "growth": {"phases": GROWTH},
    "growth without accumulate": {"phases": [gs.Phase(epochs=1, noise_multiple=1.0), gs.Phase(epochs=1)]},
    "two tests": {"phases": [replace(GROWTH[0], noise_multiple=1.0), gs.Phase(epochs=1)]},
    "a phase in steps": {"phases": [gs.Phase(steps=1), gs.Phase(epochs=1)]},
    "methods after steps": {"phases": [gs.Phase(steps=1), gs.Phase(epochs=4, strategy="lbfgs")]},
    "muon": {"optimizer": gs.optim.Muon(0.01)},
    "lamb": {"optimizer": gs.optim.LAMB(0.01)},
    "adam": {"optimizer": gs.optim.Adam(0.01)},
    "momentum": {"optimizer": gs.optim.SGD(0.01, momentum=0.9)},
    "any device": {"device": "auto"},
    "auto": {"strategy": "auto", "data": MANY},
    "auto with options": {"strategy": "auto", "strategy_options": {"every": 2}, "data": MANY},
    "auto in steps": {"strategy": "auto", "steps": 90},
    "a death": {"script": kill_at("worker-1", 0.02)},
    "other workers": {"resumed": 3},
}
"""What a job may ask for; `script` and `resumed` tell the simulation something."""
TOLD = ("script", "resumed")

KINDS = {**STRATEGIES, **CODECS, **SOURCES, **FEATURES}
PAIRS = [
    *itertools.product(STRATEGIES, [*CODECS, *SOURCES, *FEATURES]),
    *itertools.product(CODECS, [*SOURCES, *FEATURES]),
    *itertools.product(SOURCES, FEATURES),
    *itertools.combinations(FEATURES, 2),
]


def together(*names: str) -> dict[str, Any] | None:
    """The options of several; None if two of them are values of one option."""
    options: dict[str, Any] = {}
    for name in names:
        for option, value in KINDS[name].items():
            if option in options and options[option] is not value and options[option] != value:
                return None
            options[option] = value
    return None if {"epochs", "steps"} <= options.keys() else options


def job_of(options: Mapping[str, Any]) -> gs.Job:
    """A job with these options."""
    method = options.get("strategy") in METHODS
    common: dict[str, Any] = {"workers": 2, "batch_size": 4, "seed": 3, "deadlines": QUICK}
    if not {"steps", "phases"} & options.keys():
        common["epochs"] = 4 if method else 2
    if options.get("strategy") == "hogwild":
        common["optimizer"] = gs.optim.SGD(0.01)
    asked = {name: value for name, value in options.items() if name not in TOLD}
    return gs.Job(**{"model": MODEL, "data": classes(X), **common, **asked})


def named(said: str) -> list[Rule]:
    """The rules whose reason a message gives."""
    return [rule for rule in rules() if re.search(re.sub(r"\\{.*?\\}", ".*", re.escape(rule.why)), said)]


VALUE = r"micro_batches=\d of a minibatch of \d samples"
"""A refusal of one value, which a pair may meet as well."""


def refusal(options: Mapping[str, Any]) -> str:
    """Why a job is not planned; "" if it is."""
    try:
        plan_run(job_of(options), "pairs")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KINDS)
def test_each_pair_is_planned_or_refused_by_a_rule(name: str) -> None:
    pairs = {pair: options for pair in PAIRS if pair[0] == name and (options := together(*pair)) is not None}
    refused = {pair: said for pair, options in pairs.items() if (said := refusal(options))}
    wrong = [
        f"{pair}: {said}" for pair, said in refused.items() if not (named(said) or re.search(VALUE, said))
    ]
    assert not wrong, "\n".join(wrong)


# ---- the table ---------------------------------------------------------------------------------------


def test_each_rule_has_a_reason_and_is_written_once() -> None:
    assert len({(rule.who, rule.other) for rule in rules()}) == len(rules())
    silent = {"replacement", "pushed steps", "pipeline"}  # others say what to do, or the reason does
    assert not [rule for rule in rules() if not (rule.why and (rule.remedy or rule.who[0] in silent))]


def test_what_is_refused_names_both_sides_the_reason_and_the_remedy() -> None:
    traits = {
        "strategy": "strategy=SSP",
        "servers": "strategy=SSP",
        "record": "record=True",
        "split": "split=2",
    }
    refuse({name: text for name, text in traits.items() if name != "split"})
    with pytest.raises(
        ConfigError, match=r"^phases\[1\]: split=2 with record=True: a replay .*; leave record out$"
    ):
        refuse(traits, "phases[1]: ")
    assert obstacle("resharding", traits).startswith("a recording has one file for each shard")


@pytest.mark.cold
def test_the_table_is_read_without_torch() -> None:
    code = "import sys, gradstream.traits as t; t.rules(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


MODELS = {"tables", "sparse model", "sliced tensors"}
"""Traits that only the model has, where it is built."""
STARTS = {"engine", "threads", "detach", "simulation", "shm", "several machines", "no disk"}
"""Traits of ways to start a run."""


def test_each_rule_is_broken_by_some_pair() -> None:
    """Or it is about a model, a way to start a run, or what happens later: those have tests of their own."""
    met = set[Rule]()
    alike = {*CODECS} - {"codec int8", "codec dgc", "codec powersgd", "codec EF21"}  # to the rules
    pairs = [pair for pair in PAIRS if alike.isdisjoint(pair)]
    asked = [options for pair in pairs if (options := together(*pair)) is not None]
    for traits in itertools.chain.from_iterable(everything(job_of(options)) for options in asked):
        met.update(conflicts(traits))
    for options in KINDS.values():
        own = {name: value for name, value in options.items() if name not in ("model", "data", *TOLD)}
        for traits in everything(replace(session_job(), **own)):
            met.update(conflicts(traits))
    joint, local = gs.Phase(steps=2), gs.Phase(steps=2, strategy="local-sgd")
    for last in ("allreduce", gs.AllReduce(sharded=True), gs.AllReduce(exchange="torch")):
        for traits in everything(replace(session_job(), phases=[joint, local, gs.Phase(strategy=last)])):
            met.update(conflicts(traits))
    elsewhere = {"pushed steps", "resharding", *MODELS, *STARTS}
    missing = [rule for rule in rules() if not {*rule.who, rule.other} & elsewhere and rule not in met]
    assert not missing, "\n".join(f"{rule.who} {rule.verb} {rule.other}" for rule in missing)


def everything(job: gs.Job) -> Iterator[dict[str, str]]:
    """All traits of a job, and of each of its phases."""
    traits = traits_of_job(job)
    if job.strategy == "auto":
        yield {**traits, "auto": "auto"}
        return
    yield traits
    for number, phase in enumerate(job.phases):
        strategy = find_strategy(phase.strategy or job.strategy)
        shown = {**traits, **traits_of_phase(job.phases, number), **traits_of_strategy(strategy, 2)}
        yield {name: text for name, text in shown.items() if name != "phases"}
    strategy = strategy_of(job)
    optimizer = strategy.optimizer() if job.optimizer is None else find_optimizer(job.optimizer)
    codec = None if job.codec is None else find_codec(job.codec)
    yield {"replacement": "replacement", **traits_of(job, strategy, optimizer, codec)}


# ---- runs ----------------------------------------------------------------------------------------------

SPEEDS = gs.sim.SimulationConfig(
    costs={"gradient": gs.sim.Cost(base_s=0.01), "forward": gs.sim.Cost(base_s=0.004)}
)
PARTS = 400
LATER = (
    r"clocks of all workers|moves every parameter at every (update|step)|of a minibatch of|so nothing is left for all"
    r"|only torch.float32|no layer of this model|expected at least 3|would send .* bytes a step"
    r"|does not count its samples|with pipeline='(pipedream|delayed)': expected 1"
    r"|batch_size has 2 entries for 3 workers|measures for \d+ steps, which is"
)
"""Words of refusals of values that are known while nodes start."""


async def stopped(cluster: Any) -> None:
    """Asks the run to stop in the middle."""
    await cluster.virtual.runtime("director").sleep(0.02)
    cluster.stop()


def run(options: Mapping[str, Any]) -> None:
    """Makes a run on virtual time; one that is to go on with other workers is stopped first."""
    job, storage = job_of(options), MemoryStorage()
    told: dict[str, Any] = {"config": SPEEDS, "storage": storage}
    if "resumed" in options:
        with contextlib.suppress(Interrupted):
            gs.simulate(job, script=stopped, **told)
            return
        job, told = replace(job, workers=options["resumed"]), {**told, "resume": True}
    found = gs.simulate(job, script=options.get("script"), **told)
    assert all(np.isfinite(tensor).all() for tensor in found.parameters.values())
    assert found.summary["steps"] > 0 or "resumed" in options


@pytest.mark.parametrize("part", range(PARTS))
def test_each_pair_runs_or_is_refused(part: int) -> None:
    """A part of all pairs each, in no order; `make test` has a few of them."""
    drawn = random.Random(0).sample(PAIRS, len(PAIRS))
    wrong = {}
    for pair in drawn[part::PARTS]:
        options = together(*pair)
        try:
            run(options or {})
        except ConfigError as error:
            if not (named(str(error)) or re.search(f"{VALUE}|{LATER}", str(error))):
                wrong[pair] = repr(error)
        except PeerLostError as error:
            why = obstacle("replacement", list(everything(job_of(options or {})))[-1])
            if not why or why not in str(error):
                wrong[pair] = repr(error)
        except Exception as error:
            wrong[pair] = repr(error)
    assert not wrong, "\n".join(f"{pair}: {said}" for pair, said in wrong.items())


def loop(session: gs.Session) -> int:
    """A training loop of the user's own."""
    module = net()
    model, optimizer = session.wrap(module, torch.optim.SGD(module.parameters(), lr=0.01))
    for at in range(0, SAMPLES, 4):
        optimizer.zero_grad()
        outputs = model(torch.from_numpy(X[at : at + 4]))
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(Y[at : at + 4]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return SAMPLES // 4


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_is_in_a_loop_of_ones_own_or_refused_by_a_rule(name: str) -> None:
    said = ""
    try:
        assert loop_in_threads(loop, workers=2, deadlines=DEADLINES, **STRATEGIES[name]) == [SAMPLES // 4] * 2
    except ConfigError as error:
        said = str(error)
    assert not said or named(said), said


def test_each_feature_is_in_a_loop_of_ones_own_or_refused_by_a_rule() -> None:
    """The features that a loop may be given; what it decides itself is refused by `check_script`."""
    fine, refused = set(), {}
    for name in [*CODECS, *FEATURES]:
        if {*TOLD, "data"} & KINDS[name].keys():
            continue
        try:
            plan_run(replace(session_job(), **{"strategy": "synchronous", **KINDS[name]}), "loops")
            fine.add(name)
        except ConfigError as error:
            refused[name] = str(error)
    assert not [said for said in refused.values() if not (named(said) or re.search(VALUE, said))]
    assert {*CODECS} - {"codec EF21"} <= fine
    assert {"two servers", "logged", "record", "phases", "split"} <= refused.keys()
