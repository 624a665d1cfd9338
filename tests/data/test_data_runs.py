"""Whole runs on users' own data: loaders with processes, streams whose worker dies, tokens of any length."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.utils.data import DataLoader, IterableDataset

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.testing.runs import QUICK, Tokens, kill_at, least_squares, token_counts

LOADED = """
import time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
import gradstream as gs

class Line(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(SLOW_S / 20)
        if index == BROKEN:
            raise LookupError("nothing at this place")
        assert torch.utils.data.get_worker_info() is not None or not CHECKED
        x = np.random.default_rng(index).standard_normal(3).astype("float32")
        return x, x @ np.float32([1, 2, 3])

BROKEN, PROCESSES, SLOW_S, CHECKED = -1, 2, 0, True

def job():
    loader = DataLoader(Line(), batch_size=20, shuffle=True, num_workers=PROCESSES,
                        persistent_workers=PROCESSES > 0)
    model = gs.from_torch(lambda: torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0)),
                          torch.nn.functional.mse_loss)
    return gs.Job(model, gs.from_loader(loader), optimizer=gs.optim.SGD(lr=0.2), workers=2, epochs=5,
                  chunk_elems=64, deadlines=gs.Deadlines(lease_s=5, silence_s=10, retry_s=10))
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(**changes: object) -> gs.Job:
        text = textwrap.dedent(LOADED)
        for name, value in changes.items():
            text += f"\n{name} = {value!r}"
        Path("loaded.py").write_text(text)
        return load_job("loaded.py")

    return write


def test_a_loader_with_processes_in_real_workers_and_in_none_give_the_same_bits(write: Any) -> None:
    run = gs.train(write(), run_dir=Path("real"))
    np.testing.assert_allclose(run.parameters["0.weight"], [[1, 2, 3]], atol=0.1)
    assert (run.summary["samples"], run.summary["samples_accounted"]) == (1000, 1000)
    simulated = gs.simulate(write(PROCESSES=0, CHECKED=False))
    assert simulated.parameters["0.weight"].tobytes() == run.parameters["0.weight"].tobytes()


def test_an_error_of_a_data_set_in_a_workers_loader_process_ends_the_run(write: Any) -> None:
    with pytest.raises(
        gs.errors.UserCodeError, match=r"worker-\d, step \d.*raised LookupError: nothing at"
    ) as raised:
        gs.train(write(BROKEN=150), run_dir=Path("broken"))
    assert "in __getitem__" in raised.value.traceback_text


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_killed_workers_loader_processes_go_with_it_and_others_do_its_work(write: Any) -> None:
    readers: list[int] = []

    def kill(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["rank"] == 1 and not readers:
            pid = int(re.findall(r"pid (\d+)", Path("killed/logs/worker-1.log").read_text())[0])
            readers.extend(children_of(pid))
            os.kill(pid, signal.SIGKILL)

    job = write(SLOW_S=0.1, CHECKED=False)  # orphans are read in the node itself
    run = gs.train(job, strategy="downpour", run_dir=Path("killed"), epochs=4, on_event=kill)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 800
    assert len(readers) == 2
    assert not any(map(is_running, readers))


def numbered_stream(rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
    """Of 48 samples those of one rank, six at a time."""
    mine = np.arange(48)[rank::world]
    for start in range(0, len(mine), 6):
        ids = mine[start : start + 6]
        yield gs.model.Batch(ids, ids, len(ids), ids)


@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_each_worker_makes_its_own_stream(strategy: str) -> None:
    data = gs.from_stream(numbered_stream, batches=4)
    options: Any = {"optimizer": gs.optim.SGD(lr=1.0), "chunk_elems": 64, "epochs": 3, "workers": 2}
    if strategy == "synchronous":
        model, _ = least_squares(8, 2)
        stream = gs.from_stream(lambda r, w, e, s: iter([(np.ones((r + 1, 2)), np.ones(r + 1))]), batches=1)
        run = gs.simulate(model, stream, strategy=strategy, **options)
        assert [row["samples"] for row in run.history if row["rank"] == 1] == [2, 2, 2]
        return
    run = gs.simulate(Tokens(3), data, strategy=strategy, **options)
    assert (token_counts(run, 48) == 3).all()
    assert [event["samples"] for event in run.events if event["event"] == "ledger"] == [None] * 3
    assert (run.summary["samples"], run.summary["samples_accounted"]) == (144, None)


def test_a_dead_workers_stream_is_gone_through_by_the_others() -> None:
    config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(per_sample_s=1e-2)})
    run = gs.simulate(
        Tokens(2),
        gs.from_stream(numbered_stream, batches=4),
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=1.0),
        workers=2,
        epochs=3,
        chunk_elems=64,
        deadlines=QUICK,
        config=config,
        script=kill_at("worker-1", 0.3),
    )
    counts = token_counts(run, 48)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_reassigned"] > 0
    assert counts.min() == 3
    assert counts.max() <= 4  # what it had pushed without its receipt having arrived


def test_a_stream_of_unknown_length_runs_for_steps_and_in_shape_only_worlds() -> None:
    def forever(rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
        yield np.ones((3, 2)), np.ones(3)

    model, _ = least_squares(8, 2, reduction="mean")
    run = gs.simulate(model, gs.from_stream(forever), optimizer=gs.optim.SGD(lr=0.1), workers=2, steps=5)
    assert (run.summary["steps"], run.summary["samples"]) == (10, 30)
    shape_only = gs.simulate(
        model,
        gs.from_stream(forever),
        workers=2,
        steps=5,
        batch_size=4,
        config=gs.sim.SimulationConfig(shape_only=True),
    )
    assert shape_only.summary["samples"] == 40
    with pytest.raises(gs.errors.ConfigError, match=r"epochs=2: .* is unknown; give steps= instead"):
        gs.simulate(model, gs.from_stream(forever), workers=2, epochs=2)


class Ending(IterableDataset[Any]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Any]:
        yield from [(np.ones(2), 1.0)] * 9


def test_a_loader_that_ends_early_ends_the_run_naming_rank_and_batch() -> None:
    model, _ = least_squares(8, 2)
    data = gs.from_loader(DataLoader(Ending(), batch_size=2))
    with pytest.raises(
        gs.errors.UserCodeError, match=r"worker-\d, step 2.*of rank \d ended after 2 of its 3 batches"
    ):
        gs.simulate(model, data, workers=2, epochs=1, optimizer=gs.optim.SGD(lr=0.01))


class Bag(nn.Module):
    """Which class the tokens of a line are of, whatever its length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, tokens: list[torch.Tensor]) -> torch.Tensor:
        return self.head(torch.stack([self.embedding(line).mean(0) for line in tokens]))  # type: ignore[no-any-return]


def test_tokens_of_varying_length_train_a_module() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 80)
    lines = [rng.integers(10 * label, 10 * label + 10, rng.integers(1, 7)) for label in labels]

    def collate(samples: list[Any]) -> Any:
        return [torch.as_tensor(line) for line, _ in samples], torch.tensor([int(y) for _, y in samples])

    samples = list(zip(lines, labels, strict=True))
    data = gs.from_dataset(samples[:60], collate, samples[60:], name="lines")
    run = gs.simulate(
        gs.from_torch(Bag, F.cross_entropy),
        data,
        optimizer=gs.optim.Adam(lr=0.1),
        workers=2,
        batch_size=10,
        epochs=5,
    )
    assert run.evaluate().accuracy == 1.0


@pytest.mark.parametrize("length", [4, None])
def test_accumulated_steps_of_a_stream(length: int | None) -> None:
    data = gs.from_stream(numbered_stream, batches=length)
    ends: Any = {"epochs": 3} if length else {"steps": 6}
    model = Tokens(1)
    model.reduction = "sum"
    run = gs.simulate(
        model,
        data,
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=1.0),
        workers=2,
        accumulate=2,
        chunk_elems=64,
        **ends,
    )
    assert (run.summary["steps"], run.summary["samples"]) == (12, 144)


def test_accumulated_steps_of_a_loader_are_those_of_twice_its_batch_size() -> None:
    model, arrays = least_squares(64, 3)
    pairs = [(arrays.inputs[i], arrays.targets[i]) for i in range(64)]
    options: Any = {"optimizer": gs.optim.SGD(lr=2.0**-9), "workers": 2, "epochs": 1, "seed": 4}

    def run(batch_size: int, accumulate: int) -> gs.Run:
        loader: Any = DataLoader(pairs, batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
        data = gs.from_loader(loader)
        return gs.simulate(model, data, strategy="downpour", accumulate=accumulate, **options)

    one, two = run(8, 1), run(4, 2)
    assert one.parameters["w"].tobytes() == two.parameters["w"].tobytes()
