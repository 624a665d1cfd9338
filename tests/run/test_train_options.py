"""All training options at once, in real processes: each finds the job's own functions in its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.job.files import load_job
from gradstream.run import preparation

JOB = """
import numpy as np
import torch
from torch import nn

import gradstream as gs


def rate(position):
    return 0.1 / (1 + position.epoch)


def top2(outputs, targets):
    return (outputs.topk(2).indices == targets[:, None]).any(1).float().mean().item()


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def job():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 4)).astype("float32")
    y = x[:, :3].argmax(1)
    return gs.Job(
        gs.from_torch(build, nn.functional.cross_entropy),
        gs.from_arrays(x[:480], y[:480], x[480:], y[480:]),
        optimizer=gs.optim.SGD(lr=gs.schedules.Warmup(rate, 3), momentum=0.9, weight_decay=0.01),
        groups=[{"match": "*.bias", "weight_decay": 0.0}, {"match": "2.*", "lr_scale": 2.0}],
        accumulate=2,
        clip_norm=5.0,
        evaluate_every="epoch",
        metrics={"top2": top2, "samples": lambda outputs, targets: float(len(targets))},
        workers=2,
        servers=2,
        batch_size=10,
        epochs=40,
        chunk_elems=64,
        until=gs.until(accuracy=0.8),
    )
"""


class Recorder:
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_start(self, info: dict[str, object]) -> None:
        self.told.append(f"start in {info['run_dir']}")

    def on_step(self, event: dict[str, object]) -> None:
        raise RuntimeError("no more of this")

    def on_end(self, run: gs.Run) -> None:
        self.told.append("end")


class Evaluations(Recorder):
    def on_step(self, event: dict[str, object]) -> None:
        pass

    def on_evaluate(self, event: dict[str, object]) -> None:
        self.told.append("evaluated")


def test_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.py").write_text(JOB)
    broken, recorder = Recorder(), Evaluations()
    job = load_job("options.py")
    run = gs.train(job, callbacks=[broken, recorder], run_dir=tmp_path / "run")

    assert run.summary["reason"].startswith("accuracy 0.")
    assert run.summary["samples_accounted"] == sum(row["samples"] for row in run.history) < 480 * 40
    rounds = len(run.history) // 2
    for row in run.history:
        assert row["lr"] == pytest.approx(0.1 / (1 + row["step"] / 12) * min(1, (row["step"] + 1) / 3))
        assert row["samples"] == 20
        assert row["gradient_norm"] > 0
    *_, reached, final = run.evaluations
    assert reached["accuracy"] >= 0.8
    assert (final["final"], final["step"]) == (True, rounds)
    assert final["accuracy"] == run.evaluate().accuracy
    assert final["metrics"] == run.evaluate().metrics
    assert final["metrics"]["top2"] > final["accuracy"]

    # The same numbers without processes: the options mean the same there.
    simulated = gs.simulate(
        load_job("options.py"), epochs=None, steps=rounds, until=None, evaluate_every=None
    )
    for name, value in run.parameters.items():
        assert np.allclose(value, simulated.parameters[name], atol=1e-4), name

    assert broken.told == [f"start in {tmp_path / 'run'}"]
    assert capfd.readouterr().err.count("RuntimeError: no more of this") == 1
    assert recorder.told == [broken.told[0], *["evaluated"] * len(run.evaluations), "end"]


def test_more_processes_than_fit_into_memory_are_refused_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.py").write_text(JOB)
    monkeypatch.setattr(preparation, "free_memory_bytes", lambda: 6 * preparation.FORKED_BYTES - 1)
    with pytest.raises(ConfigError, match=r"6 processes on this machine .* 3 shards, 2 workers"):
        gs.train(load_job("options.py"), workers=2, servers=3, run_dir=tmp_path / "run")
    assert not list((tmp_path / "run" / "logs").glob("*"))
