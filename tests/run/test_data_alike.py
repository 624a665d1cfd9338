"""Data that are not the same on every node of one machine are refused before anything is trained."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import gradstream as gs
from gradstream.data import alike, arrays
from gradstream.data.alike import RANDOM, checks_of, differences
from gradstream.data.arrays import quick_checks
from gradstream.errors import ConfigError
from gradstream.job.files import load_job
from gradstream.run.remote.members import difference
from gradstream.wire import v1

SCRIPT = """
import numpy as np
import gradstream as gs
x = np.random.default_rng({seed}).standard_normal((64, 2)).astype("float32")
model = gs.from_functions(
    lambda seed: {{"w": np.zeros(2)}}, lambda p, x: x @ p["w"], lambda p, x, y: {{"w": np.zeros(2, "f4")}}
)
def job():
    return gs.Job(model, gs.from_arrays(x, x[:, 0]), batch_size=8, epochs=1)
"""


def test_arrays_drawn_without_a_seed_are_named_and_so_is_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("drawn.py").write_text(SCRIPT.format(seed=""))
    with pytest.raises(
        gs.errors.ConfigError,
        match=r"worker-[01]: inputs of the data set 'arrays' differ between nodes: this node has \(64, 2\)",
    ) as told:
        gs.train(load_job("drawn.py"))
    assert "give the random generator a seed" in str(told.value)


def test_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    one = np.arange(1000.0).reshape(100, 10)
    checks = quick_checks({"a": one})
    assert checks["a"].startswith("(100, 10) float64, content ")
    others: list[Any] = [one + 1, one.astype("f4"), one.reshape(50, 20), one[:99]]
    for other in others:
        assert quick_checks({"a": other}) != checks
    assert quick_checks({"a": np.asfortranarray(one)}) == checks
    data: Any = gs.from_arrays({"x": one}, one[:, 0])
    assert list(data.quick_checks) == ["inputs['x']", "targets", "test_inputs['x']", "test_targets"]
    monkeypatch.setattr(arrays, "QUICK_BYTES", 4000)
    changed = one.copy()
    changed[-1] = 0
    assert quick_checks({"a": changed}) != quick_checks({"a": one})


def test_a_warning_of_the_users_code_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    warned = "import warnings\ndef outputs(p, x):\n    warnings.warn('careful')\n    return x @ p['w']\n"
    text = SCRIPT.format(seed="0").replace(
        'lambda p, x, y: {"w"', 'lambda p, x, y: outputs(p, x) is None or {"w"'
    )
    Path("warns.py").write_text(warned + text)
    gs.train(load_job("warns.py"), run_dir=Path("run"))
    assert capfd.readouterr().err.count("worker-0: UserWarning: careful\n") == 1
    assert "UserWarning: careful" in Path("run/logs/worker-1.log").read_text()


LABELS = """
import os
import numpy as np
import gradstream as gs

NAMES = {names}

class Labelled:
    def __len__(self):
        return 60

    def __getitem__(self, number):
        name = sorted(NAMES)[number % 5]
        return np.full(5, number, "f4"), NAMES.index(name)

def gradients(parameters, inputs, targets):
    return {{"w": np.zeros((5, 5), "f4")}}

def job():
    model = gs.from_functions(lambda seed: {{"w": np.zeros((5, 5), "f4")}}, lambda p, x: x @ p["w"], gradients)
    data = {data}
    return gs.Job(model, data, batch_size=10, epochs=1)
"""
A_SET = 'list({"cat", "dog", "bird", "fish", "cow"})'
DATASET = "gs.from_dataset(Labelled(), test=Labelled())"
LOADER = (
    "gs.from_loader(__import__('torch').utils.data.DataLoader(Labelled(), 10, num_workers=2), Labelled())"
)


def command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(gs.__file__).parents[1]), **variables}
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.cold
@pytest.mark.parametrize(
    ("data", "names"),
    [(DATASET, A_SET), (LOADER, A_SET), (DATASET, "__import__('names_of').NAMES")],
    ids=["dataset", "loader", "module"],
)
def test_labels_in_the_order_of_a_set_are_the_same_in_all_processes(
    tmp_path: Path, data: str, names: str
) -> None:
    """The launcher has its own order of sets, unless it is the command line.

    A compiled file has that of the process which has compiled it: the first command here leaves one.
    """
    (tmp_path / "names_of.py").write_text(f"NAMES = {A_SET}\n")
    (tmp_path / "job.py").write_text(LABELS.format(names=names, data=data))
    train = "import gradstream as gs; from gradstream.job.files import load_job; gs.train(load_job('job.py'))"
    done = command(tmp_path, "-c", train, PYTHONHASHSEED="3")
    assert done.returncode == 0, done.stderr  # all nodes have the seed that was given
    refused = command(tmp_path, "-c", train, PYTHONHASHSEED="")
    assert "sample " in refused.stderr and "targets of the data set 'Labelled' differ" in refused.stderr
    assert "PYTHONHASHSEED=0" in refused.stderr
    done = command(tmp_path, "-m", "gradstream", "train", "job.py", "--run-dir", "run", PYTHONHASHSEED="")
    assert done.returncode == 0, done.stderr


def test_machines_compare_samples(tmp_path: Path) -> None:
    """One has the classes of a folder in another order."""
    text = LABELS.format(names="open('classes').read().split()", data=DATASET)
    facts = []
    for machine, names in (
        ("a", "cat dog bird fish cow"),
        ("b", "dog cat cow fish bird"),
        ("c", "cat dog bird fish cow"),
    ):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "job.py").write_text(text)
        (tmp_path / machine / "classes").write_text(names)
        code = (
            "import json\nfrom gradstream.job.files import load_job\n"
            "from gradstream.run.remote.members import facts_of\n"
            "print(json.dumps(facts_of(load_job('job.py'))))"
        )
        said = command(tmp_path / machine, "-c", code)
        facts.append(json.loads(said.stdout))
    found = difference(facts[0], facts[1], "b")
    assert found is not None
    assert found.code == v1.BAD_DATA
    assert re.match(
        r"data, (held-out )?sample \d+, targets differs: b has \[\d\], the launcher has \[\d\]", found.message
    )
    assert difference(facts[0], facts[2], "c") is None


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples with noise by the global generators, and by one of its own; labels without."""

    def __init__(self, names: str = "abc", own: bool = True) -> None:
        self.names = names
        self.own = np.random.default_rng() if own else None
        self.opened_by = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        self.opened_by = os.getpid()
        noise = 0.0 if self.own is None else float(self.own.normal())
        return (random.random(), noise, torch.rand(6)), self.names.index("abc"[number % 3])


def test_what_is_random_is_not_compared() -> None:
    here, there, other = (checks_of(gs.from_dataset(Augmented(names))) for names in ("abc", "abc", "bac"))
    assert not list(differences(here, there))
    assert RANDOM in here.values()
    assert (
        sum(found != RANDOM for found in here.values()) == 1 + 3 * alike.NUM_DRAWN
    )  # by the global generators
    assert {re.sub(r"\d+", "N", name) for name, _, _ in differences(here, other)} == {"sample N, targets"}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_is_not_read_where_its_file_must_not_be_open(workers: int) -> None:
    """A loader's processes would share the handle that a data set opens at its first sample."""
    data = Augmented(own=False)
    loader = DataLoader(data, 10, num_workers=workers)
    checks = checks_of(gs.from_loader(loader, test=data))
    assert len(checks) == 1 + 2 * alike.NUM_DRAWN * 4
    assert data.opened_by == (0 if workers else os.getpid())
    assert not list(differences(checks, checks_of(gs.from_dataset(data, test=data))))


def test_data_that_cannot_be_asked_for_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(samples: list[Any]) -> Any:
        if len(samples) < 2:
            raise ValueError("expected pairs")
        return torch.utils.data.default_collate(samples)

    assert len(checks_of(gs.from_dataset(Augmented(), pairs))) == 1
    stream = gs.from_stream(lambda rank, world, epoch, seed: iter(()), batches=3)
    assert len(checks_of(stream)) == 1
    monkeypatch.setattr(alike, "DRAWING_S", -1.0)
    few = checks_of(gs.from_dataset(Augmented()))
    assert len(few) == 1
    monkeypatch.undo()
    assert not list(differences(few, checks_of(gs.from_dataset(Augmented()))))
    shorter: Any = Augmented()
    assert [name for name, _, _ in differences(few, checks_of(gs.from_dataset([shorter[0]])))] == [
        "number of samples"
    ]


CHANGING = """
import numpy as np
import gradstream as gs

def gradients(parameters, inputs, targets):
    return {"w": np.zeros(3, "f4")}

def job():
    targets = np.array(open("labels").read().split(), "f4")
    inputs = np.random.default_rng(0).normal(size=(len(targets), 3)).astype("f4")
    model = gs.from_functions(lambda seed: {"w": np.zeros(3, "f4")}, lambda p, x: x @ p["w"], gradients)
    return gs.Job(model, DATA, batch_size=10, steps=400, checkpoint_every=20)
"""


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("gs.from_arrays(inputs, targets)", "targets"),
        ("gs.from_arrays(inputs, inputs[:, 0], inputs, targets)", "test_targets"),
        ("gs.from_dataset(list(zip(inputs, targets)))", r"sample \d+, targets"),
    ],
)
def test_a_resumed_run_refuses_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(CHANGING.replace("DATA", data))
    labels = [str(number) for number in range(60)]
    Path("labels").write_text(" ".join(labels))

    def stop(event: Any) -> None:
        if event["event"] == "checkpoint":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gs.train(load_job("job.py"), run_dir=Path("run"), on_event=stop)
    Path("labels").write_text(" ".join(reversed(labels)))
    for job in (None, load_job("job.py")):  # also a job that is given again
        with pytest.raises(
            ConfigError, match=f"{named} of the data set '.*' changed since .*--allow-changed"
        ):
            gs.resume("run", job=job)
    Path("labels").write_text(" ".join(labels[:-1]))
    with pytest.raises(ConfigError, match="number of samples of the data set"):
        gs.resume("run", allow_changed=True)
    Path("labels").write_text(" ".join(reversed(labels)))
    gs.resume("run", allow_changed=True)
    assert "the run goes on with the data of now" in capfd.readouterr().err
