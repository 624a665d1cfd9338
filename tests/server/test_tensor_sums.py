"""Norms of whole tensors in runs: the same updates however many shards, parts or workers hold a tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.optim.groups import add_up
from gradstream.run.result import Run
from gradstream.server.aggregation import EveryPush
from gradstream.server.shard.agreement import TensorSums
from gradstream.server.shard.config import ShardConfig
from gradstream.testing.runs import kill_at, replace_at
from gradstream.wire import v1
from split_jobs import data, difference, net, run

LARS = gs.optim.LARS(lr=0.5, momentum=0.5, weight_decay=1e-2, trust_coefficient=0.1)
LAMB = gs.optim.LAMB(lr=0.02)
RULES = [pytest.param(LARS, id="lars"), pytest.param(LAMB, id="lamb")]

SLICES = gs.pipeline.Hybrid("slices")
SHARDED = gs.AllReduce(sharded=True, bucket_mib=5e-4)


def trained(rule: Any, **options: Any) -> Run:
    return run(**{"strategy": "synchronous", "optimizer": rule, "servers": 1, **options})


@pytest.fixture(scope="module")
def whole() -> dict[Any, Run]:
    """Each rule with all parameters on one shard."""
    return {rule: trained(rule) for rule in (LARS, LAMB)}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("servers", [2, 3, 8])
def test_bits_do_not_depend_on_the_number_of_shards(rule: Any, servers: int, whole: dict[Any, Run]) -> None:
    assert difference(trained(rule, servers=servers), whole[rule]) == 0


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"strategy": "allreduce"}, LAMB),
        ({"strategy": SHARDED}, LAMB),
        ({"strategy": gs.AllReduce(sharded=False, bucket_mib=5e-4)}, LARS),
        ({"strategy": SHARDED, "workers": 3, "batch_size": 4}, LARS),
        ({"split": 2, "servers": 1}, LAMB),
        ({"split": 3, "servers": 2}, LARS),
        ({"split": 2, "servers": 2, "pipeline": SLICES}, LAMB),
        ({"split": 2, "servers": 2, "pipeline": SLICES}, LARS),
        ({"split": 2, "strategy": "allreduce"}, LARS),
    ],
    ids=[
        *("allreduce", "sharded", "replicated", "three", "parts", "more-parts", "slices-lamb", "slices-lars"),
        "parts-allreduce",
    ],
)
def test_any_division_of_tensors_gives_the_same_run(
    options: dict[str, Any], rule: Any, whole: dict[Any, Run]
) -> None:
    options = {"servers": None, **options}
    if "split" in options and options.get("strategy") != "allreduce":
        options["servers"] = options["servers"] or 1
    assert difference(trained(rule, **options), whole[rule]) < 1e-12


def lars_by_hand(steps: int) -> dict[str, np.ndarray[Any, Any]]:
    """`LARS` in one process, on the gradient of all samples."""
    torch.manual_seed(0)
    inputs = data()
    x, y = torch.from_numpy(inputs.inputs), torch.from_numpy(inputs.targets)
    model = net()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.copy_(torch.from_numpy(START[name]))
    velocity = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for _ in range(steps):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        for name, weights in model.named_parameters():
            w, g = weights.detach(), weights.grad
            assert g is not None
            decay = 1e-2 if w.ndim > 1 else 0.0
            ratio = 0.1 * w.norm() / (g.norm() + decay * w.norm()) if w.ndim > 1 else 1.0
            velocity[name] = 0.5 * velocity[name] + ratio * (g + decay * w)
            w -= 0.5 * velocity[name]
    return {name: one.detach().numpy() for name, one in model.named_parameters()}


START: dict[str, np.ndarray[Any, Any]] = {}


def started() -> nn.Module:
    """The network with the same parameters each time."""
    model = net()
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            START[name] = rng.standard_normal(tuple(weights.shape)) / 2
            weights.copy_(torch.from_numpy(START[name]))
    return model


def test_a_run_is_that_of_a_naive_loop() -> None:
    found = trained(LARS, build=started, workers=3, batch_size=12, epochs=6, servers=3)
    for name, expected in lars_by_hand(6).items():
        assert np.allclose(found.parameters[name], expected, rtol=1e-11, atol=1e-12), name


def test_the_norm_of_a_chunk_in_the_place_of_the_layers_would_be_noticed(
    whole: dict[Any, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def own(self: TensorSums, chunk: int, step: int, pieces: Any) -> Any:
        return add_up(pieces)

    monkeypatch.setattr(TensorSums, "total", own)
    assert difference(trained(LARS, servers=2), whole[LARS]) > 1e-4


def test_the_norm_of_one_shard_in_the_place_of_all_would_be_noticed(
    whole: dict[Any, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(self: TensorSums, said: v1.TensorSums) -> None:
        self.take(self.decision(self.number(said), {0: {0: said}}))

    monkeypatch.setattr(TensorSums, "say", own)
    assert difference(trained(LARS), whole[LARS]) == 0
    with pytest.raises(AssertionError):
        test_bits_do_not_depend_on_the_number_of_shards(LARS, 2, whole)


def test_a_death_and_a_network_that_loses_frames_change_no_bit(whole: dict[Any, Run]) -> None:
    poor = gs.sim.Link(latency_s=1e-3, loss=0.05, duplicate=0.2, corrupt=0.05)
    nodes = [*(f"shard-{rank}" for rank in range(3)), "worker-0", "worker-1"]
    links = {(a, b): poor for a in nodes for b in nodes if "shard" in a + b}
    config = gs.sim.SimulationConfig(network=gs.sim.Network(links=links))
    assert difference(trained(LARS, servers=3, config=config), whole[LARS]) == 0
    found = trained(LARS, servers=3, script=kill_at("worker-1", 0.02))
    assert found.summary["workers_lost"] == ["worker-1"]
    assert difference(found, whole[LARS]) == 0


def test_a_worker_that_takes_a_lost_ones_place_changes_no_bit(whole: dict[Any, Run]) -> None:
    for kill_s in (0.0203, 0.031, 0.0444):
        found = trained(LARS, servers=2, script=replace_at("worker-1", kill_s, 0.001))
        assert found.summary["workers_lost"] == ["worker-1"]
        assert difference(found, whole[LARS]) == 0


def test_a_death_under_allreduce_changes_a_rounding_alone(whole: dict[Any, Run]) -> None:
    found = trained(LARS, strategy="allreduce", servers=None, script=kill_at("worker-1", 0.02))
    assert found.summary["workers_lost"] == ["worker-1"]
    assert difference(found, whole[LARS]) < 1e-12


def test_the_first_shard_waits_for_every_shard_and_counts_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[v1.TensorSums] = []
    monkeypatch.setattr(TensorSums, "decided", lambda _, total: totals.append(total))
    served: Any = SimpleNamespace(serve=lambda method, handler: None)
    runtime: Any = None
    sums = TensorSums(runtime, served, ShardConfig(0, 2, EveryPush(), LARS), 1, 2, [0, 1])
    first = v1.TensorSums(step=1, tensors=[0, 1], sums=[1.0, 2.0, 3.0, 4.0])
    sums.hear(0, first)
    sums.hear(0, first)  # again, after a lost stream
    sums.hear(1, v1.TensorSums(step=2, tensors=[1], sums=[9.0, 9.0]))
    assert totals == []
    sums.hear(1, v1.TensorSums(step=1, tensors=[1], sums=[5.0, 6.0]))
    assert totals == [v1.TensorSums(step=1, tensors=[0, 1], sums=[1.0, 2.0, 8.0, 10.0])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "downpour"}, "take strategy='synchronous' or 'allreduce'"),
        ({"strategy": "ssp"}, "needs the norm of one gradient of the whole tensor"),
        ({"strategy": "hogwild"}, "expected gradstream.optim.SGD"),
        ({"acknowledge": "replicated", "servers": 2}, "leave acknowledge out"),
        ({"record": True}, "leave record out"),
        (
            {"strategy": "allreduce", "split": 2, "pipeline": SLICES},
            "norms strategy='synchronous'",
        ),
    ],
)
def test_what_has_no_norms_of_whole_tensors_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(LARS, **{"servers": None, **options})


def test_workers_with_parameters_of_their_own_have_whole_tensors() -> None:
    options: dict[str, Any] = {"workers": 1, "strategy": gs.strategies.ParameterAveraging(every=1)}
    assert difference(trained(LARS, **options), trained(LARS, workers=1)) < 1e-12
