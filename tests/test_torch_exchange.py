"""AllReduce over torch.distributed: whole runs."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.jobfile import load_job
from gradstream.strategies import AllReduce
from gradstream.testing.runs import least_squares

SMALL = 128 * 8 / (1 << 20)  # MiB: buckets of 128 float64


@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"overlap": False}])
def test_equals_the_exchange_of_our_own_bit_for_bit(options: Mapping[str, Any], tmp_path: Path) -> None:
    model, data = least_squares(64, 300, grid=2.0**-10)
    common: Any = {"steps": 3, "chunk_elems": 64, "optimizer": gs.SGD(lr=2.0**-7), "seed": 5, "workers": 3}
    common |= {"batch_size": [7, 0, 9]}
    expected = gs.simulate(model, data, strategy=gs.Synchronous(), **common).parameters["w"]
    strategy = AllReduce(exchange="torch", bucket_mib=SMALL, **options)
    run = gs.train(model, data, strategy=strategy, run_dir=tmp_path / "run", processes=False, **common)
    assert run.parameters["w"].tobytes() == expected.tobytes()


def test_what_it_cannot_do_is_said_before_anything_is_started() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torch'"):
        AllReduce(exchange="torhc")
    with pytest.raises(ConfigError, match="chooses its algorithm itself"):
        AllReduce(exchange="gloo", algorithm="ring")
    model, data = least_squares(16, 10)
    with pytest.raises(ConfigError, match="cannot be simulated"):
        gs.simulate(model, data, strategy=AllReduce(exchange="torch"), steps=1)


JOB = """
import gradstream as gs
from gradstream.testing.runs import least_squares


def job():
    model, data = least_squares(64, 100_000)
    return gs.Job(
        model, data, strategy="allreduce", strategy_options={"exchange": "torch"}, workers=3, steps=5000,
        batch_size=8, deadlines=gs.Deadlines(lease_s=3.0, silence_s=5.0),
    )
"""


@pytest.mark.limit_s(200)
def test_a_worker_that_is_killed_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text(JOB)

    def killer(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 5 and event["rank"] == 0:
            (run_dir,) = Path("runs").iterdir()
            found = re.search(r"pid (\d+)", (run_dir / "logs" / "worker-1.log").read_text())
            assert found
            os.kill(int(found[1]), signal.SIGKILL)

    with pytest.raises(gs.PeerLostError) as caught:
        gs.train(load_job(str(path)), on_event=killer)
    assert caught.value.peer == "worker-1"
