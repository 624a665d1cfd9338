"""Runs whose workers encode what they push: the bits of other runs where nothing is lost, and bytes as counted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.codec.base import Encoder
from gradstream.codec.sparse import num_kept
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.files import load_job
from gradstream.job.overrides import overrides, with_overrides
from gradstream.job.registry import CODECS, find_codec
from gradstream.job.settings.layers import Setting, apply
from gradstream.run.planning import plan_run
from gradstream.server.client.push import PushCodec
from gradstream.testing.runs import (
    NUM_SAMPLES,
    QUICK,
    UNSTEADY,
    Tokens,
    check_exactly_once,
    kill_at,
    least_squares,
    numbered,
)
from whole_runs import same

C = gs.codecs
ALL = C.ErrorFeedback(C.TopK(1.0))
"""Loses nothing: every number is sent, with its place."""

KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {"optimizer": gs.optim.Adam(lr=0.01), "workers": 3, "servers": 2},
    "downpour": {"strategy": gs.Downpour(overlap=False), "workers": 1, "optimizer": gs.optim.SGD(0.01, momentum=0.9)},
    "downpour, every third": {"strategy": gs.Downpour(push_every=3, fetch_every=3, overlap=False), "workers": 1},
    "ssp": {"strategy": "ssp", "workers": 1, "optimizer": gs.optim.SGD(0.01)},
    "elastic-averaging": {"strategy": gs.ElasticAveraging(every=2), "workers": 1, "optimizer": gs.optim.SGD(0.01)},
    "diloco": {"strategy": gs.DiLoCo(every=3), "workers": 2, "optimizer": gs.optim.SGD(0.1)},
    "streaming-diloco": {
        "strategy": gs.StreamingDiLoCo(every=4, fragments=2), "workers": 2, "optimizer": gs.optim.SGD(0.1),
    },
}  # fmt: skip


def linear(**options: Any) -> gs.Run:
    """A run on random numbers, in which each bit counts: 70 parameters in 2 chunks."""
    model, data = least_squares(48, 70, whole=False, reduction="mean", dtype="float32")
    return gs.simulate(model, data, **{"batch_size": 4, "chunk_elems": 64, "epochs": 3, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_a_codec_that_loses_nothing_changes_no_bit(kind: str) -> None:
    assert same(linear(**KINDS[kind]), linear(**KINDS[kind], codec=ALL))


def test_a_codec_that_loses_something_is_seen() -> None:
    assert not same(linear(**KINDS["synchronous"]), linear(**KINDS["synchronous"], codec=C.Cast()))


@pytest.mark.parametrize("name", [name for name in CODECS if name != "powersgd"])
def test_runs_learn_with_each_codec(name: str) -> None:
    """To within a tenth of the distance from the start."""
    options = {"density": 0.2} if name in ("top-k", "random-k", "dgc") else {}
    model, data = least_squares(64, 8, reduction="mean", dtype="float32")
    run = gs.simulate(
        model, data, workers=2, batch_size=8, epochs=60, optimizer=gs.optim.SGD(lr=0.02),
        codec=find_codec(name, options),
    )  # fmt: skip
    batch = data.batch(np.arange(64))
    best = np.linalg.lstsq(np.asarray(batch.inputs), np.asarray(batch.targets), rcond=None)[0]
    assert np.linalg.norm(run.parameters["w"] - best) < 0.1 * np.linalg.norm(best)


@pytest.mark.parametrize(
    ("codec", "size"), [(C.Cast(), 2 * 70), (C.ErrorFeedback(C.TopK(0.1)), 8 * (num_kept(0.1, 64) + num_kept(0.1, 6))),
                        (C.Blocks(), 64 + 4 + 8 + 4)],
)  # fmt: skip
def test_bytes_are_those_of_the_codec(codec: Any, size: int) -> None:
    run = linear(workers=2, codec=codec)
    pushes = 2 * 3 * (48 // 8)
    assert run.summary["pushed_bytes"] == pushes * size + 4 * 70  # and the initial parameters, as they are


def test_seeds_of_workers_and_pushes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = Encoder.seed

    def noted(self: Encoder, number: int, part: int) -> int:
        seen.append(real(self, number, part))
        return seen[-1]

    monkeypatch.setattr(Encoder, "seed", noted)
    one = linear(workers=2, codec="qsgd")
    assert len(set(seen)) == len(seen) == 2 * 2 * 18 and all(0 <= seed < 1 << 63 for seed in seen)
    assert same(one, linear(workers=2, codec="qsgd"))
    assert not same(one, linear(workers=2, codec="qsgd", seed=1))


# ---- faults ---------------------------------------------------------------------------------------

COUNTED: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=1.0), "workers": 3, "servers": 2, "batch_size": 2, "chunk_elems": 64, "epochs": 4,
    "deadlines": QUICK, "config": UNSTEADY,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_every_sample_counts_once_over_an_unsteady_network(strategy: str, seed: int) -> None:
    model = Tokens(num_chunks=3)
    rate = {"optimizer": gs.optim.SGD(lr=6.0)} if strategy == "synchronous" else {}
    model.reduction = "sum" if strategy == "synchronous" else "mean"
    script = kill_at(f"worker-{seed % 3}", 0.1 + 0.05 * seed) if seed % 2 else None
    run = gs.simulate(
        model, numbered(NUM_SAMPLES), **{**COUNTED, **rate}, strategy=strategy, codec=ALL, seed=seed, script=script
    )  # fmt: skip
    check_exactly_once(run, NUM_SAMPLES, 4)


def test_a_push_that_is_sent_again_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker: the same bits whatever the network does, and whichever shard it has to try again."""
    codec = C.ErrorFeedback(C.Blocks("int4"))
    options = {"workers": 1, "servers": 2, "codec": codec, "optimizer": gs.optim.SGD(0.01), "epochs": 6}
    steady = linear(**options)
    to_shards = {("worker-0", f"shard-{rank}"): gs.sim.Link(loss=0.02, corrupt=0.05) for rank in range(2)}
    shaken = {"config": gs.sim.SimulationConfig(network=gs.sim.Network(links=to_shards)), "deadlines": QUICK}
    assert same(steady, linear(**options, **shaken))
    counted: list[int] = []
    real = PushCodec.encode

    async def encode(self: PushCodec, update: Any, chunk: int) -> Any:
        counted.append(chunk in self._encoded)
        return await real(self, update, chunk)

    monkeypatch.setattr(PushCodec, "encode", encode)
    linear(**options, **shaken)
    assert any(counted), "no chunk was sent again"


def test_a_chunk_that_is_encoded_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PushCodec.encode

    async def encode(self: PushCodec, update: Any, chunk: int) -> Any:
        self._encoded.clear()
        return await real(self, update, chunk)

    monkeypatch.setattr(PushCodec, "encode", encode)
    with pytest.raises(AssertionError):
        test_a_push_that_is_sent_again_is_encoded_once(pytest.MonkeyPatch())


def test_phases_have_codecs_of_their_own() -> None:
    """As `DGC` needs it: ever fewer numbers. What one phase had left out does not go on in the next."""
    phases = [gs.Phase(epochs=2, codec=C.DGC(density)) for density in (0.5, 0.2, 0.1)]
    run = linear(workers=2, phases=phases, epochs=None, optimizer=gs.optim.SGD(0.01))
    sent = [num_kept(density, 64) + num_kept(density, 6) for density in (0.5, 0.2, 0.1)]
    assert run.summary["pushed_bytes"] == 4 * 70 + 2 * 2 * 6 * 8 * sum(sent)
    losses = [row["loss"] for row in run.history]
    assert np.mean(losses[-12:]) < 0.8 * np.mean(losses[:12])


# ---- in a group -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_counts_once_in_a_group_whose_workers_die(seed: int) -> None:
    """The sums of tokens are small whole numbers, which two bytes hold."""
    model = Tokens(num_chunks=3)
    model.reduction = "sum"
    options = {**COUNTED, "servers": None, "optimizer": gs.optim.SGD(lr=6.0)}
    script = kill_at(f"worker-{seed % 3}", 0.1 + 0.05 * seed) if seed % 2 else None
    strategy = gs.AllReduce(bucket_mib=1e-4 if seed % 3 else None)
    run = gs.simulate(
        model, numbered(NUM_SAMPLES), **options, strategy=strategy, codec=C.Cast("float16"), seed=seed, script=script
    )  # fmt: skip
    check_exactly_once(run, NUM_SAMPLES, 4)


@pytest.mark.parametrize("codec", ["int4", C.ErrorFeedback(C.TopK(0.2)), "sign"])
def test_a_group_and_a_server_learn_alike(codec: Any) -> None:
    """One encodes gradients, and the other one their shares of the mean; buckets are as large as chunks."""
    options = {"workers": 2, "codec": codec, "optimizer": gs.optim.SGD(lr=0.01), "epochs": 4}
    served = linear(**options, strategy="synchronous").parameters["w"]
    among = linear(**options, strategy=gs.AllReduce(bucket_mib=64 * 4 / (1 << 20))).parameters["w"]
    assert np.allclose(among, served, atol=1e-5) and not np.array_equal(among, 0 * among)


def test_all_workers_of_a_group_have_the_same_bits() -> None:
    run = linear(
        strategy="allreduce", workers=3, codec="qsgd", optimizer=gs.optim.Adam(lr=0.01), checkpoint_every=None
    )
    again = linear(
        strategy=gs.AllReduce(overlap=False), workers=3, codec="qsgd", optimizer=gs.optim.Adam(lr=0.01)
    )
    assert same(run, again)


def test_bytes_of_a_group_are_counted() -> None:
    model, data = least_squares(32, 100_000, whole=False, reduction="mean", dtype="float32")
    slow = gs.sim.SimulationConfig(network=gs.sim.Network(bandwidth_bytes_s=1e5))
    ring, patient = gs.AllReduce(algorithm="ring"), gs.Deadlines(silence_s=600, lease_s=600)

    def round_s(codec: str | None) -> float:
        """Of rounds alone: all runs begin with a broadcast of the parameters."""
        one, three = (
            gs.simulate(
                model, data, strategy=ring, workers=4, batch_size=4, epochs=epochs, codec=codec, config=slow,
                optimizer=gs.optim.SGD(1e-3), deadlines=patient,
            ).summary["train_s"]
            for epochs in (1, 3)
        )  # fmt: skip
        return float(three - one) / 4

    whole_s = round_s(None)
    for codec, share in {"int4": 2 * 3 / 4 * (1 / 2 + 4 / 256), "top-k": 3 * 8 / 100}.items():
        assert round_s(codec) / whole_s == pytest.approx(share / (2 * 3 / 4 * 4), rel=0.1)


def test_a_codec_that_would_send_more_than_a_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"where a ring sends .*; take a smaller codec"):
        linear(strategy="allreduce", workers=4, codec=C.ErrorFeedback(C.TopK(density=0.3)))


def test_a_gradient_that_is_not_finite_leaves_a_round_out_and_spoils_no_remainder() -> None:
    model, data = least_squares(48, 70, whole=False, reduction="mean", dtype="float32")
    x, y = data.batch(np.arange(48)).inputs, data.batch(np.arange(48)).targets
    spoilt = np.array(x)
    spoilt[7] = np.nan
    options: dict[str, Any] = {
        "strategy": "allreduce", "workers": 2, "batch_size": 4, "chunk_elems": 64, "epochs": 3, "codec": "int8",
        "optimizer": gs.optim.SGD(0.01),
    }  # fmt: skip
    run = gs.simulate(model, (spoilt, np.asarray(y)), **options)
    assert run.summary["samples_dropped"] and np.isfinite(run.parameters["w"]).all()
    assert np.linalg.norm(run.parameters["w"]) > 0


# ---- what is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "int8", ALL, C.DGC(0.1), C.ErrorFeedback(C.QSGD(bits=8), decay=0.9)])
def test_a_codec_travels_to_other_processes(codec: Any) -> None:
    model, data = least_squares(8, 4)
    job = gs.Job(model, data, codec=codec)
    again = with_overrides(dataclasses.replace(job, codec=None), overrides(job))
    assert again.codec == codec


def test_a_codec_of_a_phase_travels_too() -> None:
    model, data = least_squares(8, 4)
    job = gs.Job(model, data, phases=[gs.Phase(epochs=1, codec=C.DGC(0.1)), gs.Phase(epochs=1, codec="int8")])
    again = with_overrides(dataclasses.replace(job, phases=()), overrides(job))
    assert [phase.codec for phase in again.phases] == [C.DGC(0.1), "int8"]


@pytest.mark.parametrize("strategy", ["synchronous", "diloco"])
def test_parts_of_a_split_model_encode_what_they_push(strategy: str) -> None:
    rng = np.random.default_rng(0)
    data = gs.from_arrays(rng.standard_normal((48, 6)).astype("float32"), rng.integers(0, 4, 48))
    model = gs.from_torch(
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), nn.functional.cross_entropy
    )
    whole, all_of_it, rounded = (
        gs.simulate(model, data, strategy=strategy, workers=2, split=2, batch_size=6, epochs=2, codec=codec)
        for codec in (None, ALL, C.Blocks("int4"))
    )
    assert same(whole, all_of_it) and not same(whole, rounded)


def test_settings_name_a_codec_and_its_options() -> None:
    model, data = least_squares(8, 4)
    layer = [Setting("codec", "top-k", "here"), Setting("codec.density", 0.25, "here")]
    assert apply(gs.Job(model, data), [layer]).codec == C.ErrorFeedback(C.TopK(0.25))
    with pytest.raises(ConfigError, match=r"codec.block"):
        apply(gs.Job(model, data), [[Setting("codec", "top-k", "here"), Setting("codec.block", 8, "here")]])
    with pytest.raises(UnknownNameError, match="int8"):
        find_codec("int9")


def test_the_example_for_slow_links_is_a_job() -> None:
    job = load_job(str(Path(__file__).parents[2] / "examples" / "slow_links.py"))
    plan = plan_run(job, "laptops")
    assert (plan.workers, plan.servers, plan.codec) == (2, 0, find_codec("float4"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": gs.AllReduce(sharded=True)}, "sharded=True: it exchanges other than whole gradients"),
        ({"strategy": "parameter-averaging"}, "take strategy='diloco'"),
        ({"strategy": "lbfgs"}, "exact sum over all samples"),
        ({"strategy": "dc-asgd"}, "corrects gradients"),
        ({"record": True}, "leave one of the two out"),
        ({"noise_scale": True}, "does not have the length of a gradient"),
        ({"codec": C.DGC(), "optimizer": gs.optim.SGD(0.1, momentum=0.9)}, "would add a second"),
        ({"codec": C.EF21(C.TopK(0.1))}, "take ErrorFeedback"),
        ({"codec": 3}, "without encoded_bytes.*expected a name .bfloat16, "),
        ({"codec": C.TopK}, r"is the class TopK; expected an object, TopK\(\)"),
        ({"codec": "none"}, "leave codec out"),
    ],
)
def test_what_cannot_be_encoded_is_refused_before_anything_starts(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        linear(**{"workers": 2, "codec": "int8", **options})


def test_numbers_of_eight_bytes_are_refused() -> None:
    model, data = least_squares(48, 70, reduction="mean")
    assert model.layout.dtype == torch.float64
    with pytest.raises(ConfigError, match=r"elements of torch.float64; expected torch.float32"):
        gs.simulate(model, data, workers=1, codec="int8", epochs=1)


def test_a_shard_refuses_what_its_codec_does_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    real = C.TopK.encode

    def lying(self: Any, tensor: torch.Tensor, into: torch.Tensor, *rest: Any, **options: Any) -> None:
        real(self, tensor, into, *rest, **options)
        into[:4].view(torch.int32)[0] = 1 << 20

    monkeypatch.setattr(C.TopK, "encode", lying)
    with pytest.raises(gs.errors.GradstreamError, match=r"chunk \d, encoded: got an element at 1048576"):
        linear(workers=1, codec=C.TopK(0.5), deadlines=QUICK)


def test_what_is_no_codec_of_flat_tensors_has_no_feedback_around_it() -> None:
    with pytest.raises(ConfigError, match="PowerSGD keeps what it leaves out already; use it alone"):
        C.ErrorFeedback(C.PowerSGD())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got a str; expected a codec, such as"):
        C.EF21("top-k")  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "share"), [("int8", 1 / 4), (C.PowerSGD(1), 1 / 6)])
def test_bytes_of_a_group_stand_beside_those_without_a_codec(codec: Any, share: float) -> None:
    model = gs.from_torch(lambda: nn.Linear(64, 128), nn.functional.mse_loss)
    rng = np.random.default_rng(0)
    data = gs.from_arrays(
        rng.standard_normal((32, 64)).astype("float32"), rng.standard_normal((32, 128)).astype("float32")
    )
    run = gs.simulate(model, data, strategy="allreduce", workers=2, batch_size=8, epochs=1, codec=codec)
    assert run.summary["whole_pushed_bytes"] == run.summary["whole_fetched_bytes"] == 4 * 4 * (64 + 1) * 128
    assert run.summary["pushed_bytes"] < share * 1.1 * run.summary["whole_pushed_bytes"]


def test_steps_of_ten_thousand_parameters_take_less_time_over_a_slow_network() -> None:
    model, data = least_squares(32, 10_000, whole=False, reduction="mean", dtype="float32")
    slow = gs.sim.SimulationConfig(network=gs.sim.Network(bandwidth_bytes_s=1e5))
    times = {
        codec: gs.simulate(
            model, data, workers=2, batch_size=4, epochs=2, codec=codec, config=slow, optimizer=gs.optim.SGD(1e-3)
        ).summary["train_s"]
        for codec in (None, "int8", "top-k")
    }  # fmt: skip
    assert times["top-k"] < times["int8"] < times[None]
    assert math.isclose(
        times["int8"] / times[None], 0.5 + 0.5 / 4, rel_tol=0.2
    )  # parameters come as they are
