"""Loops of the user's own on several machines, and what else a script finds there, in real processes.

Machines are network namespaces; skipped with the reason where none can be made.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import gradstream as gs
from gradstream.run.place import Place
from gradstream.run.result import FINAL_MODEL
from gradstream.session import torchrun
from gradstream.session.node import job as session_job
from kit.machines import Machine, Machines, unavailable

SOURCE = str(Path(gs.__file__).resolve().parents[1])

SCRIPT = """
import os
import time
from pathlib import Path
import torch
from torch import nn
import torch.distributed as dist
import gradstream

dist.init_process_group("gloo")  # a group of the script's own
session = gradstream.join("synchronous", checkpoint_every=5)
everybody = torch.tensor([float(session.rank + 1), 1.0])
dist.all_reduce(everybody)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
loader = session.shard(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer = session.wrap(model, optimizer)
for epoch in range(int(os.environ.get("EPOCHS", "20"))):
    for x, y in loader:
        if session.skip():
            continue
        if session.step >= 10 and "UNHURRIED" in os.environ:
            time.sleep(0.1)  # so that whoever stops it comes in time
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if session.step == 10 and session.is_main:
            print("ten steps")
session.close()
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK".split()
told = [os.environ.get(name, "-") for name in names]
Path(f"told-{session.rank}").write_text(" ".join(told + [str(everybody.tolist())]))
print(f"rank {session.rank} is done\\n", end="")  # one write: those of two processes would mix
dist.destroy_process_group()
"""


PLAIN = (
    SCRIPT.replace('dist.init_process_group("gloo")', "")
    .replace("dist.all_reduce(everybody)", "")
    .replace("dist.destroy_process_group()", "")
)


class Program:
    """A command line of Python on one of the machines, or without one on this."""

    def __init__(
        self,
        machine: Machine | None,
        folder: Path,
        *arguments: str,
        script: str = SCRIPT,
        **environment: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "own.py").write_text(script)
        options: Mapping[str, Any] = {
            "cwd": folder,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        said = {"PYTHONPATH": SOURCE, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment}
        words = [sys.executable, "-m", *arguments]
        if machine is None:
            self.process = subprocess.Popen(words, env={**os.environ, **said}, text=True, **options)
        else:
            self.process = machine.start(words, env=said, **options)
        self.said = ""

    def line(self, pattern: str) -> re.Match[str]:
        """The first line from here on in which the pattern is found."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(self.said)

    def end(self) -> tuple[int, str]:
        """Status, and all that it has said."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        return self.process.wait(), self.said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the script was run on this machine alone, with a run directory "run"."""
    folder = tmp_path_factory.mktemp("alone")
    words = ("train", "own.py", "--workers", "2", "--run-dir", "run")
    status, said = Program(None, folder, "gradstream", *words).end()
    assert status == 0, said
    assert "rank 0 is done" in said and "rank 1 is done" not in said
    return folder


@pytest.fixture
def machines() -> Iterator[Machines]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Machines(2) as made:
        yield made


@pytest.mark.limit_s(200)
def test_a_script_makes_a_process_group_of_its_own(alone: Path) -> None:
    for rank in range(2):
        assert (alone / f"told-{rank}").read_text() == f"{rank} {rank} 2 2 0 0 [3.0, 2.0]"


@pytest.mark.limit_s(200)
def test_what_a_script_does_after_its_session_counts(tmp_path: Path) -> None:
    script = PLAIN.replace("print(", "raise LookupError('a fault of mine')\nprint(")
    status, said = Program(None, tmp_path, "gradstream", "train", "own.py", script=script).end()
    assert status == 1, said
    assert said.splitlines()[-1] == "LookupError: a fault of mine"


@pytest.mark.parametrize("token", [None, "another one of sixteen characters"])
def test_what_others_write_into_the_store_is_not_believed(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRADSTREAM_TOKEN", "GRADSTREAM_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("GRADSTREAM_TOKEN", token)
    dist: Any = torch.distributed
    store = dist.HashStore()
    monkeypatch.setattr(torchrun, "_store", lambda *_: store)
    text = json.dumps({"address": "10.77.0.9:4000", "fingerprint": "sha256:0"})
    forged = torchrun.proof_of("a token of sixteen characters", "nonce", text)
    store.set(torchrun.KEY, json.dumps({"signed": text, "nonce": "nonce", "proof": forged}))
    with pytest.raises(gs.errors.ConfigError, match="no secret" if token is None else "not signed"):
        torchrun.take_part(session_job(), Place(engine="torchrun", rank=1, size=2, host="", port=0))


@pytest.mark.limit_s(300)
def test_a_loop_on_two_machines_ends_as_on_one(machines: Machines, alone: Path, tmp_path: Path) -> None:
    a, b = machines[0], machines[1]
    arguments = ("gradstream", "train", "own.py", "--listen", a.address, "--wait", "2", "--run-dir", "run")
    launcher = Program(a, tmp_path / "a", *arguments)
    words = shlex.split(launcher.line(r"(gradstream join .*)")[1])
    seed = {"PYTHONHASHSEED": "1"}  # sets have another order there
    joined = Program(b, tmp_path / "b", *words, "--name", "b", **seed)
    status, said = joined.end()
    assert status == 0, said + launcher.end()[1]
    assert "in as b, with worker-1" in said
    status, said = launcher.end()
    assert status == 0, said
    assert "rank 0 is done" in said and "rank 1 is done" not in said

    # `print` of worker 1 is in the log of its own machine.
    (run_b,) = (tmp_path / "b" / "runs").iterdir()
    assert "rank 1 is done" in (run_b / "logs" / "worker-1.log").read_text()
    assert (tmp_path / "a" / "told-0").read_text() == "0 0 2 1 0 0 [3.0, 2.0]"
    assert (tmp_path / "b" / "told-1").read_text() == "1 0 2 1 1 1 [3.0, 2.0]"
    check_same(alone / "run", tmp_path / "a" / "run")
    assert list((tmp_path / "a" / "run" / "checkpoints").iterdir())


@pytest.mark.limit_s(300)
def test_a_machine_whose_only_worker_is_lost_says_so_by_its_status(
    machines: Machines, tmp_path: Path
) -> None:
    script = """
import time
import torch
import gradstream

session = gradstream.join("allreduce")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = session.shard(torch.utils.data.DataLoader(torch.randn(4000, 4), batch_size=4))
model, optimizer = session.wrap(model, optimizer)
for x in loader:
    if session.is_main and session.step >= 10:
        time.sleep(0.02)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if not session.is_main:
        model.weight.data.add_(1e-3)
session.close()
"""
    a, b = machines[0], machines[1]
    arguments = ("gradstream", "train", "own.py", "--listen", a.address, "--wait", "1", "--run-dir", "run")
    launcher = Program(a, tmp_path / "a", *arguments, script=script)
    words = shlex.split(launcher.line(r"(gradstream join .*)")[1])
    joined = Program(b, tmp_path / "b", *words, "--name", "b", script=script)
    status, said = joined.end()
    assert status == 1, said + launcher.end()[1]
    assert "the run went on without this machine: worker-1 has ended: ReplicasDifferError" in said
    status, said = launcher.end()
    assert status == 0, said


@pytest.mark.limit_s(300)
def test_a_loop_on_two_machines_is_stopped_and_goes_on(
    machines: Machines, alone: Path, tmp_path: Path
) -> None:
    a, b = machines[0], machines[1]
    machine = ("--listen", a.address, "--wait", "2")
    endless = {"EPOCHS": "9999", "UNHURRIED": "yes"}
    launcher = Program(
        a, tmp_path / "a", "gradstream", "train", "own.py", *machine, "--run-dir", "run", **endless
    )
    words = shlex.split(launcher.line(r"(gradstream join .*)")[1])
    joined = Program(b, tmp_path / "b", *words, **endless)
    launcher.line("ten steps")
    launcher.process.send_signal(signal.SIGINT)
    assert joined.end()[0] == 75, joined.said
    status, said = launcher.end()
    assert status == 75, said
    assert re.search(r"it resumes from checkpoints/step-\d+: gradstream resume", said), said

    launcher = Program(a, tmp_path / "a", "gradstream", "resume", "run", *machine)
    words = shlex.split(launcher.line(r"(gradstream join .*)")[1])
    joined = Program(b, tmp_path / "b", *words, "--run-dir", "again")
    assert joined.end()[0] == 0, joined.said + launcher.end()[1]
    assert launcher.end()[0] == 0, launcher.said
    check_same(alone / "run", tmp_path / "a" / "run")


UNKNOWN_LINKS = """
import torch
from torch import nn
import gradstream

session = gradstream.join("auto", checkpoint_every=None)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(320, 400), torch.randn(320, 1))
loader = session.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
model = nn.Sequential(nn.Linear(400, 2000), nn.Tanh(), nn.Linear(2000, 1))
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9))
for epoch in session.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
session.close()
print("steps:", session.step)
"""


@pytest.mark.limit_s(200)
def test_auto_trains_alone_over_slow_links_and_says_so(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(2, rate="10mbit") as machines:
        a, b = machines[0], machines[1]
        arguments = ("gradstream", "train", "own.py", "--listen", a.address, "--wait", "2")
        launcher = Program(a, tmp_path / "a", *arguments, script=UNKNOWN_LINKS)
        words = shlex.split(launcher.line(r"(gradstream join .*)")[1])
        joined = Program(b, tmp_path / "b", *words, script=UNKNOWN_LINKS)
        status, said = launcher.end()
        assert (status, joined.end()[0]) == (0, 0), said
    assert "phase 1 of 2, measures: allreduce, 2 workers" in said
    assert re.search(
        r"phase 2 of 2, local-sgd: local-sgd, 2 workers; .* at [\d.]+ Mbit/s: local SGD every \d+", said
    )
    assert "steps: 40" in said


@pytest.mark.limit_s(100)
def test_auto_stays_with_joint_steps_on_one_machine(tmp_path: Path) -> None:
    words = ("gradstream", "train", "own.py", "--workers", "2")
    status, said = Program(None, tmp_path / "alone", *words, script=UNKNOWN_LINKS).end()
    assert status == 0, said
    assert "phase 2 of 2, allreduce: allreduce, 2 workers; no link between machines was measured" in said
    assert "steps: 40" in said


GROWING = """
import json
import sys
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gradstream

folder, N, EPOCHS = Path(sys.argv[1]), 8 * 24 + 3, 2
session = gradstream.join()


class Used(nn.Module):
    # The gradient of a minibatch has an entry for each of its samples, so the parameters tell what was used.
    def __init__(self):
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(EPOCHS, N, dtype=torch.float64))
        self.own = nn.Parameter(torch.ones(1, dtype=torch.float64))  # its momentum has to come to a newcomer

    def forward(self, ids, epoch):
        return self.uses[epoch][ids].sum() / len(ids) + (self.own * ids / N - 0.5).pow(2).mean()


model = Used()
loader = session.shard(DataLoader(TensorDataset(torch.arange(N)), batch_size=8, shuffle=True))
before = len(loader)
if session.rank:
    (folder / "coming").touch()
groups = [{"params": [model.uses]}, {"params": [model.own], "lr": 0.01, "momentum": 0.9}]
model, optimizer = session.wrap(model, torch.optim.SGD(groups, lr=1.0))
assert len(loader) == before
rate = lambda step: 1 - 0.5 * step / (EPOCHS * before)  # the schedule of a newcomer is that of the others
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
session.register(scheduler=scheduler)
begun_at = session.step
for epoch in range(EPOCHS):
    for (ids,) in loader:
        while session.step == 3 and not (folder / "coming").exists():
            time.sleep(0.05)
        optimizer.zero_grad()
        model(ids, epoch).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(0.2)
session.close()
once = bool((model.uses.detach() != 0).all())
total = round(float(model.uses.detach().sum()), 9)
told = [once, total, session.world_size, session.step, begun_at > 0, float(model.own), before]
(folder / f"{session.rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.limit_s(300)
@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "downpour",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ssp", "diloco", "gossip")),
    ],
)
def test_a_machine_joins_a_run_that_has_begun_beyond_the_number_at_its_beginning(
    machines: Machines, tmp_path: Path, strategy: str
) -> None:
    a, b = machines[0], machines[1]
    told = tmp_path / "told"
    told.mkdir()
    arguments = (
        *("train", "own.py", "--strategy", strategy, "--listen", a.address, "--wait", "1"),
        *("--run-dir", "run", "--", str(told)),
    )
    launcher = Program(a, tmp_path / "a", "gradstream", *arguments, script=GROWING)
    words = shlex.split(launcher.line(r"(gradstream join .*)")[1])
    launcher.line(r"step \d")
    joined = Program(b, tmp_path / "b", *words, script=GROWING)
    status, said = joined.end()
    assert status == 0, said + launcher.end()[1]
    assert "with worker-1" in said
    status, said = launcher.end()
    assert status == 0, said
    assert "in the model   390 samples" in said
    assert "was lost" not in said
    first, second = (json.loads((told / f"{rank}.json").read_text()) for rank in range(2))
    assert first[0] and second[0], "not each sample was used"
    assert first[6] == second[6] == 25
    if strategy != "gossip":  # in pairs each keeps parameters of its own
        assert (first[:2], first[5]) == (second[:2], second[5])
    if strategy == "allreduce":
        assert first[3] == second[3]
        assert (first[2], first[4], second[4]) == (2, False, True)
    else:  # each makes steps of its own
        assert 0 < second[3] < first[3] < first[3] + second[3] == 50


def by_torchrun(machine: Machine, folder: Path, number: int, first: Machine, **environment: str) -> Program:
    """The same command on each of two machines, but for its number."""
    there = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1")
    at = ("--master-addr", first.address, "--master-port", "29500")  # of a network of its own
    return Program(
        machine, folder, "torch.distributed.run", *there, *at, "own.py", script=PLAIN, **environment
    )


@pytest.mark.limit_s(300)
def test_torchrun_on_two_machines(machines: Machines, alone: Path, tmp_path: Path) -> None:
    a, b = machines[0], machines[1]
    refused = [by_torchrun(one, tmp_path / f"no-{one.name}", i, a) for i, one in enumerate((a, b))]
    for status, said in [program.end() for program in refused]:
        assert status != 0
        assert "GRADSTREAM_TOKEN_FILE=gradstream.token torchrun" in said, said
    assert not (tmp_path / "no-a" / "runs").exists()

    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    both = [
        by_torchrun(a, tmp_path / "a", 0, a, GRADSTREAM_TOKEN_FILE=str(token)),
        by_torchrun(b, tmp_path / "b", 1, a, GRADSTREAM_TOKEN=token.read_text()),
    ]
    ended = [program.end() for program in both]
    assert [status for status, _ in ended] == [0, 0], ended
    assert "rank 1 is done" in ended[1][1]
    assert "the run has finished: 1,920 samples in 240 steps" in ended[0][1]
    (run_dir,) = (tmp_path / "a" / "runs").iterdir()
    assert not (tmp_path / "b" / "runs").exists()
    check_same(alone / "run", run_dir)
    assert list((run_dir / "checkpoints").iterdir())


def check_same(one: Path, other: Path) -> None:
    """Two runs have ended with the same bytes, and all samples."""
    before, after = load_file(one / FINAL_MODEL), load_file(other / FINAL_MODEL)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    made = [gs.Run.load(path).summary["samples_accounted"] for path in (one, other)]
    assert made == [20 * 96, 20 * 96]
