"""Runs whose servers encode what workers fetch: gradients are of rounded parameters, and nothing else is rounded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.codec.base import Encoder
from gradstream.codec.named import PARAMETER_CODECS, of_parameters
from gradstream.errors import ConfigError, RefusedError
from gradstream.job.overrides import overrides, with_overrides
from gradstream.memory import Span, Vector
from gradstream.run.planning import plan_run
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.client.fetch import Arrival
from gradstream.server.shard.requests import FetchHandler
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
from gradstream.wire import v1
from gradstream.wire.frames import CODED
from whole_runs import same

ELEMS, CHUNK = 70, 64
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((48, ELEMS)).astype("float32"), RNG.standard_normal(48).astype("float32")

KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {"optimizer": gs.optim.Adam(lr=0.01), "workers": 3, "servers": 2},
    "downpour": {"strategy": gs.Downpour(overlap=False), "workers": 1, "optimizer": gs.optim.SGD(0.01, momentum=0.9)},
}  # fmt: skip


def rounded(w: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """What a worker gets of parameters, chunk by chunk."""
    codec, flat = of_parameters(name), torch.from_numpy(np.asarray(w, np.float32).copy())
    for part in torch.split(flat, CHUNK):
        into = torch.empty(codec.encoded_bytes(len(part)), dtype=torch.uint8)
        codec.encode(part, into)
        codec.decode(into, part)
    return flat.numpy()


def linear(at: str = "", **options: Any) -> gs.Run:
    """A run in which each bit counts; gradients are computed where the codec `at` would round the parameters to."""

    def gradients(p: Any, x: Any, y: Any) -> tuple[float, Any]:
        w = rounded(p["w"], at) if at else p["w"]
        error = x @ w - y
        return float(error @ error) / len(y), {"w": 2 * error @ x / len(y)}

    model = gs.from_functions(
        init=lambda seed: {"w": np.full(ELEMS, 0.3, np.float32)},
        outputs=lambda p, x: x @ p["w"],
        gradients=gradients,
    )
    given = {"batch_size": 4, "chunk_elems": CHUNK, "epochs": 3, **options}
    return simulate(model, gs.from_arrays(X, Y), **given)


@pytest.mark.parametrize("name", PARAMETER_CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_at_rounded_parameters_and_nothing_else_is_rounded(kind: str, name: Any) -> None:
    """The bits of a run without the codec, whose model rounds for itself before it computes a gradient."""
    run = linear(**KINDS[kind], fetch_codec=name)
    assert same(run, linear(name, **KINDS[kind]))
    assert not same(run, linear(**KINDS[kind]))


def test_a_server_that_keeps_what_it_has_sent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FetchHandler._encoded

    async def keeps(self: FetchHandler, span: Span) -> Span:
        """A planted fault: the parameters of the server are rounded, too."""
        sent = await real(self, span)
        assert self.encoder is not None
        self.encoder.decode(sent.tensor, span.tensor)
        return sent

    monkeypatch.setattr(FetchHandler, "_encoded", keeps)
    kind = KINDS["downpour"]
    assert not same(linear(**kind, fetch_codec="int8"), linear("int8", **kind))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("float16", 2 * ELEMS),
        ("bfloat16", 2 * ELEMS),
        ("int8", (4 + 64) + (4 + 6 + 2)),
        ("int4", (4 + 32) + (4 + 3 + 1)),
    ],
)
def test_bytes_are_those_of_the_codec(name: Any, size: int) -> None:
    """Each chunk is rounded up to whole words of 4 bytes."""
    plain, coded = (linear(workers=2, servers=2, fetch_codec=one) for one in (None, name))
    count = plain.summary["fetched_bytes"] / (4 * ELEMS) - 1  # the last one is of what the run ends with
    assert count >= 2 * 18
    assert coded.summary["fetched_bytes"] == count * size + 4 * ELEMS
    assert coded.summary["whole_fetched_bytes"] == plain.summary["whole_fetched_bytes"]
    assert coded.summary["pushed_bytes"] == plain.summary["pushed_bytes"]


@pytest.mark.parametrize(
    ("name", "most"), [(None, 1e-3), ("float16", 1e-3), ("bfloat16", 5e-3), ("int8", 5e-3), ("int4", 0.2)]
)
def test_runs_end_as_near_to_the_minimum_as_parameters_are_rounded(name: Any, most: float) -> None:
    """Distances from the minimum, as parts of the way: beside that of a run that sends parameters as they are."""
    model, data = least_squares(64, 8, reduction="mean", dtype="float32")
    batch = data.batch(np.arange(64))
    best = np.linalg.lstsq(np.asarray(batch.inputs), np.asarray(batch.targets), rcond=None)[0]
    options: dict[str, Any] = {"workers": 2, "batch_size": 32, "epochs": 150, "optimizer": gs.optim.SGD(0.1)}
    run = gs.simulate(model, data, **options, fetch_codec=name)
    assert np.linalg.norm(run.parameters["w"] - best) < most * np.linalg.norm(best)


def test_a_classifier_learns_as_it_does_without() -> None:
    losses = []
    for name in (None, "bfloat16", "int8"):
        network = gs.from_torch(
            lambda: nn.Sequential(nn.Linear(ELEMS, 16), nn.Tanh(), nn.Linear(16, 4)),
            nn.functional.cross_entropy,
        )
        options: dict[str, Any] = {"workers": 2, "batch_size": 8, "epochs": 20, "fetch_codec": name}
        optimizer = gs.optim.SGD(0.05, momentum=0.9)
        run = gs.simulate(network, gs.from_arrays(X, np.arange(48) % 4), **options, optimizer=optimizer)
        losses.append(run.summary["loss"])
    assert max(losses) < 1.03 * losses[0] < 1.0, losses


# ---- strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "synchronous", "downpour", "asysg", "ssp", "softsync", "staleness-aware", "elastic-averaging",
        gs.DiLoCo(every=3), gs.strategies.AsyncDiLoCo(every=3), gs.StreamingDiLoCo(every=4, fragments=2),
    ],
    ids=str,
)  # fmt: skip
def test_strategies_with_servers_fetch_less_and_learn(strategy: Any) -> None:
    model, data = least_squares(64, 8, reduction="mean", dtype="float32")
    options: dict[str, Any] = {"strategy": strategy, "workers": 2, "batch_size": 8, "epochs": 20}
    options["optimizer"] = gs.optim.SGD(0.02)
    if not isinstance(strategy, str):
        options["optimizer"] = gs.optim.SGD(0.1)
    plain, coded = (gs.simulate(model, data, **options, fetch_codec=name) for name in (None, "bfloat16"))
    shares = [run.summary["fetched_bytes"] / run.summary["whole_fetched_bytes"] for run in (plain, coded)]
    assert shares[0] == 1.0 and 0.5 < shares[1] < 0.55  # what the run ends with is sent as it is
    distance = np.linalg.norm(coded.parameters["w"] - plain.parameters["w"])
    assert distance < 0.05 * np.linalg.norm(plain.parameters["w"])


# ---- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_every_sample_counts_once_over_an_unsteady_network(strategy: str, seed: int) -> None:
    model = Tokens(num_chunks=3)
    model.reduction = "sum" if strategy == "synchronous" else "mean"
    script = kill_at(f"worker-{seed % 3}", 0.1 + 0.05 * seed) if seed % 2 else None
    run = gs.simulate(
        model, numbered(NUM_SAMPLES), workers=3, servers=2, batch_size=2, chunk_elems=64, epochs=4,
        optimizer=gs.optim.SGD(lr=6.0 if strategy == "synchronous" else 1.0), deadlines=QUICK, config=UNSTEADY,
        strategy=strategy, fetch_codec="bfloat16", seed=seed, script=script,
    )  # fmt: skip
    check_exactly_once(run, NUM_SAMPLES, 4)


def test_a_fetch_that_is_sent_again_has_the_same_bytes() -> None:
    """One worker: the same bits whatever the network does."""
    options: dict[str, Any] = {"workers": 1, "servers": 2, "fetch_codec": "int8", "epochs": 6}
    options["optimizer"] = gs.optim.SGD(0.01)
    links = {(f"shard-{rank}", "worker-0"): gs.sim.Link(loss=0.02, corrupt=0.05) for rank in range(2)}
    shaken: dict[str, Any] = {
        "config": gs.sim.SimulationConfig(network=gs.sim.Network(links=links)),
        "deadlines": QUICK,
    }
    steady, retried = linear(**options), linear(**options, **shaken)
    assert same(steady, retried)
    assert retried.summary["retries"] > steady.summary["retries"] == 0


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_stopped_run_ends_with_the_same_bits(codec: Any) -> None:
    """Nothing is kept, so nothing is lost: neither by servers, nor in checkpoints."""
    options: dict[str, Any] = {**KINDS["synchronous"], "fetch_codec": "int8", "codec": codec}
    storage = MemoryStorage()
    whole = linear(**options)

    async def stop(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(whole.summary["train_s"] / 2)
        cluster.stop()

    with pytest.raises(gs.errors.Interrupted):
        linear(**options, storage=storage, script=stop)
    assert same(whole, linear(**options, storage=storage, resume=True))


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "allreduce"}, "strategy=AllReduce: its workers have no servers"),
        ({"strategy": "hogwild"}, "have no servers"),
        ({"strategy": "parameter-averaging"}, "take strategy='diloco'"),
        ({"strategy": "lbfgs"}, "needs exact numbers"),
        ({"strategy": "dc-asgd"}, "exact copies"),
        ({"record": True}, "a replay computes"),
        ({"noise_scale": True}, "gradients of the same parameters"),
        ({"fetch_codec": "top-k"}, "expected float16, bfloat16, int8, int4"),
    ],
)
def test_what_must_be_exact_is_refused_before_anything_starts(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"fetch_codec=.*{says}.*leave fetch_codec out"):
        linear(**{"workers": 2, "fetch_codec": "int8", **options})


def test_numbers_of_eight_bytes_are_refused() -> None:
    model, data = least_squares(48, ELEMS, reduction="mean")
    with pytest.raises(ConfigError, match=r"elements of torch.float64; expected torch.float32"):
        gs.simulate(model, data, workers=1, fetch_codec="int8", epochs=1)


def test_it_travels_to_other_processes() -> None:
    model = gs.from_torch(lambda: nn.Linear(ELEMS, 1), nn.functional.mse_loss)
    job = gs.Job(model, gs.from_arrays(X, Y), epochs=1, fetch_codec="int8")
    there = with_overrides(dataclasses.replace(job, fetch_codec=None), overrides(job))
    assert plan_run(there, "run").fetch_codec == gs.codecs.Blocks("int8")


@pytest.mark.parametrize(
    ("codec", "flags", "words", "says"),
    [
        (None, CODED, 18, "words of a codec; all nodes must have the same fetch_codec"),
        ("int8", 0, 64, "elements; all nodes"),
        ("int8", CODED, 16, "16 words of torch.float32, expected 17 words"),
    ],
)
def test_a_worker_refuses_what_its_codec_does_not_make(codec: Any, flags: int, words: int, says: str) -> None:
    vector = Vector("v", torch.full((64,), 7.0))
    encoder = None if codec is None else Encoder(of_parameters(codec), torch.float32)
    arrival = Arrival(vector, 1, None, encoder)
    header = v1.Chunk(index=0, elems=words, dtype=v1.FLOAT32, version=1, flags=flags)
    with pytest.raises(RefusedError, match=says):
        arrival.take("shard-0", header, 0, 64, torch.zeros(words), False)
    assert arrival.versions == [-1] and bool((vector.tensor == 7.0).all())
