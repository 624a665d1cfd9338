"""AllReduce over torch.distributed: whole runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.files import load_job
from gradstream.strategies import AllReduce
from gradstream.testing.runs import least_squares

SMALL = 128 * 8 / (1 << 20)  # MiB: buckets of 128 float64


@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"overlap": False}])
def test_equals_the_exchange_of_our_own_bit_for_bit(options: Mapping[str, Any], tmp_path: Path) -> None:
    model, data = least_squares(64, 300, grid=2.0**-10)
    common: Any = {
        "steps": 3,
        "chunk_elems": 64,
        "optimizer": gs.optim.SGD(lr=2.0**-7),
        "seed": 5,
        "workers": 3,
    }
    common |= {"batch_size": [7, 0, 9]}
    expected = gs.simulate(model, data, strategy=gs.Synchronous(), **common).parameters["w"]
    strategy = AllReduce(exchange="torch", bucket_mib=SMALL, **options)
    run = gs.train(model, data, strategy=strategy, run_dir=tmp_path / "run", processes=False, **common)
    assert run.parameters["w"].tobytes() == expected.tobytes()
    assert run.summary["group"] == "torch: gloo"
    (formed,) = (event for event in run.events if event["event"] == "group")
    assert (formed["hosts"], formed["ranks"]) == (1, ["worker-0", "worker-1", "worker-2"])


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

    with pytest.raises(gs.errors.PeerLostError) as caught:
        gs.train(load_job(str(path)), on_event=killer)
    assert caught.value.peer == "worker-1"


SCRIPT = """
import os, signal
import torch
import torch.distributed as dist
from torch import nn

import gradstream

dist.init_process_group("gloo")
session = gradstream.join(
    "allreduce", exchange="torch", deadlines=gradstream.Deadlines(silence_s=5, lease_s=3)
)
torch.manual_seed(session.rank)
model = nn.Linear(4, 1)
nn.init.zeros_(model.bias)
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
try:
    for step in range(100):
        if step == 10:
            both = [torch.zeros(5) for _ in range(2)]
            mine = torch.cat([p.detach().flatten() for p in model.parameters()])
            dist.all_gather(both, mine)  # in the user's own group
            assert torch.equal(*both) and both[0][-1] == 10, both
            if session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (-(1 + 2 * session.rank) * model(torch.zeros(3, 4)).mean()).backward()  # of the bias: -1 and -3
        optimizer.step()
except gradstream.errors.PeerLostError as error:
    open("heard", "w").write(f"{session.rank} {step} {error.peer}")
    raise
"""


@pytest.mark.limit_s(200)
def test_under_torchrun_beside_a_process_group_of_the_users_a_killed_worker_is_named(
    tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--monitor-interval", "3", "script.py"),  # or torchrun ends the other before it can tell
        ],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode != 0
    assert (tmp_path / "heard").exists(), done.stderr[-5000:]
    assert (tmp_path / "heard").read_text() == "0 10 worker-1", done.stderr[-3000:]
