"""What a codec keeps on each worker: in checkpoints, so that a stopped run goes on as if it had never stopped."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from torch import nn

import gradstream as gs
from gradstream._resume import begins_anew
from gradstream._simulate import simulate
from gradstream.checkpoint import Resume, to_resume
from gradstream.run.planning import plan_run
from gradstream.runtime.storage import MemoryStorage
from gradstream.worker.unsent_state import UnsentState
from whole_runs import same, unexpected

C = gs.codecs
RNG = np.random.default_rng(0)
INPUTS, TARGETS = RNG.standard_normal((48, 12)).astype("float32"), RNG.integers(0, 4, 48)

KINDS: dict[str, dict[str, Any]] = {
    "synchronous, int8": {"strategy": gs.Synchronous(), "servers": 2, "codec": "int8"},
    "synchronous, dgc": {"strategy": gs.Synchronous(), "codec": C.DGC(0.1), "optimizer": gs.optim.SGD(0.05)},
    "allreduce, top-k": {"strategy": gs.AllReduce(), "codec": C.ErrorFeedback(C.TopK(0.1))},
    "allreduce, powersgd": {"strategy": gs.AllReduce(), "codec": C.PowerSGD(1)},
    "local-sgd, float4": {"strategy": gs.LocalSGD(every=2), "codec": "float4", "optimizer": gs.optim.SGD(0.05)},
    "two parts, int8": {"strategy": gs.Synchronous(), "servers": 2, "split": 2, "codec": "int8"},
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(**options: Any) -> gs.Run:
    given: dict[str, Any] = {
        "optimizer": gs.optim.SGD(0.05, momentum=0.9), "workers": 2, "batch_size": 4, "epochs": 4, "chunk_elems": 64,
    }  # fmt: skip
    model = gs.from_torch(net, nn.functional.cross_entropy)
    return simulate(model, gs.from_arrays(INPUTS, TARGETS), **{**given, **options})


def stopped(storage: MemoryStorage, seconds: float, **options: Any) -> None:
    async def stop(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    with pytest.raises(gs.errors.Interrupted):
        trained(storage=storage, script=stop, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_ends_with_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, storage = KINDS[kind], MemoryStorage()
    whole = trained(**options)
    stopped(storage, whole.summary["train_s"] / 2, **options)
    assert same(whole, trained(**options, storage=storage, resume=True))

    async def forget(self: UnsentState, resume: Resume) -> None:
        """A planted fault."""

    monkeypatch.setattr(UnsentState, "restore", forget)
    assert not same(whole, trained(**options, storage=storage, resume=True))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "int8"}, ""),
        ({"codec": "int4"}, "is dropped: it was ErrorFeedback.* this run has ErrorFeedback"),
        ({}, "this run has nothing of that kind"),
        ({"codec": "int8", "strategy": gs.AllReduce()}, "is dropped: it was .* of Synchronous"),
        ({"codec": "int8", "workers": 3}, "new workers begin with nothing left to send: worker-2"),
        (
            {"codec": "int8", "workers": 1},
            "what workers that are no more had not sent yet is dropped: worker-1",
        ),
    ],
    ids=["same", "int4", "none", "allreduce", "more workers", "fewer workers"],
)
def test_what_begins_anew_is_said_and_the_run_goes_on(options: dict[str, Any], says: str) -> None:
    storage = MemoryStorage()
    stopped(storage, 0.02, codec="int8")
    found = to_resume(storage, unexpected)
    assert found is not None
    data = gs.from_arrays(INPUTS, TARGETS)
    job = gs.Job(
        gs.from_torch(net, nn.functional.cross_entropy), data, **{"workers": 2, "epochs": 4, **options}
    )
    sentence = begins_anew(plan_run(job, "run", resume=Resume.at(*found)))
    assert re.search(says, sentence) if says else sentence == ""
    assert trained(storage=storage, resume=True, **options).summary["samples_accounted"] == 4 * 48


@pytest.mark.parametrize(
    ("strategy", "optimizer", "says"),
    [
        (gs.LocalSGD(every=2), gs.optim.SGD(0.05, momentum=0.9), "momentum_buffer of each worker's own SGD"),
        (gs.DiLoCo(every=2), gs.optim.SGD(0.05, momentum=0.9), "momentum_buffer of each worker's own SGD"),
        (gs.LocalSGD(every=2), gs.optim.SGD(0.05), ""),
        (gs.Synchronous(), gs.optim.SGD(0.05, momentum=0.9), ""),
        (gs.AllReduce(), gs.optim.SGD(0.05, momentum=0.9), ""),
    ],
    ids=str,
)
def test_state_of_inner_optimizers_begins_anew(strategy: Any, optimizer: Any, says: str) -> None:
    storage = MemoryStorage()
    given = {"strategy": strategy, "optimizer": optimizer}
    stopped(storage, 0.02, **given)
    found = to_resume(storage, unexpected)
    assert found is not None
    model, data = gs.from_torch(net, nn.functional.cross_entropy), gs.from_arrays(INPUTS, TARGETS)
    job = gs.Job(model, data, workers=2, epochs=4, **given)
    sentence = begins_anew(plan_run(job, "run", resume=Resume.at(*found)))
    assert (says in sentence and "in no checkpoint" in sentence) if says else sentence == ""


def test_a_phase_of_the_same_codec_and_strategy_goes_on() -> None:
    phases = [gs.Phase(epochs=2), gs.Phase(epochs=2)]
    assert same(trained(codec="int8"), trained(codec="int8", epochs=None, phases=phases))
