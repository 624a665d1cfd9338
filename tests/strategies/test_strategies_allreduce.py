"""Synchronous SGD in a group of workers equals one node with the joined batch, and equals `Synchronous`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.collectives.algorithms import ALGORITHMS, PARTS
from gradstream.collectives.group import Buckets
from gradstream.data.base import BatchRef
from gradstream.errors import ConfigError, GradientError
from gradstream.memory import Span, Vector
from gradstream.runtime.simulation import Cost, Exponential, Link, LogNormal, Network, SimulationConfig
from gradstream.strategies import AllReduce
from gradstream.telemetry.meters import WaitAttribution
from gradstream.testing import check_strategy
from gradstream.testing.runs import least_squares
from gradstream.testing.suites import BrokenPropertiesError
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.group.peers import GroupPeers
from gradstream.worker.group.setup import GroupMeter, GroupSetup

LR, GRID = 2.0**-7, 2.0**-10
FEATURES = 300  # with buckets of 128 elements three, the last one short
SHARES = {1: [16], 2: [13, 3], 3: [7, 0, 9], 5: [7, 1, 0, 8, 0]}
SMALL = 128 * 8 / (1 << 20)

RULES: dict[str, Any] = {
    "sgd": gs.optim.SGD(lr=LR),
    "nesterov": gs.optim.Nesterov(LR, 0.9, weight_decay=0.01),
    "adam": gs.optim.Adam(lr=gs.schedules.Cosine(LR)),
}


def bits(model: Any, data: Any, sizes: list[int], strategy: Any, **options: Any) -> bytes:
    options = {"steps": 3, "chunk_elems": 64, "optimizer": RULES["sgd"], "seed": 5, **options}
    run = simulate(model, data, workers=len(sizes), batch_size=sizes, strategy=strategy, **options)
    assert np.abs(run.parameters["w"]).max() > 0
    return run.parameters["w"].tobytes()


@pytest.mark.parametrize(
    ("workers", "rule"), [*((workers, "sgd") for workers in SHARES), (3, "nesterov"), (5, "adam")]
)
def test_equals_the_joined_batch_through_a_server_bit_for_bit(workers: int, rule: str) -> None:
    """And that equals one node with the joined batch: see test_strategies_synchronous.py."""
    model, data = least_squares(64, FEATURES, grid=GRID)
    sizes, optimizer = SHARES[workers], RULES[rule]
    expected = bits(model, data, sizes, gs.Synchronous(), optimizer=optimizer)
    for sharded, overlap in itertools.product((False, True), repeat=2):
        strategy = AllReduce(sharded=sharded, overlap=overlap, bucket_mib=SMALL)
        assert bits(model, data, sizes, strategy, optimizer=optimizer) == expected, strategy


WAYS: dict[str, tuple[Any, int]] = {
    **{name: (AllReduce(algorithm=name, bucket_mib=SMALL), 0) for name in (*ALGORITHMS, "hierarchical")},
    **{f"{name}, sharded": (AllReduce(algorithm=name, sharded=True, bucket_mib=SMALL), 0) for name in PARTS},
    "1 server": (gs.Synchronous(), 1),
    "4 servers": (gs.Synchronous(), 4),
}


@cache
def one_node() -> bytes:
    """A step of the joined batch by one worker."""
    model, data = least_squares(64, FEATURES, grid=GRID)
    return bits(model, data, [64], gs.Synchronous(), steps=1)


@pytest.mark.parametrize("way", WAYS)
def test_16_workers_are_one_node_with_the_joined_batch_by_every_scheme(way: str) -> None:
    """In one step: more of them are made by fewer workers, above."""
    model, data = least_squares(64, FEATURES, grid=GRID)
    strategy, servers = WAYS[way]
    joined = one_node()
    assert bits(model, data, [4] * 16, strategy, servers=servers, steps=1) == joined


def test_an_algorithm_without_halves_cannot_be_sharded() -> None:
    for name in set(ALGORITHMS) - set(PARTS):
        with pytest.raises(ConfigError, match="expected halving-doubling, ring, direct, or 'auto'"):
            AllReduce(algorithm=name, sharded=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharded": "auto"}, r"sharded='auto'\): expected True, False or None"),
        ({"overlap": "no"}, r"overlap='no'\): expected True or False"),
        ({"overlap": None}, r"overlap=None\): expected True or False"),
        ({"bucket_mib": "4"}, r"bucket_mib='4'\): expected a finite number of MiB"),
        ({"bucket_mib": 0}, r"bucket_mib=0\): expected MiB, 0.0001 to"),
        ({"algorithm": None}, "unknown algorithm of AllReduce 'None'"),
        ({"exchange": "glo"}, "did you mean 'gloo'"),
    ],
)
def test_options_that_are_something_else_than_they_seem(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        AllReduce(**options)


def test_means_are_weighted_by_samples_and_parts_of_a_step_are_joined() -> None:
    model, data = least_squares(64, FEATURES, grid=GRID, reduction="mean")
    sizes = [4, 0, 2, 2]  # means of powers of two are exact
    expected = bits(model, data, sizes, gs.Synchronous(), steps=6)
    assert bits(model, data, sizes, AllReduce(bucket_mib=SMALL), steps=6) == expected
    joined = {"accumulate": 2, "steps": 3}
    expected = bits(model, data, sizes, gs.Synchronous(), **joined)
    assert bits(model, data, sizes, AllReduce(bucket_mib=SMALL), **joined) == expected


def test_groups_of_parameters_have_settings_of_their_own_in_every_slice() -> None:
    rng = np.random.default_rng(0)
    data = gs.from_arrays(rng.standard_normal((64, 8)).astype("float32"), rng.integers(0, 4, 64))
    model = gs.from_torch(
        lambda: nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 4)), nn.functional.cross_entropy
    )
    options: Any = {
        "workers": 2, "batch_size": 8, "steps": 6, "optimizer": gs.optim.Adam(lr=0.01), "clip_norm": 0.5,
        "groups": [{"match": "*.bias", "weight_decay": 0.1}, {"match": "2.*", "lr_scale": 3.0}],
    }  # fmt: skip
    runs = [
        simulate(model, data, strategy=strategy, **options)
        for strategy in (gs.Synchronous(), AllReduce(), AllReduce(sharded=True, bucket_mib=0.001))
    ]
    for run in runs[1:]:
        for name, value in runs[0].parameters.items():
            assert np.array_equal(run.parameters[name], value), name


SLOW = SimulationConfig(
    costs={"gradient": Cost(base_s=1e-3, per_sample_s=1e-4, jitter=Exponential())},
    speeds={"worker-1": 0.3},
    network=Network(bandwidth_bytes_s=1e6, link=Link(latency_s=2e-3, jitter_s=5e-3)),
)
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=1e-2, jitter=LogNormal(0.5)), "reduce": Cost(base_s=1e-3)},
    network=Network(cards={"worker-0": 1e5}),
)


@pytest.mark.parametrize("sharded", [False, True])
def test_real_numbers_have_the_same_bits_whatever_the_cluster(sharded: bool) -> None:
    model, data = least_squares(64, FEATURES, whole=False)
    sizes, strategy = [7, 1, 0, 8], AllReduce(algorithm="ring", sharded=sharded, bucket_mib=SMALL)
    options: Any = {"optimizer": RULES["adam"], "steps": 6}
    first = bits(model, data, sizes, strategy, **options)
    assert bits(model, data, sizes, dataclasses.replace(strategy, overlap=False), **options) == first
    for config in (SLOW, UNEVEN):
        assert bits(model, data, sizes, strategy, **options, config=config) == first
    server = np.frombuffer(bits(model, data, sizes, gs.Synchronous(), **options))
    assert np.abs(server - np.frombuffer(first)).max() <= 1e-12 * np.abs(server).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_worker_has_the_bits_of_a_plain_loop(dtype: str) -> None:
    model, data = least_squares(64, FEATURES, whole=False, dtype=dtype, reduction="mean")
    options: Any = {"optimizer": gs.optim.Adam(lr=LR), "steps": 12}
    expected = bits(model, data, [8], gs.Synchronous(), **options)  # which has those of torch.optim
    for sharded in (False, True):
        assert bits(model, data, [8], AllReduce(sharded=sharded), **options) == expected


def test_a_stream_says_how_many_samples_only_when_it_is_read() -> None:
    """Workers tell each other their samples; the weights equal the server's, which learns them with each push."""
    model, data = least_squares(60, FEATURES, grid=GRID)

    def batches(rank: int, num_workers: int, epoch: int, seed: int) -> Any:
        del num_workers, seed
        for start in range(20 * rank, 20 * rank + 20, 4):
            size = 4 if start % 8 or not epoch else 1 + rank
            yield data.inputs[start : start + size], data.targets[start : start + size]

    stream = gs.from_stream(batches, batches=5)
    options: Any = {
        "workers": 3,
        "epochs": 2,
        "optimizer": gs.optim.Adam(lr=gs.schedules.Cosine(LR)),
        "chunk_elems": 64,
    }
    expected = simulate(model, stream, **options)
    for sharded in (False, True):
        run = simulate(model, stream, strategy=AllReduce(sharded=sharded, bucket_mib=SMALL), **options)
        assert np.abs(run.parameters["w"]).max() > 0
        np.testing.assert_allclose(run.parameters["w"], expected.parameters["w"], rtol=1e-12)
        assert run.summary["samples"] == expected.summary["samples"]


def test_the_optimizers_state_takes_its_part_of_the_memory() -> None:
    model, data = least_squares(64, 64 * 12)
    for workers in (1, 3):
        options: Any = {"workers": workers, "batch_size": 4, "steps": 2, "optimizer": gs.optim.Adam(lr=LR)}
        run = simulate(model, data, strategy=AllReduce(sharded=True), **options)
        vectors = [e["vectors_bytes"] for e in run.events if e["event"] == "memory" and "worker" in e["node"]]
        assert vectors
        for one in vectors:
            assert one["exp_avg"] == one["exp_avg_sq"] == 8 * 64 * 12 // workers
            assert one["parameters"] == one["gradient"] == 8 * 64 * 12


def test_a_gradient_that_is_not_finite_changes_nobodys_parameters() -> None:
    """The last bucket leaves when the whole gradient has been looked at: no worker has all of them before."""
    seen: list[float] = []

    def gradients(p: Any, x: Any, y: Any) -> Any:
        seen.append(float(np.abs(p["w"]).max()))
        return 0.0, {"w": np.full(300, np.nan if x.max() >= 40 else 1.0)}

    model = gs.from_functions(
        init=lambda _: {"w": np.zeros(300)}, outputs=lambda p, x: x, gradients=gradients
    )
    data = gs.from_arrays(np.arange(64.0).reshape(64, 1), np.zeros(64))
    with pytest.raises(GradientError, match=r"worker-\d, step"):
        simulate(
            model,
            data,
            strategy="allreduce",
            workers=2,
            batch_size=4,
            steps=9,
            optimizer=gs.optim.SGD(lr=1.0),
            non_finite="error",
        )
    assert np.isfinite(seen).all()


def test_the_last_bucket_waits_for_the_end_of_the_gradient() -> None:
    """All elements are computed, but not yet known to be finite: one bucket stays behind."""
    left: list[int] = []

    class Alone:
        rank, size, shares_memory = 0, 1, False

        def allocate(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
            return Vector(name, torch.zeros(elems, dtype=dtype))

        async def allreduce(self, span: Span, *, weight: float) -> Span:
            left.append(span.stop)
            return span

    async def main() -> None:
        runtime: Any = SimpleNamespace(now=lambda: 0)
        context: Any = SimpleNamespace(
            rank=0, runtime=runtime, schedule=SimpleNamespace(round_of=lambda _: [(4, 0.1)])
        )
        group, replica = cast(Any, Alone()), cast(Any, None)
        setup = GroupSetup(
            group=group,
            buckets=Buckets(200, 64, 1),
            updater=cast(Any, None),
            sharded=False,
            parameters=cast(Any, None),
        )
        meter = GroupMeter(runtime, WaitAttribution(), on_transfer=lambda _: None)
        peers = GroupPeers(replica, context, setup, meter)
        ref = BatchRef(0, 0, 0)
        gradient = ComputedGradient(group.allocate(200, torch.float32, "g"), SampleBatch(ref, 4), 0.1)
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        gradient.task = end  # type: ignore[assignment]
        await peers.samples(gradient)
        gradient.ready.advance(200)
        *most, last = peers.buckets
        for bucket in most:
            await peers.allreduce(gradient, bucket, 1.0)
        waiting = asyncio.ensure_future(peers.allreduce(gradient, last, 1.0))
        await asyncio.sleep(0.01)
        assert left == [64, 128, 192]
        end.set_exception(GradientError("a NaN"))
        with pytest.raises(GradientError):
            await waiting
        assert left == [64, 128, 192]

    asyncio.run(main())


def test_servers_are_refused_with_the_reason() -> None:
    model, data = least_squares(8, 8)
    with pytest.raises(
        ConfigError, match=r"servers=2 with strategy=AllReduce: its workers .* leave servers out"
    ):
        simulate(model, data, strategy="allreduce", servers=2, steps=1)
    with pytest.raises(
        ConfigError, match="servers=0 with strategy=Synchronous: its workers exchange through servers"
    ):
        simulate(model, data, strategy="synchronous", servers=0, steps=1)
    assert (
        AllReduce().bucket_elems(4, 262_144) == AllReduce(bucket_mib=4).bucket_elems(4, 4_194_304) == 1 << 20
    )
    assert AllReduce().bucket_elems(4, 4_194_304) == 4_194_304  # as long as a chunk
    with pytest.raises(ConfigError, match="bucket_mib=0"):
        AllReduce(bucket_mib=0)


def test_figures_of_a_run_without_servers() -> None:
    model, data = least_squares(64, FEATURES)
    run = simulate(model, data, strategy=AllReduce(), workers=3, batch_size=4, epochs=2)
    assert (run.summary["servers"], run.summary["strategy"]) == (0, "allreduce")
    assert run.summary["samples_accounted"] == 128
    assert run.summary["pushes"] == run.summary["steps"] == 3 * len({row["step"] for row in run.history})


def test_evaluation_and_an_early_end() -> None:
    model, data = least_squares(64, 40, reduction="mean")
    held = gs.from_arrays(data.inputs, data.targets, test_inputs=data.inputs, test_targets=data.targets)
    options: Any = {"workers": 3, "batch_size": 4, "evaluate_every": 2, "optimizer": gs.optim.SGD(lr=0.001)}
    run = simulate(model, held, strategy="allreduce", steps=6, **options)
    expected = simulate(model, held, strategy="synchronous", steps=6, **options)
    losses = [[e["loss"] for e in one.events if e["event"] == "evaluated"] for one in (run, expected)]
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
    early = simulate(model, held, strategy="allreduce", epochs=500, until=gs.until(seconds=0.1), **options)
    assert "0.1" in early.summary["reason"]


class Layered(nn.Module):
    """Batch statistics are each worker's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def test_buffers_are_averaged_as_through_a_server() -> None:
    rng = np.random.default_rng(0)
    data = gs.from_arrays(rng.standard_normal((64, 8)).astype("float32"), rng.integers(0, 4, 64))
    model = gs.from_torch(Layered, nn.functional.cross_entropy)
    runs = [
        simulate(model, data, strategy=name, workers=2, batch_size=8, steps=5, optimizer=gs.optim.SGD(lr=LR))
        for name in ("synchronous", "allreduce")
    ]
    name = "layers.1.running_mean"
    assert np.abs(runs[0].parameters[name]).max() > 0
    np.testing.assert_array_equal(runs[1].parameters[name], runs[0].parameters[name])


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws_of_strategies() -> None:
    assert not check_strategy(AllReduce, sharded=True).broken


@dataclasses.dataclass(frozen=True)
class Forgetful(AllReduce):
    """The planted fault: the last bucket is not exchanged, so everybody goes on with its own."""

    bucket_mib: float = 64 * 4 / (1 << 20)

    async def train(self, worker: Any) -> None:
        group = worker.group
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            samples = await group.samples(gradient)
            for bucket in group.buckets[:-1]:
                await group.allreduce(gradient, bucket, self.weight(worker.rank, samples, worker.reduction))
            await group.update(gradient)


def test_a_bucket_that_is_forgotten_breaks_them() -> None:
    with pytest.raises(BrokenPropertiesError) as caught:
        check_strategy(Forgetful)
    assert {result.name for result in caught.value.report.broken} >= {"plain", "complete", "exactly_once"}
